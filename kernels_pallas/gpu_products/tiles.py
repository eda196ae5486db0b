"""The tile of a product on a GPU: enough bytes on their way from memory, and programs for all multiprocessors."""

from __future__ import annotations

import math
from typing import NamedTuple

from kernels_pallas.device import AMPERE, HOPPER, data_sheet
from kernels_pallas.paged_attention.tuned_tables import table_name, tuned_products
from kernels_pallas.triton import MIN_DOT, Target

# Shared memory of a program in bytes, by the least compute capability that has it, highest first.
SHARED_BYTES = {12.0: 101_376, HOPPER: 232_448, 8.6: 101_376, AMPERE: 166_912}
# By Little's law: what memory sends in the time that it takes to answer, half as much again.
LATENCY = 1.5e-6  # seconds
WARPGROUP_CHANNELS = 64  # that a warpgroup multiplies at once
FEW_ROWS = 64  # more of them are worth a warpgroup's instructions, even if multiprocessors stay idle
MAX_STAGES = 8
MIN_INPUTS, MAX_INPUTS = 32, 256  # of a block
MAX_SUMS = 2**13  # of a program of four warps; more would take all of its registers
BLOCK_BYTES = 2**13  # that a block of weights has at least where its inputs allow


class ProductTile(NamedTuple):
    """How the kernel cuts a product; the sums of a result depend on `block_channels` alone, by their instruction."""

    block_channels: int
    block_rows: int
    block_inputs: int
    num_stages: int  # blocks under way, the one in use included
    num_warps: int


def product_tile(
    target: Target,
    *,
    rows: int,
    channels: int,
    inputs: int,
    parts: int,
    itemsize: float,
    group_size: int | None = None,
    is_exact: bool = False,
) -> ProductTile:
    """Returns the tile for a product of rows by `parts` weights of `channels` and `inputs` each.

    It is that of the device's table if there is one, else by rules. `itemsize`: bytes of an element of the weights.
    `group_size`: inputs that share a scale, which a block has whole; None if all do. `is_exact`: the channels of a
    block go by the weights alone, for they decide which instruction adds a result up.
    """
    # Before Hopper the tensor cores' operands pass through registers, where 8 bits are widened too.
    most_rows = 64 if itemsize <= 1 and target.capability < HOPPER else 128
    block_rows = min(max(1 << (rows - 1).bit_length(), MIN_DOT), most_rows)
    key = (block_rows, itemsize, parts, channels, inputs)
    if not is_exact and group_size is None and (tuned := tuned_products(table_name(target.kind)).get(key)) is not None:
        return ProductTile(*(tuned[name] for name in ProductTile._fields))
    row_tiles = -(-rows // block_rows)
    block_channels = _block_channels(target, channels, 1 if is_exact else row_tiles)
    if rows > FEW_ROWS and not is_exact:
        block_channels = WARPGROUP_CHANNELS
    longest = _divisor(inputs)
    block_inputs = group_size or min(longest, 64 if rows > FEW_ROWS else 128)
    while (
        rows <= FEW_ROWS
        and block_channels * parts * block_inputs * itemsize < BLOCK_BYTES
        and block_inputs < MAX_INPUTS
        and inputs % (2 * block_inputs) == 0
    ):
        block_inputs *= 2
    block_bytes = int(parts * block_channels * block_inputs * itemsize)
    wanted = _stages(target, -(-channels // block_channels) * row_tiles, block_bytes)
    # Before Hopper the block in use has left shared memory.
    stages = shared_bytes(target.capability) // (block_bytes + 2 * block_rows * block_inputs)
    stages = min(wanted, stages if target.capability >= HOPPER else stages + 1)
    num_warps = 8 if parts * block_channels * block_rows > MAX_SUMS else 4
    return ProductTile(block_channels, block_rows, block_inputs, max(stages, 2), num_warps)


def takes_inputs(inputs: int) -> bool:
    """True if blocks divide the inputs of weights."""
    return _divisor(inputs) >= MIN_INPUTS


def shared_bytes(capability: float) -> int:
    """Returns the shared memory that a program may have on a GPU since Ampere."""
    return next(size for least, size in SHARED_BYTES.items() if capability >= least)


def needed_bytes(target: Target) -> float:
    """Returns the bytes that each multiprocessor should have under way."""
    sheet = data_sheet(target.kind)
    return (sheet.bandwidth if sheet else 1e12) * LATENCY / target.num_cores


def _block_channels(target: Target, channels: int, row_tiles: int) -> int:
    """Returns the most channels of a program that leave at most a third of the multiprocessors without one."""
    for count in (WARPGROUP_CHANNELS, 32):
        if 3 * row_tiles * -(-channels // count) >= 2 * target.num_cores:
            return count
    return MIN_DOT


def _stages(target: Target, programs: int, block_bytes: int) -> int:
    """Returns the stages by which the programs of a multiprocessor have enough bytes under way."""
    together = min(-(-programs // target.num_cores), 4)
    blocks = math.ceil(needed_bytes(target) / (together * block_bytes))
    return min(2 + blocks, MAX_STAGES)  # one block is in use, and one is waited for


def _divisor(inputs: int) -> int:
    """Returns the largest power of two that divides the inputs."""
    return inputs & -inputs
