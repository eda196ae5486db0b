"""How much of the cache a kernel holds at a time."""

from __future__ import annotations

from dataclasses import dataclass

from kernels_pallas.paged_attention.layout import Pages

# Little's law: a TPU v6e moves 1.6 MB per microsecond and answers after about two, so that much must be under way.
DECODE_BLOCK_BYTES = 2**21
DECODE_BLOCK_TOKENS = 512
# One block is computed with while the others are under way.
DECODE_BUFFERS = 4


@dataclass(frozen=True)
class DecodeBlocks:
    """A block is `pages` pages of one row; `buffers` of them are held, of which all but one are being fetched."""

    pages: int
    buffers: int


def decode_blocks(pages: Pages, table_width: int) -> DecodeBlocks:
    """Returns block sizes for a TPU decode step: DECODE_BLOCK_BYTES each where a block of tokens is that large."""
    _, planes, tiles, rows, width = pages.arrays[0].shape
    page_bytes = planes * tiles * rows * width * pages.dtype.itemsize
    tokens = min(DECODE_BLOCK_TOKENS, DECODE_BLOCK_BYTES * pages.page_size // page_bytes)
    return DecodeBlocks(max(1, min(tokens // pages.page_size, table_width)), DECODE_BUFFERS)
