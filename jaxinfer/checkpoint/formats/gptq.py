"""GPTQ (Frantar et al. 2022), as GPTQModel and AutoGPTQ write it.

A weight [out, in] of b bits is qweight i32[in b / 32, out], qzeros i32[groups, out b / 32] and scales f16[groups, out],
and g_idx i32[in] is the group of each input. The first version stores zero points less 1.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.checkpoint.formats.parts import (
    OTHER,
    SCALE_TYPES,
    Parts,
    count_groups,
    is_listed,
    order_of_groups,
    packed_modules,
    require_group_size,
    require_pattern,
)
from jaxinfer.checkpoint.safetensors_file import StatedTensor, StoredTensor, stated
from jaxinfer.checkpoint.stored import (
    Grid,
    Stored,
    StoredQuantized,
    centred,
    code_of_integers,
    require_finite,
    settings_error,
    unpacked,
)
from jaxinfer.validation import is_int

BITS = (2, 3, 4, 8)
HEAD = "lm_head"  # key that says if the unembedding is packed


def gptq_tensors(stored: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Returns the model's tensors by name; see `formats.logical_tensors`."""
    bits = settings.get("bits")
    version = settings.get("checkpoint_format") or "gptq"
    if not is_int(bits) or bits not in BITS:
        raise settings_error("GPTQ", "bits", bits, f"use a checkpoint of {', '.join(map(str, BITS))} bits")
    size = require_group_size("GPTQ", settings.get("group_size", 128))
    if version not in ("gptq", "gptq_v2"):
        raise settings_error("GPTQ", "checkpoint_format", version, "use a checkpoint in gptq or gptq_v2")
    if settings.get("pack_dtype") not in (None, "int32"):
        raise settings_error("GPTQ", "pack_dtype", settings["pack_dtype"], OTHER)
    # Which modules are packed, the file itself says; other settings for some of them are not honoured.
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or any(own and not key.startswith("-:") for key, own in dynamic.items()):
        raise settings_error("GPTQ", "dynamic", dynamic, OTHER)
    others, modules = packed_modules(stored, "qweight", ("qweight", "qzeros", "scales", "g_idx"))
    options = {
        "bits": bits,
        "size": size,
        "is_symmetric": bool(settings.get("sym", True)),
        "has_order": bool(settings.get("desc_act", False)),
        "zero_step": int(version == "gptq"),
    }
    return {**others, **{f"{parts.module}.weight": _weight(parts, **options) for parts in modules}}


def stated_parts(
    module: str, outputs: int, inputs: int, settings: Mapping[str, Any], dtype: str
) -> dict[str, StatedTensor] | None:
    """Returns the parts of a weight as the settings describe them, None if they leave it in floating point."""
    del dtype  # scales are in float16
    skipped = [require_pattern("GPTQ", "dynamic", key[2:]) for key in settings.get("dynamic") or () if key[:2] == "-:"]
    blocks = settings.get("modules_in_block_to_quantize")
    if any(re.match(pattern, module) for pattern in skipped) or (module.endswith("lm_head") and not settings.get(HEAD)):
        return None
    if isinstance(blocks, list) and not any(is_listed(module, block) for block in blocks):
        return None
    bits, size = settings["bits"], settings.get("group_size", 128)
    groups = count_groups(module, inputs, size, bits)
    return {
        "qweight": stated("I32", inputs * bits // 32, outputs),
        "qzeros": stated("I32", groups, outputs * bits // 32),
        "scales": stated("F16", groups, outputs),
        "g_idx": stated("I32", inputs),
    }


def _weight(
    parts: Parts, *, bits: int, size: int, is_symmetric: bool, has_order: bool, zero_step: int
) -> StoredQuantized:
    words, outputs = parts.require("qweight", ["I32"], (None, None)).shape
    inputs = words * 32 // bits
    if words * 32 % bits:
        raise ValueError(f"{parts.module}.qweight has {words} words, which {bits} bits do not fill; use another file")
    groups = count_groups(parts.module, inputs, size, bits)
    zeros = parts.require("qzeros", ["I32"], (groups, outputs * bits // 32))
    scales = parts.require("scales", SCALE_TYPES, (groups, outputs))
    g_idx = parts.require("g_idx", ["I32"], (inputs,)) if has_order or "g_idx" in parts else None
    middle = 2 ** (bits - 1)
    has_order &= groups > 1

    @functools.cache
    def order() -> np.ndarray:
        if g_idx is None:
            return np.arange(inputs, dtype=np.int32)
        return order_of_groups(f"{parts.module}.g_idx", g_idx.map(), groups, may_differ=has_order)

    def read_values(rows: slice) -> np.ndarray:
        return centred(unpacked(parts["qweight"].map()[:, rows], bits).T[:, order()], bits)

    def read_zeros() -> np.ndarray:
        # Each by itself, modulo 2^bits: the zero point 0 is stored as -1.
        points = (unpacked(zeros.map(), bits, axis=1).T + np.uint8(zero_step)) & np.uint8(2**bits - 1)
        return centred(points, bits)

    def read_scales() -> np.ndarray:
        if is_symmetric and read_zeros().any():
            raise ValueError(
                f"{parts.module}.qzeros has other zero points than {middle}, but quantization_config says sym=true; set"
                " it to false"
            )
        return require_finite(parts.module, scales.map().T)

    return StoredQuantized(
        shape=(outputs, inputs),
        grid=Grid(code_of_integers(bits, inputs // groups), groups, scales.dtype, not is_symmetric, has_order),
        values=read_values,
        scales=read_scales,
        zeros=None if is_symmetric else read_zeros,
        order=order if has_order else None,
    )
