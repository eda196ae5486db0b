"""How a TPU kernel's work is cut up: queries into items, new keys and values into tiles of the pool."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.reference import LOG2_E

LANES = 128


class Items(NamedTuple):
    """The units of a kernel's work, i32[n] each: a few consecutive queries of one row."""

    count: jax.Array  # i32[1]  how many there are; what follows them means nothing
    row: jax.Array
    source: jax.Array  # where their queries lie, and their result
    start: jax.Array  # position of the first query
    end: jax.Array  # how many tokens of the row they see


def decode_items(kv_lens: jax.Array) -> Items:
    """One item per row with a context; its only query is the last token."""
    rows = jnp.nonzero(kv_lens > 0, size=kv_lens.shape[0], fill_value=0)[0].astype(jnp.int32)
    end = kv_lens[rows]
    return Items((kv_lens > 0).sum(dtype=jnp.int32)[None], rows, rows, end - 1, end)


def ragged_items(kv_lens, q_lens, starts, num_tokens: int, num_queries: int, *, is_causal: bool) -> tuple:
    """Items of up to `num_queries` tokens, and which tokens those are, i32[items, queries]: num_tokens for none.

    q_lens 3, 1 in items of 2 -> items' rows 0 0 1, their first queries 0 2 0.
    """
    T, B, Q, contexts = num_tokens, kv_lens.shape[0], num_queries, kv_lens - q_lens
    counts = (q_lens + Q - 1) // Q
    ends = jnp.cumsum(counts)
    item = jnp.arange((T + Q - 1) // Q + B)
    row = jnp.minimum((ends[None] <= item[:, None]).sum(-1), B - 1)
    first = (item - ends[row] + counts[row]) * Q
    end = jnp.minimum(contexts[row] + first + Q, kv_lens[row]) if is_causal else kv_lens[row]
    offsets = first[:, None] + jnp.arange(Q)[None]
    tokens = jnp.where(offsets < q_lens[row][:, None], starts[row][:, None] + offsets, T)
    return Items(ends[-1:], row, item, contexts[row] + first, end), tokens


def new_tiles(new, pool, block_tables, contexts, q_lens, starts):
    """Cuts new tokens [T, C, W] into the pool's tiles.

    Returns tiles [n, C, t, W], their pages and places in them i32[n], and how many there are i32[1]. What a row's first
    tile holds already is read from the pool; what follows its last token is zero.
    """
    T, B, tile, page_tiles = new.shape[0], q_lens.shape[0], pool.shape[3], pool.shape[2]
    skips = contexts % tile
    counts = jnp.where(q_lens > 0, (skips + q_lens + tile - 1) // tile, 0)
    ends = jnp.cumsum(counts)
    n = jnp.arange((T + tile - 1) // tile + 2 * B)
    row = jnp.minimum((ends[None] <= n[:, None]).sum(-1), B - 1)
    in_row = n - ends[row] + counts[row]  # 0 for a row's first tile
    place = contexts[row] // tile + in_row
    last = block_tables.shape[1] - 1
    page_ids = block_tables[row, jnp.clip(place // page_tiles, 0, last)]
    offset = (in_row * tile - skips[row])[:, None] + jnp.arange(tile)[None]  # token of the row in each slot
    is_new = (offset >= 0) & (offset < q_lens[row][:, None])
    tiles = new.at[jnp.where(is_new, starts[row][:, None] + offset, T)].get(mode="fill", fill_value=0)
    first = jnp.clip(contexts // tile, 0, page_tiles * (last + 1) - 1)
    old = pool[block_tables[jnp.arange(B), first // page_tiles], :, first % page_tiles]  # [B, C, t, W]
    is_old = (offset < 0)[:, None, :, None]
    return jnp.where(is_old, old[row], tiles.transpose(0, 2, 1, 3)), page_ids, place % page_tiles, ends[-1:]


def head_factors(K: int, factor: float, scale: float, softcap: float | None, k_scale, v_scale) -> jax.Array:
    """Returns f32[2, K]: what products with stored keys are multiplied by, and what the result is multiplied by.

    Numbers are worth `factor` times what the matrix unit reads, times their scales.
    """
    to_scores = scale * LOG2_E if softcap is None else scale / softcap
    ones = jnp.ones(K, jnp.float32)
    k_scale, v_scale = (ones if s is None else s.astype(jnp.float32) for s in (k_scale, v_scale))
    return jnp.stack([to_scores * k_scale, v_scale]) * factor


def sinks_of_rows(sinks: jax.Array, R: int) -> jax.Array:
    """Returns sinks f32[K, G] as the kernel keeps a maximum, f32[K, R, LANES]: row r of a tile is query head r % G."""
    K, G = sinks.shape
    return jnp.broadcast_to(jnp.tile(sinks, (1, -(-R // G)))[:, :R, None], (K, R, LANES))
