"""Writes new keys and values into pages, in place: what a GPU runs before it attends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import triton
from kernels_pallas.exact_sums import sums_are_exact
from kernels_pallas.paged_attention.call import AttentionCall
from kernels_pallas.paged_attention.gpu.chunks import arrays_of, find_chunk, find_pages, num_chunks

# Tokens that one program appends.
APPEND_TILE = 16
# Numbers per token and head from which on a program needs more threads to keep them in registers.
WIDE = 256


def append(new: Sequence, pools: Sequence, call: AttentionCall, interpret: bool) -> tuple:
    """Returns the pools with what is new in each, as it is stored, written in place.

    New tokens are [T, K, H] for pools [P, S, K, H], and their scales [T, K] for pools [P, K, S], which come last.
    """
    (T, K, H), B, q_len = new[0].shape, call.kv_lens.shape[0], call.q_len
    block_q, num_warps = append_tile(q_len, H)
    arrays = arrays_of(call)
    return tuple(
        triton.launch(
            functools.partial(_append_kernel, names=tuple(arrays), num_pools=len(pools), block_q=block_q, q_len=q_len),
            *arrays.values(),
            *new,
            *pools,
            grid=(num_chunks(T, B, block_q, q_len), K),
            out=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
            aliases={len(arrays) + len(new) + i: i for i in range(len(pools))},
            num_warps=num_warps,
            num_stages=1,
            name="append_kv",
            interpret=interpret,
        )
    )


def append_tile(q_len: int | None, head_dim: int) -> tuple[int, int]:
    """Returns how many tokens of a row a program appends, and its warps: one, if sums of norms must be exact."""
    if sums_are_exact():
        return 1, 1
    block_q = APPEND_TILE if q_len is None else min(pl.next_power_of_2(q_len), APPEND_TILE)
    return block_q, 1 if block_q < APPEND_TILE else 4 if head_dim <= WIDE else 8


class Tile(NamedTuple):
    """The tokens of a program; each array has one number for a token."""

    row: jax.Array  # i32[]
    tokens: jax.Array  # i32  in the batch
    positions: jax.Array  # i32  in the row
    is_token: jax.Array  # False past the end of the row
    is_real: jax.Array  # False for padding too, which is in no page

    def slots(self, arrays: Any, page_size: int) -> tuple[jax.Array, jax.Array]:
        """Returns the page of each token, and its slot there."""
        page_ids = find_pages(arrays, self.row, self.positions, page_size, self.is_real)
        return page_ids, self.positions & (page_size - 1)


def find_tile(arrays: Any, num_tokens: int, block_q: int, q_len: int | None) -> Tile:
    """Returns the tokens of tile `program_id(0)`."""
    chunk = find_chunk(arrays, num_tokens, block_q, q_len)
    queries = chunk.offset + jnp.arange(block_q, dtype=jnp.int32)
    positions, is_token = chunk.context + queries, queries < chunk.num_queries
    is_real = is_token & (positions >= 0)  # a padding row with tokens has a context below 0
    return Tile(chunk.row, chunk.first_token + queries, positions, is_token, is_real)


def _append_kernel(*refs, names, num_pools: int, block_q: int, q_len: int | None) -> None:
    """One program: tile `program_id(0)` of tokens, KV head `program_id(1)`."""
    arrays = SimpleNamespace(**dict(zip(names, refs, strict=False)))
    all_new, pools = refs[len(names) : len(names) + num_pools], refs[-num_pools:]
    head, (T, _, H) = pl.program_id(1), all_new[0].shape
    tile = find_tile(arrays, T, block_q, q_len)
    tokens, is_real, (page_ids, slots) = tile.tokens, tile.is_real, tile.slots(arrays, pools[0].shape[1])
    columns = jnp.arange(pl.next_power_of_2(H), dtype=jnp.int32)
    mask = is_real[:, None] & (columns < H)[None]
    for new, pool in zip(all_new, pools, strict=True):
        if len(pool.shape) == 3:
            triton.store(pool, (page_ids, head, slots), triton.load(new, (tokens, head), is_real), is_real)
            continue
        value = triton.load(new, (tokens[:, None], head, columns[None]), mask)
        triton.store(pool, (page_ids[:, None], slots[:, None], head, columns[None]), value, mask)
