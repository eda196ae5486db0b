"""AWQ (Lin et al. 2023), in the layout "gemm" of AutoAWQ.

A weight [out, in] of 4 bits is qweight i32[in, out / 8], qzeros i32[groups, out / 8] and scales f16[groups, out]. A
word has eight outputs, in the order 0 2 4 6 1 3 5 7 from its lowest bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.checkpoint.formats.parts import (
    SCALE_TYPES,
    Parts,
    count_groups,
    is_listed,
    packed_modules,
    require_group_size,
)
from jaxinfer.checkpoint.safetensors_file import StatedTensor, StoredTensor, stated
from jaxinfer.checkpoint.stored import (
    Grid,
    Stored,
    StoredQuantized,
    centred,
    require_finite,
    settings_error,
    unpacked,
)

PER_WORD = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 to 7 in a word
MIDDLE = 8


def awq_tensors(stored: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Returns the model's tensors by name; see `formats.logical_tensors`."""
    bits = settings.get("bits", settings.get("w_bit", 4))
    version = settings.get("version", "gemm")
    if bits != 4:
        raise settings_error("AWQ", "bits", bits, "use a checkpoint of 4 bits")
    size = require_group_size("AWQ", settings.get("group_size", settings.get("q_group_size", 128)))
    if str(version).lower() != "gemm":
        raise settings_error("AWQ", "version", version, "use a checkpoint in the layout gemm")
    has_zeros = bool(settings.get("zero_point", True))
    others, modules = packed_modules(stored, "qweight", ("qweight", "qzeros", "scales"))
    return {**others, **{f"{parts.module}.weight": _weight(parts, size, has_zeros) for parts in modules}}


def stated_parts(
    module: str, outputs: int, inputs: int, settings: Mapping[str, Any], dtype: str
) -> dict[str, StatedTensor] | None:
    """Returns the parts of a weight as the settings describe them, None if they leave it in floating point."""
    del dtype  # scales are in float16
    if module.endswith("lm_head") or is_listed(module, settings.get("modules_to_not_convert")):
        return None
    groups = count_groups(module, inputs, settings.get("group_size", settings.get("q_group_size", 128)), 4)
    return {
        "qweight": stated("I32", inputs, outputs // PER_WORD),
        "qzeros": stated("I32", groups, outputs // PER_WORD),
        "scales": stated("F16", groups, outputs),
    }


def _weight(parts: Parts, size: int, has_zeros: bool) -> StoredQuantized:
    inputs, words = parts.require("qweight", ["I32"], (None, None)).shape
    outputs, groups = words * PER_WORD, count_groups(parts.module, inputs, size, 4)
    scales = parts.require("scales", SCALE_TYPES, (groups, outputs))
    if has_zeros or "qzeros" in parts:
        parts.require("qzeros", ["I32"], (groups, words))

    def read(name: str, rows: slice) -> np.ndarray:
        first = rows.start // PER_WORD
        numbers = unpacked(parts[name].map()[:, first : -(-rows.stop // PER_WORD)], 4, axis=1)
        numbers = numbers.reshape(len(numbers), -1, PER_WORD)[..., PLACES].reshape(len(numbers), -1)
        return centred(numbers[:, rows.start - first * PER_WORD : rows.stop - first * PER_WORD].T, 4)

    def read_zeros() -> np.ndarray:
        return read("qzeros", slice(0, outputs))

    def read_scales() -> np.ndarray:
        if not has_zeros and "qzeros" in parts and read_zeros().any():
            raise ValueError(
                f"{parts.module}.qzeros has other zero points than {MIDDLE}, but quantization_config says"
                " zero_point=false; set it to true"
            )
        return require_finite(parts.module, scales.map().T)

    return StoredQuantized(
        shape=(outputs, inputs),
        grid=Grid("int4", groups, scales.dtype, has_zeros, has_order=False),
        values=lambda rows: read("qweight", rows),
        scales=read_scales,
        zeros=read_zeros if has_zeros else None,
    )
