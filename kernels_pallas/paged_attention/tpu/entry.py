"""Paged attention for TPU in Pallas: appends and attends in one kernel, fetching across rows.

A kernel walks over blocks of a few pages, row after row, and keeps several blocks under way while it computes with
one: short contexts are bound by latency, not by bandwidth, unless the next rows' blocks are fetched meanwhile. The
pool's tiles (see `layout.py`) arrive in registers as the matrix unit wants them, so that the same code runs compiled
and interpreted.

What lies in unused slots never reaches a result: only tiles with a used slot are fetched. The rest of a row's last
tile, and in the buffer the rest of its first and last block, where an earlier row's tiles lie, is zeroed. So values
need no mask, and the blocks between no work for it; scores are masked by position.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention.call import AttentionCall, token_rows
from kernels_pallas.paged_attention.layout import FNUZ_FACTOR, Pages, as_integers, pack_planes, pad_heads, to_stored
from kernels_pallas.paged_attention.online_softmax import LOG2_E
from kernels_pallas.paged_attention.tpu.attend import reads_as_fn
from kernels_pallas.paged_attention.tpu.block_sizes import Blocks, chip_at_hand, decode_blocks, ragged_blocks
from kernels_pallas.paged_attention.tpu.items import (
    LANES,
    Plan,
    RaggedPlan,
    SinglePlan,
    Stored,
    head_factors,
    new_scales,
    new_tiles,
    plan_decode,
    plan_tiles,
    ragged_items,
)
from kernels_pallas.paged_attention.tpu.kernel import padded_rows, run_kernel

PAGE_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
MAX_HEAD_DIM = 512
# Their vector memory has no room for the prefill kernel: 17.8 MiB of 16 on v4.
SMALL_CHIPS = ("v2", "v3", "v4", "v4i")
# The scalar memory holds 1 MiB; half of it is left to the compiler.
MAX_TABLE_BYTES = 2**19


def paged_attention_tpu(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    pages: Pages,
    call: AttentionCall,
    *,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, Pages]:
    """The contract is that of `paged_attention`; `blocks` overrides the block sizes, and the plan is for the same."""
    if pages.is_packed:
        raise NotImplementedError(
            "pages of int4 have no TPU kernel; use int8 or float8_e4m3fn (of an engine EngineConfig.cache_dtype='int8'"
            " or 'fp8')"
        )
    check_support(q, pages, PAGE_DTYPES)
    if pages.layout != "tpu":
        raise NotImplementedError(f"the TPU kernels read pages of layout 'tpu', not {pages.layout!r}")
    if pages.head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(f"head_dim={pages.head_dim} has no TPU kernel; at most {MAX_HEAD_DIM}")
    if call.window is not None and call.tree_mask is not None:
        raise NotImplementedError(f"window={call.window} together with tree_mask has no TPU kernel; leave out one")
    _, N, H = q.shape
    K, (pool,) = pages.num_kv_heads, pages.arrays
    W, G = pool.shape[-1], N // K
    new = None
    if k is not None and v is not None:
        new = _new_of(pages, k, v, k_scale, v_scale)
    factor = FNUZ_FACTOR if pages.is_fnuz and not reads_as_fn(pool.dtype) else 1.0
    out, pool = attend_rows(
        pad_heads(q, W),
        new,
        Stored(pool, *(pages.scales or ())),
        call.in_pool(),
        num_kv_heads=K,
        decoding=blocks or decode_blocks(pages, call.block_tables.shape[1], G),
        tiling=blocks,
        factors=head_factors(K, factor, call.scale, call.softcap, k_scale, v_scale),
        sinks=None if sinks is None else sinks.astype(jnp.float32).reshape(K, G) * LOG2_E,
        interpret=interpret,
    )
    # Packed heads keep their values, and so their result, in the right half of the lanes.
    first = 0 if pages.head_dim * 2 > LANES else W // 2
    scales = None if pool.scales is None else (pool.scales,)
    return out[..., first : first + H], replace(pages, arrays=(pool.numbers,), scales=scales)


def _new_of(pages: Pages, k: jax.Array, v: jax.Array, k_scale: jax.Array | None, v_scale: jax.Array | None) -> Stored:
    """Returns keys and values [T, K, H] as the pool holds them."""
    if pages.scales is None:
        return Stored(pack_planes(pages, to_stored(k, k_scale, pages.dtype), to_stored(v, v_scale, pages.dtype)))
    k, v, scales = as_integers(pages, k, v)
    return Stored(pack_planes(pages, k, v), *scales)


def attend_rows(
    queries: jax.Array,
    new: Stored | None,
    pool: Stored,
    call: AttentionCall,
    *,
    num_kv_heads: int,
    decoding: Blocks,
    tiling: Blocks | None,
    **options: Any,
) -> tuple[jax.Array, Stored]:
    """Returns the attention [T, N, V] of queries [T, N, W], and the pool with `new` of the tokens appended.

    The call is `in_pool`; a plan of `plan_step` is made here if it has none. `decoding` are the block sizes of rows
    with one token, `tiling` those of others, by rules if None; `options` are those of `run_kernel`.
    """
    block_tables, q_len, tree_mask, plan = call.block_tables, call.q_len, call.tree_mask, call.plan
    if block_tables.size * 4 > MAX_TABLE_BYTES:
        raise NotImplementedError(
            f"block_tables {block_tables.shape} of rows and pages take {block_tables.size * 4} bytes of a TPU's scalar"
            f" memory, of which there are {MAX_TABLE_BYTES}; lower the rows (max_num_seqs) or their longest context"
            " (max_model_len), or raise page_size"
        )
    (T, N, _), (B, M), K = queries.shape, block_tables.shape, num_kv_heads
    G = N // K
    tiling = tiling or ragged_blocks(pool.numbers, M, T, B, K, G, q_len, tree_mask)
    if plan is not None and plan.ragged is not None and plan.ragged.tokens.shape[1] != tiling.queries:
        raise ValueError(
            f"plan has items of {plan.ragged.tokens.shape[1]} queries but {tiling} is used; make it for them"
        )
    if q_len != 1:
        _check_tree(tree_mask, tiling, q_len or T)
    if plan is None:
        sizes = {"num_tokens": T, "num_kv_heads": K, "num_groups": G, "has_scales": pool.scales is not None}
        plan = plan_step(pool.numbers, call, **sizes, tiling=tiling)
    block_tables = block_tables.astype(jnp.int32)
    options |= {"window": call.window, "softcap": call.softcap}
    run = functools.partial(run_kernel, block_tables=block_tables, **options)
    if plan.decode is not None:
        return _decode(run, plan.decode, queries, new, pool, decoding, K)
    assert plan.ragged is not None
    out, pool = _ragged(run, plan.ragged, queries, new, pool, block_tables, tiling, G)
    if plan.single is None:
        return out, pool
    decode, last, row, is_single = plan.single
    new = jax.tree.map(lambda x: x[last], new)
    decoded, pool = _decode(run, decode, queries[last], new, pool, decoding, K)
    # Taken by every token from its row: a scatter to the rows' tokens takes a TPU's compiler half a minute.
    return jnp.where(is_single[:, None, None], decoded[row], out), pool


def plan_step(
    pool: Any,
    call: AttentionCall,
    *,
    num_tokens: int,
    num_kv_heads: int,
    num_groups: int,
    has_scales: bool = False,
    tiling: Blocks | None = None,
) -> Plan:
    """Returns the plan of a step for layers with a pool [P, C, S / t, t, W], of which the shape matters.

    `tiling` are the block sizes of rows of several tokens, by rules if None.
    """
    (B, M), (T, page_tiles, tile) = call.block_tables.shape, (num_tokens, *pool.shape[2:4])
    q_len, tree_mask = call.q_len, call.tree_mask
    tiling = tiling or ragged_blocks(pool, M, T, B, num_kv_heads, num_groups, q_len, tree_mask)
    kv_lens, cu_q_lens = call.kv_lens.astype(jnp.int32), call.cu_q_lens.astype(jnp.int32)
    if q_len == 1:
        return Plan(decode=plan_decode(kv_lens))
    starts, q_lens, row = cu_q_lens[:-1], cu_q_lens[1:] - cu_q_lens[:-1], token_rows(cu_q_lens, T)
    # Rows of one token among longer ones would waste most of a tile of queries.
    may_decode = q_len is None and tree_mask is None
    single = None
    if may_decode:
        lens, last = jnp.where(q_lens == 1, kv_lens, 0), jnp.clip(starts, 0, T - 1)
        is_single = (lens[row] > 0) & (jnp.arange(T) == last[row])
        single = SinglePlan(plan_decode(lens), last, row, is_single)
        kv_lens = jnp.where(q_lens > 1, kv_lens, 0)
    q_lens = jnp.where(kv_lens > 0, q_lens, 0)
    Q = tiling.queries
    items, tokens = ragged_items(kv_lens, q_lens, starts, T, Q, is_causal=tree_mask is None)
    tree = None
    if tree_mask is not None:  # a word per row of queries, in every lane
        words = tree_mask.astype(jnp.int32).at[tokens].get(mode="fill", fill_value=0).transpose(0, 2, 1)
        padding = padded_rows(Q * num_groups, tiling) - Q * num_groups
        words = jnp.pad(jnp.repeat(words, num_groups, axis=2), ((0, 0), (0, 0), (0, padding)))
        tree = jnp.broadcast_to(words[..., None], (*words.shape, LANES))
    tiles = plan_tiles(kv_lens - q_lens, q_lens, starts, T, M, page_tiles, tile)
    is_real = jnp.arange(T) - starts[row] < q_lens[row]
    scale_tiles = None
    if has_scales:
        scale_tiles = plan_tiles(kv_lens - q_lens, q_lens, starts, T, M, 1, page_tiles * tile)
    return Plan(ragged=RaggedPlan(items, tokens, tree, tiles, is_real, scale_tiles), single=single)


def paged_attention_tpu_interpreted(*args, **kwargs) -> tuple[jax.Array, Pages]:
    """Runs the TPU kernels on any device in Pallas' interpreter: the same code, much slower, for tests."""
    return paged_attention_tpu(*args, **kwargs, interpret=pltpu.InterpretParams())


def check_support(q: jax.Array, pages: Any, page_dtypes: Sequence[str]) -> None:
    """Refuses chips and dtypes that have no kernel."""
    chip = chip_at_hand()
    if chip in SMALL_CHIPS:
        raise NotImplementedError(f"TPU {chip} has too little vector memory for the TPU kernels; use a v5e or later")
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"q of {q.dtype} has no TPU kernel; use bfloat16 or float32")
    if pages.dtype not in page_dtypes:
        raise NotImplementedError(f"pages of {pages.dtype} have no TPU kernel; use one of {[*page_dtypes]}")


def _check_tree(tree_mask: jax.Array | None, blocks: Blocks, most: int) -> None:
    most = 0 if tree_mask is None else min(32 * tree_mask.shape[1], most)
    if blocks.queries < most:
        raise ValueError(
            f"blocks.queries={blocks.queries} would split the {most} tokens that a row of tree_mask may have, which see"
            f" each other; take {most} or more"
        )


def _decode(run, plan, queries, new, pool, blocks, K):
    """queries [B, N, W], new of B tokens or None: one token a row, appended in the block that holds its page."""
    B, N, W = queries.shape
    G = N // K
    padded = jnp.pad(queries.reshape(B, K, G, W), ((0, 0), (0, 0), (0, padded_rows(G, blocks) - G), (0, 0)))
    out, pool = run(plan.items, padded, pool, new=new, blocks=blocks)
    out = out[:, :, :G].reshape(B, N, -1)
    return jnp.where(plan.has_context[:, None, None], out, jnp.zeros((), out.dtype)), pool


def _ragged(run, plan, queries, new, pool, block_tables, blocks, G):
    """queries [T, N, W], new of T tokens or None: any number of tokens a row, appended before anything is read."""
    appended = {}
    if new is not None:
        appended["tiles"] = new_tiles(plan.tiles, new.numbers, pool.numbers, block_tables)
    if new is not None and new.scales is not None:
        appended["scale_tiles"] = new_scales(plan.scale_tiles, new.scales, pool.scales, block_tables)
    out, pool = run(plan.items, queries, pool, **appended, tree=plan.tree, blocks=blocks, num_groups=G)
    return jnp.where(plan.is_real[:, None, None], out, jnp.zeros((), out.dtype)), pool
