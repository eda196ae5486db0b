"""Activations in 8 bits, beside weights of integers (W8A8): rounded, multiplied as integers, and scaled again."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.packed_numbers import unpack_int4
from kernels_pallas.row_products import integers_by_integers, rounded

LEAST, LARGEST = -128, 127


class Activations(NamedTuple):
    """The rounding of the inputs of a product to 8 bits, by steps of equal size.

    The steps of 8 bits go from the least number to the largest, or as far to both sides of 0 if it `is_symmetric`:
    those of the token, which alone decides on its numbers, or stated ones if they are not dynamic.
    """

    is_dynamic: bool
    is_symmetric: bool


class RoundedRows(NamedTuple):
    """Rows x [T, D] as (values - zeros) * scales."""

    values: jax.Array  # i8[T, D]
    scales: jax.Array  # f32[T or 1, 1]
    zeros: jax.Array | None  # i32[T or 1, 1]; None: 0

    def floats(self) -> jax.Array:
        """Returns the rows f32[T, D]."""
        values = self.values.astype(jnp.int32) if self.zeros is None else self.values.astype(jnp.int32) - self.zeros
        return values.astype(jnp.float32) * self.scales


def round_rows(x: jax.Array, activations: Activations, input_range: jax.Array | None) -> RoundedRows:
    """Rounds each row of x [T, D] to 8 bits, half to even; numbers out of a stated range become its ends.

    `input_range` f32[T or 1, 3] has the scale, its inverse and the zero point of stated steps; None for dynamic ones.
    """
    x = rounded(x.astype(jnp.float32))
    if input_range is not None:
        scales, inverses, zeros = jnp.split(input_range, 3, axis=1)
        # Integers have no NaN, which must not get lost.
        scales = jnp.where(jnp.isfinite(x).all(-1, keepdims=True), scales, jnp.nan)
    elif activations.is_symmetric:
        largest = jnp.abs(x).max(-1, keepdims=True)
        scales, inverses, zeros = *_steps(largest, 127.0), jnp.zeros_like(largest)
    else:
        low = jnp.minimum(x.min(-1, keepdims=True), 0)
        scales, inverses = _steps(jnp.maximum(x.max(-1, keepdims=True), 0) - low, 255.0)
        zeros = jnp.clip(jnp.round(LEAST - rounded(low * inverses)), LEAST, LARGEST)
    # By products, for a compiler may or may not turn the division of a row into one.
    steps = rounded(x * inverses)
    values = jnp.clip(jnp.round(steps if activations.is_symmetric else steps + zeros), LEAST, LARGEST)
    return RoundedRows(values.astype(jnp.int8), scales, None if activations.is_symmetric else zeros.astype(jnp.int32))


def _steps(sizes: jax.Array, count: float) -> tuple[jax.Array, jax.Array]:
    """Returns steps f32[T, 1] of which `count` make a size, and their inverses; 0 for a size of 0."""
    inverses = jnp.where(sizes > 0, count / jnp.where(sizes > 0, sizes, 1.0), 0.0)
    return sizes * jnp.float32(1 / count), inverses


def rounded_product(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    activations: Activations,
    input_range: jax.Array | None,
) -> jax.Array:
    """Returns x wᵀ f32[T, F] for x [T, D], rounded to 8 bits, and weights with one group of inputs.

    `values`, `scales` and `zeros` are those of `quantized_matmul`. The sums are those of integers, which are exact; so
    the bits of a row depend on no other row, on any device.
    """
    D, rows = x.shape[1], round_rows(x, activations, input_range)
    w = (unpack_int4(values, D) if values.shape[1] < D else values).astype(jnp.int8)
    sums = integers_by_integers(rows.values, w)
    if zeros is not None:
        sums = sums - rows.values.astype(jnp.int32).sum(-1, keepdims=True) * zeros.astype(jnp.int32).T
    if rows.zeros is not None:
        of_weights = w.astype(jnp.int32).sum(-1)[None]
        if zeros is not None:
            of_weights = of_weights - D * zeros.astype(jnp.int32).T
        sums = sums - rows.zeros * of_weights
    # A compiler may multiply by one of two factors before the other, as it likes.
    return rounded(sums.astype(jnp.float32) * rounded(rows.scales * scales.astype(jnp.float32).T))
