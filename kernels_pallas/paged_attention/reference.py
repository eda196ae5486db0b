"""Paged attention in plain JAX: the oracle of every kernel, and the production path on CPU and old GPUs.

The batch is cut into tiles: a few rows with one or a few queries each, or many queries of one row. A loop walks over
the tiles, an inner loop over the pages that the tile can see, with an online softmax (Milakov & Gimelshein 2018), so
the cache is never gathered whole and nothing past the tile's longest row is read. The result of a query depends on its
row alone, bit for bit on CPU, because

* pages are visited one at a time from the first, whatever the tile, so sums always add up in the same order;
* the running maximum is rounded up to an integer and exponentials are base 2, so rescaling is by powers of two, exact;
* no matrix product has a single row, which XLA would hand to another routine with another order of summation.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.layout import Pages, pad_heads, read_pages, to_stored, write_kv
from kernels_pallas.paged_attention.shapes import token_slots
from kernels_pallas.row_sum import row_sum

LOG2_E = 1.4426950408889634
# Finite, so that a row of masked scores gives zeros and not NaN.
MASKED = -1e30
# Queries per tile in prefill: wide enough for the products, small enough that a short row wastes little.
WIDE_TILE = 32
# Queries per tile where rows have few: enough for both cores, few enough that rows of a tile are about equally long.
ROWS_TILE = 8


class Scoring(NamedTuple):
    """What turns products of queries and keys into weights; None switches a part off."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: jax.Array | None  # f32[K, G]
    k_scale: jax.Array | None  # f32[K]
    v_scale: jax.Array | None  # f32[K]
    tree_mask: jax.Array | None  # u32[T, words]; in a tile u32[R, Q, words]


def paged_attention_reference(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    pages: Pages,
    *,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    scale: float,
    page_offset: jax.Array | int = 0,
    q_len: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    tree_mask: jax.Array | None = None,
) -> tuple[jax.Array, Pages]:
    """The contract is that of `paged_attention`."""
    T, N, head_dim = q.shape
    if k is not None and v is not None:
        slots = token_slots(T, pages, block_tables, kv_lens, cu_q_lens, page_offset)
        k, v = to_stored(k, k_scale, pages.dtype), to_stored(v, v_scale, pages.dtype)
        pages = write_kv(pages, k, v, slots)
    K = pages.num_kv_heads
    queries = pad_heads(q, _head_width(pages)).reshape(T, K, N // K, -1)
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(K, N // K)
    pool = (pages, block_tables + page_offset)
    scoring = Scoring(scale, window, softcap, sinks, k_scale, v_scale, tree_mask)
    out = jnp.zeros_like(queries)
    if q_len == 1 and T <= ROWS_TILE:  # a single tile, in the order that rows have
        positions = kv_lens[:, None] - 1
        out = _attend_tile(queries[:, None], *pool, positions, positions, kv_lens, scoring._replace(tree_mask=None))
        out = out[:, 0].astype(q.dtype)
    elif q_len is not None and q_len <= ROWS_TILE:
        out = _attend(
            out, queries, *pool, kv_lens, cu_q_lens, num_queries=q_len, num_rows=ROWS_TILE // q_len, scoring=scoring
        )
    else:
        # The decoding rows of a mixed step would waste a wide tile.
        long, single = jnp.where(q_lens > 1, kv_lens, 0), jnp.where(q_lens == 1, kv_lens, 0)
        out = _attend(out, queries, *pool, long, cu_q_lens, num_queries=min(WIDE_TILE, T), num_rows=1, scoring=scoring)
        out = _attend(out, queries, *pool, single, cu_q_lens, num_queries=1, num_rows=ROWS_TILE, scoring=scoring)
    return out.reshape(T, N, -1)[..., :head_dim], pages


def _head_width(pages: Pages) -> int:
    """The head dimension that `read_pages` gives."""
    return jax.eval_shape(read_pages, pages, jax.ShapeDtypeStruct((1,), jnp.int32))[1].shape[-1]


def _attend(
    out, queries, pages, block_tables, kv_lens, cu_q_lens, *, num_queries: int, num_rows: int, scoring: Scoring
) -> jax.Array:
    """Returns `out` [T, K, G, H] with the rows of kv_lens > 0 filled in, in tiles of num_rows x num_queries."""
    T, B = queries.shape[0], kv_lens.shape[0]
    R, Q = min(num_rows, B), num_queries
    starts, q_lens = cu_q_lens[:-1], cu_q_lens[1:] - cu_q_lens[:-1]
    # A tile takes as long as its longest row, so rows of similar length go together.
    order = jnp.argsort(-kv_lens)
    num_parts = jnp.where(kv_lens > 0, (q_lens + Q - 1) // Q, 0)[order]
    ends = jnp.cumsum(num_parts)  # parts per row 3, 2, 1, 0 -> ends 3 5 6 6; part 4 is in row 1

    def attend_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        part = i * R + jnp.arange(R)
        place = jnp.minimum((ends[None] <= part[:, None]).sum(-1), B - 1)
        row = order[place]
        offsets = ((part - ends[place] + num_parts[place]) * Q)[:, None] + jnp.arange(Q)[None]  # [R, Q] in its row
        is_query = (part < ends[-1])[:, None] & (offsets < q_lens[row][:, None])
        tokens = jnp.where(is_query, starts[row][:, None] + offsets, T)
        context = (kv_lens - q_lens)[row][:, None]  # tokens before this step
        tree = None
        if scoring.tree_mask is not None:
            tree = scoring.tree_mask.at[tokens].get(mode="fill", fill_value=0)
            offsets = jax.lax.population_count(tree).sum(-1).astype(jnp.int32) - 1
        positions = jnp.where(is_query, context + offsets, -1)
        q_tile = queries.at[tokens].get(mode="fill", fill_value=0)
        tile_scoring = scoring._replace(tree_mask=tree)
        o_tile = _attend_tile(q_tile, pages, block_tables[row], positions, context, kv_lens[row], tile_scoring)
        return out.at[tokens].set(o_tile.astype(out.dtype), mode="drop")

    return jax.lax.fori_loop(0, (ends[-1] + R - 1) // R, attend_tile, out)


def _attend_tile(q_tile, pages, block_tables, positions, context, kv_lens, scoring: Scoring) -> jax.Array:
    """q_tile [R, Q, K, G, H] at positions i32[R, Q] (-1 for none) over tables i32[R, M] -> [R, Q, K, G, H] float32."""
    R, Q, K, G, H = q_tile.shape
    S = pages.page_size
    W = max(Q * G, 2)  # all queries of a KV head in one product; a single one is doubled
    q = jnp.broadcast_to(q_tile.transpose(0, 2, 1, 3, 4).reshape(R, K, Q * G, H), (R, K, W, H))
    # Per row, what lies before the first slot that is seen and after the last may be anything.
    first, last = jnp.zeros((R,), jnp.int32), positions.max(-1)
    if scoring.tree_mask is not None:
        last = jnp.where(last < 0, last, kv_lens - 1)
    if scoring.window is not None:
        lowest = jnp.where(positions >= 0, positions, jnp.int32(2**30)).min(-1)
        first = jnp.maximum(lowest - scoring.window + 1, 0)
        if scoring.tree_mask is not None:  # a draft sees all of its ancestors
            first = jnp.minimum(first, context[:, 0])

    def is_visible_to(slots: jax.Array) -> jax.Array:
        """[R, 1, W, S]: which slots each query sees."""
        at = positions[:, :, None]
        seen = slots[None, None] <= at
        if scoring.window is not None:
            seen &= slots[None, None] > at - scoring.window
        if scoring.tree_mask is not None:
            j = jnp.maximum(slots[None] - context, 0)[:, None]  # the token of the row whose key is in the slot
            words = jnp.take_along_axis(
                scoring.tree_mask, jnp.broadcast_to(j >> 5, (R, Q, S)), 2, mode="fill", fill_value=0
            )
            is_own = (words >> (j & 31).astype(jnp.uint32)) & 1
            is_before = slots[None] < context
            seen = jnp.where(is_before[:, None], seen, (is_own == 1) & (at >= 0))
        return jnp.broadcast_to(jnp.broadcast_to(seen[:, :, None], (R, Q, G, S)).reshape(R, Q * G, S), (R, W, S))[
            :, None
        ]

    def attend_page(i: jax.Array, carry: tuple) -> tuple:
        maximum, total, out = carry
        slots = i * S + jnp.arange(S)
        k, v = (x.astype(q.dtype) for x in read_pages(pages, block_tables[:, i]))  # [R, K, H, S], [R, K, S, H]
        # A masked weight is 0, but 0 * NaN is NaN: what lies in unused slots must go as well.
        is_seen = (slots[None] >= first[:, None]) & (slots[None] <= last[:, None])
        v = jnp.where(is_seen[:, None, :, None], v, jnp.zeros_like(v))
        scores = _scores(jnp.einsum("rkwh,rkhs->rkws", q, k, preferred_element_type=jnp.float32), scoring)
        is_visible = is_visible_to(slots)
        scores = jnp.where(is_visible, scores, MASKED)
        new_maximum = jnp.maximum(maximum, jnp.ceil(scores.max(-1)))
        weights = jnp.where(is_visible, jnp.exp2(scores - new_maximum[..., None]), 0.0)
        rescale = jnp.exp2(maximum - new_maximum)
        update = jnp.einsum("rkws,rksh->rkwh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_maximum, total * rescale + row_sum(weights), out * rescale[..., None] + update

    zero = jnp.zeros((R, K, W), jnp.float32)
    start = (zero + MASKED, zero, jnp.zeros((R, K, W, H), jnp.float32))
    if scoring.sinks is not None:  # a score without a value, seen before the first page
        sinks = jnp.broadcast_to(scoring.sinks[None, :, None] * LOG2_E, (R, K, Q, G)).reshape(R, K, Q * G)
        sinks = jnp.broadcast_to(sinks, zero.shape)
        start = (jnp.ceil(sinks), jnp.exp2(sinks - jnp.ceil(sinks)), start[2])
    _, total, out = jax.lax.fori_loop(first.min() // S, last.max() // S + 1, attend_page, start)
    out = (out / jnp.where(total > 0, total, 1.0)[..., None])[:, :, : Q * G]
    if scoring.v_scale is not None:
        out = out * jnp.broadcast_to(scoring.v_scale[None, :, None, None], out.shape)
    return out.reshape(R, K, Q, G, H).transpose(0, 2, 1, 3, 4)


def _scores(products: jax.Array, scoring: Scoring) -> jax.Array:
    """Turns products [R, K, W, S] of queries and stored keys into scores, in base 2."""
    if scoring.k_scale is not None:
        products = products * jnp.broadcast_to(scoring.k_scale[None, :, None, None], products.shape)
    if scoring.softcap is None:
        return products * (scoring.scale * LOG2_E)
    return jnp.tanh(products * (scoring.scale / scoring.softcap)) * (scoring.softcap * LOG2_E)
