"""The GPU kernel that attends: a tile of queries of one row over the blocks of its context, or over a part of them.

    rows of a tile, G = 3 heads per KV head:   q0h0 q0h1 q0h2 q1h0 q1h1 q1h2 …  padded to a power of two

The running maximum is rounded up to an integer and exponentials are base 2, as in the reference: rescaling, and so the
combination of splits, is by powers of two, exact.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import triton
from kernels_pallas.paged_attention.gpu.block_sizes import GpuBlockSizes
from kernels_pallas.paged_attention.gpu.chunks import find_chunk, find_slots, num_chunks
from kernels_pallas.paged_attention.reference import LOG2_E, MASKED

OPTIONAL = ("v_pages", "sinks", "k_scale", "v_scale", "tree_mask")


def attend(
    q: jax.Array, kv_lens: jax.Array, cu_q_lens: jax.Array, *, block_sizes: GpuBlockSizes, interpret: bool, **rest
) -> jax.Array:
    """Launches the kernel and combines the splits; rows of kv_lens = 0 and tokens past the last row give zeros.

    `value_size` V says that a value is the first V numbers of its key, and there is no `v_pages`.
    """
    (T, N, H), splits = q.shape, block_sizes.num_splits
    statics = {name: rest.pop(name) for name in ("q_len", "scale", "window", "softcap")}
    V = rest.pop("value_size", None) or H
    arrays = {"q": q, "kv_lens": kv_lens, "cu_q_lens": cu_q_lens, **rest}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    G = heads_of_tile(N // rest["k_pages"].shape[2], block_sizes.block_m)
    block_q = block_sizes.block_m // G
    if splits == 1:
        out = [jax.ShapeDtypeStruct((T, N, V), q.dtype)]
    else:
        out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((splits, T, N, V), *[(splits, T, N)] * 2)]
    outputs = triton.launch(
        functools.partial(_kernel, names=tuple(arrays), block_sizes=block_sizes, value_size=V, **statics),
        *arrays.values(),
        grid=(num_chunks(T, kv_lens.shape[0], block_q, statics["q_len"]), N // G, splits),
        out=out,
        num_warps=block_sizes.num_warps,
        num_stages=block_sizes.num_stages,
        name="paged_attention",
        interpret=interpret,
    )
    return outputs[0] if splits == 1 else _combine(*outputs).astype(q.dtype)


def heads_of_tile(group: int, block_m: int) -> int:
    """Returns how many of the query heads of a KV head share a tile: all of them if they fit."""
    return max(n for n in range(1, min(group, block_m) + 1) if group % n == 0)


def _combine(out: jax.Array, maximum: jax.Array, total: jax.Array) -> jax.Array:
    """Partial results out f32[splits, T, N, H], maximum and total f32[splits, T, N] -> f32[T, N, H]."""
    weights = jnp.exp2(maximum - jnp.broadcast_to(maximum.max(0, keepdims=True), maximum.shape))
    total = (total * weights).sum(0)
    out = (out * weights[..., None]).sum(0)
    return out / jnp.where(total > 0, total, 1.0)[..., None]


class _Part(NamedTuple):
    """Some columns of keys, queries or values."""

    columns: jax.Array  # i32[n]  n is their number rounded up to a power of two
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
    parts: tuple[_Part, ...]  # the columns of a value, then those that only a key has
    context: jax.Array  # i32[]  tokens of the row before this step
    start: jax.Array  # i32[]  the first token of the context that some query sees
    whole: jax.Array  # i32[]  tokens from the first that every query sees
    end: jax.Array  # i32[]  one past the last token that some query sees


def _kernel(*refs, names, block_sizes: GpuBlockSizes, value_size: int, q_len, scale, window, softcap) -> None:
    """One program: tile `program_id(0)` of heads `program_id(1)` over part `program_id(2)` of its context."""
    arrays = SimpleNamespace(**(dict.fromkeys(OPTIONAL) | dict(zip(names, refs, strict=False))))
    tile = _find_tile(arrays, block_sizes.block_m, value_size, q_len, window)
    q = [triton.load(arrays.q, *_queries(tile, part)) for part in tile.parts]
    attend_block = functools.partial(
        _attend_block, arrays, tile, q, block_k=block_sizes.block_k, scale=scale, window=window, softcap=softcap
    )
    # Blocks lo … hi are this split's; those before `whole` need no mask.
    lo, hi = tile.start // block_sizes.block_k, pl.cdiv(tile.end, block_sizes.block_k)
    share = pl.cdiv(hi - lo, block_sizes.num_splits)
    lo = lo + pl.program_id(2) * share
    hi = jnp.minimum(lo + share, hi)
    whole = jnp.clip(tile.whole // block_sizes.block_k, lo, jnp.maximum(lo, hi))
    carry = _start(arrays, tile, q[0].shape)
    carry = jax.lax.fori_loop(lo, whole, functools.partial(attend_block, is_whole=True), carry)
    maximum, total, out = jax.lax.fori_loop(whole, hi, functools.partial(attend_block, is_whole=False), carry)

    if arrays.v_scale is not None:
        out = out * triton.load(arrays.v_scale, (tile.kv_head,))
    index, mask = _queries(tile, tile.parts[0])
    outputs = refs[len(names) :]
    if block_sizes.num_splits == 1:
        triton.store(outputs[0], index, out / jnp.where(total > 0, total, 1.0)[:, None], mask)
        return
    split = pl.program_id(2)
    triton.store(outputs[0], (split, *index), out, mask)
    for target, value in zip(outputs[1:], (maximum, total), strict=True):
        triton.store(target, (split, tile.tokens, tile.heads), value, tile.is_query)


def _find_tile(arrays, block_m: int, value_size: int, q_len: int | None, window: int | None) -> _Tile:
    T, N, H = arrays.q.shape
    group = N // arrays.k_pages.shape[2]
    G = heads_of_tile(group, block_m)
    block_q = block_m // G
    chunk = find_chunk(arrays, T, block_q, q_len)
    rows = jnp.arange(block_m, dtype=jnp.int32)
    queries = chunk.offset + rows // G
    is_query = (rows < block_q * G) & (queries < chunk.num_queries)
    tokens, positions = chunk.first_token + queries, chunk.context + queries
    first = chunk.context + chunk.offset
    if arrays.tree_mask is None:
        whole, end = first + 1, jnp.minimum(first + block_q, chunk.kv_len)
    else:
        first = whole = chunk.context
        end = chunk.kv_len
        if window is not None:
            positions = chunk.context + _num_ancestors(arrays.tree_mask, tokens, is_query)
    if window is not None:
        whole = jnp.int32(0)  # the last queries of a tile do not see what the first do, so every block is masked
    start = jnp.int32(0) if window is None else first - window + 1
    end = jnp.where(chunk.offset < chunk.num_queries, jnp.maximum(end, 0), 0)
    return _Tile(
        row=chunk.row,
        kv_head=pl.program_id(1) // (group // G),
        tokens=tokens,
        heads=pl.program_id(1) * G + rows % G,
        positions=positions,
        is_query=is_query,
        parts=tuple(_part(first, end) for first, end in ((0, value_size), (value_size, H)) if end > first),
        context=chunk.context,
        start=jnp.clip(start, 0, end),
        whole=whole,
        end=end,
    )


def _part(first: int, end: int) -> _Part:
    n = max(pl.next_power_of_2(end - first), triton.MIN_DOT)
    return _Part(first + jnp.arange(n, dtype=jnp.int32), end, is_padded=n > end - first)


def _num_ancestors(tree_mask, tokens: jax.Array, is_query: jax.Array) -> jax.Array:
    """Returns how many tokens of its row each query of a tree descends from, i32[W]."""
    num_set = jnp.full(tokens.shape, -1, jnp.int32)
    for i in range(tree_mask.shape[1]):
        num_set = num_set + jax.lax.population_count(triton.load(tree_mask, (tokens, i), is_query)).astype(jnp.int32)
    return num_set


def _queries(tile: _Tile, part: _Part) -> tuple[tuple, jax.Array]:
    """Returns the index of some of the tile's columns in [T, N, H] and which of its elements exist, [W, n]."""
    index = (tile.tokens[:, None], tile.heads[:, None], part.columns[None])
    return index, tile.is_query[:, None] & (part.columns < part.end)[None]


def _start(arrays, tile: _Tile, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns running maximum f32[W], total f32[W] and output f32[W, H] before the first block."""
    maximum, total = jnp.full(shape[:1], MASKED, jnp.float32), jnp.zeros(shape[:1], jnp.float32)
    if arrays.sinks is not None:
        # A sink is a score without a value; one split counts it.
        sink = triton.load(arrays.sinks, (tile.heads,), tile.is_query).astype(jnp.float32) * LOG2_E
        is_first = pl.program_id(2) == 0
        maximum = jnp.where(is_first, jnp.ceil(sink), maximum)
        total = jnp.where(is_first, jnp.exp2(sink - maximum), total)
    return maximum, total, jnp.zeros(shape, jnp.float32)


def _attend_block(arrays, tile: _Tile, q, i, carry, *, is_whole: bool, block_k: int, scale, window, softcap) -> tuple:
    maximum, total, out = carry
    slots = i * block_k + jnp.arange(block_k, dtype=jnp.int32)
    # What no query sees is not read: a page may be freed, a slot may hold NaN, and 0 * NaN is NaN.
    is_seen = None if is_whole else (slots >= tile.start) & (slots < tile.end)
    load = functools.partial(_load_slots, arrays, tile, slots, is_seen)
    keys = [load(arrays.k_pages, part).astype(q[0].dtype) for part in tile.parts]
    scores = sum(triton.dot(own, k, transpose_b=True) for own, k in zip(q, keys, strict=True))
    if arrays.k_scale is not None:
        scores = scores * triton.load(arrays.k_scale, (tile.kv_head,))
    if softcap is not None:
        scores, scale = jnp.tanh(scores * (scale / softcap)), softcap
    scores = scores * (scale * LOG2_E)
    is_visible = None if is_whole else _visible(arrays, tile, slots, window)
    if is_visible is not None:
        scores = jnp.where(is_visible, scores, MASKED)
    new_maximum = jnp.maximum(maximum, jnp.ceil(scores.max(-1)))
    weights = jnp.exp2(scores - new_maximum[:, None])
    if is_visible is not None:
        weights = jnp.where(is_visible, weights, 0.0)
    rescale = jnp.exp2(maximum - new_maximum)
    v = keys[0] if arrays.v_pages is None else load(arrays.v_pages, tile.parts[0]).astype(q[0].dtype)
    update = triton.dot(weights.astype(v.dtype), v)
    return new_maximum, total * rescale + weights.sum(-1), out * rescale[:, None] + update


def _load_slots(arrays, tile: _Tile, slots: jax.Array, is_seen: jax.Array | None, pool, part: _Part) -> jax.Array:
    """Returns columns of the keys or values of the tile's KV head, [slots, n]; zeros where they are not seen."""
    page_ids, places = find_slots(arrays, tile.row, slots, pool.shape[1], is_seen)
    mask = (part.columns < part.end)[None]
    if is_seen is not None:
        mask = is_seen[:, None] & mask
    elif part.is_padded:
        mask = jnp.broadcast_to(mask, (slots.size, part.columns.size))
    else:
        mask = None  # nothing to hide: the loads of whole blocks stay plain
    index = (page_ids[:, None], places[:, None], tile.kv_head, part.columns[None])
    return triton.load(pool, index, mask)


def _visible(arrays, tile: _Tile, slots: jax.Array, window: int | None) -> jax.Array:
    """Returns bool[W, slots]: what each query sees."""
    is_visible = slots[None] <= tile.positions[:, None]
    if window is not None:
        is_visible = is_visible & (slots[None] > tile.positions[:, None] - window)
    if arrays.tree_mask is None:
        return is_visible
    drafts = slots - tile.context
    in_step = (drafts >= 0) & (slots < tile.end)
    words = triton.load(
        arrays.tree_mask,
        (tile.tokens[:, None], (drafts >> 5)[None]),
        tile.is_query[:, None] & in_step[None],
    )
    bits = (words >> (drafts & 31)[None].astype(words.dtype)) & 1
    return jnp.where(in_step[None], bits != 0, is_visible)
