"""How a TPU kernel's work is cut up: queries into items, new keys and values into tiles of the pool."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.layout import pad_heads
from kernels_pallas.paged_attention.online_softmax import LOG2_E

LANES = 128


class Stored(NamedTuple):
    """Keys and values as a pool holds them: those of its pages, or those of tokens."""

    numbers: jax.Array  # [P, C, S / t, t, W] of a pool, [T, C, W] of tokens
    scales: jax.Array | None = None  # f32[P, 2, K, L] or f32[T, 2, K] of keys and values; None without


class Items(NamedTuple):
    """The units of a kernel's work, i32[n] each: a few consecutive queries of one row."""

    count: jax.Array  # i32[1]  how many there are; what follows them means nothing
    row: jax.Array
    source: jax.Array  # where their queries lie, and their result: the row, or the first token
    size: jax.Array  # how many queries there are
    start: jax.Array  # position of the first query
    end: jax.Array  # how many tokens of the row they see


class Tiles(NamedTuple):
    """The tiles of the pool that a step's new tokens are in, n of them with t slots each, for all layers."""

    count: jax.Array  # i32[1]  how many there are; what follows them means nothing
    row: jax.Array  # i32[n]
    page: jax.Array  # i32[n]  place of the tile's page in the row's block table
    place: jax.Array  # i32[n]  place of the tile in the page
    token: jax.Array  # i32[n, t]  the token of each slot, T for none
    is_old: jax.Array  # bool[n, t]  slots that the pool fills, before a row's first token
    first_page: jax.Array  # i32[B]  of each row's first tile
    first_place: jax.Array  # i32[B]


class RaggedPlan(NamedTuple):
    """The places of the tokens of longer rows in the kernel's work."""

    items: Items
    tokens: jax.Array  # i32[items, queries]  those of each item, T for none
    tree: jax.Array | None  # i32[items, words, R, LANES]
    tiles: Tiles
    is_real: jax.Array  # bool[T]
    scale_tiles: Tiles | None = None  # the pages with the scales of new tokens, each a tile; None without scales


class DecodePlan(NamedTuple):
    """The places of rows of one token in the kernel's work."""

    items: Items
    has_context: jax.Array  # bool[B]  rows that are not padding


class SinglePlan(NamedTuple):
    """The places of the rows of one token among longer ones."""

    decode: DecodePlan  # of these rows alone
    last: jax.Array  # i32[B]  each row's last token
    row: jax.Array  # i32[T]  of each token
    is_single: jax.Array  # bool[T]


class Plan(NamedTuple):
    """What the kernels derive from a step's lengths, the same in all layers whose pools have equal tiles."""

    decode: DecodePlan | None = None  # if all rows have one token
    ragged: RaggedPlan | None = None
    single: SinglePlan | None = None


def plan_decode(kv_lens: jax.Array) -> DecodePlan:
    """Returns an item per row with a context; its only query is the last token."""
    has_context = kv_lens > 0
    rows = jnp.nonzero(has_context, size=kv_lens.shape[0], fill_value=0)[0].astype(jnp.int32)
    count, end = has_context.sum(dtype=jnp.int32)[None], kv_lens[rows]
    return DecodePlan(Items(count, rows, rows, jnp.ones_like(rows), end - 1, end), has_context)


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
    size = jnp.clip(q_lens[row] - first, 0, Q)
    return Items(ends[-1:], row, starts[row] + first, size, contexts[row] + first, end), tokens


def plan_tiles(contexts, q_lens, starts, num_tokens: int, table_width: int, page_tiles: int, tile: int) -> Tiles:
    """Returns the tiles of new tokens: rows' own, each from the one with its first token on."""
    B, last = q_lens.shape[0], table_width - 1
    skips = contexts % tile
    counts = jnp.where(q_lens > 0, (skips + q_lens + tile - 1) // tile, 0)
    ends = jnp.cumsum(counts)
    n = jnp.arange((num_tokens + tile - 1) // tile + 2 * B)
    row = jnp.minimum((ends[None] <= n[:, None]).sum(-1), B - 1)
    in_row = n - ends[row] + counts[row]  # 0 for a row's first tile
    place = contexts[row] // tile + in_row
    offset = (in_row * tile - skips[row])[:, None] + jnp.arange(tile)[None]  # token of the row in each slot
    is_new = (offset >= 0) & (offset < q_lens[row][:, None])
    first = jnp.clip(contexts // tile, 0, page_tiles * table_width - 1)
    return Tiles(
        count=ends[-1:],
        row=row,
        page=jnp.clip(place // page_tiles, 0, last),
        place=place % page_tiles,
        token=jnp.where(is_new, starts[row][:, None] + offset, num_tokens),
        is_old=offset < 0,
        first_page=first // page_tiles,
        first_place=first % page_tiles,
    )


def new_tiles(tiles: Tiles, new, pool, block_tables):
    """Cuts new tokens [T, C, W] into the pool's tiles.

    Returns tiles [n, C, t, W], their pages and places in them i32[n], and how many there are i32[1]. What a row's first
    tile holds already is read from the pool; what follows its last token is zero.
    """
    values = new.at[tiles.token].get(mode="fill", fill_value=0).transpose(0, 2, 1, 3)
    rows = jnp.arange(block_tables.shape[0])
    old = pool[block_tables[rows, tiles.first_page], :, tiles.first_place]  # [B, C, t, W]
    values = jnp.where(tiles.is_old[:, None, :, None], old[tiles.row], values)
    return values, block_tables[tiles.row, tiles.page], tiles.place, tiles.count


def new_scales(tiles: Tiles, new, pool, block_tables):
    """Cuts the scales of new tokens [T, 2, K] into whole pages, the tiles of a plan for tiles as long as a page.

    Returns scales [n, 2, K, L], their pages i32[n], and how many there are i32[1], as `new_tiles` does.
    """
    values = pad_heads(new.at[tiles.token].get(mode="fill", fill_value=0).transpose(0, 2, 3, 1), pool.shape[-1])
    old = pool[block_tables[jnp.arange(block_tables.shape[0]), tiles.first_page]]  # [B, 2, K, L]
    is_old = pad_heads(tiles.is_old, pool.shape[-1])[:, None, None]
    return jnp.where(is_old, old[tiles.row], values), block_tables[tiles.row, tiles.page], tiles.count


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
