"""How much of the cache a kernel holds at a time: what is tuned for the chip at hand, or else by rules."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
TABLES = Path(__file__).parent / "tuned"
# What an entry of a table is for; its other fields say what was chosen, and how it was ranked.
KEYS = ("kernel", "page_dtype", "num_kv_heads", "head_dim", "num_groups")


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
    tuned = tuned_entry("decode", pages, num_groups)
    if tuned is not None:
        return Blocks(_pages_of(tuned["block_tokens"], pages, table_width), tuned["buffers"])
    return Blocks(_block_pages(pages, table_width), DECODE_BUFFERS)


def ragged_blocks(
    pages: Pages, table_width: int, num_tokens: int, num_groups: int, q_len: int | None, tree_mask: jax.Array | None
) -> Blocks:
    """Returns block sizes for any number of tokens a row; those of a tree stay together."""
    queries = min(max(8, RAGGED_ROWS // num_groups), q_len or num_tokens)
    if tree_mask is not None:
        queries = q_len or min(32 * tree_mask.shape[1], num_tokens)
    return Blocks(_block_pages(pages, table_width), RAGGED_BUFFERS, queries, _matrix_unit())


def tuned_entry(kernel: str, pages: Pages, num_groups: int) -> dict[str, Any] | None:
    """Returns the entry of a kernel for these pages in the table of the chip at hand, if there is one."""
    chip = chip_at_hand()
    call = (kernel, pages.dtype.name, pages.num_kv_heads, pages.head_dim, num_groups)
    return None if chip is None else tuned_table(chip).get(call)


def chip_at_hand() -> str | None:
    """Returns the name of the TPU that is compiled for, as "v5e" or "7x"; None where the kernels are interpreted."""
    try:
        info: Any = pltpu.get_tpu_info()
    except ValueError:
        return None
    return str(info.chip_version.value)


@functools.cache
def tuned_table(chip: str) -> dict[tuple, dict[str, Any]]:
    """Returns the table that `scripts/tune_kernels.py` wrote for a chip, by `KEYS`; an empty one if it wrote none."""
    path = TABLES / f"tpu_{chip}.json"
    if not path.exists():
        return {}
    return {tuple(entry[key] for key in KEYS): entry for entry in json.loads(path.read_text())["entries"]}


def _matrix_unit() -> int:
    """Returns the width of the TPU's matrix unit: with fewer rows at a time it waits, with more registers spill."""
    try:
        return pltpu.get_tpu_info().mxu_column_size
    except ValueError:  # interpreted, where there is no TPU
        return Blocks.rows


def _block_pages(pages: Pages, table_width: int) -> int:
    _, planes, tiles, rows, width = pages.arrays[0].shape
    page_bytes = planes * tiles * rows * width * pages.dtype.itemsize
    return _pages_of(min(BLOCK_TOKENS, BLOCK_BYTES * pages.page_size // page_bytes), pages, table_width)


def _pages_of(tokens: int, pages: Pages, table_width: int) -> int:
    return max(1, min(tokens // pages.page_size, table_width))
