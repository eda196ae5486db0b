"""The group-wise quantized product for NVIDIA GPUs from Ampere on, in Pallas-Triton.

XLA writes the weights to memory in floating point before it multiplies by them, which is all the traffic that
quantization saves. Here a program takes some rows and some output channels, reads the numbers group by group, widens
them in registers and scales each group's product. Few rows leave most of a GPU idle, so the groups are split over
several programs, whose sums are added afterwards. FP8 with a scale per channel is read in parts of its one group.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import triton
from kernels_pallas.device import HOPPER
from kernels_pallas.dispatch import NoGainError
from kernels_pallas.quantized_matmul.reference import (
    doubled_fp4,
    layer_of,
    multiply_widened,
    split_int4,
    wide_scales,
)

GROUP_SIZES = (32, 64, 128, 256)
FP8 = "float8_e4m3fn"
# Inputs of a block where all inputs have one scale.
PART = 128
# Programs per multiprocessor that keep enough bytes under way: three stages of 64 channels x 128 bytes each.
PROGRAMS_PER_CORE = 2
# Rows of a single tile. For each further tile the kernel would read and widen the integers again: 256 rows by 14,336 x
# 4,096 weights took 200 us on an H200, and 67 by weights in bfloat16, which 36 us are enough to write at 4 TB/s.
MAX_ROWS = 64
# Fewer groups per program than this are not worth a pass over the results.
MIN_GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class MatmulBlockSizes:
    """How the kernel cuts its work; a block along the inputs is one group."""

    block_m: int  # rows
    block_n: int  # output channels
    num_splits: int  # programs that share the groups of one tile
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        triton.require_block_sizes(
            self, blocks=("block_m", "block_n"), counts=("num_splits", "num_warps", "num_stages")
        )


def matmul_block_sizes(*, rows: int, channels: int, groups: int, target: triton.Target) -> MatmulBlockSizes | None:
    """Returns block sizes for a product of `rows` rows, or None if widening the weights once takes less time.

    The compile tests keep them free of spills.
    """
    if rows > MAX_ROWS:
        return None
    block_m = max(pl.next_power_of_2(rows), triton.MIN_DOT)
    block_n = 64
    num_tiles = pl.cdiv(rows, block_m) * pl.cdiv(channels, block_n)
    splits = min(pl.cdiv(PROGRAMS_PER_CORE * target.num_cores, num_tiles), groups // MIN_GROUPS)
    return MatmulBlockSizes(
        block_m=block_m, block_n=block_n, num_splits=max(1, splits), num_warps=4, num_stages=3 if block_m < 64 else 2
    )


def quantized_matmul_gpu(
    x: jax.Array,
    weights: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    layer: jax.Array | None = None,
    *,
    block_sizes: MatmulBlockSizes | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The contract is that of `quantized_matmul`; `block_sizes` None takes those estimated for the device."""
    weights, scales, zeros = layer_of((weights, scales, zeros), layer)
    (T, D), F = x.shape, weights.shape[0]
    target = _check(x, weights, scales.shape[1], interpret)
    size = _block_of_inputs(D, scales.shape[1])
    block_sizes = block_sizes or matmul_block_sizes(rows=T, channels=F, groups=D // size, target=target)
    if block_sizes is None:
        return multiply_widened(x, weights, scales, zeros)
    splits, block_m, block_n = block_sizes.num_splits, block_sizes.block_m, block_sizes.block_n
    weights, has_fp8_bits = triton.as_loaded(weights, target)
    arrays = {"x": x, "weights": weights, "scales": scales}
    if zeros is not None:
        arrays["zeros"] = zeros
    (out,) = triton.launch(
        functools.partial(_kernel, names=tuple(arrays), block_sizes=block_sizes, size=size, has_fp8_bits=has_fp8_bits),
        *arrays.values(),
        # Programs of the same channels are neighbours, so that their weights are read from memory once.
        grid=(pl.cdiv(T, block_m), pl.cdiv(F, block_n), splits),
        out=[jax.ShapeDtypeStruct((splits, T, F), x.dtype if splits == 1 else jnp.float32)],
        num_warps=block_sizes.num_warps,
        num_stages=block_sizes.num_stages,
        name="quantized_matmul",
        interpret=interpret,
    )
    return out[0] if splits == 1 else out.sum(0).astype(x.dtype)


def _check(x: jax.Array, weights: jax.Array, groups: int, interpret: bool) -> triton.Target:
    fused = NoGainError(
        f"groups=1 of {weights.dtype} is not supported by the GPU kernel: XLA fuses the conversion into a product with"
        " one scale per channel; use implementation='reference'"
    )
    if groups == 1 and weights.dtype != FP8:
        raise fused
    dtypes = ("bfloat16", "float16", "float32") if interpret else ("bfloat16", "float16")
    for what, value, supported in (
        ("x.dtype", x.dtype.name, dtypes),
        ("weights.dtype", weights.dtype.name, ("int8", "uint8", FP8)),  # 4 bits are packed in bytes
        ("group size", _block_of_inputs(x.shape[1], groups), GROUP_SIZES),
    ):
        if value not in supported:
            raise NotImplementedError(f"{what}={value} is not supported by the GPU kernel; supported: {supported}")
    target = triton.INTERPRETED if interpret else triton.target()
    # From Hopper on XLA fuses the conversion of FP8 into a product; before, it writes the weights in floating point.
    if groups == 1 and target.capability >= HOPPER:
        raise fused
    return target


def _block_of_inputs(num_inputs: int, groups: int) -> int:
    """Returns the inputs of a block: those of a group, or a part of the only one that divides it."""
    return math.gcd(num_inputs, PART) if groups == 1 else num_inputs // groups


def _kernel(*refs, names, block_sizes: MatmulBlockSizes, size: int, has_fp8_bits: bool) -> None:
    """One program: rows `program_id(0)`, channels `program_id(1)`, part `program_id(2)` of the blocks of inputs."""
    arrays = SimpleNamespace(**({"zeros": None} | dict(zip(names, refs, strict=False))))
    (T, D), F, out_ref = arrays.x.shape, arrays.scales.shape[0], refs[-1]
    blocks = D // size
    rows = pl.program_id(0) * block_sizes.block_m + jnp.arange(block_sizes.block_m, dtype=jnp.int32)
    channels = pl.program_id(1) * block_sizes.block_n + jnp.arange(block_sizes.block_n, dtype=jnp.int32)
    multiply = functools.partial(_multiply_block, arrays, rows, channels, size=size, has_fp8_bits=has_fp8_bits)
    share = pl.cdiv(blocks, block_sizes.num_splits)
    first = pl.program_id(2) * share
    last = jnp.minimum(first + share, blocks)
    out = jnp.zeros((block_sizes.block_m, block_sizes.block_n), jnp.float32)
    out = jax.lax.fori_loop(first, last, multiply, out)
    mask = (rows < T)[:, None] & (channels < F)[None]
    triton.store(out_ref, (pl.program_id(2), rows[:, None], channels[None]), out, mask)


def _multiply_block(
    arrays, rows: jax.Array, channels: jax.Array, block, out: jax.Array, *, size: int, has_fp8_bits: bool
) -> jax.Array:
    """Adds the product of one block of inputs to out f32[rows, channels]."""
    (T, D), (F, groups) = arrays.x.shape, arrays.scales.shape
    group = 0 if groups == 1 else block
    is_packed = arrays.weights.shape[1] < D
    width = size // 2 if is_packed else size
    inputs, is_row, is_channel = jnp.arange(width, dtype=jnp.int32), rows < T, channels < F
    weights = triton.load(
        arrays.weights,
        (channels[:, None], (block * width + inputs)[None]),
        jnp.broadcast_to(is_channel[:, None], (channels.size, width)),
    )
    parts = split_int4(weights) if is_packed else (weights,)
    zeros = None
    if arrays.zeros is not None:
        zeros = load_zeros(arrays.zeros, (channels,), group, groups, is_channel)
    product = jnp.zeros(out.shape, jnp.float32)
    for i, part in enumerate(parts):
        x = triton.load(
            arrays.x,
            (rows[:, None], (block * size + i * width + inputs)[None]),
            jnp.broadcast_to(is_row[:, None], (rows.size, width)),
        )
        part = numbers_of(part, arrays.weights, has_fp8_bits).astype(jnp.float32)
        if zeros is not None:
            part = part - zeros[:, None]
        product = product + triton.dot(x, part.astype(x.dtype), transpose_b=True)
    scales = triton.load(arrays.scales, (channels, group), is_channel)
    return out + product * scales_of_numbers(scales, arrays.weights, has_fp8_bits)[None]


def load_zeros(zeros: Any, places: tuple, group: Any, groups: int, mask: jax.Array) -> jax.Array:
    """Returns the zero points f32 of a group at some places, of an array [..., groups] or two to a byte."""
    if zeros.shape[-1] == groups:
        return triton.load(zeros, (*places, group), mask).astype(jnp.float32)
    low, high = split_int4(triton.load(zeros, (*places, group >> 1), mask))
    return jnp.where(group & 1 == 0, low, high).astype(jnp.float32)


def numbers_of(stored: jax.Array, weights: Any, has_fp8_bits: bool) -> jax.Array:
    """Returns the numbers that loaded ones of `weights` stand for, up to the factor in `scales_of_numbers`."""
    if has_fp8_bits:
        return triton.floats_of_fp8(stored)
    return doubled_fp4(stored) if weights.dtype == jnp.uint8 else stored


def scales_of_numbers(scales: jax.Array, weights: Any, has_fp8_bits: bool) -> jax.Array:
    """Returns the scales f32 of the numbers of `numbers_of`."""
    wide = wide_scales(weights, scales)
    return wide * triton.FP8_FACTOR if has_fp8_bits else wide
