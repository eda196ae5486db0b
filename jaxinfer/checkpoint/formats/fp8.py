"""FP8 (Micikevicius et al. 2022) with scales per block, as DeepSeek-V3 and Qwen3 are published.

A weight [out, in] is weight f8_e4m3[out, in] and weight_scale_inv f[out / 128, in / 128], by which it is multiplied.
The last blocks may be smaller. Without a size of blocks there is one scale. The format also names 8 bits for
activations, to multiply faster; here they keep the engine's dtype, which is more exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.checkpoint.formats.cache_scales import has_cache_scales, stored_scales, with_present_names
from jaxinfer.checkpoint.formats.parts import SCALE_TYPES, Parts, is_listed, packed_modules
from jaxinfer.checkpoint.safetensors_file import StatedTensor, StoredTensor, stated
from jaxinfer.checkpoint.stored import Grid, Stored, StoredQuantized, require_finite, settings_error
from jaxinfer.validation import MAX_INT, is_int

CODE = "float8_e4m3fn"
# By the scale's name: that of DeepSeek and Qwen, and that of AutoFP8.
PARTS = {
    "weight_scale_inv": ("weight", "weight_scale_inv", "activation_scale"),
    "weight_scale": ("weight", "weight_scale", "input_scale"),
}
MIN_GROUP = 16


def fp8_tensors(stored: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Returns the model's tensors by name; see `formats.logical_tensors`."""
    if settings.get("fmt", "e4m3") not in ("e4m3", CODE):  # two names of one type
        raise settings_error("FP8", "fmt", settings["fmt"], "use a checkpoint in e4m3")
    if settings.get("activation_scheme", "dynamic") not in ("dynamic", "static"):
        raise settings_error("FP8", "activation_scheme", settings["activation_scheme"], "it is dynamic or static")
    if settings.get("kv_cache_quant_method") not in (None, {}):
        name = "kv_cache_quant_method"
        raise settings_error("FP8", name, settings[name], "use a checkpoint without it")
    block = require_block(settings.get("weight_block_size"))
    tensors: dict[str, Stored] = {}
    others = dict(stored)
    if has_cache_scales(settings):
        others = with_present_names(stored)
        tensors |= stored_scales(others)
    for scale, names in PARTS.items():
        others, modules = packed_modules(others, scale, names)
        tensors |= {f"{parts.module}.weight": float8_weight(parts, scale, block=block) for parts in modules}
    return {**others, **tensors}


def stated_parts(
    module: str, outputs: int, inputs: int, settings: Mapping[str, Any], dtype: str
) -> dict[str, StatedTensor] | None:
    """Returns the parts of a weight as the settings describe them, None if they leave it in floating point."""
    del dtype  # DeepSeek's scales are in float32
    skipped = (settings.get(key) for key in ("modules_to_not_convert", "ignored_layers"))
    if module.endswith("lm_head") or any(is_listed(module, names) for names in skipped):
        return None
    block = require_block(settings.get("weight_block_size"))
    blocks = () if block is None else (-(-outputs // block[0]), -(-inputs // block[1]))
    return {"weight": stated("F8_E4M3", outputs, inputs), "weight_scale_inv": stated("F32", *blocks)}


def require_block(block: Any) -> tuple[int, int] | None:
    """Returns the outputs and inputs that share a scale, None if all of a weight do; raises ValueError for others."""
    if block is None:
        return None
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(is_int(size) and 0 < size <= MAX_INT for size in block)
    ):
        raise settings_error("FP8", "weight_block_size", block, "it is two positive numbers")
    return block[0], block[1]


def float8_weight(
    parts: Parts, scale_name: str, *, block: tuple[int, int] | None, is_by_channel: bool = False
) -> StoredQuantized:
    """Returns a weight in FP8 with a scale per block, per channel [out, 1], or one for all, [1] or []."""
    outputs, inputs = parts.require("weight", ["F8_E4M3"], (None, None)).shape
    rows, size = (outputs, inputs) if block is None else block
    shape: tuple[int, ...] = (-(-outputs // rows), -(-inputs // size))
    if is_by_channel:
        rows, shape = 1, (outputs, 1)
    elif block is None and len(parts[scale_name].shape) < 2:
        shape = (1,) * len(parts[scale_name].shape)
    scales = parts.require(scale_name, (*SCALE_TYPES, "U8"), shape)
    # Groups of equal size: those of 576 inputs in blocks of 128 have 64.
    own_size = math.gcd(inputs, min(size, inputs))
    if block is not None and own_size < min(MIN_GROUP, inputs):
        raise ValueError(
            f"{parts.module} has {inputs} inputs in blocks of {size}: groups of equal size would have {own_size},"
            f" fewer than {MIN_GROUP}; use another checkpoint"
        )
    groups = inputs // own_size

    def read_scales() -> np.ndarray:
        stored = require_finite(parts.module, scales.map()).reshape(-1, -(-inputs // size))
        return stored[(np.arange(outputs) // rows)[:, None], np.arange(groups) * own_size // size]

    def read_values(rows: slice) -> np.ndarray:
        values = parts["weight"].map()[rows]
        if np.isnan(values).any():
            raise ValueError(f"{parts.module} has weights that are no numbers; download the checkpoint again")
        return values

    return StoredQuantized(
        shape=(outputs, inputs),
        grid=Grid(
            CODE,
            groups,
            scales.dtype,
            has_zeros=False,
            has_order=False,
            block_outputs=1 if block is None or is_by_channel else rows,
        ),
        values=read_values,
        scales=read_scales,
    )
