"""The few shapes in which steps are computed, and how a scheduled step is laid out in one of them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.batch import Batch, Row, make_batch
from jaxinfer.config import EngineConfig
from jaxinfer.engine.step import Step
from jaxinfer.sampling_batch import SamplingBatch, make_sampling

# A shape is compiled once and costs time to compile, while rows and tokens of padding cost little: on CPU they are not
# multiplied, and accelerators stream the same weights whether few rows need them or many.
DECODE_ROWS = (1, 8)
PREFILL_TOKENS = (64,)
GROWTH = 8


@dataclass(frozen=True)
class Bucket:
    """One compiled shape: T tokens in B rows. A decode bucket has T = B, one token per row."""

    is_decode: bool
    num_tokens: int
    num_rows: int

    @property
    def name(self) -> str:
        return f"decode {self.num_rows}" if self.is_decode else f"prefill {self.num_tokens}"


def plan_buckets(config: EngineConfig) -> tuple[Bucket, ...]:
    """Returns every shape an engine of this configuration can ask for, smallest first of each kind.

    Decoding takes 1, 8, 64, … rows and prefill 64, 512, … tokens, up to the limits of the configuration, one of which
    is the prefill beside decoding rows. A prefill has as many rows as it could have.
    """
    max_rows, max_tokens = config.max_num_seqs, config.max_num_batched_tokens
    decode = [Bucket(True, rows, rows) for rows in _sizes(DECODE_ROWS, max_rows)]
    sizes = {*_sizes(PREFILL_TOKENS, max_tokens), config.max_mixed_tokens or max_tokens}
    prefill = [Bucket(False, n, min(n, max_rows)) for n in sorted(sizes)]
    return (*decode, *prefill)


def _sizes(first: tuple[int, ...], last: int) -> list[int]:
    """`first`, going on by GROWTH, as far as below `last`; then `last` itself."""
    sizes = list(first)
    while sizes[-1] < last:
        sizes.append(sizes[-1] * GROWTH)
    return [*(size for size in sizes if size < last), last]


def choose_bucket(buckets: tuple[Bucket, ...], step: Step) -> Bucket:
    """Returns the smallest bucket that holds the step."""
    for bucket in buckets:
        fits = bucket.num_tokens >= step.num_tokens and bucket.num_rows >= len(step.chunks)
        if bucket.is_decode == step.is_decode and fits:
            return bucket
    raise RuntimeError(f"no bucket holds {step.num_tokens} tokens in {len(step.chunks)} rows")


def build_batch(
    step: Step,
    bucket: Bucket,
    *,
    page_size: int,
    table_width: int,
    max_listed_tokens: int = EngineConfig.max_listed_tokens,
    vocab_size: int = 0,
    custom: tuple[str, ...] = (),
) -> tuple[Batch, SamplingBatch]:
    """Lays the step out in the bucket's shape, one row per chunk, in new host arrays."""
    rows = [
        Row(
            chunk.request.token_ids[chunk.start : chunk.start + chunk.num_tokens],
            chunk.start,
            chunk.request.pages,
        )
        for chunk in step.chunks
    ]
    batch = make_batch(
        rows,
        page_size=page_size,
        num_tokens=bucket.num_tokens,
        num_rows=bucket.num_rows,
        table_width=table_width,
    )
    requests = [chunk.request for chunk in step.chunks]
    sampling = make_sampling(
        [request.sampling for request in requests],
        num_rows=bucket.num_rows,
        seeds=[request.seed for request in requests],
        sample_index=[request.sample_index for request in requests],
        prompt_lens=[request.num_prompt_tokens for request in requests],
        stop_token_ids=[request.stop_token_ids for request in requests],
        max_listed_tokens=max_listed_tokens,
        vocab_size=vocab_size,
        custom=custom,
        masks={
            row: chunk.request.grammar.mask()
            for row, chunk in enumerate(step.chunks)
            if chunk.request.grammar is not None and chunk.is_last
        },
    )
    return batch, sampling
