"""Weights in the blocks of a GGUF file, as they lie there."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

from jaxinfer.gguf.blocks import BLOCK_TYPES

# Why devices do not share a model of such weights, and the way out.
BLOCKS_ARE_WHOLE = (
    "the blocks of a GGUF are not split by tensor or experts yet; load it on one device, by replicas or stages, or"
    " another format of the model"
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
        return self.unpacked().widened()

    def unpacked(self) -> UnpackedBlocks:
        """Returns the blocks with a byte for each integer of a plane, and scales and offsets in float32."""
        kind = TYPES[self.type]
        assert kind.levels is not None
        blocks = self.blocks.reshape(-1, kind.num_bytes)
        unpacked = UnpackedBlocks(kind.planes(blocks), *kind.levels(blocks), self.type)
        return jax.tree.map(lambda a: a.reshape(*self.shape[:-1], -1, *a.shape[1:]), unpacked)


@struct.dataclass
class UnpackedBlocks:
    """Blocks as integers, which a CPU would otherwise unpack again for each number that it multiplies."""

    planes: Any  # of the block type, each u8 or i8[out..., blocks, ...]
    scales: Any  # f32[out..., blocks, groups]
    offsets: Any  # f32[out..., blocks, groups] or None
    type: str = struct.field(pytree_node=False)

    def widened(self) -> jax.Array:
        """Returns the weights f32[out..., in]."""
        *outputs, _, _ = self.scales.shape
        parts = jax.tree.map(lambda a: a.reshape(-1, *a.shape[len(outputs) + 1 :]), self)
        return TYPES[self.type].scaled(parts.planes, parts.scales, parts.offsets).reshape(*outputs, -1)
