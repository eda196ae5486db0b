"""How much of the cache a kernel holds at a time: what is tuned for the chip at hand, or else by rules."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention.layout import Pages
from kernels_pallas.paged_attention.tpu.attend import MAX_ROWS_IN_REGISTERS
from kernels_pallas.paged_attention.tuned_tables import tuned_table

BLOCK_BYTES = 2**21
BLOCK_TOKENS = 512
# One block is computed with while the others are under way.
MIN_BUFFERS = 3
INTERPRETED_BUFFERS = 4
MAX_BUFFERS = 12
# All blocks that are held at once, half of what kernels may use of the vector memory.
MAX_HELD_BYTES = 2**24
# How long a TPU's memory takes to answer.
LATENCY = 2e-6
# Queries that share a block of keys. By the compiler's schedules more are slower where a row has 128 tokens in a step,
# fewer wherever it has more.
TILE_QUERIES = 128
# Numbers of a tile's result, over all heads; what the kernel holds beside it is some six times as much.
MAX_TILE_SIZE = 2**19
# A row has a tile of its own, however few its tokens. From this many rows on, tiles are halved, for less padding.
MAX_PADDING = 8


@dataclass(frozen=True)
class Blocks:
    """A block is `pages` pages of one row; `buffers` of them are held, of which all but one are being fetched.

    `queries` tokens of a row share a block; where their heads make more than `rows` rows, that many are computed with
    at a time.
    """

    pages: int
    buffers: int
    queries: int = 1
    rows: int = 128


def decode_blocks(pages: Pages, table_width: int, num_groups: int) -> Blocks:
    """Returns block sizes for one token a row: BLOCK_BYTES each, where a block of BLOCK_TOKENS is that large."""
    chip = chip_at_hand()
    call = ("decode", pages.dtype.name, pages.num_kv_heads, pages.head_dim, num_groups)
    tuned = None if chip is None else tuned_table(f"tpu_{chip}").get(call)
    if tuned is not None:
        return Blocks(_pages_of(tuned["block_tokens"], pages.page_size, table_width), tuned["buffers"])
    return untuned_blocks(pages.arrays[0], table_width)


def ragged_blocks(
    pool: jax.Array,
    table_width: int,
    num_tokens: int,
    num_rows: int,
    num_kv_heads: int,
    num_groups: int,
    q_len: int | None,
    tree_mask: jax.Array | None,
) -> Blocks:
    """Returns block sizes for any number of tokens a row; those of a tree stay together."""
    tile_size = num_kv_heads * num_groups * pool.shape[-1]
    queries = TILE_QUERIES if TILE_QUERIES * num_rows <= MAX_PADDING * num_tokens else TILE_QUERIES // 2
    queries = min(max(8, min(queries, MAX_TILE_SIZE // tile_size)), q_len or num_tokens)
    if tree_mask is not None:
        queries = q_len or min(32 * tree_mask.shape[1], num_tokens)
    blocks = replace(untuned_blocks(pool, table_width), queries=queries, rows=matrix_unit())
    # More rows take longer to compute with than the memory to answer.
    return blocks if queries * num_groups <= MAX_ROWS_IN_REGISTERS else replace(blocks, buffers=MIN_BUFFERS)


def buffers_for(block_bytes: int, bandwidth: float) -> int:
    """Returns how many blocks to hold, so that what is under way keeps the memory busy while it answers."""
    wanted = 1 + math.ceil(LATENCY * bandwidth / block_bytes)  # Little's law, and the block that is computed with
    return max(MIN_BUFFERS, min(wanted, MAX_BUFFERS, MAX_HELD_BYTES // block_bytes))


def chip_at_hand() -> str | None:
    """Returns the name of the TPU that is compiled for, as "v5e" or "7x"; None where the kernels are interpreted."""
    try:
        info: Any = pltpu.get_tpu_info()
    except ValueError:
        return None
    return str(info.chip_version.value)


def matrix_unit() -> int:
    """Returns the width of the TPU's matrix unit: with fewer rows at a time it waits, with more registers spill."""
    try:
        return pltpu.get_tpu_info().mxu_column_size
    except ValueError:  # interpreted, where there is no TPU
        return Blocks.rows


def untuned_blocks(pool: jax.Array, table_width: int) -> Blocks:
    """Returns block sizes by rules, for a pool [P, C, S / t, t, W]."""
    _, planes, tiles, rows, width = pool.shape
    page_size, page_bytes = tiles * rows, planes * tiles * rows * width * pool.dtype.itemsize
    num_pages = _pages_of(min(BLOCK_TOKENS, BLOCK_BYTES * page_size // page_bytes), page_size, table_width)
    try:
        info: Any = pltpu.get_tpu_info()
    except ValueError:  # interpreted, where nothing has to be waited for
        return Blocks(num_pages, INTERPRETED_BUFFERS)
    return Blocks(num_pages, buffers_for(num_pages * page_bytes, info.mem_bw_bytes_per_second * info.num_cores))


def _pages_of(tokens: int, page_size: int, table_width: int) -> int:
    return max(1, min(tokens // page_size, table_width))
