"""The quantized product on GPUs before Ampere, in plain JAX, for Triton compiles for none of them.

A product of matrices reads its weights in floating point there, so XLA writes all of them to memory in every step. For
14,336 x 4,096 in int8, which are 59 MB, a product of 8 rows moves 299 MB. Here a few rows are sums along the inputs.
XLA widens, multiplies and adds up in one kernel, and so reads the integers alone, once for every 8 rows. For more rows
each turn widens some channels and multiplies by them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.device import AMPERE, device_at_hand
from kernels_pallas.dispatch import NoGainError
from kernels_pallas.packed_numbers import MAX_WIDENED, in_turns, split_int4, whole_zeros, wide_scales
from kernels_pallas.quantized_matmul.reference import layer_of, product_of_widened

# Rows that read the integers together, and rows up to which they are summed. For 14,336 x 4,096 a T4 needs 0.3 ms for
# the instructions of 8 rows at its clock, and 0.9 ms to move 299 MB by its data sheet.
PASS_ROWS, FEW_ROWS = 8, 16
# Products that a thread adds up for each of its inputs, and channels of them: with more its registers spill.
MAX_PRODUCTS, MAX_CHANNELS = 16, 4

Parts = tuple[jax.Array, jax.Array, jax.Array | None]  # values, scales and zeros of `quantized_matmul`


class Plane(NamedTuple):
    """Numbers of the weights, and the inputs that they multiply."""

    weights: jax.Array  # f32[F, n]
    x: jax.Array  # f[T, n]


def quantized_matmul_before_ampere(
    x: jax.Array, weights: jax.Array, scales: jax.Array, zeros: jax.Array | None, layer: jax.Array | None = None
) -> jax.Array:
    """The contract is that of `quantized_matmul`, for a GPU before Ampere."""
    if not device_at_hand().is_before_ampere:
        raise NoGainError(f"GPUs of compute capability {AMPERE} and up have a kernel for this product, or need none")
    return multiply_by_channels(x, layer_of((weights, scales, zeros), layer)).astype(x.dtype)


@jax.custom_vjp
def multiply_by_channels(x: jax.Array, parts: Parts) -> jax.Array:
    """Returns x wᵀ f32[T, F] for x [T, D] and the parts of weights of F channels, on any device."""
    (T, D), (values, scales, _) = x.shape, parts
    if T > FEW_ROWS or values.dtype == jnp.uint8:  # XLA would write FP4 out before sums of it
        tile = max(MAX_WIDENED // D, 1)
        start = jnp.zeros((T, scales.shape[0]), jnp.float32)
        return in_turns(start, parts, tile, lambda own: product_of_widened(x, *own))
    sums = [_sums_of_rows(x[:PASS_ROWS], parts)]
    for first in range(PASS_ROWS, T, PASS_ROWS):
        # Without the barrier XLA computes all passes in one kernel, whose registers are too few.
        *before, last = sums
        x, parts, last = jax.lax.optimization_barrier((x, parts, last))
        sums = [*before, last, _sums_of_rows(x[first : first + PASS_ROWS], parts)]
    return jnp.concatenate(sums)


def _derivative(operands: tuple[jax.Array, Parts], change: jax.Array) -> tuple[Any, ...]:
    return jax.vjp(lambda x, parts: product_of_widened(x, *parts), *operands)[1](change)


# XLA's sums of several numbers have none of their own.
multiply_by_channels.defvjp(lambda x, parts: (multiply_by_channels(x, parts), (x, parts)), _derivative)


def _sums_of_rows(x: jax.Array, parts: Parts) -> jax.Array:
    """Returns x wᵀ f32[T, F] for at most PASS_ROWS rows: each channel's and row's sum is one of a single reduction.

    A thread reads a few inputs of some neighbouring channels and of all rows, and multiplies each pair.
    """
    planes, T = _planes(x, *parts), x.shape[0]
    F = parts[1].shape[0]
    channels = math.gcd(F, min(max(MAX_PRODUCTS // (T * len(planes)), 1), MAX_CHANNELS))
    # f32[T, F / channels, channels, n], of which XLA computes a thread's own
    products, *others = (
        plane.weights.reshape(1, F // channels, channels, -1) * plane.x.astype(jnp.float32)[:, None, None]
        for plane in planes
    )
    products = sum(others, products)
    operands = tuple(products[row, :, channel] for channel in range(channels) for row in range(T))

    def add(sums: tuple[jax.Array, ...], others: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(a + b for a, b in zip(sums, others, strict=True))

    sums = jax.lax.reduce(operands, (np.float32(0),) * len(operands), add, (1,))
    y = jnp.stack(sums).reshape(channels, T, -1).transpose(1, 2, 0).reshape(T, F)
    return y * wide_scales(*parts[:2]).T if parts[1].shape[1] == 1 else y


def _planes(x: jax.Array, values: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> list[Plane]:
    """Returns the weights, two planes if they lie two to a byte; a scale per channel is left to the sums."""
    (T, D), (F, groups) = x.shape, scales.shape
    wide, zeros = wide_scales(values, scales), whole_zeros(zeros, groups)

    def widened(values: jax.Array) -> jax.Array:
        w = values.reshape(F, groups, -1).astype(jnp.float32)
        if zeros is not None:
            w = w - zeros.astype(jnp.float32)[..., None]
        return (w if groups == 1 else w * wide[..., None]).reshape(F, -1)

    if values.shape[1] == D:
        return [Plane(widened(values), x)]
    halves = jnp.moveaxis(x.reshape(T, groups, 2, -1), 2, 0).reshape(2, T, -1)  # in the order of `pack_int4`
    # With the barrier a thread loads four neighbours at once.
    halves = jax.lax.optimization_barrier(halves)
    return [Plane(widened(half), halves[i]) for i, half in enumerate(split_int4(values))]
