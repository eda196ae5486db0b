"""AWQ (Lin et al. 2023), in the layout "gemm" of AutoAWQ.

A weight [out, in] of 4 bits is qweight i32[in, out / 8], qzeros i32[groups, out / 8] and scales f16[groups, out]. A
word has eight outputs, in the order 0 2 4 6 1 3 5 7 from its lowest bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.checkpoint.formats.gptq import SCALE_TYPES
from jaxinfer.checkpoint.formats.parts import Parts, packed_modules
from jaxinfer.checkpoint.safetensors_file import StoredTensor
from jaxinfer.checkpoint.stored import (
    Grid,
    Stored,
    StoredQuantized,
    centred,
    require_even,
    require_finite,
    settings_error,
    unpacked,
)
from jaxinfer.validation import is_int

PER_WORD = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 to 7 in a word
MIDDLE = 8


def awq_tensors(stored: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Returns the model's tensors by name; see `formats.logical_tensors`."""
    bits = settings.get("bits", settings.get("w_bit", 4))
    size = settings.get("group_size", settings.get("q_group_size", 128))
    version = settings.get("version", "gemm")
    if bits != 4:
        raise settings_error("AWQ", "bits", bits, "use a checkpoint of 4 bits")
    if not is_int(size) or (size < 1 and size != -1):
        raise settings_error("AWQ", "group_size", size, "it is a number of inputs, or -1 for all of them")
    if str(version).lower() != "gemm":
        raise settings_error("AWQ", "version", version, "use a checkpoint in the layout gemm")
    has_zeros = bool(settings.get("zero_point", True))
    others, modules = packed_modules(stored, "qweight", ("qweight", "qzeros", "scales"))
    return {**others, **{f"{parts.module}.weight": _weight(parts, size, has_zeros) for parts in modules}}


def _weight(parts: Parts, size: int, has_zeros: bool) -> StoredQuantized:
    inputs, words = parts.require("qweight", ["I32"], (None, None)).shape
    outputs, size = words * PER_WORD, inputs if size == -1 else size
    if inputs == 0 or inputs % size:
        raise ValueError(f"{parts.module} has {inputs} inputs, which groups of {size} do not divide; use another file")
    groups = inputs // size
    require_even(parts.module, size, 4)
    scales = parts.require("scales", SCALE_TYPES, (groups, outputs))
    if has_zeros or "qzeros" in parts:
        parts.require("qzeros", ["I32"], (groups, words))

    def read(name: str) -> np.ndarray:
        numbers = unpacked(parts[name].map(), 4, axis=1).reshape(-1, words, PER_WORD)[..., PLACES]
        return centred(numbers.reshape(-1, outputs).T, 4)

    def read_scales() -> np.ndarray:
        if not has_zeros and "qzeros" in parts and read("qzeros").any():
            raise ValueError(
                f"{parts.module}.qzeros has other zero points than {MIDDLE}, but quantization_config says"
                " zero_point=false; set it to true"
            )
        return require_finite(parts.module, scales.map().T)

    return StoredQuantized(
        shape=(outputs, inputs),
        grid=Grid("int4", groups, scales.dtype, has_zeros, has_order=False),
        values=lambda: read("qweight"),
        scales=read_scales,
        zeros=(lambda: read("qzeros")) if has_zeros else None,
    )
