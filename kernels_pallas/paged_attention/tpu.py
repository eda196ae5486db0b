"""Paged attention for TPU in Pallas: appends and attends in one kernel, fetching across rows.

A kernel walks over blocks of a few pages, row after row, and keeps several blocks under way while it computes with
one: short contexts are bound by latency, not by bandwidth, unless the next rows' blocks are fetched meanwhile. The
pool's tiles (see `layout.py`) arrive in registers as the matrix unit wants them, so that the same code runs compiled
and interpreted.

What lies in unused slots never reaches a result: only tiles with a used slot are fetched, the rest of a row's last tile
is zeroed where it is appended to, and buffers start as zeros. So values need no mask; scores are masked by position.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention.block_sizes import Blocks, decode_blocks, ragged_blocks
from kernels_pallas.paged_attention.layout import FNUZ_FACTOR, Pages, pack_planes, pad_heads, to_stored
from kernels_pallas.paged_attention.reference import LOG2_E, MASKED
from kernels_pallas.paged_attention.shapes import token_rows
from kernels_pallas.paged_attention.tpu_attend import (
    MAX_ROWS_IN_REGISTERS,
    attention_of_block,
    piece_width,
    reads_as_fn,
)
from kernels_pallas.paged_attention.tpu_items import (
    LANES,
    decode_items,
    head_factors,
    new_tiles,
    ragged_items,
    sinks_of_rows,
)

# Rows of a 32-bit register; a group of query heads is padded to them.
SUBLANES = 8
# What the kernels may use of the vector memory: half of the smallest that a chip since v5e has.
VMEM_BYTES = 2**25
PAGE_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
MAX_HEAD_DIM = 256
# The scalar memory holds 1 MiB; half of it is left to the compiler.
MAX_TABLE_BYTES = 2**19


def paged_attention_tpu(
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
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, Pages]:
    """The contract is that of `paged_attention`; `blocks` overrides the block sizes."""
    _check_support(q, pages, window, tree_mask)
    if block_tables.size * 4 > MAX_TABLE_BYTES:
        raise NotImplementedError(
            f"block_tables {block_tables.shape} take more than {MAX_TABLE_BYTES} bytes of scalar memory; use larger"
            " pages or fewer rows"
        )
    T, N, H = q.shape
    K, (pool,) = pages.num_kv_heads, pages.arrays
    M, W, G = block_tables.shape[1], pool.shape[-1], N // K
    queries = pad_heads(q.reshape(T, K, G, H), W)
    new = None
    if k is not None and v is not None:
        new = pack_planes(pages, to_stored(k, k_scale, pages.dtype), to_stored(v, v_scale, pages.dtype))
    block_tables = block_tables.astype(jnp.int32) + page_offset
    kv_lens, cu_q_lens = kv_lens.astype(jnp.int32), cu_q_lens.astype(jnp.int32)
    factor = FNUZ_FACTOR if pages.is_fnuz and not reads_as_fn(pool.dtype) else 1.0
    run = functools.partial(
        _run_kernel,
        block_tables=block_tables,
        factors=head_factors(K, factor, scale, softcap, k_scale, v_scale),
        sinks=None if sinks is None else sinks.astype(jnp.float32).reshape(K, G) * LOG2_E,
        window=window,
        softcap=softcap,
        interpret=interpret,
    )
    decoding = blocks or decode_blocks(pages, M, G)
    if q_len == 1:
        out, pool = _decode(run, queries, new, pool, kv_lens, decoding)
    else:
        # Rows of one token among longer ones would waste most of a tile of queries.
        q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
        may_decode = q_len is None and tree_mask is None
        long = jnp.where(q_lens > 1, kv_lens, 0) if may_decode else kv_lens
        tiling = blocks or ragged_blocks(pages, M, T, G, q_len, tree_mask)
        out, pool = _ragged(run, queries, new, pool, block_tables, long, cu_q_lens, tree_mask, tiling)
        if may_decode:
            single, last = jnp.where(q_lens == 1, kv_lens, 0), jnp.clip(cu_q_lens[:-1], 0, T - 1)
            new = None if new is None else new[last]
            decoded, pool = _decode(run, queries[last], new, pool, single, decoding)
            # Taken by every token from its row: a scatter to the rows' tokens takes a TPU's compiler half a minute.
            row = token_rows(cu_q_lens, T)
            is_single = (single[row] > 0) & (jnp.arange(T) == last[row])
            out = jnp.where(is_single[:, None, None, None], decoded[row], out)
    # Packed heads keep their values, and so their result, in the right half of the lanes.
    first = 0 if pages.head_dim * 2 > LANES else W // 2
    return out[..., first : first + H].reshape(T, N, H), replace(pages, arrays=(pool,))


def paged_attention_tpu_interpreted(*args, **kwargs) -> tuple[jax.Array, Pages]:
    """Runs the TPU kernels on any device in Pallas' interpreter: the same code, much slower, for tests."""
    return paged_attention_tpu(*args, **kwargs, interpret=pltpu.InterpretParams())


def _check_support(q: jax.Array, pages: Pages, window: int | None, tree_mask: jax.Array | None) -> None:
    if pages.layout != "tpu":
        raise NotImplementedError(f"the TPU kernels read pages of layout 'tpu', not {pages.layout!r}")
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"q of {q.dtype} has no TPU kernel; use bfloat16 or float32")
    if pages.dtype not in PAGE_DTYPES:
        raise NotImplementedError(f"pages of {pages.dtype} have no TPU kernel; use one of {[*PAGE_DTYPES]}")
    if pages.head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(f"head_dim={pages.head_dim} has no TPU kernel; at most {MAX_HEAD_DIM}")
    if window is not None and tree_mask is not None:
        raise NotImplementedError(f"window={window} together with tree_mask has no TPU kernel; leave out one")


def _decode(run, queries, new, pool, kv_lens, blocks):
    """queries [B, K, G, W], new [B, C, W] or None: one token a row, appended in the block that holds its page."""
    G = queries.shape[2]
    padded = jnp.pad(queries, ((0, 0), (0, 0), (0, -G % SUBLANES), (0, 0)))
    out, pool = run(decode_items(kv_lens), padded, pool, new=new, blocks=blocks)
    return jnp.where((kv_lens > 0)[:, None, None, None], out[:, :, :G], jnp.zeros((), out.dtype)), pool


def _ragged(run, queries, new, pool, block_tables, kv_lens, cu_q_lens, tree_mask, blocks):
    """queries [T, K, G, W], new [T, C, W] or None: any number of tokens a row, appended before anything is read."""
    (T, K, G, W), Q = queries.shape, blocks.queries
    starts = cu_q_lens[:-1]
    q_lens = jnp.where(kv_lens > 0, cu_q_lens[1:] - starts, 0)
    items, token = ragged_items(kv_lens, q_lens, starts, T, Q, is_causal=tree_mask is None)
    num_items = token.shape[0]
    tiled = queries.at[token].get(mode="fill", fill_value=0).transpose(0, 2, 1, 3, 4).reshape(num_items, K, Q * G, W)
    # Many rows are computed with in pieces of equal size.
    multiple = SUBLANES if blocks.rows >= Q * G else blocks.rows
    tiled = jnp.pad(tiled, ((0, 0), (0, 0), (0, -(Q * G) % multiple), (0, 0)))
    R = tiled.shape[2]
    tree = None
    if tree_mask is not None:  # a word per row of queries, in every lane
        words = tree_mask.astype(jnp.int32).at[token].get(mode="fill", fill_value=0).transpose(0, 2, 1)
        words = jnp.pad(jnp.repeat(words, G, axis=2), ((0, 0), (0, 0), (0, R - Q * G)))
        tree = jnp.broadcast_to(words[..., None], (*words.shape, LANES))
    tiles = None if new is None else new_tiles(new, pool, block_tables, kv_lens - q_lens, q_lens, starts)
    out, pool = run(items, tiled, pool, tiles=tiles, tree=tree, blocks=blocks, num_groups=G)
    row = token_rows(cu_q_lens, T)
    place = jnp.arange(T) - starts[row]
    out = out[:, :, : Q * G].reshape(num_items, K, Q, G, W)
    first_item = jnp.cumsum(pl.cdiv(q_lens, Q)) - pl.cdiv(q_lens, Q)
    out = out[first_item[row] + place // Q, :, place % Q]
    is_real = place < q_lens[row]
    return jnp.where(is_real[:, None, None, None], out, jnp.zeros((), out.dtype)), pool


@functools.partial(jax.jit, static_argnames=("window", "softcap", "blocks", "num_groups", "interpret"))
def _run_kernel(
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
    tree=None,
    num_groups=None,
):
    """queries [items, K, R, W] -> the same shape, and the pool. `new` or `tiles` are appended.

    `tree` is i32[items, words, R, LANES].
    """
    _, K, R, W = queries.shape
    C, page_tiles, tile = pool.shape[1:4]
    NB, block_tiles = blocks.buffers, blocks.pages * page_tiles
    anywhere, in_vmem = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)
    scalars = {"tables": block_tables.reshape(-1), "factors": factors, **items._asdict()}
    inputs = {"q_hbm": (queries, anywhere), "pool_in": (pool, anywhere)}
    scratch = {
        "kv": pltpu.VMEM((NB, C, block_tiles, tile, W), pool.dtype),
        "q": pltpu.VMEM((NB, K, R, W), queries.dtype),
        "out": pltpu.VMEM((2, K, R, W), queries.dtype),
        "maximum": pltpu.VMEM((K, R, LANES), jnp.float32),
        "total": pltpu.VMEM((K, R, LANES), jnp.float32),
        "acc": pltpu.VMEM((K, R, W), jnp.float32),
        "kv_arrived": pltpu.SemaphoreType.DMA((NB,)),
        "q_arrived": pltpu.SemaphoreType.DMA((NB,)),
        "out_left": pltpu.SemaphoreType.DMA((2,)),
    }
    if R > MAX_ROWS_IN_REGISTERS:
        size, width = min(R, blocks.rows), piece_width(block_tiles * tile)
        scratch["scores"] = pltpu.VMEM((size, width), jnp.float32)
        scratch["greatest"] = pltpu.VMEM((size, LANES), jnp.float32)
        scratch["weights"] = pltpu.VMEM((size, width), queries.dtype)
        scratch["rescale"] = pltpu.VMEM((size, LANES), jnp.float32)
    if new is not None:
        inputs["new_hbm"] = (new, anywhere)
        scratch["new"] = pltpu.VMEM((NB, C, W), pool.dtype)
        scratch["written"] = pltpu.VMEM((2, C, tile, W), pool.dtype)
        scratch["tile_left"] = pltpu.SemaphoreType.DMA((2,))
    if tiles is not None:
        values, scalars["tile_pages"], scalars["tile_places"], scalars["num_tiles"] = tiles
        inputs["tiles_hbm"] = (values, anywhere)
        scratch["tiles_left"] = pltpu.SemaphoreType.DMA(())
    if tree is not None:
        inputs["tree_hbm"] = (tree, anywhere)
        scratch["tree"] = pltpu.VMEM((NB, *tree.shape[1:]), jnp.int32)
    if num_groups is not None:  # which of an item's queries each row belongs to
        offsets = jnp.broadcast_to((jnp.arange(R, dtype=jnp.int32) // num_groups)[:, None], (R, LANES))
        inputs["offsets"] = (offsets, in_vmem)
    if sinks is not None:
        inputs["sinks"] = (sinks_of_rows(sinks, R), in_vmem)
    kernel = functools.partial(
        _kernel,
        names=(*scalars, *inputs, "out_hbm", "pool", *scratch),
        num_rows_of_tables=block_tables.shape[0],
        window=window,
        softcap=softcap,
    )
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[anywhere] * 2,
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={len(scalars) + 1: 1},
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True, vmem_limit_bytes=VMEM_BYTES),
        name="paged_decode" if num_groups is None else "paged_ragged",
    )(*scalars.values(), *(array for array, _ in inputs.values()))


def _kernel(*refs, names, num_rows_of_tables, window, softcap):
    """What each reference is stands in `_run_kernel`; the scalars among them are `Items` and page tables."""
    s = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    has_new, has_tiles, has_tree = (hasattr(s, name) for name in ("new_hbm", "tiles_hbm", "tree_hbm"))
    pool = s.pool
    NB, _, block_tiles, tile, W = s.kv.shape
    K, R, _ = s.acc.shape
    page_tiles, block = pool.shape[2], block_tiles * tile
    page, M = page_tiles * tile, s.tables.shape[0] // num_rows_of_tables
    num_items = s.count[0]
    attend_block = attention_of_block(s, window=window, softcap=softcap)

    def first_seen(i):
        """The first position that item i sees."""
        return jnp.maximum(s.start[i] + 1 - window, 0) if window is not None else 0

    def first_block(i):
        return first_seen(i) // block

    def fetched_tiles(i, b):
        """The tiles of block b that hold what item i sees in the pool: from whole pages on, up to its end."""
        num_old = s.end[i] - (1 if has_new else 0)
        end = jnp.clip((num_old + tile - 1) // tile - b * block_tiles, 0, block_tiles)
        start = jnp.clip(first_seen(i) // page * page_tiles - b * block_tiles, 0, end)
        return start, end

    def start_block(i, b, step):
        slot = lax.rem(step, NB)
        start, end = fetched_tiles(i, b)

        def start_page(p, _):
            size = jnp.minimum(end - p * page_tiles, page_tiles)
            page_id = s.tables[s.row[i] * M + b * (block_tiles // page_tiles) + p]
            source = pool.at[page_id, :, pl.ds(0, size)]
            pltpu.make_async_copy(source, s.kv.at[slot, :, pl.ds(p * page_tiles, size)], s.kv_arrived.at[slot]).start()
            return 0

        lax.fori_loop(start // page_tiles, pl.cdiv(end, page_tiles), start_page, 0)

    def wait_block(i, b, slot):
        start, end = fetched_tiles(i, b)

        @pl.when(end > start)
        def _():  # waits for as many bytes as all pages of the block have together
            part = s.kv.at[slot, :, pl.ds(0, end - start)]
            pltpu.make_async_copy(part, part, s.kv_arrived.at[slot]).wait()

    def item_copies(i):
        slot, source = lax.rem(i, NB), s.source[i]
        pairs = [(s.q_hbm, s.q)]
        if has_new:
            pairs.append((s.new_hbm, s.new))
        if has_tree:
            pairs.append((s.tree_hbm, s.tree))
        return [pltpu.make_async_copy(hbm.at[source], vmem.at[slot], s.q_arrived.at[slot]) for hbm, vmem in pairs]

    def prefetch(i, b, step):
        """Starts fetching block b of item i, where there is one, and returns the block after it."""

        @pl.when(i < num_items)
        def _():
            @pl.when(b == first_block(i))
            def _():
                for copy in item_copies(i):
                    copy.start()

            start_block(i, b, step)

        is_last = (b + 1) * block >= s.end[jnp.minimum(i, num_items - 1)]
        following = jnp.minimum(i + 1, num_items - 1)
        return jnp.where(is_last, i + 1, i), jnp.where(is_last, first_block(following), b + 1)

    def out_copy(i):
        slot = lax.rem(i, 2)
        return pltpu.make_async_copy(s.out.at[slot], s.out_hbm.at[s.source[i]], s.out_left.at[slot])

    def tile_copy(i):
        """The tile with item i's new token, on its way to the pool."""
        slot, position = lax.rem(i, 2), s.start[i]
        page_id = s.tables[s.row[i] * M + position // page]
        target = pool.at[page_id, :, lax.rem(position, page) // tile]
        return pltpu.make_async_copy(s.written.at[slot], target, s.tile_left.at[slot])

    def append(i, slot):
        """Puts item i's new token in its place in the block at `slot`, if it has one, and zeros after it."""
        position = s.end[i] - 1
        place = (slot, slice(None), lax.rem(position, block) // tile)
        # Merged as numbers of 32 bits, which all chips select from; of 8 bits as integers, to which all convert.
        narrow, wide = (jnp.int8, jnp.int32) if pool.dtype.itemsize == 1 else (pool.dtype, jnp.float32)
        old = _as_dtype(s.kv[place], narrow).astype(wide)
        row_in_tile = lax.broadcasted_iota(jnp.int32, old.shape, 1) - lax.rem(position, tile)
        if has_new:
            new = _as_dtype(s.new[lax.rem(i, NB)], narrow).astype(wide)[:, None, :]
            merged = jnp.where(row_in_tile < 0, old, jnp.where(row_in_tile == 0, new, jnp.zeros_like(old)))
        else:
            merged = jnp.where(row_in_tile <= 0, old, jnp.zeros_like(old))
        merged = _as_dtype(merged.astype(narrow), pool.dtype)
        s.kv[place] = merged
        if has_new:

            @pl.when(i >= 2)
            def _():
                tile_copy(i - 2).wait()

            s.written[lax.rem(i, 2)] = merged
            tile_copy(i).start()

    def run_item(i, carry):
        for copy in item_copies(i):
            copy.wait()
        is_empty = not hasattr(s, "sinks")
        s.maximum[...] = jnp.full(s.maximum.shape, MASKED, jnp.float32) if is_empty else s.sinks[...]
        s.total[...] = jnp.full(s.total.shape, 0.0 if is_empty else 1.0 / LANES, jnp.float32)
        s.acc[...] = jnp.zeros(s.acc.shape, jnp.float32)
        num_blocks = pl.cdiv(s.end[i], block)

        def run_block(b, carry):
            step, ahead_item, ahead_block = carry
            ahead = prefetch(ahead_item, ahead_block, step + NB - 1)
            slot = lax.rem(step, NB)
            wait_block(i, b, slot)
            pl.when(b == num_blocks - 1)(lambda: append(i, slot))
            attend_block(i, b, slot)
            return step + 1, *ahead

        carry = lax.fori_loop(first_block(i), num_blocks, run_block, carry)

        @pl.when(i >= 2)
        def _():
            out_copy(i - 2).wait()

        def finish(head):
            total = s.total[head].sum(1, keepdims=True)
            result = s.acc[head] / jnp.where(total > 0, total, 1.0) * s.factors[1, head]
            s.out[lax.rem(i, 2), head] = result.astype(s.out.dtype)

        if R <= SUBLANES:
            for head in range(K):
                finish(head)
        else:
            pl.loop(0, K)(finish)
        out_copy(i).start()
        return carry

    def zero_values(slot):
        """Makes what a first, short block leaves behind finite: 0 * NaN is NaN."""

        def zero_tile(n, _):
            s.kv[slot, :, n] = jnp.zeros((s.kv.shape[1], tile, W), s.kv.dtype)
            return 0

        lax.fori_loop(0, block_tiles, zero_tile, 0)

    def append_tiles():
        """Puts all new tiles into the pool, before any block is fetched."""

        def copy(n):
            target = pool.at[s.tile_pages[n], :, s.tile_places[n]]
            return pltpu.make_async_copy(s.tiles_hbm.at[n], target, s.tiles_left)

        pl.loop(0, s.num_tiles[0])(lambda n: copy(n).start())
        pl.loop(0, s.num_tiles[0])(lambda n: copy(n).wait())

    if has_tiles:
        append_tiles()
    ahead = (jnp.int32(0), first_block(0))
    for slot in range(NB):
        zero_values(slot)
        if slot < NB - 1:
            ahead = prefetch(*ahead, jnp.int32(slot))
    lax.fori_loop(0, num_items, run_item, (jnp.int32(0), *ahead))
    for back in (2, 1):

        @pl.when(num_items >= back)
        def _(i=num_items - back):
            out_copy(i).wait()
            if has_new:
                tile_copy(i).wait()


def _as_dtype(x: jax.Array, dtype) -> jax.Array:
    """Returns the same bits as another dtype of the same width."""
    return x if x.dtype == dtype else pltpu.bitcast(x, dtype)
