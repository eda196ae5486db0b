"""The attention of GPUs without kernels, run on CPU in blocks and tiles so small that a step has several of each."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from kernels_pallas.paged_attention.in_blocks import BlockSizes, attend_in_blocks

# 32 keys of each row of a tile, of two rows or few more.
SMALL_BLOCKS = BlockSizes(least_queries=4, most_queries=16, least_keys=32, most_keys=32, block_bytes=32 << 10)
# By whether all loops have a known number of turns.
IN_BLOCKS: dict[str, Callable[..., jax.Array]] = {
    "whole tables": functools.partial(attend_in_blocks, sizes=SMALL_BLOCKS._replace(whole_bytes=1 << 30)),
    "as far as contexts go": functools.partial(attend_in_blocks, sizes=SMALL_BLOCKS._replace(whole_bytes=0)),
}
