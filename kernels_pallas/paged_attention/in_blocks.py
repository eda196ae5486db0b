"""Paged attention in plain JAX for a GPU: it gathers blocks of pages, in loops that the host need not follow.

The host of a GPU waits before each turn of a loop of unknown length, and launches nothing behind that loop meanwhile.
So small tables are read whole, in loops of a known length, whatever the contexts are. To read large tables whole would
take longer than to wait. There the loops end with the contexts, a turn per block.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.call import AttentionCall
from kernels_pallas.paged_attention.online_softmax import (
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


class BlockSizes(NamedTuple):
    """The keys and values that `attend_in_blocks` gathers at once. No number was tuned: no such GPU was at hand.

    A block has `least_keys` to `most_keys` keys of each row of a tile, in whole pages. Its keys and values in the
    queries' type, and a float32 score for each key and query, take up to `block_bytes`. A tile of one row may take
    more, for it has `least_keys` or a page all the same. The compiler holds scores about three times at once.
    """

    least_queries: int = 16  # of a row in a tile, within the tokens of the step
    most_queries: int = 128
    least_keys: int = 256
    most_keys: int = 2048
    block_bytes: int = 64 << 20
    # A step reads its tables whole if they have room for at most these bytes of keys and values in a layer. A T4
    # writes such a copy and reads it within 0.4 ms, by its bandwidth.
    whole_bytes: int = 64 << 20


DEFAULT_SIZES = BlockSizes()


def attend_in_blocks(
    queries: jax.Array, pool: Pool, call: AttentionCall, scoring: Scoring, sizes: BlockSizes = DEFAULT_SIZES
) -> jax.Array:
    """The contract is that of `attend_ragged`."""
    q_len, tree_mask = call.q_len, call.tree_mask
    (T, K, G, H), (B, M), S, V = queries.shape, call.block_tables.shape, pool.page_size, pool.value_width
    Q = min(max(-(-T // B), sizes.least_queries), sizes.most_queries, q_len or T)
    # Rows of 1 + Q a, 1 + Q b, … tokens have the most parts of Q.
    most_rows = min(B, T)
    num_parts = most_rows + (T - most_rows) // Q
    num_own = Q
    if tree_mask is not None:
        paths = paths_of(tree_mask, q_len or T)
        num_own, scoring = paths.shape[1], scoring._replace(paths=paths)
    # The window of the first query begins anywhere in a page, and the own tokens of a tile follow it.
    num_pages = M if scoring.window is None else min(M, -(-(scoring.window + num_own - 2) // S) + 1)
    key_bytes = K * (H + V) * queries.dtype.itemsize
    part_bytes = key_bytes + Q * K * G * 4
    keys = min(max(sizes.block_bytes // (num_parts * part_bytes), sizes.least_keys), sizes.most_keys)
    per_block = min(-(-keys // S), num_pages)
    num_rows = min(max(sizes.block_bytes // (per_block * S * part_bytes), 1), num_parts)
    is_whole = B * num_pages * S * key_bytes <= sizes.whole_bytes

    attend_tile = functools.partial(_attend_tile, pool, per_block, -(-num_pages // per_block) if is_whole else None)
    if q_len == 1 and num_rows >= T:
        return attend_in_one_tile(attend_tile, queries, call, scoring)
    return attend_in_tiles(
        attend_tile,
        jnp.zeros((T, K, G, V), queries.dtype),
        queries,
        call,
        scoring,
        num_queries=Q,
        num_rows=num_rows,
        num_tiles=-(-num_parts // num_rows) if is_whole else None,
    )


def _attend_tile(
    pool: Pool, per_block: int, num_blocks: int | None, q_tile, block_tables, positions, context, scoring: Scoring
) -> jax.Array:
    """An `AttendTile` of `tiles` that gathers `per_block` pages of each row at a time.

    `num_blocks` are enough for any context. If None, the loop ends with the last block that these queries see.
    """
    (R, M), S = block_tables.shape, pool.page_size
    q, *empty = map(by_head, (q_tile, *empty_sums(q_tile, pool.value_width, scoring)))
    first, last = slots_read(positions, context, scoring)
    if scoring.paths is not None:
        last = (context + scoring.paths.max(-1)).max(-1)  # drafts lie in the order of the tree, not of a path
    begin = first // S  # in each row

    def add_block(i: jax.Array, sums: Sums) -> Sums:
        places = begin[:, None] + i * per_block + jnp.arange(per_block)[None]
        page_ids = jnp.take_along_axis(block_tables, jnp.minimum(places, M - 1), axis=1)
        k, v = (x.reshape(R, per_block, *x.shape[1:]) for x in pool.read_pages(page_ids.reshape(-1)))
        k = jnp.moveaxis(k, 1, 3).reshape(R, *k.shape[2:4], -1)  # [R, K, H, n S]
        v = jnp.moveaxis(v, 1, 2).reshape(R, v.shape[2], -1, v.shape[4])  # [R, K, n S, V]
        slots = (places[:, :, None] * S + jnp.arange(S)[None, None]).reshape(R, -1)
        is_read = slots <= last[:, None]  # before the first seen slot, its page holds tokens of the same row
        seen = sees(slots, positions, context, scoring)
        if scoring.paths is not None:
            is_own = (scoring.paths[:, :, None] == (slots - context)[:, None, :, None]).any(-1)
            seen = jnp.where((slots < context)[:, None], seen, is_own)
        return add_keys(sums, q, k, v, is_read, seen, scoring)

    end = (last // S - begin).max() // per_block + 1 if num_blocks is None else num_blocks
    sums = jax.lax.fori_loop(0, end, add_block, Sums(*empty))
    return attended(Sums(*(by_query(x, q_tile.shape[1]) for x in sums)), scoring)
