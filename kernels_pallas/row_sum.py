"""Sums over the last axis in an order that, on CPU, never depends on the other axes."""

import jax
import jax.numpy as jnp


def row_sum(x: jax.Array) -> jax.Array:
    """Returns `x.sum(-1)`, on CPU added up in a fixed tree, so that a row has the same sum in any batch.

    There `x.sum(-1)` is vectorised differently with the number of rows, and then rounds differently. Elsewhere products
    of matrices depend on the batch already, and the tree would be written to memory level by level.
    """
    return jax.lax.platform_dependent(x, cpu=_tree_sum, default=lambda x: x.sum(-1))


def _tree_sum(x: jax.Array) -> jax.Array:
    """The row is halved and added elementwise, which leaves the compiler no order to choose."""
    while x.shape[-1] > 1:
        half, is_odd = divmod(x.shape[-1], 2)
        if is_odd:
            x = jnp.concatenate([x, jnp.zeros_like(x[..., :1])], axis=-1)
            half += 1
        x = x[..., :half] + x[..., half:]
    return x[..., 0]
