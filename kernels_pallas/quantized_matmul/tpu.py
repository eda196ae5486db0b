"""The group-wise quantized product for TPUs, by weights in a stack of layers.

XLA copies 4-bit weights, and queries, keys and values of 8 bits, out of the stack before it multiplies by them. Of many
rows it also writes 4-bit weights out in floating point. The Pallas kernel reads the integers of a layer in the stack.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.device import lies_turned
from kernels_pallas.dispatch import NoGainError
from kernels_pallas.packed_numbers import wide_scales
from kernels_pallas.quantized_matmul.reference import layer_of
from kernels_pallas.tpu_products import multiply_turns, require_support

# Bytes of a block of rows, of which two are in vector memory at once.
ROWS_BYTES = 2**22
# A register holds 16 rows of bfloat16. Of many rows of few inputs, the results would fill vector memory.
MIN_ROWS, MAX_ROWS = 16, 512


def quantized_matmul_tpu(
    x: jax.Array,
    weights: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    layer: jax.Array | None,
    *,
    block_rows: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The contract is that of `quantized_matmul`; `block_rows` None is a power of two that fits in ROWS_BYTES."""
    if layer is None:
        raise NoGainError(
            "layer=None is not supported by the TPU kernel: XLA reads weights outside a stack where they lie; use"
            " implementation='reference'"
        )
    (T, D), (n, *outputs, _) = x.shape, weights.shape
    F, is_turned = math.prod(outputs), lies_turned(outputs[-1], D)
    if is_turned and len(outputs) > 1:
        raise NotImplementedError(
            f"weights.shape={weights.shape} is not supported by the TPU kernel: with {D} inputs the last axis of"
            " channels lies along lanes, so that all channels are no single axis of memory"
        )
    weights = weights.reshape(n, F, -1)
    require_support(x, weights, interpret)
    block_rows = block_rows or min(T, max_block_rows(D, x.dtype.itemsize))
    block = jnp.arange(pl.cdiv(T, block_rows), dtype=jnp.int32)
    none, all_rows = jnp.zeros_like(block), jnp.full_like(block, T)
    return multiply_turns(
        x,
        weights,
        # Not all of the stack: XLA would turn those whose channels do not lie along lanes.
        wide_scales(weights, layer_of(scales, layer)[None]),
        jnp.stack([none, block, none, all_rows, none]),
        layer,
        num_matrices=1,
        block_rows=block_rows,
        is_turned=is_turned,
        interpret=interpret,
        name="quantized_matmul",
        zeros=None if zeros is None else layer_of(zeros, layer)[None],
    )


def max_block_rows(num_inputs: int, itemsize: int) -> int:
    """Returns the largest power of two of rows that fit in ROWS_BYTES, from MIN_ROWS to MAX_ROWS."""
    fitting = 2 ** ((ROWS_BYTES // (num_inputs * itemsize)).bit_length() - 1)
    return min(max(fitting, MIN_ROWS), MAX_ROWS)
