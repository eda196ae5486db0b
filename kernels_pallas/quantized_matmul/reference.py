"""The quantized product in plain JAX: the oracle of the kernels, and what runs over meshes and where kernels refuse."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.exact_sums import refuse_if_exact
from kernels_pallas.packed_numbers import centred, dequantize, wide_scales


def layer_of(stacks: Any, layer: jax.Array | None) -> Any:
    """Returns the arrays [F, ...] of a layer of stacks [n, F..., ...], in a tree; the arrays themselves for None.

    A stack [1, F..., ...] has those of the layer alone.
    """
    if layer is None:
        return stacks

    def own(stack: jax.Array) -> jax.Array:  # the index is bounded by the number of layers
        return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False).reshape(-1, stack.shape[-1])

    return jax.tree.map(own, stacks)


def multiply_widened(x: jax.Array, weights: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> jax.Array:
    """The contract is that of `quantized_matmul`; the weights are written out once in the dtype of x."""
    return product_of_widened(x, weights, scales, zeros).astype(x.dtype)


def product_of_widened(x: jax.Array, weights: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> jax.Array:
    """Returns the same in float32, f32[T, F]."""
    w = dequantize(weights, scales, zeros, x.shape[1]).astype(x.dtype)
    return jnp.einsum("td,fd->tf", x, w, preferred_element_type=jnp.float32)


def quantized_matmul_reference(
    x: jax.Array, weights: jax.Array, scales: jax.Array, zeros: jax.Array | None, layer: jax.Array | None = None
) -> jax.Array:
    """The contract is that of `quantized_matmul`.

    Integers go into the product and scales onto its result, group by group: the compiler fuses the conversion, and the
    weights are never there in floating point. Of many rows the results per group, float32 [T, groups, F], would be
    larger than the weights in x's type; then those are made.
    """
    refuse_if_exact("a quantized product in plain JAX")
    weights, scales, zeros = layer_of((weights, scales, zeros), layer)
    (T, D), F, groups = x.shape, weights.shape[0], scales.shape[1]
    wide = wide_scales(weights, scales)
    if groups == 1:
        w = centred(weights, scales, zeros, D).reshape(F, D).astype(x.dtype)
        y = jnp.einsum("td,fd->tf", x, w, preferred_element_type=jnp.float32)
        return (y * wide[:, 0][None]).astype(x.dtype)
    if T * groups * 4 > D * x.dtype.itemsize:
        return multiply_widened(x, weights, scales, zeros)
    w = centred(weights, scales, zeros, D).astype(x.dtype)
    y = jnp.einsum("tgd,fgd->tgf", x.reshape(T, groups, -1), w, preferred_element_type=jnp.float32)
    return (y * wide.T[None]).sum(1).astype(x.dtype)
