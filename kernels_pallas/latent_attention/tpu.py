"""Latent attention for TPU: the kernel of paged attention with one plane, whose left lanes are the values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.latent_attention.layout import LatentPages
from kernels_pallas.paged_attention.call import AttentionCall
from kernels_pallas.paged_attention.layout import TPU_LANES, pad_heads, to_stored, tpu_tile
from kernels_pallas.paged_attention.tpu.block_sizes import Blocks, untuned_blocks
from kernels_pallas.paged_attention.tpu.entry import attend_rows, check_support, plan_step
from kernels_pallas.paged_attention.tpu.items import Plan, Stored, head_factors

PAGE_DTYPES = ("bfloat16", "float32")


def latent_attention_tpu(
    q: jax.Array,
    latents: jax.Array,
    pages: LatentPages,
    call: AttentionCall,
    *,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, LatentPages]:
    """The contract is that of `latent_attention`; `blocks` overrides the block sizes, and the plan is for the same."""
    check_support(q, pages, PAGE_DTYPES)
    P, S, W = pages.array.shape
    if W % TPU_LANES:
        raise NotImplementedError(f"the TPU kernels read pages of layout 'tpu', not of {W} numbers per token")
    # The same bytes: a TPU's memory has these tiles in both.
    pool = pages.array.reshape(_tiled_shape(pages))
    out, pool = attend_rows(
        pad_heads(q, W),
        Stored(pad_heads(to_stored(latents, None, pages.dtype), W)[:, None]),
        Stored(pool),
        call.in_pool(),
        num_kv_heads=1,
        decoding=blocks or untuned_blocks(pool, call.block_tables.shape[1]),
        tiling=blocks,
        factors=head_factors(1, 1.0, call.scale, None, None, None),
        sinks=None,
        value_width=-(-pages.latent_size // TPU_LANES) * TPU_LANES,
        interpret=interpret,
    )
    return out[..., : pages.latent_size], replace(pages, array=pool.numbers.reshape(P, S, W))


def plan_latents_tpu(pages: LatentPages, call: AttentionCall, **sizes: Any) -> Plan | None:
    """Returns the plan of a step; `sizes` are the arguments of `plan_step` that are not of KV heads."""
    if pages.array.shape[-1] % TPU_LANES:
        return None
    return plan_step(jax.ShapeDtypeStruct(_tiled_shape(pages), pages.dtype), call, num_kv_heads=1, **sizes)


def _tiled_shape(pages: LatentPages) -> tuple[int, ...]:
    P, S, W = pages.array.shape
    tile = tpu_tile(S, pages.dtype)
    return P, 1, S // tile, tile, W


def latent_attention_tpu_interpreted(*args, **kwargs) -> tuple[jax.Array, LatentPages]:
    """Runs the TPU kernel on any device in Pallas' interpreter: the same code, much slower, for tests."""
    return latent_attention_tpu(*args, **kwargs, interpret=pltpu.InterpretParams())
