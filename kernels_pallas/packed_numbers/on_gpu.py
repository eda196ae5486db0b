"""How a GPU's kernels read packed weights: the numbers of bytes, their zero points and their worth."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import triton
from kernels_pallas.packed_numbers.formats import doubled_fp4, split_int4, wide_scales


def numbers_of(stored: jax.Array, weights: Any, has_fp8_bits: bool) -> jax.Array:
    """Returns the numbers that loaded ones of `weights` stand for, up to the factor in `scales_of_numbers`."""
    if has_fp8_bits:
        return triton.floats_of_fp8(stored)
    return doubled_fp4(stored) if weights.dtype == jnp.uint8 else stored


def scales_of_numbers(scales: jax.Array, weights: Any, has_fp8_bits: bool) -> jax.Array:
    """Returns the scales f32 of the numbers of `numbers_of`."""
    wide = wide_scales(weights, scales)
    return wide * triton.FP8_FACTOR if has_fp8_bits else wide


def load_zeros(zeros: Any, places: tuple, group: Any, groups: int, mask: jax.Array) -> jax.Array:
    """Returns the zero points f32 of a group at some places, of an array [..., groups] or two to a byte."""
    if zeros.shape[-1] == groups:
        return triton.load(zeros, (*places, group), mask).astype(jnp.float32)
    low, high = split_int4(triton.load(zeros, (*places, group >> 1), mask))
    return jnp.where(group & 1 == 0, low, high).astype(jnp.float32)
