"""Prefill for Hopper: the attention of rows of several tokens to their pages, with TMA and wgmma (Pallas' Mosaic GPU).

    a program: one head of a tile of 128 queries           warpgroup 0   queries  0 … 63    products and softmax
                                                            warpgroup 1   queries 64 … 127   of its half
                                                            warpgroup 2   brings blocks of keys and values by TMA

While one half multiplies, the other computes its softmax (FlashAttention-3, Shah et al. 2024). A row may begin at any
token of the batch. Tiled copies begin at multiples of 8, so queries and results pass through an untiled buffer. Results
leave it in runs of 64, 32 … 1 tokens, which end where the row ends.

jax says of this interface that it can change weekly, so this file is imported only where its kernel was chosen.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from kernels_pallas.paged_attention.call import AttentionCall
from kernels_pallas.paged_attention.gpu.tiles import num_tiles, tile_table
from kernels_pallas.paged_attention.online_softmax import LOG2_E, MASKED

plgpu: Any = mosaic_gpu  # what it has differs from jax to jax
HALF = 64  # queries of a warpgroup, the rows of a wgmma
TILE = 2 * HALF  # queries of a program
BLOCK = 128  # keys of a stage
# Bytes of the blocks that are held; queries and results take 64 KiB at most beside them, of the 227 that there are.
HELD_BYTES = 128 * 1024
# 512 registers for each of 128 threads: two warpgroups compute, and one fetches.
COMPUTE_REGISTERS, FETCH_REGISTERS = 232, 40


def hopper_prefill(
    q: jax.Array,
    call: AttentionCall,
    *,
    k_pages: jax.Array,
    v_pages: jax.Array,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns the attention [T, N, H] of the rows of several tokens; that of single tokens is left undefined.

    Arguments are those of `paged_attention`, of a call that `prefill_choice.reason_against_call` allows; k_pages and
    v_pages [P, S, K, H], and the call is one `for_kernels`. Padding after the last row gives zeros.
    """
    (T, N, H), B = q.shape, call.kv_lens.shape[0]
    stages = HELD_BYTES // (2 * BLOCK * H * q.dtype.itemsize)
    arrays = {
        "q": q,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "block_tables": call.block_tables,
        "page_offset": call.page_offset,
        "tiles": tile_table(call.kv_lens, call.cu_q_lens, T, TILE),
        **({} if sinks is None else {"sinks": sinks}),
    }
    swizzled = {"transforms": (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))}
    fetched = plgpu.Barrier(num_arrivals=BLOCK // min(k_pages.shape[1], BLOCK), num_barriers=stages)
    scratch = {
        "queries": plgpu.SMEM((2, HALF, H), q.dtype, **swizzled),
        "staging": plgpu.SMEM((2, HALF, H), q.dtype),
        "keys": plgpu.SMEM((stages, BLOCK, H), q.dtype, **swizzled),
        "values": plgpu.SMEM((stages, BLOCK, H), q.dtype, **swizzled),
        "queries_here": plgpu.Barrier(num_barriers=2),
        "keys_here": fetched,
        "values_here": fetched,
        "values_clean": plgpu.Barrier(),
        "keys_read": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "values_read": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "turn": plgpu.Barrier(num_arrivals=2),
        **({"weights": plgpu.SMEM((2, HALF, BLOCK), q.dtype, **swizzled)} if interpret else {}),
    }
    statics = {"scale": call.scale, "window": call.window, "softcap": call.softcap, "interpret": interpret}

    def body(*refs: Any) -> None:
        def program(*held: Any) -> None:
            named = dict(zip((*arrays, "out", *scratch), (*refs, *held), strict=True))
            _program(SimpleNamespace(**({"sinks": None} | named)), **statics)

        pl.run_scoped(program, *scratch.values(), collective_axes="warpgroup")

    return plgpu.kernel(
        body,
        kernel_name="hopper_prefill",
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        # The last axis is the fastest: the heads of a tile run side by side, and read the same keys.
        grid=(num_tiles(T, B, TILE), N),
        grid_names=("tile", "head"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({"interpret": plgpu.InterpretGPUParams(detect_races=True)} if interpret else {}),
    )(*arrays.values())


class _Tile(NamedTuple):
    """The queries of a program and the slots that they see, all i32[]."""

    row: jax.Array  # of the batch
    first_token: jax.Array  # in the batch
    num_queries: jax.Array
    position: jax.Array  # of the first query in the row's context
    begin: jax.Array  # where the blocks begin: at the page, or half a page, of the first slot that is seen
    end: jax.Array  # one past the last slot that is seen
    num_blocks: jax.Array


def _find_tile(refs: SimpleNamespace, index: jax.Array, window: int | None) -> _Tile:
    row, first_token, num_queries, position = (refs.tiles[field, index] for field in range(4))
    end = jnp.maximum(position + num_queries, 0)
    begin = jnp.int32(0)
    if window is not None:
        begin = _round_down(jnp.maximum(position - (window - 1), 0), _box_slots(refs))
    num_blocks = pl.cdiv(jnp.maximum(end - begin, 0), jnp.int32(BLOCK))
    return _Tile(row, first_token, num_queries, position, begin, end, num_blocks)


def _box_slots(refs: SimpleNamespace) -> int:
    """Returns how many slots of a page one copy brings."""
    return min(refs.k_pages.shape[1], BLOCK)


def _round_down(n: jax.Array, multiple: int) -> jax.Array:
    return n - lax.rem(n, jnp.int32(multiple))


def _slot_of(block: jax.Array, stages: int) -> jax.Array:
    """Returns the stage of the buffers that holds a block."""
    return lax.rem(block, jnp.int32(stages))


def _program(
    refs: SimpleNamespace, *, scale: float, window: int | None, softcap: float | None, interpret: bool
) -> None:
    tile = _find_tile(refs, lax.axis_index("tile"), window)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(tile.num_queries > 0)
    def _() -> None:
        @pl.when(warpgroup < 2)
        def _() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            _compute(refs, tile, warpgroup, scale=scale, window=window, softcap=softcap, interpret=interpret)

        @pl.when(warpgroup == 2)
        def _() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            _fetch(refs, tile)


def _fetch(refs: SimpleNamespace, tile: _Tile) -> None:
    """Brings the tile's blocks of keys and values, each when both halves have read what it replaces."""
    N, (S, K), (stages, _, H) = refs.q.shape[1], refs.k_pages.shape[1:3], refs.keys.shape
    kv_head = lax.div(lax.axis_index("head"), jnp.int32(N // K))
    box = _box_slots(refs)

    def copy(pool: Any, buffer: Any, barrier: Any, block: jax.Array) -> None:
        """Brings the boxes of a block, up to the end of the context, into its slot of the buffer."""
        slot, begin = _slot_of(block, stages), tile.begin + block * BLOCK
        num_boxes = jnp.minimum(pl.cdiv(tile.end - begin, jnp.int32(box)), BLOCK // box)

        @pl.loop(jnp.int32(0), num_boxes)
        def _(i: jax.Array) -> None:
            first = begin + i * box
            page_id = refs.block_tables[tile.row, first >> (S.bit_length() - 1)] + refs.page_offset[0]
            slots = pl.ds(0 if box == S else pl.multiple_of(first & (S - 1), box), box)
            held = pl.ds(pl.multiple_of(i * box, box), box)
            plgpu.copy_gmem_to_smem(pool.at[page_id, slots, kv_head], buffer.at[slot, held], barrier.at[slot])

        @pl.loop(num_boxes, jnp.int32(BLOCK // box))
        def _(_: jax.Array) -> None:
            plgpu.barrier_arrive(barrier.at[slot])

    @pl.loop(jnp.int32(0), jnp.minimum(tile.num_blocks, stages))
    def _(block: jax.Array) -> None:
        copy(refs.k_pages, refs.keys, refs.keys_here, block)
        copy(refs.v_pages, refs.values, refs.values_here, block)

    @pl.loop(jnp.int32(0), tile.num_blocks - stages)
    def _(block: jax.Array) -> None:
        slot = _slot_of(block, stages)
        plgpu.barrier_wait(refs.keys_read.at[slot])
        copy(refs.k_pages, refs.keys, refs.keys_here, block + stages)
        plgpu.barrier_wait(refs.values_read.at[slot])
        plgpu.barrier_wait(refs.values_here.at[slot])  # at once; who waits for a barrier must see each of its phases
        copy(refs.v_pages, refs.values, refs.values_here, block + stages)

    def wait_for_the_last_of_each_slot(*barriers: Any) -> None:
        for slot in range(stages):

            @pl.when(slot < tile.num_blocks)
            def _(slot: int = slot) -> None:
                for barrier in barriers:
                    plgpu.barrier_wait(barrier.at[slot])

    wait_for_the_last_of_each_slot(refs.values_here)

    # Behind the end is what another block or program left, or a page: its weight is 0, but 0 * NaN is NaN.
    @pl.when(lax.rem(tile.end - tile.begin, jnp.int32(BLOCK)) > 0)
    def _() -> None:
        block = tile.num_blocks - 1
        slot, num_seen = _slot_of(block, stages), tile.end - tile.begin - block * BLOCK
        for i in range(0, BLOCK, 64):
            for j in range(0, H, 64):
                part = refs.values.at[slot, pl.ds(i, 64), pl.ds(j, 64)]
                row = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=plgpu.Layout.WGMMA)
                values = part[...]
                part[...] = jnp.where(row + i < num_seen, values, jnp.zeros_like(values))
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.values_clean)

    wait_for_the_last_of_each_slot(refs.keys_read, refs.values_read)


def _compute(
    refs: SimpleNamespace, tile: _Tile, half: jax.Array, *, scale: float, window: int | None, softcap, interpret: bool
) -> None:
    """Attends with one half of the tile's queries."""
    (T, _, H), stages, head = refs.q.shape, refs.keys.shape[0], lax.axis_index("head")
    queries, staging = refs.queries.at[half], refs.staging.at[half]
    matrix = plgpu.Layout.WGMMA
    first_token = tile.first_token + half * HALF
    # The last queries of the batch are read with some before them, which fill the first rows and are not written.
    skipped = jnp.maximum(first_token - (T - HALF), 0)
    position = tile.position + half * HALF - skipped  # of row 0
    plgpu.copy_gmem_to_smem(refs.q.at[pl.ds(first_token - skipped, HALF), head], staging, refs.queries_here.at[half])
    plgpu.barrier_wait(refs.queries_here.at[half])
    queries[...] = plgpu.load(staging, layout=matrix, optimized=False)
    plgpu.commit_smem()

    def take_turn() -> None:
        plgpu.barrier_arrive(refs.turn)
        plgpu.barrier_wait(refs.turn)

    def attend_block(block: jax.Array, carry: tuple, *, is_whole: bool) -> tuple:
        out, maximum, total = carry
        slot = _slot_of(block, stages)

        def multiply_keys(accumulator: Any) -> jax.Array:
            plgpu.wgmma(accumulator, queries, refs.keys.at[slot].transpose((1, 0)))
            take_turn()
            return accumulator[...]

        scores = pl.run_scoped(multiply_keys, plgpu.ACC((HALF, BLOCK), jnp.float32))
        plgpu.barrier_arrive(refs.keys_read.at[slot])
        factor = scale * LOG2_E
        if softcap is not None:
            # tanh by an exponential: the instruction for it is right to 11 bits only.
            root = lax.rsqrt(jnp.exp2(scores * (2 * factor / softcap)) + 1)
            scores, factor = 1 - 2 * root * root, softcap * LOG2_E
        if not is_whole:
            key = plgpu.broadcasted_iota(jnp.int32, (HALF, BLOCK), 1, layout=matrix)
            row = plgpu.broadcasted_iota(jnp.int32, (HALF,), 0, layout=matrix.reduce(1))
            own = row + (position - tile.begin - block * BLOCK)  # the key of each query
            is_visible = key <= lax.broadcast_in_dim(own, key.shape, [0])
            if window is not None:
                is_visible = is_visible & (key > lax.broadcast_in_dim(own - window, key.shape, [0]))
            scores = jnp.where(is_visible, scores, MASKED / factor)
        # A row that has seen nothing yet counts masked scores, and forgets them with the first that it sees.
        new_maximum = jnp.maximum(maximum, scores.max(axis=1) * factor)
        rescale = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_maximum, scores.shape, [0]))
        out = out * lax.broadcast_in_dim(rescale, out.shape, [0])
        total = total * rescale + weights.sum(axis=1)
        weights = weights.astype(refs.q.dtype)
        out, total, new_maximum, weights = lax.optimization_barrier((out, total, new_maximum, weights))
        plgpu.barrier_arrive(refs.turn)
        plgpu.barrier_wait(refs.values_here.at[slot])
        if not is_whole:
            is_ragged = lax.rem(tile.end - tile.begin, jnp.int32(BLOCK)) > 0

            @pl.when(is_ragged & (block + 1 == tile.num_blocks))
            def _() -> None:
                plgpu.barrier_wait(refs.values_clean)

        plgpu.barrier_wait(refs.turn)

        def multiply_values(accumulator: Any, weights: Any = weights) -> None:
            plgpu.wgmma(accumulator, weights, refs.values.at[slot])

            @pl.when(block + 1 < tile.num_blocks)
            def _() -> None:
                plgpu.barrier_wait(refs.keys_here.at[_slot_of(block + 1, stages)])

        if interpret:  # the interpreter has no `run_state`, and takes operands from memory alone
            refs.weights[half] = weights
            plgpu.commit_smem()

            def multiply_fresh(accumulator: Any) -> jax.Array:
                multiply_values(accumulator, refs.weights.at[half])
                return accumulator[...]

            out = out + pl.run_scoped(multiply_fresh, plgpu.ACC((HALF, H), jnp.float32))
        else:
            out = pl.run_state(multiply_values)(plgpu.ACC.init(out))
        plgpu.barrier_arrive(refs.values_read.at[slot])
        return out, new_maximum, total

    @pl.when(tile.num_blocks > 0)
    def _() -> None:
        plgpu.barrier_wait(refs.keys_here.at[0])

    pl.when(half == 1)(take_turn)
    start = (MASKED, 0.0) if refs.sinks is None else (refs.sinks[head] * LOG2_E, 1.0)
    carry = (
        plgpu.layout_cast(jnp.zeros((HALF, H), jnp.float32), matrix),
        *(plgpu.layout_cast(jnp.full((HALF,), value, jnp.float32), matrix.reduce(1)) for value in start),
    )
    first_whole, end_whole = _whole_blocks(tile, position, window)
    whole, masked = (functools.partial(attend_block, is_whole=is_whole) for is_whole in (True, False))
    if window is not None:
        carry = lax.fori_loop(jnp.int32(0), first_whole, masked, carry)
    carry = lax.fori_loop(first_whole, end_whole, whole, carry)
    out, _, total = lax.fori_loop(end_whole, tile.num_blocks, masked, carry)
    pl.when(half == 0)(take_turn)

    out = out / lax.broadcast_in_dim(jnp.maximum(total, 1e-30), out.shape, [0])
    staging[...] = out.astype(refs.q.dtype)
    plgpu.commit_smem()
    count, row = jnp.clip(tile.num_queries - half * HALF, 0, HALF), skipped
    size = HALF
    while size:

        @pl.when((count & size) != 0)
        def _(row: jax.Array = row, size: int = size) -> None:
            tokens = pl.ds(first_token + row - skipped, size)
            plgpu.copy_smem_to_gmem(staging.at[pl.ds(row, size)], refs.out.at[tokens, head])

        row, size = row + (count & size), size // 2
    plgpu.wait_smem_to_gmem(0)


def _whole_blocks(tile: _Tile, position: jax.Array, window: int | None) -> tuple[jax.Array, jax.Array]:
    """Returns the first block that all queries of a half see whole, the first at `position`, and one past the last."""
    end = lax.div(jnp.clip(position + 1, tile.begin, tile.end) - tile.begin, jnp.int32(BLOCK))
    if window is None:
        return jnp.int32(0), end
    unseen = jnp.maximum(position + HALF - window - tile.begin, 0)
    return jnp.minimum(pl.cdiv(unseen, jnp.int32(BLOCK)), end), end
