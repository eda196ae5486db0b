"""Weights whose inputs are observed: the derivative of a layer brings the moments of what each product multiplies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from kernels_pallas.grouped_matmul import grouped_matmul


@struct.dataclass
class Moments:
    """Sums over the inputs x [in] of a product; those of E experts have a leading axis."""

    products: Any  # f32[in, in]  of x xᵀ
    num_inputs: Any  # f32[]  of 1


@struct.dataclass
class ObservedArray:
    """Weights [out..., in] beside moments, whose values no product reads.

    The derivative of any function of the product with respect to `moments` is the moments of the product's inputs,
    whatever the function, if it depends on the product. So no part of a model between the two has to know of them.
    """

    base: Any  # an array [out..., in]
    moments: Moments

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weights."""
        return self.base.shape


@jax.custom_vjp
def observe(y: jax.Array, x: jax.Array, moments: Moments) -> jax.Array:
    """Returns y, the product of x [T, in]; all rows of x count."""
    return y


def _observed_moments(x: jax.Array, change: jax.Array) -> tuple[Any, ...]:
    products = jnp.einsum("ti,tj->ij", x, x, preferred_element_type=jnp.float32)
    return change, jnp.zeros_like(x), Moments(products, jnp.float32(x.shape[0]))


observe.defvjp(lambda y, x, moments: (y, x), _observed_moments)


@jax.custom_vjp
def observe_groups(y: jax.Array, x: jax.Array, counts: jax.Array, moments: Moments) -> jax.Array:
    """Returns y, the product of x [R, in] by the weights of E experts, whose rows `grouped_matmul` counts, i32[E]."""
    return y


def _moments_of_groups(operands: tuple[jax.Array, jax.Array], change: jax.Array) -> tuple[Any, ...]:
    x, counts = operands
    # The derivative of x wᵀ for a change x.
    weights = jnp.zeros((counts.shape[0], x.shape[1], x.shape[1]), x.dtype)
    (products,) = jax.vjp(lambda w: grouped_matmul(x, w, counts), weights)[1](x)
    moments = Moments(products.astype(jnp.float32), counts.astype(jnp.float32))
    return change, jnp.zeros_like(x), np.zeros(counts.shape, jax.dtypes.float0), moments


observe_groups.defvjp(lambda y, x, counts, moments: (y, (x, counts)), _moments_of_groups)
