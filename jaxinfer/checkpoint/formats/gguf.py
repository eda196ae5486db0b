"""GGUF's tensors as those of a checkpoint: Q8_0 and Q4_0 as the integers that they are, other blocks as floats."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxinfer.checkpoint.safetensors_file import StoredTensor
from jaxinfer.checkpoint.stored import Grid, Stored, StoredFloats, StoredQuantized, require_finite
from jaxinfer.gguf.blocks import BLOCK_TYPES, q4_0_integers, q8_0_integers
from jaxinfer.gguf.file import GGUFFile
from jaxinfer.gguf.names import NamedTensor, tensors_of

METHOD = "gguf"
FLOATS = [block_type.name for block_type in BLOCK_TYPES.values() if block_type.is_float]
# Block types that stay packed: bits of an integer, and the way from blocks to integers and scales.
INTEGERS = {"Q8_0": (8, q8_0_integers), "Q4_0": (4, q4_0_integers)}


def settings_of_gguf(file: GGUFFile) -> dict[str, Any] | None:
    """Returns settings as a config.json has them of a packed format; None if all weights become floating point."""
    is_packed = any(tensor.type.name in INTEGERS for tensor in file.tensors.values())
    return {"quant_method": METHOD} if is_packed else None


def gguf_tensors(file: GGUFFile) -> dict[str, Stored]:
    """Returns the model's tensors by their Hugging Face names; ValueError for tensors that it cannot have."""
    return {name: _stored(name, tensor) for name, tensor in tensors_of(file).items()}


def _stored(name: str, tensor: NamedTensor) -> Stored:
    block_type = tensor.stored.type
    if tensor.is_as_stored:
        return StoredTensor(tensor.stored.path, block_type.name, tensor.shape, tensor.stored.offset)
    if block_type.name in INTEGERS and len(tensor.shape) == 2:
        return _packed(name, tensor)

    def floats() -> np.ndarray:
        try:
            return tensor.numbers()
        except ValueError as error:
            raise ValueError(f"{tensor.stored.path}: {name}: {error}; download the file again") from None

    return StoredFloats(tensor.shape, floats, block_type.name, tensor.stored.num_bytes)


def _packed(name: str, tensor: NamedTensor) -> StoredQuantized:
    bits, integers = INTEGERS[tensor.stored.type.name]
    outputs, inputs = tensor.shape
    length = tensor.stored.type.length
    return StoredQuantized(
        shape=(outputs, inputs),
        grid=Grid(bits, inputs // length, "F16", has_zeros=False, has_order=False),
        values=lambda: integers(tensor.blocks())[0],
        scales=lambda: require_finite(f"{tensor.stored.path}: {name}", integers(tensor.blocks())[1]),
    )


def describe_widened(tensors: Iterable[Stored], dtype: np.dtype) -> str | None:
    """Returns a sentence on the blocks among tensors that load as `dtype`, and on their memory; None without any."""
    packed = [tensor for tensor in tensors if not isinstance(tensor, StoredTensor)]
    widened = [tensor for tensor in packed if isinstance(tensor, StoredQuantized) or tensor.kind not in FLOATS]
    kinds = {tensor.kind if isinstance(tensor, StoredFloats) else f"Q{tensor.grid.bits}_0" for tensor in widened}
    stored = sum(
        tensor.num_bytes if isinstance(tensor, StoredFloats) else _packed_bytes(tensor.shape, tensor.grid)
        for tensor in widened
    )
    loaded = sum(math.prod(tensor.shape) for tensor in widened) * dtype.itemsize
    if not widened:
        return None
    return f"weights of type {', '.join(sorted(kinds))} become {dtype}: {_size(loaded)} in place of {_size(stored)}"


def _packed_bytes(shape: tuple[int, int], grid: Grid) -> int:
    outputs, inputs = shape
    return outputs * (inputs * grid.bits // 8 + 2 * grid.num_groups)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
