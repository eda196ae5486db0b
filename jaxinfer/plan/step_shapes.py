"""The few shapes for which steps are compiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from jaxinfer.config import EngineConfig
from jaxinfer.device import (
    default_batched_tokens,
    default_mixed_tokens,
    draws_filtered,
    least_decode_rows,
    waits_for_decode,
)
from jaxinfer.sampling_params import FORMS, Form

# Few shapes, because each costs time to compile and padding costs little. On CPU, blocks of padding are not multiplied;
# accelerators stream the same weights for few rows as for many.
DECODE_ROWS = 8  # of the second size of decode steps, or the first
PREFILL_TOKENS = 128  # of the smallest prefill step, if no more rows can occur
GROWTH = 8
# Rows by default; `limits.fit_limits` takes more on accelerators.
MAX_ROWS = 32
LOOP_FORMS: tuple[Form, ...] = ("plain", "filtered")  # in which decode loops draw


@dataclass(frozen=True)
class Bucket:
    """One compiled shape: T tokens in B rows.

    A decode bucket has T = B, one token per row; in a loop each row gets up to `num_steps` tokens. A verify bucket has
    drafts in some rows; if it is mixed, other rows prefill. A draw bucket samples the tokens that decode or prefill
    steps of B rows do not draw plainly, with T = B.
    """

    is_decode: bool
    num_tokens: int  # T
    num_rows: int  # B
    q_len: int = 0  # the most drafts per row and 1 in a verify bucket; 0 in others
    is_draw: bool = False
    is_mixed: bool = False
    num_steps: int = 1  # more than 1 in a decode loop
    form: Form = "plain"  # in which it draws; the full form in a verify bucket

    @property
    def is_verify(self) -> bool:
        return self.q_len > 0

    @property
    def is_prefill(self) -> bool:
        return not self.is_decode and not self.is_verify and not self.is_draw

    @property
    def name(self) -> str:
        if self.is_verify:
            return f"{'mixed ' if self.is_mixed else ''}verify {self.num_tokens} of {self.num_rows}"
        if self.num_steps > 1:
            return f"{self.form} loop of {self.num_steps} steps {self.num_tokens}"
        return f"{f'{self.form} draw' if self.is_draw else 'decode' if self.is_decode else 'prefill'} {self.num_tokens}"

    def draw(self, form: Form) -> Bucket:
        """Returns the bucket that samples the tokens which this bucket's steps do not draw plainly."""
        return Bucket(False, self.num_rows, self.num_rows, is_draw=True, form=form)

    @property
    def num_sampled(self) -> int:
        """Returns the most tokens that a step samples."""
        return min(self.num_tokens, self.num_rows * max(self.q_len, 1))


def plan_buckets(config: EngineConfig, max_drafts: int = 0) -> tuple[Bucket, ...]:
    """Returns every shape that an engine of this configuration uses, by kind, the smallest first.

    decode:   1 (on CPU and on GPUs before Ampere), 8, 64, … rows up to max_num_seqs
    loops:    8, 64, … rows, if decode_loop_steps > 1, in each of LOOP_FORMS
    verify:   one draft per decoding row, or `max_drafts` per row, within the limit of mixed tokens; if max_drafts > 0
    mixed:    the same limit, drafts beside rows that prefill; if max_drafts > 0, without draft trees
    prefill:  128, 1024, … tokens, or from max_num_seqs on, up to the step's limit, and the limit of mixed tokens; each
              has the most rows that can occur
    """
    most_rows, max_tokens = max_rows(config), max_batched_tokens(config)
    decode = [Bucket(True, rows, rows) for rows in decode_sizes(config)]
    if (num_steps := loop_steps(config)) > 1:
        looped = [bucket for bucket in decode if bucket.num_rows > 1] or decode
        decode += [replace(bucket, num_steps=num_steps, form=form) for form in LOOP_FORMS for bucket in looped]
    sizes = {*_sizes((max(PREFILL_TOKENS, most_rows),), max_tokens), max_mixed_tokens(config)}
    prefill = [Bucket(False, n, min(n, most_rows)) for n in sorted(sizes)]
    verify = _verify_buckets(decode_sizes(config), max_drafts, max_mixed_tokens(config))
    if max_drafts and not config.draft_trees:
        most = max_mixed_tokens(config)
        verify.append(Bucket(False, most, min(most, most_rows), 1 + max_drafts, is_mixed=True))
    return (*decode, *verify, *prefill)


def plan_draws(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """Returns the draw buckets of `buckets`; verify steps and loops draw themselves."""
    drawn = [bucket for bucket in buckets if not bucket.is_verify and bucket.num_steps == 1]
    draws = {bucket.draw(form) for bucket in drawn for form in draw_forms()}
    return tuple(sorted(draws, key=lambda bucket: (FORMS.index(bucket.form), bucket.num_tokens)))


def first_buckets(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Returns the shapes that an engine waits for, which compute any request together.

    They are the smallest prefill step with all rows, and if `waits_for_decode` the smallest decode step and the largest
    plain one, in a loop if there are loops.
    """
    prefill = [bucket for bucket in buckets if bucket.is_prefill]
    most = max(bucket.num_rows for bucket in prefill)
    first = [next(bucket for bucket in prefill if bucket.num_rows == most)]
    if waits_for_decode():
        decode = [bucket for bucket in buckets if bucket.is_decode and bucket.form == "plain"]
        first += [decode[0], max(decode, key=lambda bucket: (bucket.num_rows, bucket.num_steps))]
    return tuple(dict.fromkeys(first))


def draw_forms() -> tuple[Form, ...]:
    """Returns the forms in which steps draw apart."""
    return ("filtered", "full") if draws_filtered() else ("full",)


def decode_sizes(config: EngineConfig) -> list[int]:
    """Returns the row counts of decode buckets, smallest first."""
    return _sizes(tuple(sorted({least_decode_rows(), DECODE_ROWS})), max_rows(config))


def max_rows(config: EngineConfig) -> int:
    """Returns the most rows of a step: as configured, else MAX_ROWS within the tokens of a step."""
    return config.max_num_seqs or rows_within_tokens(config, MAX_ROWS)


def rows_within_tokens(config: EngineConfig, num_rows: int) -> int:
    """Returns a number of rows, or fewer if the configuration lets a step have fewer tokens."""
    limits = [config.max_num_batched_tokens, config.max_mixed_tokens]
    return min([num_rows, *(limit for limit in limits if limit is not None)])


def loop_steps(config: EngineConfig) -> int:
    """Returns the steps of a decode loop: as configured, else 1, without loops."""
    return config.decode_loop_steps or 1


def max_batched_tokens(config: EngineConfig) -> int:
    """Returns the most tokens of a step: as configured, else the device's default, enough for all rows to advance."""
    least = max(max_rows(config), config.max_mixed_tokens or 0)
    return config.max_num_batched_tokens or max(default_batched_tokens(), least)


def max_mixed_tokens(config: EngineConfig) -> int:
    """Returns the most tokens of a step with a decoding request: as configured, else the device's default."""
    most = max_batched_tokens(config)
    # Twice the rows, so that prompts advance where all rows but one decode.
    return config.max_mixed_tokens or min(max(default_mixed_tokens() or most, 2 * max_rows(config)), most)


def _verify_buckets(sizes: list[int], max_drafts: int, max_tokens: int) -> list[Bucket]:
    q_len = 1 + max_drafts
    buckets = []
    for smaller, num_rows in pairwise([0, *sizes]) if max_drafts else ():
        # One row has few tokens with any number of drafts. Of many rows, few may have drafts.
        wanted = {q_len * num_rows} if num_rows == 1 else {2 * num_rows, q_len * num_rows}
        for n in sorted({min(num_tokens, max_tokens) for num_tokens in wanted}):
            most_rows = min(num_rows, n - 1)  # at least one row has a draft
            if most_rows > smaller:
                buckets.append(Bucket(False, n, most_rows, q_len))
    return buckets


def _sizes(first: tuple[int, ...], last: int) -> list[int]:
    """Returns `first`, continued by factors of GROWTH, as far as below `last`, then `last` itself."""
    sizes = list(first)
    while sizes[-1] < last:
        sizes.append(sizes[-1] * GROWTH)
    return [*(size for size in sizes if size < last), last]


def find_bucket(
    buckets: Sequence[Bucket],
    num_tokens: int,
    num_rows: int,
    *,
    is_decode: bool = False,
    is_verify: bool = False,
    is_mixed: bool = False,
    loop_form: Form | None = None,
) -> Bucket:
    """Returns the first bucket of a kind that holds `num_tokens` tokens in `num_rows` rows.

    `buckets`: a subset of `plan_buckets`, in its order. A prefill bucket takes decode steps if no decode bucket fits.
    Raises RuntimeError if no bucket holds them.
    """
    for bucket in buckets:
        fits = bucket.num_tokens >= num_tokens and bucket.num_rows >= num_rows
        is_of_kind = (
            bucket.is_verify == is_verify
            and bucket.is_mixed == is_mixed
            and (bucket.form if bucket.num_steps > 1 else None) == loop_form
            and (is_decode or not bucket.is_decode)
        )
        if fits and is_of_kind and not bucket.is_draw:
            return bucket
    kind = "verify" if is_verify else f"{loop_form} loop" if loop_form else "decode" if is_decode else "prefill"
    there = ", ".join(bucket.name for bucket in buckets)
    raise RuntimeError(f"no bucket for {kind} steps holds {num_tokens} tokens in {num_rows} rows; there are {there}")


def fitting_size(sizes: Iterable[int], count: int) -> int:
    """Returns the first of the sizes, sorted ascending, that is at least `count`; raises RuntimeError if none is."""
    sizes = list(sizes)
    for size in sizes:
        if size >= count:
            return size
    raise RuntimeError(f"no size of {sizes} holds {count}")
