"""The TPU kernel: a loop over items, in it one over blocks, with the next blocks under way meanwhile."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.device import VMEM_BYTES
from kernels_pallas.paged_attention.online_softmax import MASKED
from kernels_pallas.paged_attention.tpu.append import append_tiles, appending
from kernels_pallas.paged_attention.tpu.attend import (
    MAX_ROWS_IN_REGISTERS,
    attention_of_block,
    piece_width,
    take_scales,
)
from kernels_pallas.paged_attention.tpu.block_sizes import Blocks
from kernels_pallas.paged_attention.tpu.fetch import fetching
from kernels_pallas.paged_attention.tpu.items import LANES, Stored, sinks_of_rows
from kernels_pallas.paged_attention.tpu.rows import give_rows, give_tokens, take_rows

# Rows of a 32-bit register; a group of query heads is padded to them.
SUBLANES = 8


def padded_rows(R: int, blocks: Blocks) -> int:
    """Returns R rows of queries rounded up to whole registers, and to pieces of one size."""
    multiple = SUBLANES if blocks.rows >= R else blocks.rows
    return -(-R // multiple) * multiple


@functools.partial(jax.jit, static_argnames=("window", "softcap", "value_width", "blocks", "num_groups", "interpret"))
def run_kernel(
    items,
    queries,
    pool,
    *,
    block_tables,
    factors,
    sinks,
    window,
    softcap,
    blocks,
    interpret,
    new=None,
    tiles=None,
    scale_tiles=None,
    tree=None,
    num_groups=None,
    value_width=None,
):
    """queries [items, K, R, W] -> [items, K, R, V], and the pool. `new`, or `tiles` and `scale_tiles`, are appended.

    With `num_groups` G queries are [T, N, W] -> [T, N, V], and the items say which tokens are theirs; the kernel leaves
    out the tokens of none. `tree` is i32[items, words, R, LANES]. V is `value_width`, whole rows of lanes; None is W.
    """
    if num_groups is None:
        _, K, R, W = queries.shape
    else:
        (_, N, W), Q = queries.shape, blocks.queries
        K, R = N // num_groups, padded_rows(Q * num_groups, blocks)
    V = value_width or W
    pool, scales = pool
    C, page_tiles, tile = pool.shape[1:4]
    NB, block_tiles = blocks.buffers, blocks.pages * page_tiles
    in_hbm, in_vmem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.VMEM)
    scalars = {"tables": block_tables.reshape(-1), "factors": factors, **items._asdict()}
    inputs = {"q_hbm": (queries, in_hbm), "pool_in": (pool, in_hbm)}
    pools = {"pool": pool}
    scratch = {
        "kv": pltpu.VMEM((NB, C, block_tiles, tile, W), pool.dtype),
        "maximum": pltpu.VMEM((K, R, LANES), jnp.float32),
        "total": pltpu.VMEM((K, R, LANES), jnp.float32),
        "acc": pltpu.VMEM((K, R, V), jnp.float32),
        "kv_arrived": pltpu.SemaphoreType.DMA((NB,)),
        "q_arrived": pltpu.SemaphoreType.DMA((NB,)),
        "out_left": pltpu.SemaphoreType.DMA((2,)),
    }
    width = piece_width(block_tiles * tile)
    if scales is not None:
        inputs["scales_in"], pools["scale_pool"] = (scales, in_hbm), scales
        scratch["scales"] = pltpu.VMEM((NB, blocks.pages, *scales.shape[1:]), jnp.float32)
        scratch["scale_rows"] = pltpu.VMEM((2, block_tiles * tile // width, K, width), jnp.float32)
    if R > MAX_ROWS_IN_REGISTERS:
        size = min(R, blocks.rows)
        scratch["scores"] = pltpu.VMEM((size, width), jnp.float32)
        scratch["greatest"] = pltpu.VMEM((size, LANES), jnp.float32)
        scratch["weights"] = pltpu.VMEM((size, width), queries.dtype)
        scratch["rescale"] = pltpu.VMEM((size, LANES), jnp.float32)
    if new is not None:
        inputs["new_hbm"] = (new.numbers, in_hbm)
        scratch["new"] = pltpu.VMEM((NB, C, W), pool.dtype)
        scratch["written"] = pltpu.VMEM((2, C, tile, W), pool.dtype)
        scratch["tile_left"] = pltpu.SemaphoreType.DMA((2,))
        if scales is not None:
            in_lanes = jnp.broadcast_to(new.scales[..., None], (*new.scales.shape, scales.shape[-1]))
            inputs["new_scales_hbm"] = (in_lanes, in_hbm)
            scratch["new_scales"] = pltpu.VMEM((NB, *scales.shape[1:]), jnp.float32)
            scratch["written_scales"] = pltpu.VMEM((2, *scales.shape[1:]), jnp.float32)
    if tiles is not None:
        values, scalars["tile_pages"], scalars["tile_places"], scalars["num_tiles"] = tiles
        inputs["tiles_hbm"] = (values, in_hbm)
        scratch["tiles_left"] = pltpu.SemaphoreType.DMA(())
    if scale_tiles is not None:
        values, scalars["scale_pages"], scalars["num_scale_pages"] = scale_tiles
        inputs["new_scales_hbm"] = (values, in_hbm)
    if tree is not None:
        inputs["tree_hbm"] = (tree, in_hbm)
        scratch["tree"] = pltpu.VMEM((NB, *tree.shape[1:]), jnp.int32)
    if num_groups is None:
        scratch["q"] = pltpu.VMEM((NB, K, R, W), queries.dtype)
        scratch["out"] = pltpu.VMEM((2, K, R, V), queries.dtype)
    else:
        scratch["q"] = pltpu.VMEM((1, K, R, W), queries.dtype)
        scratch["out"] = pltpu.VMEM((2, Q, N, V), queries.dtype)
        scratch["q_tokens"] = pltpu.VMEM((NB, Q, N, W), queries.dtype)
        scratch["by_token"] = pltpu.VMEM((W // LANES, Q, N, LANES), jnp.float32)
        scratch["rows"] = pltpu.VMEM((W // LANES, R, LANES), jnp.float32)
        # Which of an item's queries each row belongs to.
        offsets = jnp.broadcast_to((jnp.arange(R, dtype=jnp.int32) // num_groups)[:, None], (R, LANES))
        inputs["offsets"] = (offsets, in_vmem)
    if sinks is not None:
        inputs["sinks"] = (sinks_of_rows(sinks, R), in_vmem)
    kernel = functools.partial(
        _kernel,
        names=(*scalars, *inputs, "out_hbm", *pools, *scratch),
        num_rows_of_tables=block_tables.shape[0],
        window=window,
        softcap=softcap,
    )
    out, *pools = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[in_hbm] * (1 + len(pools)),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*queries.shape[:-1], V), queries.dtype),
            *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in pools.values()),
        ],
        input_output_aliases={len(scalars) + 1 + n: 1 + n for n in range(len(pools))},
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True, vmem_limit_bytes=VMEM_BYTES),
        name="paged_decode" if num_groups is None else "paged_ragged",
    )(*scalars.values(), *(array for array, _ in inputs.values()))
    return out, Stored(*pools)


def _kernel(*refs, names, num_rows_of_tables, window, softcap):
    """What each reference is stands in `run_kernel`; the scalars among them are `Items` and page tables."""
    s = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    NB, _, block_tiles, tile, _ = s.kv.shape
    K, R, _ = s.acc.shape
    num_items, block = s.count[0], block_tiles * tile
    attend_block = attention_of_block(s, window=window, softcap=softcap)
    fetch = fetching(s, num_rows=num_rows_of_tables, window=window)
    append, append_copies = appending(s, num_rows=num_rows_of_tables)

    has_rows = hasattr(s, "rows")

    def out_copy(i):
        slot = lax.rem(i, 2)
        if not has_rows:
            return pltpu.make_async_copy(s.out.at[slot], s.out_hbm.at[s.source[i]], s.out_left.at[slot])
        source, target = s.out.at[slot, pl.ds(0, s.size[i])], s.out_hbm.at[pl.ds(s.source[i], s.size[i])]
        return pltpu.make_async_copy(source, target, s.out_left.at[slot])

    def run_item(i, carry):
        for copy in fetch.item_copies(i):
            copy.wait()
        if has_rows:
            take_rows(s, lax.rem(i, NB))
        is_empty = not hasattr(s, "sinks")
        s.maximum[...] = jnp.full(s.maximum.shape, MASKED, jnp.float32) if is_empty else s.sinks[...]
        s.total[...] = jnp.full(s.total.shape, 0.0 if is_empty else 1.0 / LANES, jnp.float32)
        s.acc[...] = jnp.zeros(s.acc.shape, jnp.float32)
        num_blocks = pl.cdiv(s.end[i], block)

        def run_block(b, carry):
            step, ahead_item, ahead_block = carry
            ahead = fetch.prefetch(ahead_item, ahead_block, step + NB - 1)
            slot = lax.rem(step, NB)
            fetch.wait_block(i, b, slot)
            if window is not None:
                pl.when(b == fetch.first_block(i))(lambda: fetch.zero_before(i, b, slot))

            @pl.when(b == num_blocks - 1)
            def _():
                fetch.zero_after(i, b, slot)
                append(i, slot)

            if hasattr(s, "scales"):
                take_scales(s, slot)
            attend_block(i, b, slot)
            return step + 1, *ahead

        carry = lax.fori_loop(fetch.first_block(i), num_blocks, run_block, carry)

        @pl.when(i >= 2)
        def _():
            out_copy(i - 2).wait()

        def finish(head):
            total = s.total[head].sum(1, keepdims=True)
            result = s.acc[head] / jnp.where(total > 0, total, 1.0) * s.factors[1, head]
            if has_rows:
                give_rows(s, head, result)
            else:
                s.out[lax.rem(i, 2), head] = result.astype(s.out.dtype)

        if R <= SUBLANES:
            for head in range(K):
                finish(head)
        else:
            pl.loop(0, K)(finish)
        if has_rows:
            give_tokens(s, lax.rem(i, 2))
        out_copy(i).start()
        return carry

    if hasattr(s, "tiles_hbm"):
        append_tiles(s)
    ahead = (jnp.int32(0), fetch.first_block(0))
    for slot in range(NB - 1):
        ahead = fetch.prefetch(*ahead, jnp.int32(slot))
    lax.fori_loop(0, num_items, run_item, (jnp.int32(0), *ahead))
    for back in (2, 1):

        @pl.when(num_items >= back)
        def _(i=num_items - back):
            out_copy(i).wait()
            if hasattr(s, "new_hbm"):
                for copy in append_copies(i):
                    copy.wait()
