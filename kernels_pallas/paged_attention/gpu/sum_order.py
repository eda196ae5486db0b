"""One order of sums for every batch: the bits of a token's attention then depend on its context and position alone.

    keys of a row   0 ……… 511 | 512 …… 1023 | 1024 …          parts of `split_keys`, from key 0
    a part          blocks of `block_k` keys in order          sums of their own, empty before the first block
    a token         sink, part 0, part 1, part 2 …             added in this order, by `add_part`

A window hides the first keys, and a tile may begin or end with blocks that some of its queries do not see. Such a block
changes no bit of their sums: the maximum stays, all is multiplied by 2^0 = 1, and zeros are added. So it makes no
difference which parts a program reads, or if one program reads all parts or `combine` adds those of several.

The rows of a tile are in registers of fixed places, in which the sums of a row are added. So all batches have tiles of
one size, and one number of warps, by the head size alone. A tile of 64 rows for one query of 4 heads wastes products
that a GPU does while it waits for keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.device import HOPPER
from kernels_pallas.paged_attention.gpu.block_sizes import (
    PROGRAMS_PER_CORE,
    GpuBlockSizes,
    added_parts,
    heads_of_tile,
)
from kernels_pallas.paged_attention.online_softmax import MASKED
from kernels_pallas.triton import Target, require_block_sizes

# Two accumulators of a wider tile, those of a part and of all, do not fit into registers.
MAX_HEAD_DIM = 256
INTEGERS = ("int8", "int4")  # of pages


@dataclass(frozen=True, kw_only=True)
class SumOrder:
    """An order of the sums over a token's keys."""

    split_keys: int = 512  # part i has the keys split_keys * i up to split_keys * (i + 1) of the row's context
    block_k: int = 32  # keys of a block; with 64, registers spill on Hopper for heads of 65 and more

    def __post_init__(self) -> None:
        require_block_sizes(self, blocks=("block_k",), counts=("split_keys",))
        if self.split_keys % self.block_k:
            raise ValueError(f"split_keys={self.split_keys} must be a multiple of block_k={self.block_k}")


class PartSums(NamedTuple):
    """The online softmax of some keys, for the W rows of a tile."""

    maximum: jax.Array  # f32[W]  rounded up to an integer
    total: jax.Array  # f32[W]
    out: jax.Array  # f32[W, V]


def empty_sums(shape: tuple[int, int]) -> PartSums:
    """Returns the sums [W, V] of no key."""
    zeros = jnp.zeros(shape[:1], jnp.float32)
    return PartSums(zeros + MASKED, zeros, jnp.zeros(shape, jnp.float32))


def sums_of_sinks(sinks: jax.Array | None, is_start: jax.Array | bool, shape: tuple[int, int]) -> PartSums:
    """Returns the sums [W, V] of sinks f32[W], scores in base 2; empty ones if there are none, or not `is_start`.

    Sinks are multiplied by LOG2_E before the kernels, so that no compiler fuses the product with the subtraction here.
    """
    empty = empty_sums(shape)
    if sinks is None:
        return empty
    maximum = jnp.where(is_start, jnp.ceil(sinks), MASKED)
    return empty._replace(maximum=maximum, total=jnp.where(is_start, jnp.exp2(sinks - maximum), 0.0))


def add_part(sums: PartSums, part: PartSums) -> PartSums:
    """Returns the sums of the parts before and of the next one.

    Factors are powers of two, so products are exact, and it makes no difference if a compiler fuses them with the sum.
    """
    maximum = jnp.maximum(sums.maximum, part.maximum)
    rescale, weight = jnp.exp2(sums.maximum - maximum), jnp.exp2(part.maximum - maximum)
    total = sums.total * rescale + part.total * weight
    return PartSums(maximum, total, sums.out * rescale[:, None] + part.out * weight[:, None])


def attended(sums: PartSums) -> jax.Array:
    """Returns the attention f32[W, V] of the sums of all parts; zeros for a row without a key."""
    return sums.out / jnp.where(sums.total > 0, sums.total, 1.0)[:, None]


def ordered_block_sizes(
    order: SumOrder, *, group: int, num_kv_heads: int, head_dim: int, page_dtype: str, target: Target
) -> GpuBlockSizes:
    """Returns the block sizes of every batch, by which no register spills for heads of up to `MAX_HEAD_DIM`.

    On Hopper 64 rows are one tile of `wgmma`, of four warps, or of eight that share its columns. Before Hopper
    `mma.sync` multiplies 16 rows at once.
    """
    is_wide, is_hopper = head_dim > 128, target.capability >= HOPPER
    block_m = 64 if is_hopper or not is_wide else 32
    head_tiles = num_kv_heads * group // heads_of_tile(group, block_m)
    return GpuBlockSizes(
        block_m=block_m,
        block_k=order.block_k,
        num_splits=1,
        split_keys=order.split_keys,
        added_parts=added_parts(PROGRAMS_PER_CORE * target.num_cores, head_tiles),
        num_warps=4 if head_dim <= 64 or (is_hopper and not is_wide) else 8,
        # With a third, registers spill in decoding. Stages change no sum.
        num_stages=2 if (is_wide if is_hopper else page_dtype in INTEGERS) else 3,
    )
