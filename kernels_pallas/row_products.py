"""Matrix products on CPU in which the bits of a row do not depend on the rows beside it.

On CPU in float32 a token has the same logits, to the bit, in any batch, chunk, step and bucket. Each part of a step
keeps that by a rule of its own, and this is the list of them:

products          A library of matrix products chooses its routine, and with it the order of each sum, by the shape of
                  the product. So every product that a token passes has ROW_BLOCK rows, whatever the step: more rows
                  are several products of that one shape, fewer are padded with zeros. Another number of rows takes
                  the place of ROW_BLOCK only after `equal_row_counts` has tried it on this machine.
                  (`jaxinfer.layers.product`, `paged_attention.reference`)
sums along a row  `row_sum` adds in a fixed tree.
softmax           Pages are added one by one from the first, and rescaled by powers of two, which is exact.
                  (`paged_attention.reference`)
all else          is computed element by element.

The first rule rests on two properties of products of one shape: a row has the same bits in each place among the
ROW_BLOCK rows, and however many products run side by side. `python -m jaxinfer.doctor` checks both on the machine at
hand, and repeats the trials. The trials are needed: with jax 0.10.2 products of weights [768, 768] have the bits of 8
rows at 2, 4, 16, 24 and 48 rows on a CPU with AVX-512, but not at 32 or 64. With jax 0.12.0 on the same CPU they have
them at 24 and 32 rows, but not at 2, 4, 16, 48 or 64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# As many float32 as the vector registers of a CPU hold at least.
ROW_BLOCK = 8
# Elements of the largest operand that is tried (256 MB in float32).
MAX_TRIAL_SIZE = 2**26
# Numbers that operands of trials repeat. A prime, so that no two of their rows are alike.
NUM_TRIAL_NUMBERS = 65_521

# rows [batch..., n, A], operand -> [batch..., n, B]
Product = Callable[[jax.Array, jax.Array], jax.Array]


def rows_by_matrices(rows: jax.Array, matrices: jax.Array) -> jax.Array:
    """Returns rows [R, K, n, A] times matrices [R, K, A, B], f32[R, K, n, B]."""
    return jnp.einsum("rkna,rkab->rknb", rows, matrices, preferred_element_type=jnp.float32)


@functools.cache
def equal_row_counts(
    product: Product, counts: tuple[int, ...], row_shape: tuple[int, ...], operand_shape: tuple[int, ...], dtype: Any
) -> frozenset[int]:
    """Returns those of `counts` for which products have the bits of products of ROW_BLOCK rows, on this machine.

    The products are computed and compared, with `counts` rows of row_shape [batch..., A] and an operand of
    `operand_shape`. Returns none if the default device is no CPU or the operand is larger than MAX_TRIAL_SIZE.
    """
    if jax.default_backend() != "cpu" or math.prod(operand_shape) > MAX_TRIAL_SIZE:
        return frozenset()
    num_rows = -(-max(counts) // ROW_BLOCK) * ROW_BLOCK
    numbers = np.random.default_rng(0).standard_normal(NUM_TRIAL_NUMBERS).astype(dtype)
    rows = np.resize(numbers[::-1], (*row_shape[:-1], num_rows, row_shape[-1]))
    # The caller may be under a trace of its own.
    with jax.ensure_compile_time_eval():
        is_equal = _compare(rows, np.resize(numbers, operand_shape), product=product, counts=counts)
        return frozenset(count for count, equal in zip(counts, is_equal, strict=True) if equal)


@functools.partial(jax.jit, static_argnames=("product", "counts"))
def _compare(rows: jax.Array, operand: jax.Array, *, product: Product, counts: tuple[int, ...]) -> list[jax.Array]:
    starts = range(0, rows.shape[-2], ROW_BLOCK)
    expected = jnp.concatenate([product(rows[..., i : i + ROW_BLOCK, :], operand) for i in starts], axis=-2)
    return [(product(rows[..., :n, :], operand) == expected[..., :n, :]).all() for n in counts]
