"""How much of the cache a kernel holds at a time."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention.layout import Pages

# Little's law: a TPU v6e moves 1.6 MB per microsecond and answers after about two, so that much must be under way.
BLOCK_BYTES = 2**21
BLOCK_TOKENS = 512
# One block is computed with while the others are under way.
DECODE_BUFFERS = 4
RAGGED_BUFFERS = 3
# Rows of queries that share a block of keys: 256 are two passes of the matrix unit.
RAGGED_ROWS = 256


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


def decode_blocks(pages: Pages, table_width: int) -> Blocks:
    """Returns block sizes for one token a row: BLOCK_BYTES each, where a block of BLOCK_TOKENS is that large."""
    return Blocks(_block_pages(pages, table_width), DECODE_BUFFERS)


def ragged_blocks(
    pages: Pages, table_width: int, num_tokens: int, num_groups: int, q_len: int | None, tree_mask: jax.Array | None
) -> Blocks:
    """Returns block sizes for any number of tokens a row; those of a tree stay together."""
    queries = min(max(8, RAGGED_ROWS // num_groups), q_len or num_tokens)
    if tree_mask is not None:
        queries = q_len or min(32 * tree_mask.shape[1], num_tokens)
    return Blocks(_block_pages(pages, table_width), RAGGED_BUFFERS, queries, _matrix_unit())


def _matrix_unit() -> int:
    """Returns the width of the TPU's matrix unit: with fewer rows at a time it waits, with more registers spill."""
    try:
        return pltpu.get_tpu_info().mxu_column_size
    except ValueError:  # interpreted, where there is no TPU
        return Blocks.rows


def _block_pages(pages: Pages, table_width: int) -> int:
    _, planes, tiles, rows, width = pages.arrays[0].shape
    page_bytes = planes * tiles * rows * width * pages.dtype.itemsize
    tokens = min(BLOCK_TOKENS, BLOCK_BYTES * pages.page_size // page_bytes)
    return max(1, min(tokens // pages.page_size, table_width))
