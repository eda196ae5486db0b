"""Attention of tiles of queries in plain JAX: an online softmax (Milakov & Gimelshein 2018) over keys in any portions.

The running maximum is rounded up to an integer and exponentials are base 2, so rescaling is by powers of two, exact.
A tile of a ragged batch has a few rows of one or a few queries each, or many queries of one row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.call import AttentionCall
from kernels_pallas.paged_attention.layout import as_operand
from kernels_pallas.row_products import rounded, row_sum, rows_by_matrices

LOG2_E = 1.4426950408889634
# Finite, so that a row of masked scores gives zeros and not NaN.
MASKED = -1e30


class Scoring(NamedTuple):
    """The numbers that turn products of queries and keys into weights; None switches a part off."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: jax.Array | None = None  # f32[K, G]
    k_scale: jax.Array | None = None  # f32[K]
    v_scale: jax.Array | None = None  # f32[K]
    paths: jax.Array | None = None  # i32[T, n]  `paths_of` a tree_mask; in a tile i32[R, Q, n]


class Sums(NamedTuple):
    """The online softmax of the keys so far, for the queries [R, Q, K, G] of a tile, or [R, K, Q G] of them."""

    maximum: jax.Array  # rounded up
    total: jax.Array
    out: jax.Array  # [..., V]


def empty_sums(q_tile: jax.Array, value_width: int, scoring: Scoring) -> Sums:
    """Returns the sums of queries [R, Q, K, G, H] before the first key: of their sinks alone."""
    zero = jnp.zeros(q_tile.shape[:4], jnp.float32)
    sums = Sums(zero + MASKED, zero, jnp.zeros((*zero.shape, value_width), jnp.float32))
    if scoring.sinks is None:
        return sums
    # Rounded here: fused with the subtraction below, the product would keep more bits in some steps than in others.
    sinks = rounded(scoring.sinks * LOG2_E)
    sinks = jnp.broadcast_to(sinks[None, None], zero.shape)
    return sums._replace(maximum=jnp.ceil(sinks), total=jnp.exp2(sinks - jnp.ceil(sinks)))


def by_head(x: jax.Array) -> jax.Array:
    """Returns x [R, Q, K, G, ...] as [R, K, Q G, ...]."""
    R, Q, K, G = x.shape[:4]
    return x.swapaxes(1, 2).reshape(R, K, Q * G, *x.shape[4:])


def by_query(x: jax.Array, num_queries: int) -> jax.Array:
    """Returns x [R, K, Q G, ...] as [R, Q, K, G, ...]."""
    R, K = x.shape[:2]
    return x.reshape(R, K, num_queries, -1, *x.shape[3:]).swapaxes(1, 2)


def slots_read(positions: jax.Array, context: jax.Array, scoring: Scoring) -> tuple[jax.Array, jax.Array]:
    """Returns the first and the last slot i32[R] that queries at positions i32[R, Q] (-1 for none) of a row see.

    `context` i32[R, 1 or Q] are the tokens before this step. What lies in other slots may be anything.
    """
    first, last = jnp.zeros(positions.shape[:1], jnp.int32), positions.max(-1)
    if scoring.window is not None:
        lowest = jnp.where(positions >= 0, positions, jnp.int32(2**30)).min(-1)
        first = jnp.maximum(lowest - scoring.window + 1, 0)
        if scoring.paths is not None:  # a draft sees all of its ancestors
            first = jnp.minimum(first, context[:, 0])
    return first, last


def sees(slots: jax.Array, positions: jax.Array, context: jax.Array, scoring: Scoring) -> jax.Array:
    """Returns which slots i32[R or 1, S] a query at each position sees by its window, bool[R, Q, S]."""
    at, slots = positions[:, :, None], slots[:, None]
    seen = slots <= at
    if scoring.window is not None:
        is_near = slots > at - scoring.window
        seen &= is_near if scoring.paths is None else is_near | (slots >= context[:, :1, None])
    return seen


def add_keys(
    sums: Sums, q: jax.Array, k: jax.Array, v: jax.Array, is_read: jax.Array, seen: jax.Array, scoring: Scoring
) -> Sums:
    """Adds keys [R, K, H, S] and values [R, K, S, V] to the sums of queries [R, K, Q G, H].

    Of row r only the slots is_read[r, s] may be read; query q sees the slots seen[r, q, s].
    """
    (R, Q, S), QG = seen.shape, q.shape[2]
    k, v = as_operand(k, q.dtype), as_operand(v, q.dtype)
    # A masked weight is 0, but 0 * NaN is NaN: what lies in unused slots must go as well.
    v = jnp.where(is_read[:, None, :, None], v, jnp.zeros_like(v))
    scores = _scores(rows_by_matrices(q, k), scoring)
    is_visible = jnp.broadcast_to(seen[:, :, None], (R, Q, QG // Q, S)).reshape(R, 1, QG, S)
    scores = jnp.where(is_visible, scores, MASKED)
    maximum = jnp.maximum(sums.maximum, jnp.ceil(scores.max(-1)))
    weights = jnp.where(is_visible, jnp.exp2(scores - maximum[..., None]), 0.0)
    rescale = jnp.exp2(sums.maximum - maximum)
    update = rows_by_matrices(weights.astype(v.dtype), v)
    return Sums(maximum, sums.total * rescale + row_sum(weights), sums.out * rescale[..., None] + update)


def attended(sums: Sums, scoring: Scoring) -> jax.Array:
    """Returns the attention [..., K, G, V] in float32 of sums [..., K, G]; zeros for a query without a key."""
    out = sums.out / jnp.where(sums.total > 0, sums.total, 1.0)[..., None]
    if scoring.v_scale is not None:
        out = out * jnp.broadcast_to(scoring.v_scale[:, None, None], out.shape)
    return out


def _scores(products: jax.Array, scoring: Scoring) -> jax.Array:
    """Turns products [R, K, Q G, S] of queries and stored keys into scores, in base 2."""
    if scoring.k_scale is not None:
        products = products * jnp.broadcast_to(scoring.k_scale[None, :, None, None], products.shape)
    if scoring.softcap is None:
        return products * (scoring.scale * LOG2_E)
    return jnp.tanh(products * (scoring.scale / scoring.softcap)) * (scoring.softcap * LOG2_E)


class Pool(NamedTuple):
    """The pages that queries [T, K, G, H] attend to; V is the width of a value."""

    page_size: int
    # ids i32[n] -> keys [n, K, H, S] and values [n, K, S, V]
    read_pages: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    # slots i32[n] -> keys [n, K, H] and values [n, K, V]
    read_slots: Callable[[jax.Array], tuple[jax.Array, jax.Array]]

    @property
    def value_width(self) -> int:
        return jax.eval_shape(self.read_pages, jax.ShapeDtypeStruct((1,), jnp.int32))[1].shape[-1]


# (queries [R, Q, K, G, H], block tables i32[R, M], positions i32[R, Q] (-1 for no query), tokens before this step
# i32[R, 1], scoring) -> [R, Q, K, G, V] in float32
AttendTile = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, Scoring], jax.Array]


def attend_in_one_tile(attend_tile: AttendTile, queries: jax.Array, call: AttentionCall, scoring: Scoring) -> jax.Array:
    """Returns the attention [B, K, G, V] of rows of one query each, in the order that they have."""
    positions = call.kv_lens[:, None] - 1
    out = attend_tile(queries[:, None], call.block_tables, positions, positions, scoring._replace(paths=None))
    return out[:, 0].astype(queries.dtype)


def attend_in_tiles(
    attend_tile: AttendTile,
    out: jax.Array,
    queries: jax.Array,
    call: AttentionCall,
    scoring: Scoring,
    *,
    num_queries: int,
    num_rows: int,
    num_tiles: int | None = None,
) -> jax.Array:
    """Returns `out` [T, K, G, V] with the rows of kv_lens > 0 filled in, in tiles of num_rows x num_queries.

    `num_tiles` are enough for any lengths. If None, the loop ends with the tiles of these lengths.
    """
    block_tables, kv_lens, cu_q_lens = call.block_tables, call.kv_lens, call.cu_q_lens
    (T, B), (R, Q) = (queries.shape[0], kv_lens.shape[0]), (num_rows, num_queries)
    starts, q_lens = cu_q_lens[:-1], cu_q_lens[1:] - cu_q_lens[:-1]
    # A tile takes as long as its longest row, so rows of similar length go together.
    order = jnp.argsort(-kv_lens)
    num_parts = jnp.where(kv_lens > 0, (q_lens + Q - 1) // Q, 0)[order]
    ends = jnp.cumsum(num_parts)  # parts per row 3, 2, 1, 0 -> ends 3 5 6 6; part 4 is in row 1

    def fill_in_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        part = i * R + jnp.arange(R)
        place = jnp.minimum((ends[None] <= part[:, None]).sum(-1), B - 1)
        row = order[place]
        offsets = ((part - ends[place] + num_parts[place]) * Q)[:, None] + jnp.arange(Q)[None]  # [R, Q] in its row
        is_query = (part < ends[-1])[:, None] & (offsets < q_lens[row][:, None])
        tokens = jnp.where(is_query, starts[row][:, None] + offsets, T)
        context = (kv_lens - q_lens)[row][:, None]  # tokens before this step
        paths = None
        if scoring.paths is not None:
            paths = scoring.paths.at[tokens].get(mode="fill", fill_value=-1)
            offsets = (paths >= 0).sum(-1, dtype=jnp.int32) - 1
        positions = jnp.where(is_query, context + offsets, -1)
        q_tile = queries.at[tokens].get(mode="fill", fill_value=0)
        o_tile = attend_tile(q_tile, block_tables[row], positions, context, scoring._replace(paths=paths))
        return out.at[tokens].set(o_tile.astype(out.dtype), mode="drop")

    return jax.lax.fori_loop(0, (ends[-1] + R - 1) // R if num_tiles is None else num_tiles, fill_in_tile, out)


def paths_of(tree_mask: jax.Array, most: int) -> jax.Array:
    """Returns the tokens of its row that each token sees, i32[T, most], the first of them first; -1 past the last.

    A token that sees the first, the third and itself, the sixth:  0 2 5 -1 -1 …
    """
    bits = (tree_mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    bits = bits.reshape(tree_mask.shape[0], -1)
    order = jnp.argsort(1 - bits.astype(jnp.int32), axis=1, stable=True)
    return jnp.where(jnp.arange(order.shape[1])[None] < bits.sum(1, dtype=jnp.int32)[:, None], order, -1)[:, :most]
