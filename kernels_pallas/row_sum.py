"""Sums and maxima of rows: on CPU a row's sum, and an `exp` after its maximum, do not depend on the other rows."""

import jax
import jax.numpy as jnp


def row_sum(x: jax.Array) -> jax.Array:
    """Returns `x.sum(-1)`, on CPU added up in a fixed tree, so that a row has the same sum in any batch.

    There `x.sum(-1)` is vectorised differently with the number of rows, and then rounds differently. Elsewhere products
    of matrices depend on the batch already, and the tree would be written to memory level by level.
    """
    return jax.lax.platform_dependent(x, cpu=_tree_sum, default=lambda x: x.sum(-1))


def row_max(x: jax.Array) -> jax.Array:
    """Returns `x.max(-1)`, on CPU by `top_k`, which XLA does not fuse with later operations.

    The maximum is exact in any order; an `exp` after it is not. XLA gives a maximum over 4,096 numbers or more, and an
    `exp` after it, to a library with another `exp`, unless the maximum has other uses as well. jax 0.12.0 also
    vectorises an `exp` by the number of rows, if it fuses comparisons with it.
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
