"""The online softmax (Milakov & Gimelshein 2018) of attention in plain JAX, added up over keys in any portions.

The running maximum is rounded up to an integer and exponentials are base 2, so rescaling is by powers of two, exact.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.layout import as_operand
from kernels_pallas.row_products import rounded, rows_by_matrices
from kernels_pallas.row_sum import row_sum

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
