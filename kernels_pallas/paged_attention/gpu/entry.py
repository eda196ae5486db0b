"""Paged attention for NVIDIA GPUs from Ampere on: one Pallas-Triton kernel for decode, verification and prefill.

A program owns a tile: some queries of one row, for all query heads of one KV head, so that keys and values are read
once per group. It walks over the row's context in blocks with an online softmax; where tiles are few, the context is
split over several programs, whose partial results are combined afterwards (Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import triton
from kernels_pallas.paged_attention.call import AttentionCall
from kernels_pallas.paged_attention.gpu import sum_order
from kernels_pallas.paged_attention.gpu.append import append
from kernels_pallas.paged_attention.gpu.attend import attend
from kernels_pallas.paged_attention.gpu.block_sizes import GpuBlockSizes, gpu_block_sizes
from kernels_pallas.paged_attention.gpu.chunks import for_kernels
from kernels_pallas.paged_attention.gpu.prefill_choice import choose_prefill
from kernels_pallas.paged_attention.gpu.sum_order import SumOrder, ordered_block_sizes
from kernels_pallas.paged_attention.layout import Pages, pack_integers, to_integers, to_stored
from kernels_pallas.paged_attention.online_softmax import LOG2_E

MAX_HEAD_DIM = 512
FP8 = "float8_e4m3fn"
PAGE_SIZES = (16, 32, 64, 128, 256)
# Queries that a tile of a ragged batch may hold, before heads and registers limit them.
WIDE_TILE = 128


def paged_attention_gpu(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    pages: Pages,
    call: AttentionCall,
    *,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    block_sizes: GpuBlockSizes | None = None,
    prefill: str | None = None,
    order: SumOrder | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, Pages]:
    """The contract is that of `paged_attention`; `block_sizes` and `prefill` None take what suits the device.

    `prefill` is the kernel for the rows of several tokens of a ragged batch, see `choose_prefill`.
    """
    further = (("pages.layout", pages.layout, ("gpu",)), ("head_dim", q.shape[-1], range(1, MAX_HEAD_DIM + 1)))
    target = check_support(q, pages, interpret=interpret, page_dtypes=("int8", "int4", FP8), further=further)
    (_, N, H), K, M, call = q.shape, pages.num_kv_heads, call.block_tables.shape[1], for_kernels(call)
    if order is not None:
        _check_order(q, call, block_sizes, prefill)
        sinks = None if sinks is None else sinks.astype(jnp.float32) * LOG2_E
    if k is not None and v is not None:
        pages = _append(pages, k, v, k_scale, v_scale, call, interpret)
    held: dict[str, Any] = {"k_pages": pages.arrays[0], "v_pages": pages.arrays[1], "sinks": sinks}
    scales = {} if pages.scales is None else {"k_scales": pages.scales[0], "v_scales": pages.scales[1]}
    arrays = {**held, **scales, "k_scale": k_scale, "v_scale": v_scale}
    chosen = functools.partial(
        gpu_block_sizes,
        group=N // K,
        num_kv_heads=K,
        head_dim=H,
        page_dtype=pages.dtype.name,
        max_context=min(M * pages.page_size, call.window or M * pages.page_size),
        has_tree=call.tree_mask is not None,
        target=target,
    )
    sizes = chosen if block_sizes is None else lambda **_: block_sizes
    if order is not None:
        heads = {"group": N // K, "num_kv_heads": K, "head_dim": H, "page_dtype": pages.dtype.name}
        ordered = ordered_block_sizes(order, **heads, target=target)
        attend_in_order = functools.partial(attend, arrays=arrays, order=order, interpret=interpret)
        return attend_rows(attend_in_order, q, call, lambda **_: ordered), pages
    absent = {"tree_mask": call.tree_mask, "k_scale": k_scale, "v_scale": v_scale}
    attend_long = None
    options: dict[str, Any] = {"absent": absent, "target": target, "interpret": interpret}
    if call.q_len is None and choose_prefill(prefill, q, pages, scale=call.scale, **options) == "mosaic":
        from kernels_pallas.paged_attention.gpu.hopper_prefill import hopper_prefill

        attend_long = functools.partial(hopper_prefill, **held, interpret=interpret)
    attend_tiles = functools.partial(attend, arrays=arrays, interpret=interpret)
    return attend_rows(attend_tiles, q, call, sizes, attend_long), pages


def _check_order(q: jax.Array, call: AttentionCall, block_sizes: GpuBlockSizes | None, prefill: str | None) -> None:
    """Refuses what has no order of sums. The drafts of a tree are not where decoding would have them."""
    for what, value, supported in (
        ("head_dim", q.shape[-1], range(1, sum_order.MAX_HEAD_DIM + 1)),
        ("tree_mask", None if call.tree_mask is None else "an array", (None,)),
        ("block_sizes", block_sizes, (None,)),
        ("prefill", prefill, ("triton", None)),
    ):
        if value not in supported:
            raise NotImplementedError(f"{what}={value} is not supported with an order of sums; supported: {supported}")


def _append(pages: Pages, k: jax.Array, v: jax.Array, k_scale: Any, v_scale: Any, call: AttentionCall, interpret: bool):
    """Returns the pool with keys and values [T, K, H] of a batch written to it in place."""
    if pages.scales is None:
        new = to_stored(k, k_scale, pages.dtype), to_stored(v, v_scale, pages.dtype)
        return dataclasses.replace(pages, arrays=append(new, pages.arrays, call, interpret))
    bits = 4 if pages.is_packed else 8
    (k, k_scales), (v, v_scales) = to_integers(k, bits), to_integers(v, bits)
    if pages.is_packed:
        k, v = pack_integers(k), pack_integers(v)
    pools = append((k, v, k_scales, v_scales), (*pages.arrays, *pages.scales), call, interpret)
    return dataclasses.replace(pages, arrays=pools[:2], scales=pools[2:])


def attend_rows(
    attend_tiles: Callable[..., jax.Array],
    q: jax.Array,
    call: AttentionCall,
    sizes: Callable[..., GpuBlockSizes],
    attend_long: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Returns the attention [T, N, V] of queries [T, N, H], by `attend_tiles(q, call, block_sizes)`.

    sizes(num_rows=, queries=) gives the block sizes for rows of up to that many queries. `attend_long(q, call)`, if
    there is no tree, attends instead with the rows of a ragged batch that have several tokens.
    """
    (T, B), kv_lens, cu_q_lens = (q.shape[0], call.kv_lens.shape[0]), call.kv_lens, call.cu_q_lens
    if call.q_len is not None:
        return attend_tiles(q, call, sizes(num_rows=B, queries=call.q_len))
    # Rows of one token would waste a wide tile, and being few tiles want their context split.
    starts, is_single = cu_q_lens[:-1], cu_q_lens[1:] - cu_q_lens[:-1] == 1
    if attend_long is not None:
        out = attend_long(q, call)
    else:
        # Partial results of every token would outweigh what splitting gains, so only long contexts are split.
        chosen = dataclasses.replace(sizes(num_rows=T // WIDE_TILE + 1, queries=min(T, WIDE_TILE)), num_splits=1)
        out = attend_tiles(q, dataclasses.replace(call, kv_lens=jnp.where(is_single, 0, kv_lens)), chosen)
    single_lens, ones = jnp.where(is_single, kv_lens, 0), jnp.arange(B + 1, dtype=jnp.int32)
    singles = dataclasses.replace(call, kv_lens=single_lens, cu_q_lens=ones, q_len=1, tree_mask=None)
    chosen = sizes(num_rows=B, queries=1)
    decoded = attend_tiles(q.at[starts].get(mode="clip"), singles, chosen)
    return out.at[jnp.where(is_single, starts, T)].set(decoded, mode="drop")


def check_support(
    q: jax.Array, pages: Any, *, interpret: bool, page_dtypes: Sequence[str], further: Sequence[tuple[str, Any, Any]]
) -> triton.Target:
    """Refuses what the kernel cannot do; returns the GPU.

    Pages may be of q's dtype or of `page_dtypes`; `further` are a name, its value and what is supported.
    """
    name = q.dtype.name
    # In float32 the tensor cores are of no use and registers spill by the kilobyte; the interpreter does not mind.
    dtypes = ("bfloat16", "float16", "float32") if interpret else ("bfloat16", "float16")
    for what, value, supported in (
        ("q.dtype", name, dtypes),
        ("pages.dtype", pages.dtype.name, (name, *page_dtypes)),
        ("page_size", pages.page_size, PAGE_SIZES),
        *further,
    ):
        if value not in supported:
            raise NotImplementedError(f"{what}={value} is not supported by the GPU kernel; supported: {supported}")
    if interpret:
        return triton.INTERPRETED
    target = triton.target()
    if pages.dtype.name == FP8 and target.capability < triton.FP8_CAPABILITY:
        raise NotImplementedError(
            f"pages.dtype={FP8} is not supported on compute capability {target.capability}; it needs"
            f" {triton.FP8_CAPABILITY}; use {' or '.join(n for n in (*page_dtypes, name) if n != FP8)}"
        )
    return target
