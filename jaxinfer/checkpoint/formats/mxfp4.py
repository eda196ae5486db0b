"""MXFP4 (OCP's Microscaling formats, 2023), as GPT-OSS is published.

The experts of a layer [E, out, in] are blocks u8[E, out, in / 32, 16] and scales u8[E, out, in / 32]. A byte has two
numbers of E2M1, the first in its low half, and a scale is an exponent of 2, less 127 (E8M0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.formats.parts import Parts
from jaxinfer.checkpoint.safetensors_file import StatedTensor, StoredTensor, stated
from jaxinfer.checkpoint.stored import FP4, Grid, Stored, StoredQuantized, require_finite, unpacked

GROUP_SIZE, BLOCK_BYTES = 32, 16
BLOCKS = "_blocks"  # end of the names of packed experts


def mxfp4_tensors(stored: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Returns the model's tensors by name; see `formats.logical_tensors`."""
    del settings  # says nothing else
    tensors: dict[str, Stored] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition("_")
        if part == "blocks":
            own = {"blocks": tensor} | ({"scales": stored[scales]} if (scales := f"{module}_scales") in stored else {})
            tensors[name] = _weight(Parts(module, own))
        elif part != "scales" or f"{module}_blocks" not in stored:
            tensors[name] = tensor
    return tensors


def stated_parts(name: str, shape: tuple[int, ...]) -> dict[str, StatedTensor]:
    """Returns the parts, by name, of the experts [E, out, in] whose blocks have this name."""
    *outputs, inputs = shape
    groups = inputs // GROUP_SIZE
    scales = name.removesuffix(BLOCKS) + "_scales"
    return {name: stated("U8", *outputs, groups, BLOCK_BYTES), scales: stated("U8", *outputs, groups)}


def _weight(parts: Parts) -> StoredQuantized:
    *outputs, groups, _ = parts.require("blocks", ["U8"], (None, None, None, BLOCK_BYTES)).shape
    scales = parts.require("scales", ["U8"], (*outputs, groups))
    shape = (*outputs, groups * GROUP_SIZE)

    return StoredQuantized(
        shape=shape,
        grid=Grid(FP4, groups, scales.dtype, has_zeros=False, has_order=False),
        values=lambda rows: unpacked(parts["blocks"].map().reshape(-1, shape[-1] // 2)[rows], 4, axis=1),
        scales=lambda: require_finite(parts.module, scales.map()),
    )
