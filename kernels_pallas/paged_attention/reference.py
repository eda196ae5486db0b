"""Paged attention in plain JAX: the oracle of every kernel, and the production path on CPU and old GPUs.

A GPU gathers blocks of pages (`in_blocks`). Elsewhere a loop walks over the tiles of the batch, an inner loop over the
pages that the tile can see, with an online softmax. So the cache is never gathered whole and nothing past the tile's
longest row is read. The result of a query depends on its row alone, bit for bit on CPU, because

* pages are visited one at a time from the first, whatever the tile, so sums always add up in the same order;
* rescaling is exact (`online_softmax`);
* the number of queries in a product follows the rule of `kernels_pallas.row_products`;
* a draft in a tree reads its ancestors in the slots in which decoding would have them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from kernels_pallas.device import device_at_hand
from kernels_pallas.paged_attention.call import AttentionCall, token_slots
from kernels_pallas.paged_attention.in_blocks import attend_in_blocks
from kernels_pallas.paged_attention.layout import Pages, gather_tokens, pad_heads, read_pages, write_kv
from kernels_pallas.paged_attention.online_softmax import (
    AttendTile,
    Pool,
    Scoring,
    Sums,
    add_keys,
    attend_in_one_tile,
    attend_in_tiles,
    attended,
    by_head,
    by_query,
    empty_sums,
    paths_of,
    sees,
    slots_read,
)

# Queries per tile in prefill: wide enough for the products, small enough that a short row wastes little.
WIDE_TILE = 32
# Queries per tile where rows have few: enough for both cores, few enough that rows of a tile are about equally long.
ROWS_TILE = 8

# Page i of every row of a tile: keys [R, K, H, S] and values [R, K, S, V].
ReadPage = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def attend_ragged(queries: jax.Array, pool: Pool, call: AttentionCall, scoring: Scoring) -> jax.Array:
    """Returns the attention [T, K, G, V] of queries [T, K, G, H] to the pages of their rows; the call is `in_pool`.

    The queries' own keys and values are in the pool already.
    """
    attend = attend_in_blocks if device_at_hand().platform == "gpu" else attend_by_pages
    return attend(queries, pool, call, scoring)


def paged_attention_reference(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    pages: Pages,
    call: AttentionCall,
    *,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    attend: Callable[..., jax.Array] = attend_ragged,
) -> tuple[jax.Array, Pages]:
    """The contract is that of `paged_attention`; `attend` takes the place of `attend_ragged`."""
    T, N, head_dim = q.shape
    if k is not None and v is not None:
        pages = write_kv(pages, k, v, token_slots(T, pages, call), k_scale, v_scale)
    K = pages.num_kv_heads
    read = functools.partial(read_pages, pages)

    def read_slots(slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = gather_tokens(pages, slots)
        return pad_heads(k, pool.value_width), pad_heads(v, pool.value_width)

    pool = Pool(pages.page_size, read, read_slots)
    queries = pad_heads(q, pool.value_width).reshape(T, K, N // K, -1)
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(K, N // K)
    scoring = Scoring(call.scale, call.window, call.softcap, sinks, k_scale, v_scale)
    out = attend(queries, pool, call.in_pool(), scoring)
    return out.reshape(T, N, -1)[..., :head_dim], pages


def attend_by_pages(queries: jax.Array, pool: Pool, call: AttentionCall, scoring: Scoring) -> jax.Array:
    """`attend_ragged` in loops as long as the contexts, over one page at a time."""
    if call.tree_mask is not None:
        scoring = scoring._replace(paths=paths_of(call.tree_mask, call.q_len or queries.shape[0]))
    attend_tile = functools.partial(_attend_tile, pool)
    return attend_in_tiles_of(attend_tile, queries, call, scoring, value_width=pool.value_width)


def attend_in_tiles_of(
    attend_tile: AttendTile, queries: jax.Array, call: AttentionCall, scoring: Scoring, *, value_width: int
) -> jax.Array:
    """Returns the attention [T, K, G, V] of queries [T, K, G, H], in tiles of sizes that suit the call; V is given."""
    T, kv_lens, q_len = queries.shape[0], call.kv_lens, call.q_len
    B, q_lens = kv_lens.shape[0], call.cu_q_lens[1:] - call.cu_q_lens[:-1]
    if q_len == 1 and T <= ROWS_TILE:
        return attend_in_one_tile(attend_tile, queries, call, scoring)

    def fill_in(out: jax.Array, kv_lens: jax.Array, num_queries: int, num_rows: int) -> jax.Array:
        rows, sizes = replace(call, kv_lens=kv_lens), {"num_queries": num_queries, "num_rows": min(num_rows, B)}
        return attend_in_tiles(attend_tile, out, queries, rows, scoring, **sizes)

    out = jnp.zeros((*queries.shape[:-1], value_width), queries.dtype)
    if q_len is not None and q_len <= ROWS_TILE:
        return fill_in(out, kv_lens, q_len, ROWS_TILE // q_len)
    # The decoding rows of a mixed step would waste a wide tile.
    out = fill_in(out, jnp.where(q_lens > 1, kv_lens, 0), min(WIDE_TILE, T), 1)
    return fill_in(out, jnp.where(q_lens == 1, kv_lens, 0), 1, ROWS_TILE)


def _attend_tile(pool: Pool, q_tile, block_tables, positions, context, scoring: Scoring) -> jax.Array:
    """An `AttendTile` of `tiles` that reads a page of each row at a time."""
    R, Q = q_tile.shape[:2]
    sums = empty_sums(q_tile, pool.value_width, scoring)
    end = positions.max() // pool.page_size + 1

    def read_page(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pool.read_pages(block_tables[:, i])

    if scoring.paths is None:
        return attended(add_pages(sums, read_page, q_tile, positions, context, (0, end), scoring), scoring)
    # Pages before the trees are read once a row, the others once a query.
    before = jnp.where(positions[:, :1] >= 0, context, jnp.int32(2**30)).min() // pool.page_size
    sums = add_pages(sums, read_page, q_tile, positions, context, (0, jnp.minimum(before, end)), scoring)
    context = jnp.broadcast_to(context, (R, Q))
    *sums, q_tile, positions, context = (x.reshape(R * Q, 1, *x.shape[2:]) for x in (*sums, q_tile, positions, context))
    read = _read_along(scoring.paths.reshape(R * Q, -1), pool, jnp.repeat(block_tables, Q, 0), context)
    sums = add_pages(Sums(*sums), read, q_tile, positions, context, (before, end), scoring)
    out = attended(sums, scoring)
    return out.reshape(R, Q, *out.shape[2:])


def add_pages(
    sums: Sums, read: ReadPage, q_tile: jax.Array, positions: jax.Array, context: jax.Array, pages, scoring: Scoring
) -> Sums:
    """Adds the keys and values of pages from one to before another, i32[] each, to a tile's sums."""
    S = jax.eval_shape(read, jnp.int32(0))[1].shape[2]
    q, *start = map(by_head, (q_tile, *sums))
    first, last = slots_read(positions, context, scoring)

    def add_page(i: jax.Array, sums: Sums) -> Sums:
        slots = (i * S + jnp.arange(S))[None]
        is_read = (slots >= first[:, None]) & (slots <= last[:, None])
        return add_keys(sums, q, *read(i), is_read, sees(slots, positions, context, scoring), scoring)

    begin = jnp.maximum(pages[0], first.min() // S)
    added = jax.lax.fori_loop(begin, pages[1], add_page, Sums(*start))
    return Sums(*(by_query(x, q_tile.shape[1]) for x in added))


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
