"""The grouped product for NVIDIA GPUs from Ampere on, in Pallas-Triton.

XLA needs much memory for `jax.lax.ragged_dot` on a GPU, and writes integers out in floating point before it. Here a
program takes some rows of one expert and some output channels. It reads the expert's weights block by block and widens
integers in registers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import triton
from kernels_pallas.dispatch import NoGainError
from kernels_pallas.grouped_matmul.reference import experts_of, grouped_matmul_reference
from kernels_pallas.packed_numbers import split_int4
from kernels_pallas.packed_numbers.on_gpu import load_zeros, numbers_of, scales_of_numbers

# Of float32, tensor cores multiply what `jax_default_matmul_precision` says, as in XLA's own products.
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class GroupedBlockSizes:
    """How the kernel cuts its work."""

    block_m: int  # rows
    block_n: int  # output channels
    block_k: int  # inputs, of one group of a scale at most
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        triton.require_block_sizes(self, blocks=("block_m", "block_n", "block_k"), counts=("num_warps", "num_stages"))


# Decoding: reading the weights takes the time, so blocks are long and several programs fit on a multiprocessor.
FEW_ROWS = GroupedBlockSizes(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=3)
SOME_ROWS = GroupedBlockSizes(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=3)
MANY_ROWS = GroupedBlockSizes(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3)


def grouped_block_sizes(*, rows: int, num_experts: int, itemsize: int, is_fp4: bool = False) -> GroupedBlockSizes:
    """Returns block sizes by the mean rows of an expert; the compile tests keep them free of spills.

    An expert's last tile is half empty on average, so an expert should have two tiles or more. A block of numbers of 4
    bytes, `itemsize`, has half the inputs. Widening FP4 takes registers, so that a block of it has half the channels.
    """
    mean = rows / num_experts
    sizes = SOME_ROWS if mean < 2 * MANY_ROWS.block_m else MANY_ROWS
    sizes = FEW_ROWS if mean <= FEW_ROWS.block_m else sizes
    sizes = replace(sizes, block_n=sizes.block_n // 2) if is_fp4 and sizes is MANY_ROWS else sizes
    return replace(sizes, block_k=sizes.block_k // 2) if itemsize == 4 else sizes


def grouped_matmul_gpu(
    rows: jax.Array,
    weights: jax.Array,
    counts: jax.Array,
    scales: jax.Array | None,
    first_expert: jax.Array | None = None,
    zeros: jax.Array | None = None,
    *,
    block_sizes: GroupedBlockSizes | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The contract is that of `grouped_matmul`; `block_sizes` None takes those by the mean rows of an expert."""
    _check(rows, weights, interpret)
    E = counts.shape[0]
    weights = experts_of(weights, first_expert, E)
    scales, zeros = jax.tree.map(lambda a: experts_of(a, first_expert, E), (scales, zeros))
    block_sizes = block_sizes or grouped_block_sizes(
        rows=rows.shape[0], num_experts=E, itemsize=rows.dtype.itemsize, is_fp4=weights.dtype == "uint8"
    )
    return _multiply(rows, weights, counts, scales, zeros, block_sizes, interpret)


def _check(rows: jax.Array, weights: jax.Array, interpret: bool) -> None:
    if rows.shape[0] == 0:
        raise NoGainError("no rows at all are not supported by the GPU kernel; use implementation='reference'")
    if rows.dtype not in DTYPES:
        raise NotImplementedError(f"rows.dtype={rows.dtype} is not supported by the GPU kernel; supported: {DTYPES}")
    if weights.dtype == "int4":
        raise NotImplementedError(
            "weights.dtype=int4 is not supported by the GPU kernel; pack two integers to a byte by pack_int4"
        )
    if not interpret:
        triton.target()  # raises for what is no GPU


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _multiply(
    rows: jax.Array,
    weights: jax.Array,
    counts: jax.Array,
    scales: jax.Array | None,
    zeros: jax.Array | None,
    block_sizes: GroupedBlockSizes,
    interpret: bool,
) -> jax.Array:
    R, F = rows.shape[0], weights.shape[1]
    tiles = tiles_of(counts, num_rows=R, block_m=block_sizes.block_m)
    target = triton.INTERPRETED if interpret else triton.target()
    weights, has_fp8_bits = triton.as_loaded(weights, target)
    arrays = {"tiles": tiles, "rows": rows, "weights": weights}
    arrays |= {name: a for name, a in (("scales", scales), ("zeros", zeros)) if a is not None}
    (out,) = triton.launch(
        functools.partial(_kernel, names=tuple(arrays), block_sizes=block_sizes, has_fp8_bits=has_fp8_bits),
        *arrays.values(),
        # Programs of the same rows are neighbours, and tiles of the same expert follow each other: so rows and weights
        # are read from memory once, and from the cache after.
        grid=(pl.cdiv(F, block_sizes.block_n), tiles.shape[1]),
        out=[jax.ShapeDtypeStruct((R, F), rows.dtype)],
        num_warps=block_sizes.num_warps,
        num_stages=block_sizes.num_stages,
        name="grouped_matmul",
        interpret=interpret,
    )
    return out


def _forward(*operands: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _multiply(*operands), operands[:5]


def _backward(
    block_sizes: GroupedBlockSizes, interpret: bool, operands: tuple[Any, ...], change: jax.Array
) -> tuple[Any, ...]:
    """Returns the derivative of the reference, for Pallas differentiates no kernel."""
    rows, weights, counts, scales, zeros = operands

    def multiply(rows: jax.Array, weights: jax.Array, scales: jax.Array | None) -> jax.Array:
        return grouped_matmul_reference(rows, weights, counts, scales, zeros=zeros)

    _, derivative = jax.vjp(multiply, rows, weights, scales)
    of_rows, of_weights, of_scales = derivative(change)
    return of_rows, of_weights, None, of_scales, None


_multiply.defvjp(_forward, _backward)


def tiles_of(counts: jax.Array, *, num_rows: int, block_m: int) -> jax.Array:
    """Returns the expert, the first row and the end of the expert's rows of each tile, i32[3, tiles].

    The rows of each expert begin a new tile. Rows without an expert have tiles of an expert E, and so have tiles that
    are left over, whose first row is past all rows.

        counts 3 0 5, 9 rows, block_m 4  ->  expert 0 2 2 3 3   first row 0 3 7 8 12   end 3 8 8 9 9
    """
    E = counts.shape[0]
    counts = jnp.concatenate([counts, num_rows - counts.sum(keepdims=True)])
    ends = jnp.cumsum(counts)
    tiles = -(-counts // block_m)
    tile_ends = jnp.cumsum(tiles)
    # With n experts that have rows, all but a row of each may fill tiles; each one's last tile need not be full.
    n = min(E + 1, num_rows)
    tile = jnp.arange((num_rows - n) // block_m + n, dtype=jnp.int32)
    expert = jnp.minimum((tile_ends[None] <= tile[:, None]).sum(1, dtype=jnp.int32), E)
    first = (ends - counts)[expert] + (tile - (tile_ends - tiles)[expert]) * block_m
    return jnp.stack([expert, first, ends[expert]])


class _Tile(NamedTuple):
    """The rows and channels of a program."""

    expert: jax.Array  # i32[]
    rows: jax.Array  # i32[block_m]
    channels: jax.Array  # i32[block_n]
    is_row: jax.Array  # bool[block_m]  of the expert
    is_channel: jax.Array  # bool[block_n]


class _Block(NamedTuple):
    """The stored columns that a turn of the loop reads."""

    groups: int  # of inputs that share a scale; 1 without scales
    group_size: int  # inputs of a group
    is_packed: bool
    width: int  # columns of a block
    span: int  # columns of a group
    per_group: int  # blocks of a group
    has_fp8_bits: bool


def _kernel(*refs, names: tuple[str, ...], block_sizes: GroupedBlockSizes, has_fp8_bits: bool) -> None:
    """One program: channels `program_id(0)` of tile `program_id(1)`."""
    arrays = SimpleNamespace(**({"scales": None, "zeros": None} | dict(zip(names, refs, strict=False))))
    (E, F, _), out_ref = arrays.weights.shape, refs[-1]
    expert, first, end = (triton.load(arrays.tiles, (i, pl.program_id(1))) for i in range(3))
    rows = first + jnp.arange(block_sizes.block_m, dtype=jnp.int32)
    channels = pl.program_id(0) * block_sizes.block_n + jnp.arange(block_sizes.block_n, dtype=jnp.int32)
    tile, block = _Tile(expert, rows, channels, rows < end, channels < F), _block_of(arrays, block_sizes, has_fp8_bits)
    out = jnp.zeros((block_sizes.block_m, block_sizes.block_n), jnp.float32)
    num_blocks = jnp.where(expert < E, jnp.int32(block.groups * block.per_group), jnp.int32(0))
    out = jax.lax.fori_loop(jnp.int32(0), num_blocks, functools.partial(_multiply_block, arrays, tile, block), out)
    if arrays.scales is not None and block.groups == 1:
        scales = triton.load(arrays.scales, (expert, channels, 0), tile.is_channel & (expert < E))
        out = out * scales_of_numbers(scales, arrays.weights, block.has_fp8_bits)[None]
    triton.store(out_ref, (rows[:, None], channels[None]), out, tile.is_row[:, None] & tile.is_channel[None])


def _block_of(arrays: SimpleNamespace, block_sizes: GroupedBlockSizes, has_fp8_bits: bool) -> _Block:
    D, columns = arrays.rows.shape[1], arrays.weights.shape[2]
    groups = 1 if arrays.scales is None else arrays.scales.shape[2]
    span, is_packed = columns // groups, columns < D
    width = block_sizes.block_k // 2 if is_packed else block_sizes.block_k
    width = max(triton.MIN_DOT, min(width, pl.next_power_of_2(span)))
    return _Block(groups, D // groups, is_packed, width, span, pl.cdiv(span, width), has_fp8_bits)


def _multiply_block(arrays: SimpleNamespace, tile: _Tile, block: _Block, i: jax.Array, out: jax.Array) -> jax.Array:
    """Adds the product of block i of the inputs to out f32[block_m, block_n]."""
    n = jnp.int32(block.per_group)
    group, part = (jnp.int32(0), i) if block.groups == 1 else (jax.lax.div(i, n), jax.lax.rem(i, n))
    columns = part * block.width + jnp.arange(block.width, dtype=jnp.int32)
    is_column = jnp.broadcast_to(True, columns.shape) if block.span % block.width == 0 else columns < block.span
    index = (tile.expert, tile.channels[:, None], (group * block.span + columns)[None])
    weights = triton.load(arrays.weights, index, tile.is_channel[:, None] & is_column[None])
    product = out if block.groups == 1 else jnp.zeros(out.shape, jnp.float32)
    zeros = None
    if arrays.zeros is not None:
        zeros = load_zeros(arrays.zeros, (tile.expert, tile.channels), group, block.groups, tile.is_channel)
    for j, half in enumerate(split_int4(weights) if block.is_packed else (weights,)):
        inputs = group * block.group_size + j * block.span + columns
        x = triton.load(arrays.rows, (tile.rows[:, None], inputs[None]), tile.is_row[:, None] & is_column[None])
        half = numbers_of(half, arrays.weights, block.has_fp8_bits)
        wide = half if half.dtype == x.dtype else half.astype(jnp.float32)
        wide = (wide if zeros is None else wide - zeros[:, None]).astype(x.dtype)
        product = product + triton.dot(x, wide, transpose_b=True)
    if block.groups == 1:
        return product
    scales = triton.load(arrays.scales, (tile.expert, tile.channels, group), tile.is_channel)
    return out + product * scales_of_numbers(scales, arrays.weights, block.has_fp8_bits)[None]
