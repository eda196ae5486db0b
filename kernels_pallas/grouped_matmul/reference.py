"""The grouped product in plain JAX: the oracle of the kernels, and what runs on CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.packed_numbers import dequantize


def grouped_matmul_reference(
    rows: jax.Array,
    weights: jax.Array,
    counts: jax.Array,
    scales: jax.Array | None,
    first_expert: jax.Array | None = None,
    zeros: jax.Array | None = None,
) -> jax.Array:
    """The contract is that of `grouped_matmul`. Integers are written out as weights in rows' dtype."""
    (R, D), E = rows.shape, counts.shape[0]
    weights = experts_of(weights, first_expert, E)
    if scales is not None:
        scales = experts_of(scales, first_expert, E)
        zeros = None if zeros is None else experts_of(zeros, first_expert, E)
        weights = dequantize_experts(weights, scales, zeros, D, rows.dtype)
    axes = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    out = jax.lax.ragged_dot_general(rows, weights, counts, axes, preferred_element_type=jnp.float32)
    # jax does not say what the rows without an expert are.
    has_expert = jnp.arange(R) < counts.sum()
    return jnp.where(has_expert[:, None], out, 0.0).astype(rows.dtype)


def experts_of(stack: jax.Array, first_expert: jax.Array | None, num_experts: int) -> jax.Array:
    """Returns the experts [E, ...] of a stack [S, ...] from the first on; the stack itself if it holds no others."""
    if stack.shape[0] == num_experts or first_expert is None:
        return stack
    return jax.lax.dynamic_slice_in_dim(stack, first_expert, num_experts)


def dequantize_experts(
    weights: jax.Array, scales: jax.Array, zeros: jax.Array | None, num_inputs: int, dtype: Any
) -> jax.Array:
    """Returns the weights [E, F, D] of D inputs in `dtype`; integers, scales and zeros are as in `grouped_matmul`."""
    E, F, _ = scales.shape
    weights, scales, zeros = jax.tree.map(lambda a: a.reshape(E * F, -1), (weights, scales, zeros))
    wide = dequantize(weights, scales, zeros, num_inputs)
    return wide.astype(dtype).reshape(E, F, num_inputs)
