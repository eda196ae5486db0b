"""Latent attention for NVIDIA GPUs: the kernels of paged attention, with values inside their keys.

A latent is read once, for its score and as a value. Query heads go in several tiles where one has too many.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
from jax.experimental import pallas as pl

from kernels_pallas.device import HOPPER
from kernels_pallas.latent_attention.layout import LatentPages, stored_latents
from kernels_pallas.paged_attention.call import AttentionCall
from kernels_pallas.paged_attention.gpu.append import append
from kernels_pallas.paged_attention.gpu.attend import attend
from kernels_pallas.paged_attention.gpu.block_sizes import (
    MAX_SPLITS,
    MIN_SPLIT,
    SPLIT_KEYS,
    GpuBlockSizes,
    added_parts,
    heads_of_tile,
)
from kernels_pallas.paged_attention.gpu.chunks import for_kernels
from kernels_pallas.paged_attention.gpu.entry import FP8, attend_rows, check_support
from kernels_pallas.triton import Target

MAX_LATENT_SIZE = 512
MAX_ROTARY_SIZE = 128


def latent_attention_gpu(
    q: jax.Array,
    latents: jax.Array,
    pages: LatentPages,
    call: AttentionCall,
    *,
    block_sizes: GpuBlockSizes | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, LatentPages]:
    """The contract is that of `latent_attention`; `block_sizes` None takes those that suit the device."""
    R, (N, width) = pages.latent_size, q.shape[1:]
    sizes_allowed = (("latent_size", R, MAX_LATENT_SIZE), ("rotary_size", width - R, MAX_ROTARY_SIZE))
    further = [(name, value, range(1, most + 1)) for name, value, most in sizes_allowed]
    target = check_support(q, pages, interpret=interpret, page_dtypes=("int8", "int4", FP8), further=further)
    call = for_kernels(call)
    new, new_scales = stored_latents(pages, latents)
    pools = pages.array[:, :, None], *(pages.scales or ())
    new = new[:, None], *(scales[:, None] for scales in new_scales)
    pool, *scales = append(new, pools, call, interpret)
    arrays = {"k_pages": pool}
    if scales:
        arrays |= {"k_scales": scales[0], "rotary_scales": scales[1], "v_scales": scales[0]}
    max_context = call.block_tables.shape[1] * pages.page_size

    def sizes(num_rows: int, queries: int) -> GpuBlockSizes:
        return block_sizes or latent_block_sizes(
            num_rows=num_rows,
            queries=queries,
            num_heads=N,
            max_context=max_context,
            has_scales=pages.scales is not None,
            target=target,
        )

    out = attend_rows(functools.partial(attend, arrays=arrays, value_size=R, interpret=interpret), q, call, sizes)
    return out, replace(pages, array=pool[:, :, 0], scales=tuple(scales) if scales else None)


def latent_block_sizes(
    *, num_rows: int, queries: int, num_heads: int, max_context: int, has_scales: bool, target: Target
) -> GpuBlockSizes:
    """Returns block sizes for `num_rows` rows of up to `queries` queries.

    By the compiler these stay in registers, and a core has room for one program of many rows.
    """
    most = 64 if target.capability >= HOPPER and not has_scales else 32
    block_m = min(most, max(16, pl.next_power_of_2(queries * num_heads)))
    heads = heads_of_tile(num_heads, block_m)
    num_tiles = num_rows * (num_heads // heads) * -(-queries // (block_m // heads))
    return GpuBlockSizes(
        block_m=block_m,
        block_k=32 if block_m == 16 else 16,
        num_splits=max(1, min(target.num_cores // num_tiles, MAX_SPLITS, max_context // MIN_SPLIT)),
        split_keys=SPLIT_KEYS,
        added_parts=added_parts(target.num_cores, num_heads // heads),
        num_warps=8 if block_m > 16 else 4,
        num_stages=3,
    )
