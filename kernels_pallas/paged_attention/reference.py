"""Paged attention in plain JAX: the oracle of every kernel, and the production path on CPU and old GPUs.

The batch is cut into tiles: a few rows with one or a few queries each, or many queries of one row. A loop walks over
the tiles, an inner loop over the pages that the tile can see, with an online softmax (Milakov & Gimelshein 2018). So
the cache is never gathered whole and nothing past the tile's longest row is read. The result of a query depends on its
row alone, bit for bit on CPU, because

* pages are visited one at a time from the first, whatever the tile, so sums always add up in the same order;
* the running maximum is rounded up to an integer and exponentials are base 2, so rescaling is by powers of two, exact;
* the number of queries in a product follows the rule of `kernels_pallas.row_products`;
* a draft in a tree reads its ancestors in the slots in which decoding would have them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.layout import Pages, gather_tokens, pad_heads, read_pages, to_stored, write_kv
from kernels_pallas.paged_attention.shapes import token_slots
from kernels_pallas.row_products import rounded, rows_by_matrices
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
    window: int | None = None
    softcap: float | None = None
    sinks: jax.Array | None = None  # f32[K, G]
    k_scale: jax.Array | None = None  # f32[K]
    v_scale: jax.Array | None = None  # f32[K]
    paths: jax.Array | None = None  # i32[T, n]  `_paths` of a tree_mask; in a tile i32[R, Q, n]


class Sums(NamedTuple):
    """The online softmax of the pages so far, for the queries [R, Q, K, G] of a tile, or [R, K, Q G] of them."""

    maximum: jax.Array  # rounded up
    total: jax.Array
    out: jax.Array  # [..., V]


class Pool(NamedTuple):
    """The pages that queries [T, K, G, H] attend to; V is the width of a value."""

    page_size: int
    # ids i32[n] -> keys [n, K, H, S] and values [n, K, S, V]
    read_pages: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    # slots i32[n] -> keys [n, K, H] and values [n, K, V]
    read_slots: Callable[[jax.Array], tuple[jax.Array, jax.Array]]


# Page i of every row of a tile: keys [R, K, H, S] and values [R, K, S, V].
ReadPage = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


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
    width = _value_width(functools.partial(read_pages, pages))

    def read_slots(slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = gather_tokens(pages, slots)
        return pad_heads(k, width), pad_heads(v, width)

    pool = Pool(pages.page_size, functools.partial(read_pages, pages), read_slots)
    queries = pad_heads(q, width).reshape(T, K, N // K, -1)
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(K, N // K)
    out = attend_ragged(
        queries,
        pool,
        block_tables=block_tables + page_offset,
        kv_lens=kv_lens,
        cu_q_lens=cu_q_lens,
        q_len=q_len,
        tree_mask=tree_mask,
        scoring=Scoring(scale, window, softcap, sinks, k_scale, v_scale),
    )
    return out.reshape(T, N, -1)[..., :head_dim], pages


def _value_width(read: Callable[[jax.Array], tuple[jax.Array, jax.Array]]) -> int:
    return jax.eval_shape(read, jax.ShapeDtypeStruct((1,), jnp.int32))[1].shape[-1]


def attend_ragged(
    queries: jax.Array,
    pool: Pool,
    *,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    q_len: int | None,
    tree_mask: jax.Array | None,
    scoring: Scoring,
) -> jax.Array:
    """Returns the attention [T, K, G, V] of queries [T, K, G, H] to the pages of their rows.

    The queries' own keys and values are in the pool already. Arrays are as in `paged_attention`.
    """
    T = queries.shape[0]
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    if tree_mask is not None:
        scoring = scoring._replace(paths=_paths(tree_mask, q_len or T))
    out = jnp.zeros((*queries.shape[:-1], _value_width(pool.read_pages)), queries.dtype)
    rows = (pool, block_tables)
    if q_len == 1 and T <= ROWS_TILE:  # a single tile, in the order that rows have
        positions = kv_lens[:, None] - 1
        out = _attend_tile(queries[:, None], *rows, positions, positions, scoring._replace(paths=None))
        return out[:, 0].astype(queries.dtype)
    if q_len is not None and q_len <= ROWS_TILE:
        return _attend(
            out, queries, *rows, kv_lens, cu_q_lens, num_queries=q_len, num_rows=ROWS_TILE // q_len, scoring=scoring
        )
    # The decoding rows of a mixed step would waste a wide tile.
    long, single = jnp.where(q_lens > 1, kv_lens, 0), jnp.where(q_lens == 1, kv_lens, 0)
    out = _attend(out, queries, *rows, long, cu_q_lens, num_queries=min(WIDE_TILE, T), num_rows=1, scoring=scoring)
    return _attend(out, queries, *rows, single, cu_q_lens, num_queries=1, num_rows=ROWS_TILE, scoring=scoring)


def _attend(
    out, queries, pool: Pool, block_tables, kv_lens, cu_q_lens, *, num_queries: int, num_rows: int, scoring: Scoring
) -> jax.Array:
    """Returns `out` [T, K, G, V] with the rows of kv_lens > 0 filled in, in tiles of num_rows x num_queries."""
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
        paths = None
        if scoring.paths is not None:
            paths = scoring.paths.at[tokens].get(mode="fill", fill_value=-1)
            offsets = (paths >= 0).sum(-1, dtype=jnp.int32) - 1
        positions = jnp.where(is_query, context + offsets, -1)
        q_tile = queries.at[tokens].get(mode="fill", fill_value=0)
        o_tile = _attend_tile(q_tile, pool, block_tables[row], positions, context, scoring._replace(paths=paths))
        return out.at[tokens].set(o_tile.astype(out.dtype), mode="drop")

    return jax.lax.fori_loop(0, (ends[-1] + R - 1) // R, attend_tile, out)


def _attend_tile(q_tile, pool: Pool, block_tables, positions, context, scoring: Scoring) -> jax.Array:
    """q_tile [R, Q, K, G, H] at positions i32[R, Q] (-1 for none) over tables i32[R, M] -> [R, Q, K, G, V] float32.

    `context` i32[R, 1] are the tokens before this step.
    """
    (R, Q, K, G), V = q_tile.shape[:4], _value_width(pool.read_pages)
    zero = jnp.zeros((R, Q, K, G), jnp.float32)
    sums = Sums(zero + MASKED, zero, jnp.zeros((R, Q, K, G, V), jnp.float32))
    if scoring.sinks is not None:  # a score without a value, seen before the first page
        # Rounded here: fused with the subtraction below, the product would keep more bits in some steps than in others.
        sinks = rounded(scoring.sinks * LOG2_E)
        sinks = jnp.broadcast_to(sinks[None, None], zero.shape)
        sums = sums._replace(maximum=jnp.ceil(sinks), total=jnp.exp2(sinks - jnp.ceil(sinks)))
    end = positions.max() // pool.page_size + 1

    def read_page(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pool.read_pages(block_tables[:, i])

    if scoring.paths is None:
        sums = _add_pages(sums, read_page, q_tile, positions, context, (0, end), scoring)
    else:
        # Pages before the trees are read once a row, the others once a query.
        before = jnp.where(positions[:, :1] >= 0, context, jnp.int32(2**30)).min() // pool.page_size
        sums = _add_pages(sums, read_page, q_tile, positions, context, (0, jnp.minimum(before, end)), scoring)
        context = jnp.broadcast_to(context, (R, Q))
        *sums, q_tile, positions, context = (
            x.reshape(R * Q, 1, *x.shape[2:]) for x in (*sums, q_tile, positions, context)
        )
        read = _read_along(scoring.paths.reshape(R * Q, -1), pool, jnp.repeat(block_tables, Q, 0), context)
        sums = _add_pages(Sums(*sums), read, q_tile, positions, context, (before, end), scoring)
    out = sums.out / jnp.where(sums.total > 0, sums.total, 1.0)[..., None]
    if scoring.v_scale is not None:
        out = out * jnp.broadcast_to(scoring.v_scale[:, None, None], out.shape)
    return out.reshape(R, Q, K, G, V)


def _add_pages(
    sums: Sums, read: ReadPage, q_tile: jax.Array, positions: jax.Array, context: jax.Array, pages, scoring: Scoring
) -> Sums:
    """Adds the keys and values of pages from one to before another, i32[] each, to a tile's sums."""
    R, Q, K, G = q_tile.shape[:4]
    S = jax.eval_shape(read, jnp.int32(0))[1].shape[2]
    q, *start = (x.swapaxes(1, 2).reshape(R, K, Q * G, *x.shape[4:]) for x in (q_tile, *sums))
    # Per row, what lies before the first slot that is seen and after the last may be anything.
    first, last = jnp.zeros((R,), jnp.int32), positions.max(-1)
    if scoring.window is not None:
        lowest = jnp.where(positions >= 0, positions, jnp.int32(2**30)).min(-1)
        first = jnp.maximum(lowest - scoring.window + 1, 0)
        if scoring.paths is not None:  # a draft sees all of its ancestors
            first = jnp.minimum(first, context[:, 0])

    def is_visible_to(slots: jax.Array) -> jax.Array:
        """Returns which slots i32[S] each query sees, bool[R, 1, Q G, S]."""
        at = positions[:, :, None]
        seen = slots[None, None] <= at
        if scoring.window is not None:
            is_near = slots[None, None] > at - scoring.window
            seen &= is_near if scoring.paths is None else is_near | (slots[None, None] >= context[:, :1, None])
        return jnp.broadcast_to(seen[:, :, None], (R, Q, G, S)).reshape(R, 1, Q * G, S)

    def attend_page(i: jax.Array, sums: Sums) -> Sums:
        slots = i * S + jnp.arange(S)
        k, v = (x.astype(q.dtype) for x in read(i))  # [R, K, H, S], [R, K, S, V]
        # A masked weight is 0, but 0 * NaN is NaN: what lies in unused slots must go as well.
        is_seen = (slots[None] >= first[:, None]) & (slots[None] <= last[:, None])
        v = jnp.where(is_seen[:, None, :, None], v, jnp.zeros_like(v))
        scores = _scores(rows_by_matrices(q, k), scoring)
        is_visible = is_visible_to(slots)
        scores = jnp.where(is_visible, scores, MASKED)
        maximum = jnp.maximum(sums.maximum, jnp.ceil(scores.max(-1)))
        weights = jnp.where(is_visible, jnp.exp2(scores - maximum[..., None]), 0.0)
        rescale = jnp.exp2(sums.maximum - maximum)
        update = rows_by_matrices(weights.astype(v.dtype), v)
        return Sums(maximum, sums.total * rescale + row_sum(weights), sums.out * rescale[..., None] + update)

    begin = jnp.maximum(pages[0], first.min() // S)
    added = jax.lax.fori_loop(begin, pages[1], attend_page, Sums(*start))
    return Sums(*(x.reshape(R, K, Q, G, *x.shape[3:]).swapaxes(1, 2) for x in added))


def _paths(tree_mask: jax.Array, most: int) -> jax.Array:
    """Returns the tokens of its row that each token sees, i32[T, most], the first of them first; -1 past the last.

    A token that sees the first, the third and itself, the sixth:  0 2 5 -1 -1 …
    """
    bits = (tree_mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    bits = bits.reshape(tree_mask.shape[0], -1)
    order = jnp.argsort(1 - bits.astype(jnp.int32), axis=1, stable=True)
    return jnp.where(jnp.arange(order.shape[1])[None] < bits.sum(1, dtype=jnp.int32)[:, None], order, -1)[:, :most]


def _read_along(paths: jax.Array, pool: Pool, block_tables: jax.Array, context: jax.Array) -> ReadPage:
    """Returns what reads page i of each query as if the tokens of its path i32[R, n] alone came after its context.

    So a draft meets its ancestors where decoding would, and adds up in the same order.
    """
    (R, n), S = paths.shape, pool.page_size
    is_token = paths >= 0
    position = jnp.where(is_token, context + paths, 0)
    slots = jnp.take_along_axis(block_tables, position // S, axis=1) * S + position % S
    own_k, own_v = (x.reshape(R, n, *x.shape[1:]) for x in pool.read_slots(slots.reshape(-1)))
    rows, places = jnp.arange(R)[:, None], context + jnp.arange(n)[None]

    def read(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = pool.read_pages(block_tables[:, i])
        at = jnp.where(is_token & (places >= i * S), places - i * S, S)  # past the page is dropped
        return k.at[rows, :, :, at].set(own_k, mode="drop"), v.at[rows, :, at].set(own_v, mode="drop")

    return read


def _scores(products: jax.Array, scoring: Scoring) -> jax.Array:
    """Turns products [R, K, Q G, S] of queries and stored keys into scores, in base 2."""
    if scoring.k_scale is not None:
        products = products * jnp.broadcast_to(scoring.k_scale[None, :, None, None], products.shape)
    if scoring.softcap is None:
        return products * (scoring.scale * LOG2_E)
    return jnp.tanh(products * (scoring.scale / scoring.softcap)) * (scoring.softcap * LOG2_E)
