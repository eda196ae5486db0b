"""Sums and maxima over the last axis that, on CPU, never depend on the other axes."""

import jax
import jax.numpy as jnp


def row_sum(x: jax.Array) -> jax.Array:
    """Returns `x.sum(-1)`, on CPU added up in a fixed tree, so that a row has the same sum in any batch.

    There `x.sum(-1)` is vectorised differently with the number of rows, and then rounds differently. Elsewhere products
    of matrices depend on the batch already, and the tree would be written to memory level by level.
    """
    return jax.lax.platform_dependent(x, cpu=_tree_sum, default=lambda x: x.sum(-1))


def row_max(x: jax.Array) -> jax.Array:
    """Returns `x.max(-1)`, on CPU by a sort, which the compiler computes apart from what follows.

    A maximum is exact in any order. But the compiler gives a reduction of 4,096 numbers or more to a library, with an
    `exp` that follows, and the `exp` of that library has other bits. Beside comparisons of a row's parts, which it
    fuses with the `exp`, jax 0.12.0 vectorises that differently with the number of rows.
    """
    return jax.lax.platform_dependent(x, cpu=lambda x: jax.lax.top_k(x, 1)[0][..., 0], default=lambda x: x.max(-1))


def _tree_sum(x: jax.Array) -> jax.Array:
    """The row is halved and added elementwise, which leaves the compiler no order to choose."""
    while x.shape[-1] > 1:
        half, is_odd = divmod(x.shape[-1], 2)
        if is_odd:
            x = jnp.concatenate([x, jnp.zeros_like(x[..., :1])], axis=-1)
            half += 1
        x = x[..., :half] + x[..., half:]
    return x[..., 0]
