"""Block sizes of the GPU kernel: what can be chosen, what is tuned for the device, and what is chosen elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels_pallas.device import HOPPER
from kernels_pallas.paged_attention.tuned_tables import table_name, tuned_table
from kernels_pallas.triton import Target, require_block_sizes

# By Little's law 4.8 TB/s for 1 µs need 36 KB in flight on each of 132 multiprocessors. A program of the decode kernel
# has two blocks of 64 keys of 256 bytes and their values under way, 64 KB, also while it computes.
PROGRAMS_PER_CORE = 2
# A split shorter than this spends more on starting and combining than on reading.
MIN_SPLIT = 256
MAX_SPLITS = 32
# The most keys of a part. One long row among short ones then holds up no program for longer than others.
SPLIT_KEYS = 2048
# Parts that long contexts may add, for each program that the device runs at once: so no part takes longer than half of
# what all take together, and programs that find no part take no time that counts.
PARTS_PER_PROGRAM = 4
# The fields that a table has.
TUNED = ("block_k", "num_warps", "num_stages")


@dataclass(frozen=True, kw_only=True)
class GpuBlockSizes:
    """How the GPU kernel cuts its work. Any choice gives the same result up to rounding."""

    block_m: int  # query rows (queries x heads of a group) per tile
    block_k: int  # keys per block
    num_splits: int  # parts that the context of a tile is cut into at least, if it has the blocks
    split_keys: int  # the most keys of a part, unless the batch would have more than `added_parts` for that
    added_parts: int  # for each tile of heads
    num_warps: int
    num_stages: int  # of Triton's pipeline

    def __post_init__(self) -> None:
        counts = ("num_splits", "split_keys", "added_parts", "num_warps", "num_stages")
        require_block_sizes(self, blocks=("block_m", "block_k"), counts=counts)


def gpu_block_sizes(
    *,
    num_rows: int,
    queries: int,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    page_dtype: str,
    max_context: int,
    has_tree: bool,
    target: Target,
) -> GpuBlockSizes:
    """Returns block sizes for `num_rows` rows of up to `queries` queries.

    The compile tests show that each choice by these rules stays in registers, for heads of up to 512. What is tuned for
    the device are the blocks of single queries, and how they are fetched.
    """
    is_wide, is_widest, is_hopper = head_dim > 128, head_dim > 256, target.capability >= HOPPER
    # The accumulator, float32 [block_m, head_dim], lives in registers; the bits of a tree want some as well. On an H200
    # tiles of 64 took 0.95 of the time of 128 for a prompt of 4,096 tokens, and 0.88 for four of 1,024 (heads of 128,
    # jax 0.11.2). For an A100 and an L4 the compiler spills registers with 64. Heads above 256 have half the tiles and
    # the keys: with more, registers spill on all three, and an L4 has too little shared memory.
    # Columns of padding take a mask, for which an A100 and an L4 have registers with 64 rows and four warps alone.
    is_padded = head_dim & (head_dim - 1) != 0
    has_four_warps = not is_wide and (is_hopper or is_padded)
    limit = 32 if is_widest else 64 if is_hopper or is_wide or has_tree or is_padded else 128
    block_m = 16
    while block_m < group or block_m < min(queries * group, limit):
        block_m *= 2
    # Before Hopper the operands of tensor cores pass through registers.
    is_decode = block_m == 16
    needs_eight = is_wide or (is_hopper and group == 8 and head_dim > 64)
    is_crowded = is_wide or not (is_decode or is_hopper or head_dim <= 64)
    num_tiles = num_rows * num_kv_heads * -(-queries // (block_m // group))
    splits = PROGRAMS_PER_CORE * target.num_cores // num_tiles
    sizes = GpuBlockSizes(
        block_m=block_m,
        block_k=(32 if is_crowded else 64) // (2 if is_widest else 1),
        num_splits=max(1, min(splits, MAX_SPLITS, max_context // MIN_SPLIT)),
        split_keys=SPLIT_KEYS,
        added_parts=added_parts(
            PROGRAMS_PER_CORE * target.num_cores, num_kv_heads * group // heads_of_tile(group, block_m)
        ),
        # Four warps spill registers in decoding with heads of 129 to 256, and on Hopper with groups of 8 heads of 128.
        num_warps=8 if (is_decode and needs_eight) or block_m >= (128 if has_four_warps else 64) else 4,
        # Two blocks are under way while a third is computed with; wide tiles of prefill, and trees before Hopper, have
        # room for fewer.
        num_stages=2 if not is_decode and (is_wide or (has_tree and not is_hopper)) else 3,
    )
    call = ("decode", page_dtype, num_kv_heads, head_dim, group)
    tuned = tuned_table(table_name(target.kind)).get(call) if queries == 1 else None
    return sizes if tuned is None else replace(sizes, **{name: tuned[name] for name in TUNED})


def added_parts(num_programs: int, head_tiles: int) -> int:
    """Returns the parts that long contexts may add on a device that runs that many programs at once."""
    return -(-PARTS_PER_PROGRAM * num_programs // head_tiles)


def heads_of_tile(group: int, block_m: int) -> int:
    """Returns how many of the query heads of a KV head share a tile: all of them if they fit."""
    return max(n for n in range(1, min(group, block_m) + 1) if group % n == 0)
