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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention.block_sizes import DecodeBlocks, decode_blocks
from kernels_pallas.paged_attention.layout import Pages, pack_planes, pad_heads, to_stored

LOG2_E = 1.4426950408889634
# Finite, so that a row of masked scores gives zeros and not NaN.
MASKED = -1e30
# Rows of a 32-bit register; a group of query heads is padded to them.
SUBLANES = 8
LANES = 128
# KV heads whose code is laid out side by side, so that one's products hide another's softmax.
HEADS_TOGETHER = 8
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
    blocks: DecodeBlocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, Pages]:
    """The contract is that of `paged_attention`; `blocks` overrides the block sizes."""
    _check_support(q, pages)
    if block_tables.size * 4 > MAX_TABLE_BYTES:
        raise NotImplementedError(
            f"block_tables {block_tables.shape} take more than {MAX_TABLE_BYTES} bytes of scalar memory; use larger"
            " pages or fewer rows"
        )
    if q_len != 1 or tree_mask is not None:
        raise NotImplementedError(f"the TPU decode kernel computes one token a row, not q_len={q_len}")
    B, N, H = q.shape
    K = pages.num_kv_heads
    G = -(-(N // K) // SUBLANES) * SUBLANES
    (pool,) = pages.arrays
    W = pool.shape[-1]
    queries = pad_heads(q.reshape(B, K, N // K, H), W)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, G - N // K), (0, 0)))
    new = None
    if k is not None and v is not None:
        new = pack_planes(pages, to_stored(k, k_scale, pages.dtype), to_stored(v, v_scale, pages.dtype))
    out, pool = _decode(
        queries,
        new,
        pool,
        block_tables,
        kv_lens,
        jnp.asarray(page_offset, jnp.int32),
        _head_factors(K, scale, softcap, k_scale, v_scale),
        None if sinks is None else _per_lane(sinks, K, G),
        window=window,
        softcap=softcap,
        blocks=blocks or decode_blocks(pages, block_tables.shape[1]),
        interpret=interpret,
    )
    # Packed heads keep their values, and so their result, in the right half of the lanes.
    first = 0 if pages.head_dim * 2 > LANES else W // 2
    return out[:, :, : N // K, first : first + H].reshape(B, N, H), replace(pages, arrays=(pool,))


def paged_attention_tpu_interpreted(*args, **kwargs) -> tuple[jax.Array, Pages]:
    """Runs the TPU kernels on any device in Pallas' interpreter: the same code, much slower, for tests."""
    return paged_attention_tpu(*args, **kwargs, interpret=pltpu.InterpretParams())


def _check_support(q: jax.Array, pages: Pages) -> None:
    if pages.layout != "tpu":
        raise NotImplementedError(f"the TPU kernels read pages of layout 'tpu', not {pages.layout!r}")
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"q of {q.dtype} has no TPU kernel; use bfloat16 or float32")
    if pages.dtype not in PAGE_DTYPES:
        raise NotImplementedError(f"pages of {pages.dtype} have no TPU kernel; use one of {[*PAGE_DTYPES]}")
    if pages.head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(f"head_dim={pages.head_dim} has no TPU kernel; at most {MAX_HEAD_DIM}")


def _head_factors(K: int, scale: float, softcap: float | None, k_scale, v_scale) -> jax.Array:
    """Returns f32[2, K]: what products with stored keys are multiplied by, and what the result is multiplied by."""
    to_scores = scale * LOG2_E if softcap is None else scale / softcap
    ones = jnp.ones(K, jnp.float32)
    return jnp.stack(
        [to_scores * (ones if k_scale is None else k_scale.astype(jnp.float32)), ones if v_scale is None else v_scale]
    )


def _per_lane(sinks: jax.Array, K: int, G: int) -> jax.Array:
    """Returns sinks f32[N] in base 2 as the kernel keeps a maximum, f32[K, G, LANES]."""
    sinks = sinks.astype(jnp.float32).reshape(K, -1) * LOG2_E
    sinks = jnp.pad(sinks, ((0, 0), (0, G - sinks.shape[1])))
    return jnp.broadcast_to(sinks[:, :, None], (K, G, LANES))


@functools.partial(jax.jit, static_argnames=("window", "softcap", "blocks", "interpret"))
def _decode(
    queries, new, pool, block_tables, kv_lens, page_offset, factors, sinks, *, window, softcap, blocks, interpret
):
    """queries [B, K, G, W], new [B, C, W] in the pool's dtype or None -> out [B, K, G, W], pool."""
    B, K, G, W = queries.shape
    C, page_tiles, tile = pool.shape[1:4]
    NB, block_tiles = blocks.buffers, blocks.pages * page_tiles
    rows = jnp.nonzero(kv_lens > 0, size=B, fill_value=0)[0].astype(jnp.int32)
    counts = jnp.stack([(kv_lens > 0).sum().astype(jnp.int32), page_offset])
    scalars = [counts, rows, kv_lens.astype(jnp.int32), block_tables.astype(jnp.int32).reshape(-1), factors]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    inputs, specs = [queries, pool], [anywhere, anywhere]
    scratch = {
        "kv": pltpu.VMEM((NB, C, block_tiles, tile, W), pool.dtype),
        "q": pltpu.VMEM((NB, K, G, W), queries.dtype),
        "out": pltpu.VMEM((2, K, G, W), queries.dtype),
        "maximum": pltpu.VMEM((K, G, LANES), jnp.float32),
        "total": pltpu.VMEM((K, G, LANES), jnp.float32),
        "acc": pltpu.VMEM((K, G, W), jnp.float32),
        "kv_arrived": pltpu.SemaphoreType.DMA((NB,)),
        "q_arrived": pltpu.SemaphoreType.DMA((NB,)),
        "out_left": pltpu.SemaphoreType.DMA((2,)),
    }
    if new is not None:
        inputs, specs = [*inputs, new], [*specs, anywhere]
        scratch |= {
            "new": pltpu.VMEM((NB, C, W), pool.dtype),
            "written": pltpu.VMEM((2, C, tile, W), pool.dtype),
            "tile_left": pltpu.SemaphoreType.DMA((2,)),
        }
    if sinks is not None:
        inputs, specs = [*inputs, sinks], [*specs, pl.BlockSpec(memory_space=pltpu.VMEM)]
    kernel = functools.partial(
        _decode_kernel,
        names=tuple(scratch),
        has_new=new is not None,
        has_sinks=sinks is not None,
        window=window,
        softcap=softcap,
    )
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=specs,
            out_specs=[anywhere] * 2,
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={len(scalars) + 1: 1},
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        name="paged_decode",
    )(*scalars, *inputs)


def _as_operand(x: jax.Array, dtype) -> jax.Array:
    """Returns what a product with `dtype` takes: the matrix unit's input stage converts float8, twice as fast."""
    return x if x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype)


def _product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Returns the sum over the last axis of x and `axis` of y, in float32; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


class _Refs:
    """The scratch memory of a kernel by name."""

    def __init__(self, names, refs):
        self.__dict__.update(zip(names, refs, strict=True))


def _decode_kernel(counts, rows, kv_lens, tables, factors, *refs, names, has_new, has_sinks, window, softcap):
    """counts: rows that are not padding, page offset. rows: which. tables: i32[B * M]. factors: f32[2, K]."""
    q_hbm, _, *refs = refs
    new_hbm = refs.pop(0) if has_new else None
    sinks = refs.pop(0) if has_sinks else None
    out_hbm, pool = refs[:2]
    s = _Refs(names, refs[2:])
    NB, _, block_tiles, tile, W = s.kv.shape
    K, _, _ = s.acc.shape
    page_tiles, block = pool.shape[2], block_tiles * tile
    page, M = page_tiles * tile, tables.shape[0] // kv_lens.shape[0]
    num_rows, page_offset = counts[0], counts[1]

    def first_seen(i):
        """The first position that row i sees."""
        return jnp.maximum(kv_lens[rows[i]] - window, 0) if window is not None else 0

    def first_block(i):
        return first_seen(i) // block

    def fetched_tiles(i, b):
        """The tiles of block b that hold what row i has in the pool and sees: from whole pages on, up to its end."""
        num_old = kv_lens[rows[i]] - (1 if has_new else 0)
        end = jnp.clip((num_old + tile - 1) // tile - b * block_tiles, 0, block_tiles)
        start = jnp.clip(first_seen(i) // page * page_tiles - b * block_tiles, 0, end)
        return start, end

    def start_block(i, b, step):
        slot, row = lax.rem(step, NB), rows[i]
        start, end = fetched_tiles(i, b)

        def start_page(p, _):
            size = jnp.minimum(end - p * page_tiles, page_tiles)
            page_id = tables[row * M + b * (block_tiles // page_tiles) + p] + page_offset
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

    def row_copies(i):
        slot, row = lax.rem(i, NB), rows[i]
        copies = [pltpu.make_async_copy(q_hbm.at[row], s.q.at[slot], s.q_arrived.at[slot])]
        if has_new:
            copies.append(pltpu.make_async_copy(new_hbm.at[row], s.new.at[slot], s.q_arrived.at[slot]))
        return copies

    def prefetch(i, b, step):
        """Starts fetching block b of row i, where there is one, and returns the block after it."""

        @pl.when(i < num_rows)
        def _():
            @pl.when(b == first_block(i))
            def _():
                for copy in row_copies(i):
                    copy.start()

            start_block(i, b, step)

        is_last = (b + 1) * block >= kv_lens[rows[jnp.minimum(i, num_rows - 1)]]
        next_row = jnp.minimum(i + 1, num_rows - 1)
        return jnp.where(is_last, i + 1, i), jnp.where(is_last, first_block(next_row), b + 1)

    def out_copy(i):
        slot = lax.rem(i, 2)
        return pltpu.make_async_copy(s.out.at[slot], out_hbm.at[rows[i]], s.out_left.at[slot])

    def tile_copy(i):
        """The tile with row i's new token, on its way to the pool."""
        slot, row, position = lax.rem(i, 2), rows[i], kv_lens[rows[i]] - 1
        page_id = tables[row * M + position // page] + page_offset
        target = pool.at[page_id, :, lax.rem(position, page) // tile]
        return pltpu.make_async_copy(s.written.at[slot], target, s.tile_left.at[slot])

    def append(i, slot):
        """Puts row i's new token in its place in the block at `slot`, and zeros after it."""
        position = kv_lens[rows[i]] - 1
        place = (slot, slice(None), lax.rem(position, block) // tile)
        wide = jnp.float32 if jnp.issubdtype(pool.dtype, jnp.floating) else jnp.int32
        old = s.kv[place].astype(wide)
        row_in_tile = lax.broadcasted_iota(jnp.int32, old.shape, 1) - lax.rem(position, tile)
        if has_new:
            new = s.new[lax.rem(i, NB)].astype(wide)[:, None, :]
            merged = jnp.where(row_in_tile < 0, old, jnp.where(row_in_tile == 0, new, jnp.zeros_like(old)))
        else:
            merged = jnp.where(row_in_tile <= 0, old, jnp.zeros_like(old))
        s.kv[place] = merged.astype(pool.dtype)
        if has_new:

            @pl.when(i >= 2)
            def _():
                tile_copy(i - 2).wait()

            s.written[lax.rem(i, 2)] = merged.astype(pool.dtype)
            tile_copy(i).start()

    def attend_heads(i, b, slot, first_head, num_heads):
        """Adds block b to the sums of KV heads first_head to first_head + num_heads."""
        position = b * block + lax.broadcasted_iota(jnp.int32, (s.q.shape[2], block), 1)
        is_visible = position < kv_lens[rows[i]]
        if window is not None:
            is_visible &= position >= first_seen(i)
        for h in range(num_heads):
            head = first_head + h
            q = s.q[lax.rem(i, NB), head]
            planes = s.kv.shape[1] // K
            keys = _as_operand(s.kv[slot, head * planes].reshape(block, W), q.dtype)
            values = _as_operand(s.kv[slot, head * planes + planes - 1].reshape(block, W), q.dtype)
            scores = _product(q, keys, 1)
            scores = scores * factors[0, head]
            if softcap is not None:
                scores = jnp.tanh(scores) * (softcap * LOG2_E)
            scores = jnp.where(is_visible, scores, MASKED)
            old_maximum = s.maximum[head]
            maximum = jnp.maximum(old_maximum, scores.max(1, keepdims=True))
            weights = jnp.exp2(scores - maximum[:, :1])
            rescale = jnp.exp2(old_maximum - maximum)
            update = _product(weights.astype(q.dtype), values, 0)
            s.maximum[head] = maximum
            s.total[head] = rescale * s.total[head] + weights.sum(1, keepdims=True)
            s.acc[head] = rescale[:, :1] * s.acc[head] + update

    def attend_block(i, b, slot):
        together = max(n for n in range(1, HEADS_TOGETHER + 1) if K % n == 0)
        if together == K:
            attend_heads(i, b, slot, 0, K)
        else:

            @pl.loop(0, K // together)
            def _(group):
                attend_heads(i, b, slot, group * together, together)

    def run_row(i, carry):
        for copy in row_copies(i):
            copy.wait()
        s.maximum[...] = jnp.full(s.maximum.shape, MASKED, jnp.float32) if sinks is None else sinks[...]
        s.total[...] = jnp.full(s.total.shape, 0.0 if sinks is None else 1.0, jnp.float32)
        s.acc[...] = jnp.zeros(s.acc.shape, jnp.float32)
        num_blocks = pl.cdiv(kv_lens[rows[i]], block)

        def run_block(b, carry):
            step, *ahead = carry
            ahead = prefetch(*ahead, step + NB - 1)
            slot = lax.rem(step, NB)
            wait_block(i, b, slot)
            pl.when(b == num_blocks - 1)(lambda: append(i, slot))
            attend_block(i, b, slot)
            return step + 1, *ahead

        carry = lax.fori_loop(first_block(i), num_blocks, run_block, carry)

        @pl.when(i >= 2)
        def _():
            out_copy(i - 2).wait()

        for h in range(K):
            s.out[lax.rem(i, 2), h] = (s.acc[h] / s.total[h][:, :1] * factors[1, h]).astype(s.out.dtype)
        out_copy(i).start()
        return carry

    def zero_values(slot):
        """Makes what a first, short block leaves behind finite: 0 * NaN is NaN."""

        def zero_tile(n, _):
            s.kv[slot, :, n] = jnp.zeros((s.kv.shape[1], tile, W), s.kv.dtype)
            return 0

        lax.fori_loop(0, block_tiles, zero_tile, 0)

    ahead = (jnp.int32(0), first_block(0))
    for slot in range(NB):
        zero_values(slot)
        if slot < NB - 1:
            ahead = prefetch(*ahead, jnp.int32(slot))
    lax.fori_loop(0, num_rows, run_row, (jnp.int32(0), *ahead))
    for back in (2, 1):

        @pl.when(num_rows >= back)
        def _(i=num_rows - back):
            out_copy(i).wait()
            if has_new:
                tile_copy(i).wait()
