"""The GPU kernels that attend: a tile of queries of one row over the blocks of its context, or over a part of them.

    rows of a tile, G = 3 heads per KV head:   q0h0 q0h1 q0h2 q1h0 q1h1 q1h2 …  padded to a power of two

The running maximum is rounded up to an integer and exponentials are base 2, as in the reference: rescaling, and so the
combination of splits, is by powers of two, exact.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import triton
from kernels_pallas.paged_attention.call import AttentionCall
from kernels_pallas.paged_attention.gpu.block_sizes import GpuBlockSizes, heads_of_tile
from kernels_pallas.paged_attention.gpu.chunks import Chunk, arrays_of, find_pages
from kernels_pallas.paged_attention.gpu.combine import combine
from kernels_pallas.paged_attention.gpu.parts import (
    Cut,
    Keys,
    Part,
    blocks_in_order,
    blocks_of,
    cut_batch,
    find_part,
    keys_of,
    load_rows,
    parts_in_order,
)
from kernels_pallas.paged_attention.gpu.sum_order import (
    PartSums,
    SumOrder,
    add_part,
    attended,
    empty_sums,
    sums_of_sinks,
)
from kernels_pallas.paged_attention.online_softmax import LOG2_E, MASKED
from kernels_pallas.row_products import rounded

OPTIONAL = ("v_pages", "sinks", "k_scale", "v_scale", "k_scales", "rotary_scales", "v_scales", "tree_mask")


def attend(
    q: jax.Array,
    call: AttentionCall,
    block_sizes: GpuBlockSizes,
    *,
    arrays: Mapping[str, jax.Array | None],
    value_size: int | None = None,
    order: SumOrder | None = None,
    interpret: bool,
) -> jax.Array:
    """Launches the kernel and combines the parts; rows of kv_lens = 0 and tokens past the last row give zeros.

    `arrays` are `k_pages` and those of OPTIONAL. `value_size` V says that a value is the first V numbers of its key,
    and there is no `v_pages`. With an order of sums `sinks` are scores in base 2.
    """
    k_pages = arrays["k_pages"]
    assert k_pages is not None
    (T, N, H), B, (_, S, K, _) = q.shape, call.kv_lens.shape[0], k_pages.shape
    q_len, V = call.q_len, value_size or H
    given = {"q": q, **arrays_of(call), **arrays, "tree_mask": call.tree_mask}
    given = {name: array for name, array in given.items() if array is not None}
    G = heads_of_tile(N // K, block_sizes.block_m)
    cut = cut_batch(
        T,
        B,
        q_len=q_len,
        block_q=block_sizes.block_m // G,
        window=call.window,
        max_context=call.block_tables.shape[1] * S,
        token_bytes=4 * N * (V + 2),
        sizes=block_sizes,
        order=order,
    )
    out = [jax.ShapeDtypeStruct((T, N, V), q.dtype)]
    if cut.num_slots:
        out += [jax.ShapeDtypeStruct((cut.num_slots, N, *width), jnp.float32) for width in ((V,), (), ())]
    options = {"num_warps": block_sizes.num_warps, "interpret": interpret}
    statics = {"scale": call.scale, "softcap": call.softcap}
    # KV heads are the fast axis, so that the longest tiles of all heads come first.
    outputs = triton.launch(
        functools.partial(_kernel, names=tuple(given), cut=cut, value_size=V, **statics),
        *given.values(),
        grid=(N // G, cut.num_programs),
        out=out,
        num_stages=block_sizes.num_stages,
        name="paged_attention",
        **options,
    )
    if not cut.num_slots:
        return outputs[0]
    queries = min(cut.block_q, q_len or cut.block_q)
    out, partial_out, maximum, total = outputs
    lens = call.kv_lens, call.cu_q_lens, *(() if order is None else (arrays.get("sinks"),))
    return combine(out, partial_out, maximum, total, *lens, cut=cut, queries=queries, heads=G, **options)


class _Columns(NamedTuple):
    """Some columns of keys, queries or values."""

    index: jax.Array  # i32[n]  n is their number rounded up to a power of two
    end: int  # those from here on are not read
    is_padded: bool


class _Tile(NamedTuple):
    """Where a program's queries are and what they see. W = block_m rows."""

    row: jax.Array  # i32[]
    kv_head: jax.Array  # i32[]
    tokens: jax.Array  # i32[W]  in the batch
    heads: jax.Array  # i32[W]  query heads
    positions: jax.Array  # i32[W]  in the row's context
    is_query: jax.Array  # bool[W]
    columns: tuple[_Columns, ...]  # the columns of a value, then those that only a key has
    context: jax.Array  # i32[]  tokens of the row before this step
    keys: Keys
    is_packed: bool  # a byte holds two integers


def _kernel(*refs, names, cut: Cut, value_size: int, scale, softcap) -> None:
    """One program: part `program_id(1)` of the heads `program_id(0)`."""
    arrays = SimpleNamespace(**(dict.fromkeys(OPTIONAL) | dict(zip(names, refs, strict=False))))
    rows, head_tile = load_rows(arrays, cut), pl.program_id(0)
    part = find_part(rows, rows.tiles * rows.parts, pl.program_id(1), cut)
    tile, block_k = _find_tile(arrays, part.chunk, head_tile, cut, value_size), cut.sizes.block_k
    q = [triton.load(arrays.q, *_queries(tile, columns)) for columns in tile.columns]
    if cut.order is not None:
        options = {"block_k": block_k, "scale": scale, "window": cut.window, "softcap": softcap}
        return _attend_in_order(arrays, tile, q, part, cut, cut.order, refs[len(names) :], options)
    lo, hi = blocks_of(part, tile.keys, block_k)
    # Blocks before `whole` need no mask.
    whole = jnp.clip(tile.keys.whole // block_k, lo, jnp.maximum(lo, hi))
    attend_block = functools.partial(
        _attend_block, arrays, tile, q, hi, block_k=block_k, scale=scale, window=cut.window, softcap=softcap
    )
    carry = _start(arrays, tile, part.index == 0, q[0].shape), _pages_of(arrays, tile, lo, hi, block_k)
    carry = jax.lax.fori_loop(lo, whole, functools.partial(attend_block, is_whole=True), carry)
    sums, _ = jax.lax.fori_loop(whole, hi, functools.partial(attend_block, is_whole=False), carry)
    maximum, total, out = sums

    if arrays.v_scale is not None:
        out = out * triton.load(arrays.v_scale, (tile.kv_head,))
    outputs = refs[len(names) :]
    index, mask = _queries(tile, tile.columns[0])
    is_alone = part.num_parts == 1
    triton.store(outputs[0], index, out / jnp.where(total > 0, total, 1.0)[:, None], mask & is_alone)
    if cut.num_slots:
        slots = part.first_slot + part.index * part.chunk.num_queries + tile.tokens - part.chunk.first_token
        triton.store(outputs[1], (slots[:, None], *index[1:]), out, mask & ~is_alone)
        for target, value in zip(outputs[2:], (maximum, total), strict=True):
            triton.store(target, (slots, tile.heads), value, tile.is_query & ~is_alone)


def _attend_in_order(
    arrays, tile: _Tile, q, part: Part, cut: Cut, order: SumOrder, outputs, options: Mapping[str, Any]
) -> None:
    """Attends to a program's parts of the order: adds them if they are all of its tile, else `combine` does."""
    (W, V), head_tile = q[0].shape, pl.program_id(0)
    first, begin, end = parts_in_order(part, tile.keys, order)
    last_block, is_alone = pl.cdiv(tile.keys.end, order.block_k), part.num_parts == 1
    attend_block = functools.partial(_attend_block, arrays, tile, q, last_block, is_in_order=True, **options)

    def attend_part(i: jax.Array, sums: PartSums) -> PartSums:
        lo, hi = blocks_in_order(tile.keys, i, order)
        whole = jnp.clip(tile.keys.whole // order.block_k, lo, hi)
        carry = tuple(empty_sums((W, V))), _pages_of(arrays, tile, lo, last_block, order.block_k)
        carry = jax.lax.fori_loop(lo, whole, functools.partial(attend_block, is_whole=True), carry)
        (maximum, total, out), _ = jax.lax.fori_loop(whole, hi, functools.partial(attend_block, is_whole=False), carry)
        if arrays.v_scale is not None:
            out = out * triton.load(arrays.v_scale, (tile.kv_head,))
        return add_part(sums, PartSums(maximum, total, out))

    def attend_parts(index: jax.Array, _: tuple) -> tuple:
        """Attends to part `index`, or to all that there are, and stores the result."""
        sinks = None if arrays.sinks is None else triton.load(arrays.sinks, (tile.heads,), tile.is_query & is_alone)
        start = sums_of_sinks(sinks, is_alone, (W, V))
        sums = jax.lax.fori_loop(index, jnp.where(is_alone, end, index + 1), attend_part, start)
        # The compiler does not know this 0. Otherwise it finds places before the loops, and keeps them in registers.
        zero = jnp.minimum(index, 0)
        own = _find_tile(arrays, part.chunk._replace(offset=part.chunk.offset + zero), head_tile + zero, cut, V)
        columns, mask = _queries(own, own.columns[0])
        triton.store(outputs[0], columns, attended(sums), mask & is_alone)
        if cut.num_slots:
            slots = part.first_slot + (index - first) * part.chunk.num_queries + own.tokens - part.chunk.first_token
            triton.store(outputs[1], (slots[:, None], *columns[1:]), sums.out, mask & ~is_alone)
            for target, value in zip(outputs[2:], (sums.maximum, sums.total), strict=True):
                triton.store(target, (slots, own.heads), value, own.is_query & ~is_alone)
        return ()

    jax.lax.fori_loop(begin, jnp.where(is_alone, begin + 1, end), attend_parts, ())


def _find_tile(arrays, chunk: Chunk, head_tile: jax.Array, cut: Cut, value_size: int) -> _Tile:
    _, N, H = arrays.q.shape
    group = N // arrays.k_pages.shape[2]
    G = heads_of_tile(group, cut.sizes.block_m)
    block_q = cut.block_q
    rows = jnp.arange(cut.sizes.block_m, dtype=jnp.int32)
    queries = chunk.offset + rows // G
    is_query = (rows < block_q * G) & (queries < chunk.num_queries)
    tokens, positions = chunk.first_token + queries, chunk.context + queries
    if arrays.tree_mask is not None and cut.window is not None:
        positions = chunk.context + _num_ancestors(arrays.tree_mask, tokens, is_query)
    return _Tile(
        row=chunk.row,
        kv_head=head_tile // (group // G),
        tokens=tokens,
        heads=head_tile * G + rows % G,
        positions=positions,
        is_query=is_query,
        columns=tuple(_columns(first, end) for first, end in ((0, value_size), (value_size, H)) if end > first),
        context=chunk.context,
        keys=keys_of(chunk, cut, has_tree=arrays.tree_mask is not None),
        is_packed=arrays.k_pages.shape[3] < H,
    )


def _columns(first: int, end: int) -> _Columns:
    n = max(pl.next_power_of_2(end - first), triton.MIN_DOT)
    return _Columns(first + jnp.arange(n, dtype=jnp.int32), end, is_padded=n > end - first)


def _num_ancestors(tree_mask, tokens: jax.Array, is_query: jax.Array) -> jax.Array:
    """Returns how many tokens of its row each query of a tree descends from, i32[W]."""
    num_set = jnp.full(tokens.shape, -1, jnp.int32)
    for i in range(tree_mask.shape[1]):
        num_set = num_set + jax.lax.population_count(triton.load(tree_mask, (tokens, i), is_query)).astype(jnp.int32)
    return num_set


def _queries(tile: _Tile, columns: _Columns) -> tuple[tuple, jax.Array]:
    """Returns the index of some of the tile's columns in [T, N, H] and which of its elements exist, [W, n]."""
    index = (tile.tokens[:, None], tile.heads[:, None], columns.index[None])
    return index, tile.is_query[:, None] & (columns.index < columns.end)[None]


def _start(arrays, tile: _Tile, is_first: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns running maximum f32[W], total f32[W] and output f32[W, H] before the first block."""
    maximum, total = jnp.full(shape[:1], MASKED, jnp.float32), jnp.zeros(shape[:1], jnp.float32)
    if arrays.sinks is not None:
        # A sink is a score without a value; the first part of a tile counts it.
        sink = triton.load(arrays.sinks, (tile.heads,), tile.is_query).astype(jnp.float32) * LOG2_E
        maximum = jnp.where(is_first, jnp.ceil(sink), maximum)
        total = jnp.where(is_first, jnp.exp2(sink - maximum), total)
    return maximum, total, jnp.zeros(shape, jnp.float32)


def _attend_block(
    arrays,
    tile: _Tile,
    q,
    end: jax.Array,
    i: jax.Array,
    carry,
    *,
    is_whole: bool,
    block_k: int,
    scale,
    window,
    softcap,
    is_in_order: bool = False,
) -> tuple:
    """Adds block i to the sums; returns them, and the pages of the block after it."""
    (maximum, total, out), pages = carry
    # Found a turn ahead, so that Triton's pipeline can read keys and values before their turn.
    next_pages = _pages_of(arrays, tile, i + 1, end, block_k)
    slots = i * block_k + jnp.arange(block_k, dtype=jnp.int32)
    # What no query sees is not read: a page may be freed, a slot may hold NaN, and 0 * NaN is NaN.
    is_seen = None if is_whole else (slots >= tile.keys.start) & (slots < tile.keys.end)
    load = functools.partial(_load_slots, tile, pages, slots, is_seen)
    keys = [load(arrays.k_pages, columns).astype(q[0].dtype) for columns in tile.columns]
    products = [triton.dot(own, k, transpose_b=True) for own, k in zip(q, keys, strict=True)]
    load_scales = functools.partial(_load_scales, tile, pages, slots, is_seen)
    if arrays.k_scales is not None:  # those of the columns of a value, then of those that only a key has
        scales = map(load_scales, (arrays.k_scales, arrays.rotary_scales))
        products = [x * scale[None] for x, scale in zip(products, scales, strict=False)]
    scores = sum(products)
    if arrays.k_scale is not None:
        scores = scores * triton.load(arrays.k_scale, (tile.kv_head,))
    if softcap is not None:
        scores, scale = jnp.tanh(scores * (scale / softcap)), softcap
    scores = scores * (scale * LOG2_E)
    if is_in_order and is_whole:
        # A block with a mask selects scores before it subtracts. Here too the product is not to be fused.
        scores = rounded(scores)
    is_visible = None if is_whole else _visible(arrays, tile, slots, window)
    if is_visible is not None:
        scores = jnp.where(is_visible, scores, MASKED)
    new_maximum = jnp.maximum(maximum, jnp.ceil(scores.max(-1)))
    weights = jnp.exp2(scores - new_maximum[:, None])
    if is_visible is not None:
        weights = jnp.where(is_visible, weights, 0.0)
    rescale = jnp.exp2(maximum - new_maximum)
    v = keys[0] if arrays.v_pages is None else load(arrays.v_pages, tile.columns[0]).astype(q[0].dtype)
    worth = weights
    if arrays.v_scales is not None:
        worth = weights * load_scales(arrays.v_scales)[None]
    update = triton.dot(worth.astype(v.dtype), v)
    return (new_maximum, total * rescale + weights.sum(-1), out * rescale[:, None] + update), next_pages


def _pages_of(arrays, tile: _Tile, i: jax.Array, end: jax.Array, block_k: int) -> jax.Array:
    """Returns the page of block i, i32[], or where pages are smaller the page of each slot in it, i32[block_k].

    Any page for block `end` and those after it.
    """
    S = arrays.k_pages.shape[1]
    if block_k <= S:
        return find_pages(arrays, tile.row, i * block_k, S, i < end)
    slots = i * block_k + jnp.arange(block_k, dtype=jnp.int32)
    return find_pages(arrays, tile.row, slots, S, (slots >= tile.keys.start) & (slots < tile.keys.end))


def _load_slots(
    tile: _Tile, pages: jax.Array, slots: jax.Array, is_seen: jax.Array | None, pool, columns: _Columns
) -> jax.Array:
    """Returns columns of the keys or values of the tile's KV head, [slots, n]; zeros where they are not seen."""
    places = (slots & (pool.shape[1] - 1))[:, None]
    pages = pages[:, None] if pages.ndim else pages
    mask = (columns.index < columns.end)[None]
    if is_seen is not None:
        mask = is_seen[:, None] & mask
    elif columns.is_padded:
        mask = jnp.broadcast_to(mask, (slots.size, columns.index.size))
    else:
        mask = None  # nothing to hide: the loads of whole blocks stay plain
    if not tile.is_packed:
        return triton.load(pool, (pages, places, tile.kv_head, columns.index[None]), mask)
    # A byte has integers of both halves of a head, and is read for each; the second time it is near.
    is_high = columns.index >= pool.shape[3]
    numbers = jnp.where(is_high, columns.index - pool.shape[3], columns.index)[None]
    pairs = triton.load(pool, (pages, places, tile.kv_head, numbers), mask).astype(jnp.int32)
    return jnp.where(is_high[None], pairs >> 4, (pairs << 28) >> 28)


def _load_scales(tile: _Tile, pages: jax.Array, slots: jax.Array, is_seen: jax.Array | None, pool) -> jax.Array:
    """Returns the scales of the keys or values of the tile's KV head, f32[slots]; zeros where they are not seen."""
    return triton.load(pool, (pages, tile.kv_head, slots & (pool.shape[2] - 1)), is_seen)


def _visible(arrays, tile: _Tile, slots: jax.Array, window: int | None) -> jax.Array:
    """Returns bool[W, slots]: what each query sees."""
    is_visible = slots[None] <= tile.positions[:, None]
    if window is not None:
        is_visible = is_visible & (slots[None] > tile.positions[:, None] - window)
    if arrays.tree_mask is None:
        return is_visible
    drafts = slots - tile.context
    in_step = (drafts >= 0) & (slots < tile.keys.end)
    words = triton.load(
        arrays.tree_mask,
        (tile.tokens[:, None], (drafts >> 5)[None]),
        tile.is_query[:, None] & in_step[None],
    )
    bits = (words >> (drafts & 31)[None].astype(words.dtype)) & 1
    return jnp.where(in_step[None], bits != 0, is_visible)
