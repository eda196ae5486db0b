"""The grouped product for TPUs, in Pallas.

For `jax.lax.ragged_dot` a TPU copies the experts twice, out of the stack of layers and transposed. It also writes
integers out in floating point. Here a turn of the kernel reads some channels of one expert where they lie in the stack,
widens integers in vector memory, and multiplies a block of rows. The pipeline fetches the next expert meanwhile. The
kernel does not read experts without rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.device import lies_turned
from kernels_pallas.grouped_matmul.reference import experts_of, grouped_matmul_reference
from kernels_pallas.packed_numbers import wide_scales
from kernels_pallas.tpu_products import multiply_turns, require_support

# Rows of a block. An expert's weights are read once whatever it is, and each block takes a turn of the matrix unit for
# each expert that has rows in it; so blocks are short if experts have few rows.
FEW_ROWS, MANY_ROWS = 32, 128


def grouped_matmul_tpu(
    rows: jax.Array,
    weights: jax.Array,
    counts: jax.Array,
    scales: jax.Array | None,
    first_expert: jax.Array | None,
    zeros: jax.Array | None = None,
    *,
    block_rows: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The contract is that of `grouped_matmul`; `block_rows` None takes them by the mean rows of an expert."""
    require_support(rows, weights, interpret)
    if block_rows is None:
        mean = rows.shape[0] / counts.shape[0]
        block_rows = MANY_ROWS if mean > FEW_ROWS else FEW_ROWS
    first = jnp.zeros((), jnp.int32) if first_expert is None else first_expert
    return _multiply(rows, weights, counts, scales, zeros, first, block_rows, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _multiply(
    rows: jax.Array,
    weights: jax.Array,
    counts: jax.Array,
    scales: jax.Array | None,
    zeros: jax.Array | None,
    first: jax.Array,
    block_rows: int,
    interpret: bool,
) -> jax.Array:
    E = counts.shape[0]
    return multiply_turns(
        rows,
        weights,
        None if scales is None else wide_scales(weights, experts_of(scales, first, E)),
        turns_of(counts, num_rows=rows.shape[0], block_rows=block_rows),
        first,
        num_matrices=E,
        block_rows=block_rows,
        is_turned=lies_turned(*weights.shape[1:]),
        interpret=interpret,
        name="grouped_matmul",
        zeros=None if zeros is None else experts_of(zeros, first, E),
    )


def _forward(*operands: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _multiply(*operands), operands[:6]


def _backward(block_rows: int, interpret: bool, operands: tuple[Any, ...], change: jax.Array) -> tuple[Any, ...]:
    """Returns the derivative of the reference, for Pallas differentiates no kernel."""
    rows, weights, counts, scales, zeros, first = operands

    def multiply(rows: jax.Array, weights: jax.Array, scales: jax.Array | None) -> jax.Array:
        return grouped_matmul_reference(rows, weights, counts, scales, first, zeros)

    _, derivative = jax.vjp(multiply, rows, weights, scales)
    of_rows, of_weights, of_scales = derivative(change)
    return of_rows, of_weights, None, of_scales, None, None


_multiply.defvjp(_forward, _backward)


def turns_of(counts: jax.Array, *, num_rows: int, block_rows: int) -> jax.Array:
    """Returns the weights, the block of rows, the first row, the end and the expert of each turn, i32[5, turns].

    A block has a turn for each expert that has rows in it, and one for rows without an expert. These have an expert E,
    and read no weights: theirs are those of the turn before. Turns that are left over have no rows.

        counts 3 0 2, 7 rows, blocks of 4  ->  block 0 0 1 1 1   first 0 3 3 5 7   end 3 5 5 7 7   expert 0 2 2 3 3
    """
    E = counts.shape[0]
    last_used = jnp.where(counts > 0, jnp.arange(E, dtype=jnp.int32), 0).max()
    counts = jnp.concatenate([counts, num_rows - counts.sum(keepdims=True)])
    ends = jnp.cumsum(counts)
    firsts = ends - counts
    blocks = jnp.where(counts > 0, (ends - 1) // block_rows - firsts // block_rows + 1, 0)
    turn_ends = jnp.cumsum(blocks)
    # Each group of rows but the first may begin within a block that the one before it has begun.
    turn = jnp.arange(pl.cdiv(num_rows, block_rows) + min(E + 1, num_rows) - 1, dtype=jnp.int32)
    group = (turn_ends[None] <= turn[:, None]).sum(1, dtype=jnp.int32)
    expert, is_left_over = jnp.minimum(group, E), group > E
    block = firsts[expert] // block_rows + turn - (turn_ends - blocks)[expert]
    block = jnp.where(is_left_over, (num_rows - 1) // block_rows, block)
    first = jnp.where(is_left_over, num_rows, firsts[expert])
    return jnp.stack([jnp.where(expert < E, expert, last_used), block, first, ends[expert], expert])
