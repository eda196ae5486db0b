"""How the tokens of a ragged batch are dealt to the programs of a GPU kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import triton
from kernels_pallas.paged_attention.call import AttentionCall


class Chunk(NamedTuple):
    """The row that a program works on, and where in it."""

    row: jax.Array  # i32[]  of the batch; B for the padding after the last row
    first_token: jax.Array  # i32[]  where the row starts in the batch
    num_queries: jax.Array  # i32[]  of the row
    kv_len: jax.Array  # i32[]
    context: jax.Array  # i32[]  tokens of the row before this step; below 0 for padding
    offset: jax.Array  # i32[]  the program's first query in the row


def for_kernels(call: AttentionCall) -> AttentionCall:
    """Returns the call with its offset as the array i32[1] that kernels read."""
    return replace(call, page_offset=jnp.asarray(call.page_offset, jnp.int32).reshape(1))


def arrays_of(call: AttentionCall) -> dict[str, jax.Array]:
    """Returns the arrays of a call's rows that every kernel reads, by the names that it reads them by."""
    return {name: getattr(call, name) for name in ("kv_lens", "cu_q_lens", "block_tables", "page_offset")}


def num_chunks(T: int, B: int, block_q: int, q_len: int | None) -> int:
    """Returns how many programs it takes to give block_q of T tokens in B rows to each."""
    if q_len is None:
        return T // block_q + B + 1
    # Some rows may have fewer than q_len tokens, and T may be less than B * q_len.
    return B * pl.cdiv(q_len, block_q) + max(0, pl.cdiv(T - B * q_len, block_q))


def find_chunk(arrays, T: int, block_q: int, q_len: int | None) -> Chunk:
    """Tiles of block_q queries are dealt to the rows in order, and at last to the padding, as if it were row B."""
    B, i = arrays.kv_lens.shape[0], pl.program_id(0)
    if q_len is None:
        # Row b starts at tile cu_q_lens[b] // block_q + b, which leaves each row the most tiles that it may need.
        rows = jnp.arange(pl.next_power_of_2(B + 1), dtype=jnp.int32)
        first_tiles = triton.load(arrays.cu_q_lens, (rows,), rows <= B) // block_q + rows
        row = jnp.sum(((first_tiles <= i) & (rows <= B)).astype(jnp.int32)) - 1
        first_tile = triton.load(arrays.cu_q_lens, (row,)) // block_q + row
    else:
        row = jnp.minimum(i // pl.cdiv(q_len, block_q), B)
        first_tile = row * pl.cdiv(q_len, block_q)
    first_token = triton.load(arrays.cu_q_lens, (row,))
    end = jnp.where(row < B, triton.load(arrays.cu_q_lens, (jnp.minimum(row + 1, B),)), T)
    kv_len = jnp.where(row < B, triton.load(arrays.kv_lens, (jnp.minimum(row, B - 1),)), 0)
    num_queries = end - first_token
    return Chunk(row, first_token, num_queries, kv_len, kv_len - num_queries, (i - first_tile) * block_q)


def find_pages(arrays, row: jax.Array, positions: jax.Array, page_size: int, mask: jax.Array) -> jax.Array:
    """Returns the pages of positions i32[...] in a row's context; any page where the mask is false."""
    page_ids = triton.load(arrays.block_tables, (row, positions >> (page_size.bit_length() - 1)), mask)
    return page_ids + triton.load(arrays.page_offset, (0,))
