"""Weights in the blocks of a GGUF file, as they lie there."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

from jaxinfer.gguf.blocks import BLOCK_TYPES

# Why devices do not share a model of such weights, and the way out.
BLOCKS_ARE_WHOLE = (
    "the blocks of a GGUF are not split over devices yet; load it on one device, or another format of the model"
)
TYPES = {block.name: block for block in BLOCK_TYPES.values()}


@struct.dataclass
class PackedBlocks:
    """Weights [out..., in], whose rows of inputs are blocks of a type of ggml.

    Such blocks have scales of two levels, minima, or numbers of 2, 3, 5 or 6 bits; no kernel reads them.
    """

    blocks: Any  # u8[out..., row bytes]
    type: str = struct.field(pytree_node=False)  # a name of TYPES

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the blocks, in bytes."""
        return self.blocks.shape

    def widened(self) -> jax.Array:
        """Returns the weights f32[out..., in], bit for bit the numbers of ggml's C."""
        return self.with_levels().widened()

    def with_levels(self) -> BlocksWithLevels:
        """Returns the blocks with their scales and offsets in float32."""
        kind = TYPES[self.type]
        assert kind.levels is not None
        levels = kind.levels(self.blocks.reshape(-1, kind.num_bytes))
        scales, offsets = jax.tree.map(lambda a: a.reshape(*self.shape[:-1], -1), levels)
        return BlocksWithLevels(self.blocks, scales, offsets, self.type)


@struct.dataclass
class BlocksWithLevels:
    """Blocks whose scales and offsets were computed before, for a CPU would compute them for each number again."""

    blocks: Any  # u8[out..., row bytes]
    scales: Any  # f32[out..., groups]
    offsets: Any  # f32[out..., groups] or None
    type: str = struct.field(pytree_node=False)

    def widened(self) -> jax.Array:
        """Returns the weights f32[out..., in]."""
        kind = TYPES[self.type]
        blocks = self.blocks.reshape(-1, kind.num_bytes)
        levels = jax.tree.map(lambda a: a.reshape(blocks.shape[0], -1), (self.scales, self.offsets))
        return kind.scaled(blocks, *levels).reshape(*self.blocks.shape[:-1], -1)
