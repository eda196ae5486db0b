"""The cut of a ragged batch into parts: a tile of queries of one row, over some blocks of the keys that it sees.

    row 0: 40 queries, 3 blocks of keys   tiles of 16 queries       2 1 0            the longest first
    row 1: 16 queries, 64 blocks          a tile in 4 parts         0.0 0.1 0.2 0.3
    row 2: 1 query, 9 blocks                                        0

    parts in order: 2 1 0 | 0.0 0.1 0.2 0.3 | 0

Parts have at most `split_keys` keys, or twice, four times … that if the batch would have too many parts. So while its
keys are few enough, the parts of a row depend on the row alone, and with them the bits of its result. Each program
counts the parts of all rows and finds its own; no list of parts is made before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import triton
from kernels_pallas.paged_attention.gpu.block_sizes import GpuBlockSizes
from kernels_pallas.paged_attention.gpu.chunks import Chunk, num_chunks
from kernels_pallas.paged_attention.gpu.sum_order import SumOrder

# The most bytes of partial results that long contexts add.
MAX_PARTIAL_BYTES = 1 << 27
# A run of parts of an order of sums has two to this at most: 2^25 keys of the default order.
MAX_DOUBLINGS = 16


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What is known of the parts of T tokens in B rows when a program is compiled."""

    T: int
    B: int
    block_q: int  # queries of a tile
    sizes: GpuBlockSizes
    window: int | None
    num_tiles: int  # tiles of the batch, at most
    num_added: int  # parts beyond `sizes.num_splits` of each tile, at most, in the whole batch
    num_slots: int  # tokens of partial results, at most
    order: SumOrder | None = None

    @property
    def num_programs(self) -> int:
        """Programs for each tile of heads: one a part."""
        return self.num_tiles * self.sizes.num_splits + self.num_added

    @property
    def num_split_tiles(self) -> int:
        """Tiles with several parts, at most."""
        return min(self.num_tiles, self.num_programs - self.num_tiles)


def cut_batch(
    T: int,
    B: int,
    *,
    q_len: int | None,
    block_q: int,
    window: int | None,
    max_context: int,
    token_bytes: int,
    sizes: GpuBlockSizes,
    order: SumOrder | None = None,
) -> Cut:
    """Returns the cut of T tokens in B rows of up to `max_context` tokens, with `token_bytes` of a partial result."""
    num_tiles = num_chunks(T, B, block_q, q_len)
    cut = partial(Cut, T=T, B=B, block_q=block_q, sizes=sizes, window=window, num_tiles=num_tiles, order=order)
    if order is not None:
        most = -(-max_context // order.split_keys)
        most = most if window is None else min(most, parts_of_window(order, window, block_q))
        num_added = min(sizes.added_parts, num_tiles * (most - 1))
        return cut(num_added=num_added, num_slots=min(T * most, MAX_PARTIAL_BYTES // token_bytes) if num_added else 0)
    seen = max_context if window is None else min(max_context, window + block_q)
    most = pl.cdiv(seen, sizes.split_keys)
    # Each added part makes its tile one of two parts at least, so it needs room for two.
    added_tokens = 2 * min(block_q, q_len or block_q)
    num_added = min(sizes.added_parts, num_tiles * (most - 1), MAX_PARTIAL_BYTES // (added_tokens * token_bytes))
    num_further = num_tiles * (sizes.num_splits - 1) + num_added
    num_slots = min(T * max(most, sizes.num_splits), added_tokens * num_further)
    return cut(num_added=num_added, num_slots=num_slots)


class Rows(NamedTuple):
    """The parts of each row i32[n], and of the padding after row B - 1 as if it were row B; nothing beyond."""

    index: jax.Array
    first_tokens: jax.Array
    q_lens: jax.Array
    kv_lens: jax.Array
    tiles: jax.Array
    parts: jax.Array  # of each tile: its programs
    slots: jax.Array  # of each query, if its tile has several parts
    run: jax.Array | None = None  # i32[]  parts of an order of sums that a program has


class Part(NamedTuple):
    """The work of a program."""

    chunk: Chunk
    index: jax.Array  # i32[]  among the parts of its tile
    num_parts: jax.Array  # i32[]  of its tile
    first_slot: jax.Array  # i32[]  of the row's partial results
    run: jax.Array | None = None  # i32[]  parts of an order of sums that a program has


def load_rows(arrays: Any, cut: Cut) -> Rows:
    """Reads the rows of the batch and cuts each."""
    index = jnp.arange(pl.next_power_of_2(cut.B + 1), dtype=jnp.int32)
    first_tokens = triton.load(arrays.cu_q_lens, (index,), index <= cut.B)
    ends = triton.load(arrays.cu_q_lens, (index + 1,), index < cut.B)
    kv_lens = triton.load(arrays.kv_lens, (index,), index < cut.B)
    return cut_rows(index, first_tokens, ends, kv_lens, cut)


def cut_rows(index: jax.Array, first_tokens: jax.Array, ends: jax.Array, kv_lens: jax.Array, cut: Cut) -> Rows:
    """Returns the cut of each row, from its number, its tokens' start and end in the batch and its context."""
    q_lens = jnp.where(index < cut.B, ends - first_tokens, jnp.where(index == cut.B, cut.T - first_tokens, 0))
    tiles, sizes = pl.cdiv(q_lens, cut.block_q), cut.sizes
    if cut.order is not None:
        return _rows_in_order(Rows(index, first_tokens, q_lens, kv_lens, tiles, tiles, tiles), cut, cut.order)
    seen = kv_lens if cut.window is None else jnp.minimum(kv_lens, cut.window + cut.block_q)
    blocks = pl.cdiv(seen, sizes.block_k)
    parts = jnp.minimum(blocks, sizes.num_splits)
    if cut.num_added:
        # A tile of b blocks has fewer than b / n more parts if n blocks are a part.
        least = pl.cdiv(sizes.split_keys, sizes.block_k)
        times = pl.cdiv(jnp.sum(tiles * blocks, dtype=jnp.int32), cut.num_added * least)
        doublings = jnp.sum((times > (1 << jnp.arange(16, dtype=jnp.int32))).astype(jnp.int32), dtype=jnp.int32)
        parts = jnp.maximum(parts, pl.cdiv(blocks, least << doublings))
    parts = jnp.maximum(parts, 1)
    return Rows(index, first_tokens, q_lens, kv_lens, tiles, parts, parts)


def parts_of_window(order: SumOrder, window: int, block_q: int) -> int:
    """Returns in how many parts of an order of sums the keys are that a tile sees through a window, at most."""
    return -(-(window + block_q) // order.split_keys) + 1


def _rows_in_order(rows: Rows, cut: Cut, order: SumOrder) -> Rows:
    """Returns the rows with their parts: runs of 1, 2, 4, … parts of the order, the least that there is room for.

    A tile with no more parts than a run has one program, which needs no slots.
    """
    slots = pl.cdiv(rows.kv_lens, order.split_keys)
    if cut.window is not None:
        slots = jnp.minimum(slots, parts_of_window(order, cut.window, cut.block_q))
    if not cut.num_added:
        return rows._replace(parts=jnp.ones_like(slots), slots=slots, run=jnp.int32(1 << MAX_DOUBLINGS))
    runs = 1 << jnp.arange(MAX_DOUBLINGS, dtype=jnp.int32)
    # A tile of b parts has fewer than b / n more programs if n parts are a run.
    wanted = pl.cdiv(jnp.sum(rows.tiles * slots, dtype=jnp.int32), cut.num_added)
    doublings = jnp.sum((wanted > runs).astype(jnp.int32), dtype=jnp.int32)
    is_split = slots[:, None] > runs[None]
    needed = jnp.sum(jnp.where(is_split, (slots * rows.q_lens)[:, None], 0), axis=0, dtype=jnp.int32)
    without_room = jnp.sum((needed > cut.num_slots).astype(jnp.int32), dtype=jnp.int32)
    run = 1 << jnp.maximum(doublings, without_room)
    return rows._replace(parts=jnp.maximum(pl.cdiv(slots, run), 1), slots=slots, run=run)


def find_part(rows: Rows, num_items: jax.Array, i: jax.Array, cut: Cut, *, per_tile: int | None = None) -> Part:
    """Returns item i of the rows' items i32[n], which are the parts of each tile, or `per_tile` of each.

    Past the last item it is a part of a row without queries.
    """
    ends = jnp.cumsum(num_items)
    row = jnp.sum((ends <= i).astype(jnp.int32), dtype=jnp.int32)

    def of_row(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(rows.index == row, values, 0), dtype=jnp.int32)

    q_len, kv_len, num_parts = of_row(rows.q_lens), of_row(rows.kv_lens), jnp.maximum(of_row(rows.parts), 1)
    place, count = i - of_row(ends - num_items), per_tile or num_parts
    tile = jnp.maximum(of_row(rows.tiles) - 1 - place // count, 0)
    slots = jnp.where((rows.index < row) & (rows.parts > 1), rows.slots * rows.q_lens, 0)
    chunk = Chunk(row, of_row(rows.first_tokens), q_len, kv_len, kv_len - q_len, tile * cut.block_q)
    return Part(chunk, place % count, num_parts, jnp.sum(slots, dtype=jnp.int32), rows.run)


class Keys(NamedTuple):
    """The tokens of a row's context that the queries of a tile see, i32[] each."""

    start: jax.Array  # the first that some query sees
    whole: jax.Array  # every query sees all from the first to before this
    end: jax.Array  # one past the last that some query sees


def keys_of(chunk: Chunk, cut: Cut, *, has_tree: bool) -> Keys:
    """Returns what the tile that begins at a chunk's offset sees."""
    first = chunk.context + chunk.offset
    whole, end = first + 1, jnp.minimum(first + cut.block_q, chunk.kv_len)
    if has_tree:
        first = whole = chunk.context
        end = chunk.kv_len
    if cut.window is not None:
        whole = jnp.int32(0)  # the last queries of a tile do not see what the first do, so every block is masked
    start = jnp.int32(0) if cut.window is None else first - cut.window + 1
    end = jnp.where(chunk.offset < chunk.num_queries, jnp.maximum(end, 0), 0)
    return Keys(jnp.clip(start, 0, end), whole, end)


def blocks_of(part: Part, keys: Keys, block_k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first block of a part and one past its last."""
    lo, hi = keys.start // block_k, pl.cdiv(keys.end, block_k)
    share = pl.cdiv(hi - lo, part.num_parts)
    lo = lo + part.index * share
    return lo, jnp.minimum(lo + share, hi)


def parts_in_order(part: Part, keys: Keys, order: SumOrder) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the first part of the order that a tile sees, a program's first and one past its last, i32[] each."""
    first, end = keys.start // order.split_keys, pl.cdiv(keys.end, order.split_keys)
    if part.run is None:
        raise RuntimeError("these rows were cut without an order of sums")
    begin = first + part.index * part.run
    return first, begin, jnp.minimum(begin + part.run, end)


def blocks_in_order(keys: Keys, part: jax.Array, order: SumOrder) -> tuple[jax.Array, jax.Array]:
    """Returns the first block of a part of the order that a tile sees, and one past the last."""
    num_blocks = order.split_keys // order.block_k
    lo = jnp.maximum(part * num_blocks, keys.start // order.block_k)
    return lo, jnp.minimum((part + 1) * num_blocks, pl.cdiv(keys.end, order.block_k))
