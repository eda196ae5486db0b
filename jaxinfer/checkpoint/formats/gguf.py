"""GGUF's tensors as those of a checkpoint: integers with one scale a group, or the blocks as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxinfer.checkpoint.safetensors_file import StoredTensor
from jaxinfer.checkpoint.stored import (
    FP4,
    Blocks,
    Grid,
    Stored,
    StoredBlocks,
    StoredQuantized,
    in_pieces,
    require_finite,
)
from jaxinfer.gguf.blocks import mxfp4_codes, q4_0_integers, q8_0_integers, require_finite_scales
from jaxinfer.gguf.file import GGUFFile
from jaxinfer.gguf.names import NamedTensor, tensors_of

METHOD = "gguf"
Unpacking = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
# Types of blocks that kernels multiply: the codes of numbers, the type of scales, and the way from blocks to both.
INTEGERS: dict[str, tuple[str, str, Unpacking]] = {
    "Q8_0": ("int8", "F16", q8_0_integers),
    "Q4_0": ("int4", "F16", q4_0_integers),
    "MXFP4": (FP4, "U8", mxfp4_codes),
}
NO_NUMBER = 255  # of MXFP4's scales


def settings_of_gguf(file: GGUFFile) -> dict[str, Any] | None:
    """Returns settings as a config.json has them of a packed format; None if all weights become floating point."""
    is_packed = any(not tensor.type.is_float and len(tensor.shape) > 1 for tensor in file.tensors.values())
    return {"quant_method": METHOD} if is_packed else None


def gguf_tensors(file: GGUFFile) -> dict[str, Stored]:
    """Returns the model's tensors by their Hugging Face names; ValueError for tensors that it cannot have."""
    return {name: _stored(name, tensor) for name, tensor in tensors_of(file).items()}


def _stored(name: str, tensor: NamedTensor) -> Stored:
    block_type, place = tensor.stored.type, f"{tensor.stored.path}: {name}"
    if tensor.is_as_stored:
        return StoredTensor(tensor.stored.path, block_type.name, tensor.shape, tensor.stored.offset)
    is_packed = not block_type.is_float and len(tensor.shape) > 1
    if is_packed and block_type.name in INTEGERS:
        return _packed(place, tensor)

    def named(read: Callable[[], np.ndarray]) -> np.ndarray:
        try:
            return read()
        except ValueError as error:
            raise ValueError(f"{place}: {error}; download the file again") from None

    def blocks(rows: slice) -> np.ndarray:
        found = tensor.blocks(rows)
        require_finite_scales(found, block_type)
        return found

    grid = Blocks(block_type.name, tensor.stored.row_bytes) if is_packed else None
    reads = (lambda rows: named(lambda: blocks(rows))), (lambda rows: named(lambda: tensor.numbers(rows)))
    return StoredBlocks(tensor.shape, grid, *reads)


def _packed(place: str, tensor: NamedTensor) -> StoredQuantized:
    code, scale_dtype, unpack = INTEGERS[tensor.stored.type.name]

    num_groups = tensor.shape[-1] // tensor.stored.type.length

    def scales() -> np.ndarray:
        shape = (*tensor.shape[:-1], num_groups)
        found = in_pieces(lambda rows: unpack(tensor.blocks(rows))[1], shape, tensor.shape[-1])
        if found.dtype == np.uint8 and (found == NO_NUMBER).any():
            raise ValueError(f"{place} has scales that are no numbers; download the file again")
        return require_finite(place, found)

    return StoredQuantized(
        shape=tensor.shape,
        grid=Grid(code, num_groups, scale_dtype, has_zeros=False, has_order=False),
        values=lambda rows: unpack(tensor.blocks(rows))[0],
        scales=scales,
    )


def describe_changed(file: GGUFFile, names: Iterable[str], becomes: str, bytes_per_weight: float) -> str | None:
    """Returns a sentence on the blocks among tensors that become something else, and on their memory; None without any.

    `becomes` names what they become, which takes `bytes_per_weight`.
    """
    named = tensors_of(file)
    widened = [tensor for tensor in map(named.__getitem__, names) if not tensor.stored.type.is_float]
    if not widened:
        return None
    kinds = ", ".join(sorted({tensor.stored.type.name for tensor in widened}))
    loaded = round(sum(math.prod(tensor.shape) for tensor in widened) * bytes_per_weight)
    stored = sum(tensor.stored.num_bytes for tensor in widened)
    return f"weights of type {kinds} become {becomes}: {_size(loaded)} in place of {_size(stored)}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
