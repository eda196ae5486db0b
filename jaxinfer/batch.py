"""One step as the device sees it: built fresh every time, never mutated in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxinfer.config import SamplingParams

# The slot of padding tokens: past every pool, and far enough from the int32 limit to take any layer's offset.
# It must not be negative: JAX wraps negative indices even where it drops those past the end.
PADDING_SLOT = 2**30


@struct.dataclass
class Batch:
    """The tokens of one step, rows one after another, padding last."""

    tokens: Any  # i32[T]
    positions: Any  # i32[T]  position of each token in its request
    slot_mapping: Any  # i32[T]  page * S + offset; PADDING_SLOT on padding
    cu_q_lens: Any  # i32[B+1]  q_lens 3, 1, 2 -> cu_q_lens 0 3 4 6
    kv_lens: Any  # i32[B]  context length including this step; 0 on padding
    block_tables: Any  # i32[B, M]  page ids; 0 past a row's pages


def num_real_tokens(batch: Batch) -> Any:
    """Returns how many of the batch's tokens are not padding, i32[]."""
    q_lens = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    return jnp.where(batch.kv_lens > 0, q_lens, 0).sum()


@struct.dataclass
class SamplingBatch:
    """How each row's next token is chosen; every field always present, for an optional one would be a recompile."""

    temperature: Any  # f32[B]  0 takes the most probable token
    top_k: Any  # i32[B]  0 is off
    top_p: Any  # f32[B]  1 is off
    min_p: Any  # f32[B]  0 is off
    seeds: Any  # u32[B, 2]  high and low word of the seed
    sample_index: Any  # i32[B]  which of several samples of one prompt
    num_log_probs: Any  # i32[B]  alternatives wanted per token


@struct.dataclass
class StepOutput:
    """What a step returns to the host. `A` is the number of alternatives the step was built for."""

    tokens: Any  # i32[B]
    log_probs: Any  # f32[B]  of the chosen token, before temperature and filters
    top_tokens: Any  # i32[B, A]  most probable first; zeros unless some row wants them
    top_log_probs: Any  # f32[B, A]


class Row(NamedTuple):
    """The part of one request computed in one step."""

    token_ids: Sequence[int]  # the chunk
    start: int  # position of its first token
    page_ids: Sequence[int]  # all pages of the request so far, the chunk's included


def make_batch(rows: Sequence[Row], *, page_size: int, num_tokens: int, num_rows: int, table_width: int) -> Batch:
    """Lays out rows in a batch of `num_tokens` tokens, `num_rows` rows and tables of `table_width` pages, on the host.

    For `decode_step` give one token per row and num_tokens = num_rows.
    """
    q_lens = np.array([len(row.token_ids) for row in rows], np.int32)
    starts = np.array([row.start for row in rows], np.int32)
    total = int(q_lens.sum())
    if total > num_tokens or len(rows) > num_rows:
        raise ValueError(f"{total} tokens in {len(rows)} rows do not fit num_tokens={num_tokens}, num_rows={num_rows}")
    for row in rows:
        _check_row(row, page_size, table_width)
    block_tables = np.zeros((num_rows, table_width), np.int32)
    for i, row in enumerate(rows):
        block_tables[i, : len(row.page_ids)] = row.page_ids
    ends = np.cumsum(q_lens)
    row_ids = np.repeat(np.arange(len(rows), dtype=np.int32), q_lens)  # q_lens 3, 1, 2 -> row_ids 0 0 0 1 2 2
    offsets = np.arange(total, dtype=np.int32) - np.repeat(ends - q_lens, q_lens)
    positions = np.repeat(starts, q_lens) + offsets
    slots = block_tables[row_ids, positions // page_size] * page_size + positions % page_size
    cu_q_lens = np.full(num_rows + 1, total, np.int32)
    cu_q_lens[: len(rows) + 1] = np.concatenate([[0], ends])
    if num_tokens == num_rows and (q_lens == 1).all():  # a decode step: padding rows own their padding token
        cu_q_lens = np.arange(num_rows + 1, dtype=np.int32)
    return Batch(
        tokens=_padded(np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int32), num_tokens, 0),
        positions=_padded(positions, num_tokens, 0),
        slot_mapping=_padded(slots, num_tokens, PADDING_SLOT),
        cu_q_lens=cu_q_lens,
        kv_lens=_padded(starts + q_lens, num_rows, 0),
        block_tables=block_tables,
    )


def _check_row(row: Row, page_size: int, table_width: int) -> None:
    num_tokens, num_pages = row.start + len(row.token_ids), len(row.page_ids)
    if len(row.token_ids) == 0 or row.start < 0:
        raise ValueError(f"a row has no tokens ({len(row.token_ids)}) or a negative start ({row.start}); leave it out")
    if num_pages > table_width:
        raise ValueError(f"a row of {num_pages} pages does not fit table_width={table_width}")
    if num_tokens > num_pages * page_size:
        raise ValueError(f"a row of {num_tokens} tokens does not fit its {num_pages} pages of {page_size} slots")


def make_sampling(
    params: Sequence[SamplingParams], *, num_rows: int, seeds: Sequence[int] | None = None
) -> SamplingBatch:
    """Lays out the sampling parameters of a batch's rows, on the host; padding rows are greedy.

    `seeds` holds each row's seed; without it every row must carry its own in its parameters.
    """
    if len(params) > num_rows or (seeds is not None and len(seeds) != len(params)):
        num_seeds = "no" if seeds is None else len(seeds)
        raise ValueError(f"{len(params)} rows with {num_seeds} seeds do not fit num_rows={num_rows}")
    if seeds is None:
        if any(p.seed is None and p.temperature > 0 for p in params):
            raise ValueError("a row with temperature above 0 needs a seed: set SamplingParams.seed or pass seeds")
        seeds = [p.seed or 0 for p in params]
    words = np.zeros((num_rows, 2), np.uint32)
    for i, seed in enumerate(seeds):
        words[i] = divmod(seed, 2**32)

    def column(name: str, dtype: type, padding: float) -> np.ndarray:
        return _padded(np.array([getattr(p, name) for p in params], dtype), num_rows, padding)

    return SamplingBatch(
        temperature=column("temperature", np.float32, 0),
        top_k=column("top_k", np.int32, 0),
        top_p=column("top_p", np.float32, 1),
        min_p=column("min_p", np.float32, 0),
        seeds=words,
        sample_index=np.zeros(num_rows, np.int32),
        num_log_probs=column("log_probs", np.int32, 0),
    )


def _padded(values: np.ndarray, size: int, padding: float) -> np.ndarray:
    dtype = np.float32 if values.dtype == np.float32 else np.int32
    out = np.full(size, padding, dtype)
    out[: len(values)] = values
    return out
