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
    """Returns how many tokens of a row a program appends, and its warps."""
    block_q = APPEND_TILE if q_len is None else min(pl.next_power_of_2(q_len), APPEND_TILE)
    return block_q, 1 if block_q < APPEND_TILE else 4 if head_dim <= WIDE else 8


class Places(NamedTuple):
    """The tokens of a program, and their places in the pages; each array has one number for a token."""

    tokens: jax.Array  # i32  in the batch
    is_token: jax.Array  # False past the end of the row
    is_real: jax.Array  # False for padding too, which is in no page
    page_ids: jax.Array  # i32
    slots: jax.Array  # i32  in the page


def find_places(arrays: Any, num_tokens: int, block_q: int, q_len: int | None, page_size: int) -> Places:
    """Returns the places of the tokens of tile `program_id(0)`."""
    chunk = find_chunk(arrays, num_tokens, block_q, q_len)
    queries = chunk.offset + jnp.arange(block_q, dtype=jnp.int32)
    positions, is_token = chunk.context + queries, queries < chunk.num_queries
    is_real = is_token & (positions >= 0)  # a padding row with tokens has a context below 0
    page_ids = find_pages(arrays, chunk.row, positions, page_size, is_real)
    return Places(chunk.first_token + queries, is_token, is_real, page_ids, positions & (page_size - 1))


def _append_kernel(*refs, names, num_pools: int, block_q: int, q_len: int | None) -> None:
    """One program: tile `program_id(0)` of tokens, KV head `program_id(1)`."""
    arrays = SimpleNamespace(**dict(zip(names, refs, strict=False)))
    all_new, pools = refs[len(names) : len(names) + num_pools], refs[-num_pools:]
    head, (T, _, H) = pl.program_id(1), all_new[0].shape
    tokens, _, is_real, page_ids, slots = find_places(arrays, T, block_q, q_len, pools[0].shape[1])
    columns = jnp.arange(pl.next_power_of_2(H), dtype=jnp.int32)
    mask = is_real[:, None] & (columns < H)[None]
    for new, pool in zip(all_new, pools, strict=True):
        if len(pool.shape) == 3:
            triton.store(pool, (page_ids, head, slots), triton.load(new, (tokens, head), is_real), is_real)
            continue
        value = triton.load(new, (tokens[:, None], head, columns[None]), mask)
        triton.store(pool, (page_ids[:, None], slots[:, None], head, columns[None]), value, mask)
