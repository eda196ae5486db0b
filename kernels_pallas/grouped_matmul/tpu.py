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
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.device import device_at_hand
from kernels_pallas.dispatch import NoGainError
from kernels_pallas.grouped_matmul.reference import experts_of, grouped_matmul_reference
from kernels_pallas.paged_attention.tpu.kernel import VMEM_BYTES

LANES = 128
# Rows of a block. An expert's weights are read once whatever it is, and each block takes a turn of the matrix unit for
# each expert that has rows in it; so blocks are short if experts have few rows.
FEW_ROWS, MANY_ROWS = 32, 128
# Bytes of the weights of a turn, of which two are in vector memory at once, beside what integers are widened to.
WEIGHTS_BYTES = 2**22


def grouped_matmul_tpu(
    rows: jax.Array,
    weights: jax.Array,
    counts: jax.Array,
    scales: jax.Array | None,
    first_expert: jax.Array | None,
    *,
    block_rows: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The contract is that of `grouped_matmul`; `block_rows` None takes them by the mean rows of an expert."""
    R, D = rows.shape
    if R == 0:
        raise NoGainError("no rows at all are not supported by the TPU kernel; use implementation='reference'")
    if rows.dtype not in ("bfloat16", "float32"):
        raise NotImplementedError(
            f"rows.dtype={rows.dtype} is not supported by the TPU kernel; use bfloat16 or float32"
        )
    if weights.shape[2] < D:
        raise NotImplementedError("packed integers are not supported by the TPU kernel; give weights of dtype int4")
    if not interpret and device_at_hand().platform != "tpu":
        raise NotImplementedError(f"device={device_at_hand().platform!r} is no TPU")
    if block_rows is None:
        mean = R / counts.shape[0]
        block_rows = MANY_ROWS if mean > FEW_ROWS else FEW_ROWS
    first = jnp.zeros((), jnp.int32) if first_expert is None else first_expert
    return _multiply(rows, weights, counts, scales, first, block_rows, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _multiply(
    rows: jax.Array,
    weights: jax.Array,
    counts: jax.Array,
    scales: jax.Array | None,
    first: jax.Array,
    block_rows: int,
    interpret: bool,
) -> jax.Array:
    (R, D), F = rows.shape, weights.shape[1]
    E, num_groups = counts.shape[0], 0 if scales is None else scales.shape[2]
    turns = turns_of(counts, num_rows=R, block_rows=block_rows)
    block_channels = _block_channels(F, D, max(weights.dtype.itemsize, rows.dtype.itemsize))

    def of_rows(channels: Any, turn: Any, turns: Any, _: Any) -> tuple[Any, Any]:
        return turns[1, turn], 0

    def of_expert(channels: Any, turn: Any, turns: Any, first: Any) -> tuple[Any, Any, Any]:
        expert = first[0] + turns[0, turn]
        return (expert, 0, channels) if is_turned else (expert, channels, 0)

    def of_scales(channels: Any, turn: Any, turns: Any, _: Any) -> tuple[Any, Any, Any]:
        return turns[0, turn], 0, channels

    def of_out(channels: Any, turn: Any, turns: Any, _: Any) -> tuple[Any, Any]:
        return turns[1, turn], channels

    is_turned = lies_turned(F, D)
    operands = [rows, weights.swapaxes(1, 2) if is_turned else weights]
    block = (None, D, block_channels) if is_turned else (None, block_channels, D)
    specs = [pl.BlockSpec((block_rows, D), of_rows), pl.BlockSpec(block, of_expert)]
    if scales is not None:
        # With the channels along lanes, as the result has them.
        operands.append(experts_of(scales, first, E).astype(jnp.float32).swapaxes(1, 2))
        specs.append(pl.BlockSpec((None, num_groups, block_channels), of_scales))
    return pl.pallas_call(
        functools.partial(_kernel, num_experts=E, num_groups=num_groups, is_turned=is_turned),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            # Turns of an expert follow each other, so its channels are read once; so do those of a block of rows,
            # which stays in vector memory until all its experts have written.
            grid=(pl.cdiv(F, block_channels), turns.shape[1]),
            in_specs=specs,
            out_specs=pl.BlockSpec((block_rows, block_channels), of_out),
        ),
        out_shape=jax.ShapeDtypeStruct((R, F), rows.dtype),
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        name="grouped_matmul",
    )(turns, first.reshape(1).astype(jnp.int32), *operands)


def _forward(*operands: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _multiply(*operands), operands[:5]


def _backward(block_rows: int, interpret: bool, operands: tuple[Any, ...], change: jax.Array) -> tuple[Any, ...]:
    """Returns the derivative of the reference, for Pallas differentiates no kernel."""
    rows, weights, counts, scales, first = operands

    def multiply(rows: jax.Array, weights: jax.Array, scales: jax.Array | None) -> jax.Array:
        return grouped_matmul_reference(rows, weights, counts, scales, first)

    _, derivative = jax.vjp(multiply, rows, weights, scales)
    of_rows, of_weights, of_scales = derivative(change)
    return of_rows, of_weights, None, of_scales, None


_multiply.defvjp(_forward, _backward)


def lies_turned(num_channels: int, num_inputs: int) -> bool:
    """True if weights lie with channels along lanes and not inputs: XLA for TPU lays an array out with least padding.

    The kernel reads what lies there; any other view of it would be a copy.
    """
    F, D = num_channels, num_inputs
    return F * pl.cdiv(D, LANES) > D * pl.cdiv(F, LANES)


def _block_channels(num_channels: int, num_inputs: int, itemsize: int) -> int:
    """Returns the channels of a turn: all, or a multiple of LANES whose weights fit in WEIGHTS_BYTES."""
    most = max(WEIGHTS_BYTES // (num_inputs * itemsize) // LANES, 1) * LANES
    if num_channels <= most:
        return num_channels
    # Equal parts, so that the last is not nearly empty.
    return pl.cdiv(pl.cdiv(num_channels, pl.cdiv(num_channels, most)), LANES) * LANES


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


def _kernel(
    turns: Any, _: Any, rows: Any, weights: Any, *refs: Any, num_experts: int, num_groups: int, is_turned: bool
) -> None:
    """One turn: rows [block_rows, D] times weights [block_channels, D] of an expert, or [D, block_channels].

    There may be scales [groups, block_channels].
    """
    *scales, out = refs
    inputs = 0 if is_turned else 1  # the axis of weights
    turn = pl.program_id(1)
    _, block, first, end, expert = (turns[i, turn] for i in range(5))
    row = block * out.shape[0] + jax.lax.broadcasted_iota(jnp.int32, (out.shape[0], 1), 0)
    # Other turns write the other rows of the block.
    is_own = (row >= first) & (row < end)

    @pl.when((first < end) & (expert < num_experts))
    def _() -> None:
        x, w = rows[...], weights[...]
        if not scales:
            product = _product(x, w, inputs)
        elif num_groups == 1:
            product = _product(x, _widened(w, x.dtype), inputs) * scales[0][...]
        else:
            product = _sum_of_groups(x, _widened(w, x.dtype), scales[0], inputs)
        out[...] = jnp.where(is_own, product.astype(out.dtype), out[...])

    @pl.when((first < end) & (expert == num_experts))
    def _() -> None:
        out[...] = jnp.where(is_own, jnp.zeros((), out.dtype), out[...])


def _sum_of_groups(x: jax.Array, w: jax.Array, scales: Any, inputs: int) -> jax.Array:
    """Returns the products of groups of inputs, each times its scales, f32[block_rows, block_channels]."""
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
        out = out + _product(part, own, inputs) * scales[group : group + 1, :]
    return out


def _product(x: jax.Array, w: jax.Array, inputs: int) -> jax.Array:
    return jax.lax.dot_general(x, w, (((1,), (inputs,)), ((), ())), preferred_element_type=jnp.float32)


def _widened(w: jax.Array, dtype: Any) -> jax.Array:
    return w.astype(jnp.float32).astype(dtype)
