"""The Pallas kernel of a TPU that multiplies rows by weights where they lie in a stack of several layers.

A kernel reads whole arrays: of a slice of a stack, XLA makes a copy for it. So this one gets the stack, and finds the
weights of its layer there, one matrix or one per expert. A turn of the kernel reads some channels of a matrix, widens
integers in vector memory, and multiplies a block of rows. The pipeline fetches the next channels or the next matrix
meanwhile. Which rows meet which matrix is the caller's choice, in the form of turns.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.device import LANES, VMEM_BYTES, device_at_hand
from kernels_pallas.dispatch import NoGainError

# Bytes of the weights of a turn, of which two are in vector memory at once, beside what integers are widened to.
WEIGHTS_BYTES = 2**22


def require_support(rows: jax.Array, weights: jax.Array, interpret: bool) -> None:
    """Raises NotImplementedError, with the reason, if the kernel cannot multiply rows [R, D] by weights [S, F, D]."""
    if rows.shape[0] == 0:
        raise NoGainError("no rows at all are not supported by the TPU kernel; use implementation='reference'")
    if rows.dtype not in ("bfloat16", "float32"):
        raise NotImplementedError(
            f"rows.dtype={rows.dtype} is not supported by the TPU kernel; use bfloat16 or float32"
        )
    if weights.dtype == "uint8":
        raise NotImplementedError(
            "weights.dtype=uint8 is not supported by the TPU kernel; use integers or float8_e4m3fn"
        )
    if weights.shape[2] < rows.shape[1]:
        raise NotImplementedError("packed integers are not supported by the TPU kernel; give weights of dtype int4")
    if not interpret and device_at_hand().platform != "tpu":
        raise NotImplementedError(f"device={device_at_hand().platform!r} is no TPU")


def multiply_turns(
    rows: jax.Array,
    weights: jax.Array,
    scales: jax.Array | None,
    turns: jax.Array,
    first: jax.Array,
    *,
    num_matrices: int,
    block_rows: int,
    is_turned: bool,
    interpret: bool,
    name: str,
    zeros: jax.Array | None = None,
) -> jax.Array:
    """Returns rows times the transposed weights of their turns, [R, F] in rows' dtype, added up in float32.

    Args:
      rows: [R, D] in blocks of `block_rows`.
      weights: [S, F, D] in rows' dtype, integers or float8_e4m3fn.
      scales: f[num_matrices, F, groups] of weights in another dtype, those of the layer.
      turns: i32[5, turns], a matrix of the layer, a block of rows, the first of the rows, their end, and again the
        matrix, or `num_matrices` for rows whose result is zeros. Turns of a block of rows follow each other.
      first: i32[] the first of the layer's `num_matrices` in the stack.
      is_turned: what `lies_turned` says of the weights as they are stored.
      name: of the kernel in the compiler's output.
      zeros: i8 or i4 zero points of the integers in the shape of `scales`; None is 0.
    """
    (R, D), F = rows.shape, weights.shape[1]
    num_groups = 0 if scales is None else scales.shape[2]
    block_channels = _block_channels(F, D, max(weights.dtype.itemsize, rows.dtype.itemsize))

    def of_rows(channels: Any, turn: Any, turns: Any, _: Any) -> tuple[Any, Any]:
        return turns[1, turn], 0

    def of_weights(channels: Any, turn: Any, turns: Any, first: Any) -> tuple[Any, Any, Any]:
        matrix = first[0] + turns[0, turn]
        return (matrix, 0, channels) if is_turned else (matrix, channels, 0)

    def of_scales(channels: Any, turn: Any, turns: Any, first: Any) -> tuple[Any, Any, Any]:
        return turns[0, turn], 0, channels

    def of_out(channels: Any, turn: Any, turns: Any, _: Any) -> tuple[Any, Any]:
        return turns[1, turn], channels

    weights = weights.swapaxes(1, 2) if is_turned else weights
    if not interpret:
        # XLA would copy a stack that fits in vector memory there whole, for each of its layers.
        weights = pltpu.with_memory_space_constraint(weights, pltpu.HBM)
    operands = [rows, weights]
    block = (None, D, block_channels) if is_turned else (None, block_channels, D)
    specs = [pl.BlockSpec((block_rows, D), of_rows), pl.BlockSpec(block, of_weights)]
    if scales is not None:
        # With the channels along lanes, as the result has them.
        of_groups = [a for a in (scales, zeros) if a is not None]
        operands += [a.astype(jnp.float32).swapaxes(1, 2) for a in of_groups]
        specs += [pl.BlockSpec((None, num_groups, block_channels), of_scales)] * len(of_groups)
    return pl.pallas_call(
        functools.partial(_kernel, num_matrices=num_matrices, is_turned=is_turned),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            # Turns of a matrix follow each other, so its channels are read once; so do those of a block of rows,
            # which stays in vector memory until all its matrices have written.
            grid=(pl.cdiv(F, block_channels), turns.shape[1]),
            in_specs=specs,
            out_specs=pl.BlockSpec((block_rows, block_channels), of_out),
        ),
        out_shape=jax.ShapeDtypeStruct((R, F), rows.dtype),
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        name=name,
    )(turns, first.reshape(1).astype(jnp.int32), *operands)


def _block_channels(num_channels: int, num_inputs: int, itemsize: int) -> int:
    """Returns the channels of a turn: all, or a multiple of LANES whose weights fit in WEIGHTS_BYTES."""
    most = max(WEIGHTS_BYTES // (num_inputs * itemsize) // LANES, 1) * LANES
    if num_channels <= most:
        return num_channels
    # Equal parts, so that the last is not nearly empty.
    return pl.cdiv(pl.cdiv(num_channels, pl.cdiv(num_channels, most)), LANES) * LANES


def _kernel(turns: Any, _: Any, rows: Any, weights: Any, *refs: Any, num_matrices: int, is_turned: bool) -> None:
    """One turn: rows [block_rows, D] times weights [block_channels, D] of a matrix, or [D, block_channels].

    There may be scales and zero points [groups, block_channels].
    """
    *of_groups, out = refs
    inputs = 0 if is_turned else 1  # the axis of weights
    turn = pl.program_id(1)
    _, block, first, end, matrix = (turns[i, turn] for i in range(5))
    row = block * out.shape[0] + jax.lax.broadcasted_iota(jnp.int32, (out.shape[0], 1), 0)
    # Other turns write the other rows of the block.
    is_own = (row >= first) & (row < end)

    @pl.when((first < end) & (matrix < num_matrices))
    def _() -> None:
        x, w = rows[...], weights[...]
        if not of_groups:
            product = _product(x, w, inputs)
        elif len(of_groups) == 1 and of_groups[0].shape[0] == 1:
            product = _product(x, _widened(w, x.dtype), inputs) * of_groups[0][...]
        else:
            product = _sum_of_groups(x, _widened(w, x.dtype), *of_groups, inputs=inputs)
        out[...] = jnp.where(is_own, product.astype(out.dtype), out[...])

    @pl.when((first < end) & (matrix == num_matrices))
    def _() -> None:
        out[...] = jnp.where(is_own, jnp.zeros((), out.dtype), out[...])


def _sum_of_groups(x: jax.Array, w: jax.Array, scales: Any, zeros: Any = None, *, inputs: int) -> jax.Array:
    """Returns the products of groups of inputs, each times its scales, f32[block_rows, block_channels].

    A zero point of a channel counts for all of a group's inputs, so it is taken from the product times their sum.
    """
    D, groups = x.shape[1], scales.shape[0]
    size, out = D // groups, jnp.zeros((x.shape[0], scales.shape[1]), jnp.float32)
    for group in range(groups):
        start, end = group * size, (group + 1) * size
        # Whole rows of lanes around the group, in which the numbers of its neighbours are zero.
        low, high = start // LANES * LANES, min(pl.cdiv(end, LANES) * LANES, D)
        part = x[:, low:high]
        if (low, high) != (start, end):
            lane = low + jax.lax.broadcasted_iota(jnp.int32, part.shape, 1)
            part = jnp.where((lane >= start) & (lane < end), part, jnp.zeros((), part.dtype))
        own = jax.lax.slice_in_dim(w, low, high, axis=inputs)
        product = _product(part, own, inputs)
        if zeros is not None:
            product = product - part.astype(jnp.float32).sum(1, keepdims=True) * zeros[group : group + 1, :]
        out = out + product * scales[group : group + 1, :]
    return out


def _product(x: jax.Array, w: jax.Array, inputs: int) -> jax.Array:
    return jax.lax.dot_general(x, w, (((1,), (inputs,)), ((), ())), preferred_element_type=jnp.float32)


def _widened(w: jax.Array, dtype: Any) -> jax.Array:
    return w.astype(jnp.float32).astype(dtype)
