"""The few shapes in which steps are computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from jaxinfer.config import EngineConfig
from jaxinfer.device import default_batched_tokens
from jaxinfer.engine.scheduling.step import Step

# A shape is compiled once and costs time to compile, while rows and tokens of padding cost little: on CPU they are not
# multiplied, and accelerators stream the same weights whether few rows need them or many.
DECODE_ROWS = (1, 8)
PREFILL_TOKENS = (128,)
GROWTH = 8


@dataclass(frozen=True)
class Bucket:
    """One compiled shape: T tokens in B rows.

    A decode bucket has T = B, one token per row. A verify bucket is for rows of up to `q_len` tokens, 0 for others. A
    draw bucket is for what steps leave to be drawn: those of a verify bucket, or all others of B rows, with T = B.
    """

    is_decode: bool
    num_tokens: int
    num_rows: int
    q_len: int = 0
    is_draw: bool = False

    @property
    def is_verify(self) -> bool:
        return self.q_len > 0 and not self.is_draw

    @property
    def is_prefill(self) -> bool:
        return not self.is_decode and not self.is_verify and not self.is_draw

    @property
    def name(self) -> str:
        draw = "draw " if self.is_draw else ""
        if self.q_len:
            return f"{draw}verify {self.num_tokens} of {self.num_rows}"
        return f"{draw or ('decode ' if self.is_decode else 'prefill ')}{self.num_tokens}"

    @property
    def draw(self) -> Bucket:
        """The shape in which what steps of this one leave to be drawn is drawn."""
        if self.is_verify:
            return replace(self, is_draw=True)
        return Bucket(False, self.num_rows, self.num_rows, is_draw=True)


def plan_buckets(config: EngineConfig, max_drafts: int = 0) -> tuple[Bucket, ...]:
    """Returns every shape an engine of this configuration can ask for, smallest first of each kind.

    Decoding takes 1, 8, 64, … rows and prefill 128, 1024, … tokens, up to the limits of the configuration, one of which
    is the prefill beside decoding rows. A prefill has as many rows as it could have. Where drafts are verified, rows
    of decoding may have one draft each, or all have `max_drafts`, as far as the limits allow.
    """
    max_rows, max_tokens = config.max_num_seqs, max_batched_tokens(config)
    decode = [Bucket(True, rows, rows) for rows in decode_sizes(config)]
    sizes = {*_sizes(PREFILL_TOKENS, max_tokens), max_verified_tokens(config)}
    prefill = [Bucket(False, n, min(n, max_rows)) for n in sorted(sizes)]
    verify = _verify_buckets(decode_sizes(config), max_drafts, max_verified_tokens(config))
    return (*decode, *verify, *prefill)


def plan_draws(buckets: Iterable[Bucket], draft_trees: bool = False) -> tuple[Bucket, ...]:
    """Returns the shapes in which steps of some buckets draw their tokens apart; trees are verified where they are."""
    draws = {bucket.draw for bucket in buckets if not (bucket.is_verify and draft_trees)}
    return tuple(sorted(draws, key=lambda bucket: (bucket.q_len, bucket.num_tokens)))


def decode_sizes(config: EngineConfig) -> list[int]:
    """Returns how many rows steps of decoding rows have."""
    return _sizes(DECODE_ROWS, config.max_num_seqs)


def max_batched_tokens(config: EngineConfig) -> int:
    """Returns how many tokens a step may have: as configured, else as the device likes it and all rows can advance."""
    least = max(config.max_num_seqs, config.max_mixed_tokens or 0)
    return config.max_num_batched_tokens or max(default_batched_tokens(), least)


def max_verified_tokens(config: EngineConfig) -> int:
    """Returns how many tokens a step may have in which drafts are verified: somebody decodes in it."""
    return config.max_mixed_tokens or max_batched_tokens(config)


def _verify_buckets(sizes: list[int], max_drafts: int, max_tokens: int) -> list[Bucket]:
    q_len = 1 + max_drafts
    buckets = []
    for smaller, num_rows in pairwise([0, *sizes]) if max_drafts else ():
        # One row wants few tokens whatever its drafts; of many rows, few may have any.
        wanted = {q_len * num_rows} if num_rows == 1 else {2 * num_rows, q_len * num_rows}
        for n in sorted({min(num_tokens, max_tokens) for num_tokens in wanted}):
            most_rows = min(num_rows, n - 1)  # one of them has a draft
            if most_rows > smaller:
                buckets.append(Bucket(False, n, most_rows, q_len))
    return buckets


def _sizes(first: tuple[int, ...], last: int) -> list[int]:
    """`first`, going on by GROWTH, as far as below `last`; then `last` itself."""
    sizes = list(first)
    while sizes[-1] < last:
        sizes.append(sizes[-1] * GROWTH)
    return [*(size for size in sizes if size < last), last]


def choose_bucket(buckets: Sequence[Bucket], step: Step) -> Bucket:
    """Returns the smallest bucket of its kind that holds the step; see `find_bucket`."""
    is_decode, is_verify = step.is_decode, step.is_verify
    return find_bucket(buckets, step.num_tokens, len(step.chunks), is_decode=is_decode, is_verify=is_verify)


def find_bucket(
    buckets: Sequence[Bucket], num_tokens: int, num_rows: int, *, is_decode: bool = False, is_verify: bool = False
) -> Bucket:
    """Returns the first bucket of a kind that holds this many tokens and rows.

    `buckets` are those of `plan_buckets` or some of them. A prefill bucket holds decode steps if no decode bucket does.
    """
    for bucket in buckets:
        fits = bucket.num_tokens >= num_tokens and bucket.num_rows >= num_rows
        is_of_kind = bucket.is_verify == is_verify and (is_decode or not bucket.is_decode)
        if fits and is_of_kind and not bucket.is_draw:
            return bucket
    kind = "verify" if is_verify else "decode" if is_decode else "prefill"
    there = ", ".join(bucket.name for bucket in buckets)
    raise RuntimeError(f"no bucket for {kind} steps holds {num_tokens} tokens in {num_rows} rows; there are {there}")


def fitting_size(sizes: Iterable[int], count: int) -> int:
    """Returns the first of the sizes, smallest first, that holds `count` rows or pages."""
    sizes = list(sizes)
    for size in sizes:
        if size >= count:
            return size
    raise RuntimeError(f"no size of {sizes} holds {count}")
