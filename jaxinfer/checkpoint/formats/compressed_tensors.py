"""compressed-tensors, as llm-compressor writes it: integers or FP8 with scales per tensor, channel, group or block.

A weight [out, in] of b bits, packed, is weight_packed i32[out, in b / 32] and weight_scale f[out, groups]; if it is not
symmetric, weight_zero_point i32[out b / 32, groups]; with act-order, weight_g_idx i32[in]. Unpacked it is weight
i8[out, in], and FP8 is weight f8_e4m3[out, in]. Which numbers they stand for says `config_groups`, by the names of
modules. Activations that a scheme has in FP8 keep the engine's dtype; see `fp8`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.checkpoint.formats.fp8 import float8_weight, require_block
from jaxinfer.checkpoint.formats.gptq import SCALE_TYPES
from jaxinfer.checkpoint.formats.parts import Parts, order_of_groups, packed_modules
from jaxinfer.checkpoint.safetensors_file import StoredTensor
from jaxinfer.checkpoint.stored import Grid, Stored, StoredQuantized, require_finite, settings_error, unpacked
from jaxinfer.validation import is_int

METHOD = "compressed-tensors"
PARTS = (
    *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
    *("input_scale", "input_zero_point"),
)
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
BITS = (2, 3, 4, 5, 6, 7, 8)
WITHOUT = "use a checkpoint without it, or the unquantized one"
# What the words of a scheme may be beside those that `_weight` reads; others would change the result.
HARMLESS_ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "type": ("int", "float"),
    "dynamic": (False, None),
}
MAX_PATTERN = 1000  # characters of a regular expression


def compressed_tensors(stored: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Returns the model's tensors by name; see `formats.logical_tensors`."""
    if settings.get("format") not in FORMATS:
        raise settings_error(METHOD, "format", settings.get("format"), f"use one of {', '.join(FORMATS)}")
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if settings.get(key) not in (None, {}):
            raise settings_error(METHOD, key, settings[key], WITHOUT)
    schemes = _schemes(settings)
    others, modules = packed_modules(stored, "weight_scale", PARTS)
    return {**others, **{f"{parts.module}.weight": _weight(parts, schemes) for parts in modules}}


def _schemes(settings: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the arguments of weights by the targets that have them."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise settings_error(METHOD, "config_groups", groups, "it maps names to schemes; download config.json again")
    schemes = []
    for name, scheme in groups.items():
        weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
        targets = scheme.get("targets") if isinstance(scheme, Mapping) else None
        if not isinstance(weights, Mapping) or not isinstance(targets, list):
            raise settings_error(METHOD, name, scheme, "a scheme has targets and weights; download config.json again")
        is_float = weights.get("type") == "float"
        for key in ("input_activations", "output_activations"):
            if scheme.get(key) is not None and not (is_float and key == "input_activations"):
                raise settings_error(METHOD, key, scheme[key], "use a checkpoint that quantizes weights alone")
        for key, harmless in HARMLESS_ARGUMENTS.items():
            if weights.get(key, harmless[0]) not in harmless:
                raise settings_error(METHOD, f"weights.{key}", weights[key], WITHOUT)
        schemes += [(_checked_target(target), weights) for target in targets]
    return schemes


def _checked_target(target: Any) -> str:
    if not isinstance(target, str) or len(target) > MAX_PATTERN:
        raise settings_error(METHOD, "targets", target, "a target is a name, or re: and a regular expression")
    if target.startswith("re:"):
        try:
            re.compile(target[3:])
        except re.error as error:
            raise settings_error(METHOD, "targets", target, f"it is no regular expression: {error}") from None
    return target


def _scheme_of(module: str, schemes: list[tuple[str, Mapping[str, Any]]]) -> Mapping[str, Any]:
    """Returns the arguments of a module: those for its name, else for a pattern of it, else for all of its class."""

    def rank(target: str) -> int | None:
        if target == module:
            return 0
        if target.startswith("re:"):
            return 1 if re.match(target[3:], module) else None
        return 2 if target == "Linear" else None

    ranked = [(place, weights) for target, weights in schemes if (place := rank(target)) is not None]
    if not ranked:
        raise ValueError(
            f"{module} is packed, but no target of quantization_config.config_groups is its name, a regular expression"
            ' that fits it, or "Linear"; correct config.json'
        )
    return min(ranked, key=lambda pair: pair[0])[1]


def _weight(parts: Parts, schemes: list[tuple[str, Mapping[str, Any]]]) -> StoredQuantized:
    scheme = _scheme_of(parts.module, schemes)
    bits, strategy = scheme.get("num_bits", 8), scheme.get("strategy")
    if scheme.get("type") == "float":
        return _float_weight(parts, bits, strategy, scheme)
    if bits not in BITS:
        raise settings_error(METHOD, "weights.num_bits", bits, "use a checkpoint of 2 to 8 bits")
    is_packed = "weight_packed" in parts
    if is_packed:
        outputs = parts.require("weight_packed", ["I32"], (None, None)).shape[0]
        inputs = _logical_inputs(parts, outputs)
        parts.require("weight_packed", ["I32"], (outputs, -(-inputs * bits // 32)))
    else:
        outputs, inputs = parts.require("weight", ["I8"], (None, None)).shape
    groups = _num_groups(parts.module, scheme, strategy, inputs)
    of_scales = (1,) if strategy == "tensor" else (outputs, groups)
    scales = parts.require("weight_scale", SCALE_TYPES, of_scales)
    middle = 2 ** (bits - 1)
    has_zeros = scheme.get("symmetric", True) is False
    if has_zeros:
        shape = (-(-outputs * bits // 32), groups) if is_packed else (outputs, groups)
        parts.require("weight_zero_point", ["I32" if is_packed else "I8"], shape)
    g_idx = None if "weight_g_idx" not in parts else parts.require("weight_g_idx", ["I32"], (inputs,))
    has_order = g_idx is not None and groups > 1

    @functools.cache
    def order() -> np.ndarray:
        assert g_idx is not None
        return order_of_groups(f"{parts.module}.weight_g_idx", g_idx.map(), groups, may_differ=True)

    def read_values() -> np.ndarray:
        if is_packed:
            numbers = unpacked(parts["weight_packed"].map(), bits, axis=1)[:, :inputs]
            values = (numbers.astype(np.int16) - middle).astype(np.int8)
        else:
            values = parts["weight"].map()
        return values[:, order()] if has_order else values

    def read_zeros() -> np.ndarray:
        stored = parts["weight_zero_point"].map()
        if not is_packed:
            return stored
        return (unpacked(stored, bits)[:outputs].astype(np.int16) - middle).astype(np.int8)

    return StoredQuantized(
        shape=(outputs, inputs),
        grid=Grid("int4" if bits <= 4 else "int8", groups, scales.dtype, has_zeros, has_order),
        values=read_values,
        scales=lambda: np.broadcast_to(require_finite(parts.module, scales.map()), (outputs, groups)),
        zeros=read_zeros if has_zeros else None,
        order=order if has_order else None,
    )


def _float_weight(parts: Parts, bits: Any, strategy: Any, scheme: Mapping[str, Any]) -> StoredQuantized:
    if bits != 8:
        raise settings_error(METHOD, "weights.num_bits", bits, "use a checkpoint with floats of 8 bits")
    if strategy not in ("tensor", "channel", "block"):
        raise settings_error(METHOD, "weights.strategy", strategy, "use tensor, channel or block")
    block = require_block(scheme.get("block_structure")) if strategy == "block" else None
    if strategy == "block" and block is None:
        raise settings_error(METHOD, "weights.block_structure", None, "it is two positive numbers")
    return float8_weight(parts, "weight_scale", block=block, is_by_channel=strategy == "channel")


def _logical_inputs(parts: Parts, outputs: int) -> int:
    shape = parts.require("weight_shape", ["I64", "I32"], (2,)).map().tolist()
    if shape[0] != outputs or not 0 < shape[1] < 2**31:
        raise ValueError(
            f"{parts.module}.weight_shape is {shape}, but its weight has {outputs} rows; download it again"
        )
    return shape[1]


def _num_groups(module: str, scheme: Mapping[str, Any], strategy: Any, inputs: int) -> int:
    if strategy in ("tensor", "channel"):
        return 1
    if strategy != "group":
        raise settings_error(METHOD, "weights.strategy", strategy, "use tensor, channel or group")
    size: Any = scheme.get("group_size")
    if not is_int(size) or size < 1 or inputs % size:
        raise ValueError(f"{module} has {inputs} inputs, which group_size={size!r} does not divide; use another file")
    return inputs // size
