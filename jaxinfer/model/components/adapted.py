"""Weights with low-rank changes, one of which each token chooses (LoRA, Hu et al. 2021; DoRA, Liu et al. 2024)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from kernels_pallas.row_products import rounded

# Terms of a sum that a CPU adds in one pass over its operands.
FOLD = 16


@struct.dataclass
class AdaptedArray:
    """Weights [out..., in] with a low-rank change in each of A slots; a token's product takes the change in its slot.

    The product is (1 + gain) x wᵀ + x down up. Only DoRA has gains other than 0. Slot 0 has zeros, for tokens without
    an adapter. All slots have one rank, so a token's result does not depend on the ranks of other adapters. `down` and
    `up` have rows of zeros up to `padded_size` of their inputs.
    """

    base: Any  # an array or a QuantizedArray [out..., in]; None if a joined tensor has the weights, see `linears`
    down: Any  # [A, in, r]
    up: Any  # [A, r, out]  times the adapter's scale
    gain: Any  # f32[A, out]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weights."""
        return self.base.shape


def padded_size(num_inputs: int) -> int:
    """Returns the number of rows of `down` or `up` for `num_inputs` inputs."""
    return num_inputs if num_inputs <= FOLD else -(-num_inputs // FOLD) * FOLD


def add_changes(y: jax.Array, x: jax.Array, w: AdaptedArray, slots: jax.Array) -> jax.Array:
    """Returns y f32[T, F], the product of x [T, D] and the weights, with the change in each token's slot i32[T]."""
    x = jnp.pad(x, ((0, 0), (0, w.down.shape[1] - x.shape[1])))
    changes = (w.down, w.up, w.gain)
    return jax.lax.platform_dependent(y, x, *changes, slots, cpu=_add_on_cpu, default=_add_by_products)


def _add_on_cpu(
    y: jax.Array, x: jax.Array, down: jax.Array, up: jax.Array, gain: jax.Array, slots: jax.Array
) -> jax.Array:
    """Multiplies number by number, which has the same bits for any tokens beside, and skips a step without adapters.

    A product of matrices per slot adds twice the time of the weights' own product, and this a third. Measured with
    weights of 704 by 256, 8 tokens and 8 adapters of rank 16 (jax 0.10.2, an AMD EPYC with AVX-512).
    """

    def add() -> jax.Array:
        states = jnp.pad(_by_own_rows(x, down, slots), ((0, 0), (0, up.shape[1] - down.shape[2])))
        return y + rounded(y * _rows_of(gain, slots)) + _by_own_rows(states, up, slots)

    return jax.lax.cond(jnp.any(slots > 0), add, lambda: y)


def _by_own_rows(x: jax.Array, w: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns x w[a] f32[T, F] for x [T, D] and w [A, D, F], added in a fixed tree.

    D = 48, FOLD = 16:  products [16, 3] -> sums [3] -> sum
    """
    (T, D), (A, _, F) = x.shape, w.shape
    parts = min(D, FOLD)
    rows, weights = x.astype(jnp.float32).reshape(T, parts, -1, 1), w.reshape(A, parts, -1, F)

    def product(i: int) -> jax.Array:
        own = weights.at[slots, i].get(mode="promise_in_bounds").astype(jnp.float32)
        return rounded(jnp.broadcast_to(rows[:, i], own.shape) * own)

    sums = _tree_sum([product(i) for i in range(parts)])  # [T, D / parts, F]
    while (n := sums.shape[1]) > 1:
        sums = jnp.pad(sums, ((0, 0), (0, padded_size(n) - n), (0, 0)))
        parts = min(n, FOLD)
        folded = sums.reshape(T, parts, -1, F)
        sums = _tree_sum([folded[:, i] for i in range(parts)])
    return sums[:, 0]


def _rows_of(table: jax.Array, slots: jax.Array) -> jax.Array:
    return table.at[slots].get(mode="promise_in_bounds")


def _tree_sum(terms: list[jax.Array]) -> jax.Array:
    while len(terms) > 1:
        pairs = [first + second for first, second in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[len(pairs) * 2 :]
    return terms[0]


def _add_by_products(
    y: jax.Array, x: jax.Array, down: jax.Array, up: jax.Array, gain: jax.Array, slots: jax.Array
) -> jax.Array:
    """Multiplies all tokens by the weights of all slots at once, and leaves out the states of other slots."""
    (A, _, r), rows = down.shape, up[:, : down.shape[2]]
    states = jnp.einsum("td,adr->tar", x, down.astype(x.dtype), preferred_element_type=jnp.float32)
    is_own = slots[:, None] == jnp.arange(A)[None]
    own = jnp.where(jnp.broadcast_to(is_own[..., None], states.shape), states, 0).astype(x.dtype)
    weights = rows.astype(x.dtype).reshape(A * r, -1)
    y = y + y * _rows_of(gain, slots)
    return y + jnp.einsum("tk,kf->tf", own.reshape(-1, A * r), weights, preferred_element_type=jnp.float32)
