"""compressed-tensors, as llm-compressor writes it: integers or FP8 with scales per tensor, channel, group or block.

A weight [out, in] of b bits, packed, is weight_packed i32[out, in b / 32] and weight_scale f[out, groups]; if it is not
symmetric, weight_zero_point i32[out b / 32, groups]; with act-order, weight_g_idx i32[in]. Unpacked it is weight
i8[out, in], and FP8 is weight f8_e4m3[out, in]. FP4 (E2M1) is weight_packed u8[out, in / 2], the first of two numbers
in the low half, and weight_scale [out, groups]: exponents of 2 u8 in MXFP4, as in MXFP8, and f8_e4m3 in NVFP4, which
weight_global_scale f32[1] divides. Which numbers they stand for says `config_groups`, by the names of modules.
Activations that a scheme has in FP8 or FP4 keep the engine's dtype; see `fp8`. In integers of 8 bits they are rounded
by `quantization.activations`, to a token's range or to input_scale f[1] and input_zero_point i8[1]. Keys and values
may have scales too; see `cache_scales`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from jaxinfer.checkpoint.formats.cache_scales import has_cache_scales, stored_scales, with_present_names
from jaxinfer.checkpoint.formats.fp8 import float8_weight, require_block
from jaxinfer.checkpoint.formats.parts import (
    MAX_PATTERN,
    OTHER,
    SCALE_TYPES,
    Parts,
    is_listed,
    order_of_groups,
    packed_modules,
    require_pattern,
)
from jaxinfer.checkpoint.safetensors_file import StatedTensor, StoredTensor, stated
from jaxinfer.checkpoint.stored import (
    FP4,
    Grid,
    Stored,
    StoredQuantized,
    centred,
    code_of_integers,
    require_even,
    require_finite,
    settings_error,
    split_multiplier,
    unpacked,
)
from jaxinfer.quantization.activations import Activations
from jaxinfer.validation import is_int

METHOD = "compressed-tensors"
PARTS = (
    *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
    *("weight_global_scale", "input_scale", "input_zero_point", "input_global_scale"),
)
FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
MAX_EXPONENT = 60.0  # of numbers for all of a tensor, whose products with others stay finite
# Of FP4, by the strategy of its scheme: MXFP4 and NVFP4.
FLOAT4_SCALES = {"group": "U8", "tensor_group": "F8_E4M3"}
BITS = (2, 3, 4, 5, 6, 7, 8)
# What the words of a scheme may be beside those that `_weight` reads; others would change the result.
HARMLESS_ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "type": ("int", "float"),
    "dynamic": (False, None),
    "symmetric": (True, False),
    "actorder": (None, False, "static", "weight", "group"),
}
WEIGHTS_ALONE = "use a checkpoint that quantizes weights alone"
MAX_INPUTS = 2**15  # of products of integers: 2^15 times 255 times 255 is less than 2^31


def compressed_tensors(stored: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Returns the model's tensors by name; see `formats.logical_tensors`."""
    has_scales = has_cache_scales(settings)
    is_dense = has_scales and not settings.get("config_groups")  # the scheme is of keys and values alone
    if settings.get("format") not in ((*FORMATS, "dense") if is_dense else FORMATS):
        raise settings_error(METHOD, "format", settings.get("format"), f"use one of {', '.join(FORMATS)}")
    sparsity = settings.get("sparsity_config")
    is_empty = isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"  # then it says nothing
    for key in ("transform_config", "sparsity_config"):
        if settings.get(key) not in (None, {}) and not (key == "sparsity_config" and is_empty):
            raise settings_error(METHOD, key, settings[key], OTHER)
    schemes = {} if is_dense else _schemes(settings)
    stored = with_present_names(stored) if has_scales else stored
    scales = stored_scales(stored) if has_scales else {}
    others, modules = packed_modules(stored, "weight_scale", PARTS)
    return {**others, **scales, **{f"{parts.module}.weight": _weight(parts, schemes) for parts in modules}}


def _schemes(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the schemes by their targets; of two for one target the last."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise settings_error(METHOD, "config_groups", groups, "it maps names to schemes; download config.json again")
    schemes: dict[str, Mapping[str, Any]] = {}
    for name, scheme in groups.items():
        weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
        targets = scheme.get("targets") if isinstance(scheme, Mapping) else None
        if not isinstance(weights, Mapping) or not isinstance(targets, list):
            raise settings_error(METHOD, name, scheme, "a scheme has targets and weights; download config.json again")
        if scheme.get("output_activations") is not None:
            raise settings_error(METHOD, "output_activations", scheme["output_activations"], WEIGHTS_ALONE)
        _activations(scheme)
        for key, harmless in HARMLESS_ARGUMENTS.items():
            if weights.get(key, harmless[0]) not in harmless:
                raise settings_error(METHOD, f"weights.{key}", weights[key], OTHER)
        schemes |= {_checked_target(target): scheme for target in targets}
    return schemes


def _activations(scheme: Mapping[str, Any]) -> Activations | None:
    """Returns how a scheme rounds the inputs of products, None if they keep the engine's dtype."""
    stated = scheme.get("input_activations")
    if stated is None or _is_float(stated):
        return None
    way = (stated.get("strategy"), stated.get("dynamic", False)) if isinstance(stated, Mapping) else None
    is_honoured = (
        way in (("token", True), ("tensor", False))
        and stated.get("type", "int") == "int"
        and stated.get("num_bits", 8) == 8
        and stated.get("symmetric", True) in (True, False)
        and stated.get("actorder") is None
    )
    if not is_honoured or _is_float(scheme["weights"]):
        raise settings_error(
            METHOD, "input_activations", stated, f"use 8 bits per token beside integers, or {WEIGHTS_ALONE}"
        )
    if scheme["weights"].get("strategy") not in ("tensor", "channel"):
        way_out = "beside activations of 8 bits it is tensor or channel; " + WEIGHTS_ALONE
        raise settings_error(METHOD, "weights.strategy", scheme["weights"].get("strategy"), way_out)
    return Activations(is_dynamic=way == ("token", True), is_symmetric=stated.get("symmetric", True))


def _is_float(arguments: Any) -> bool:
    return isinstance(arguments, Mapping) and arguments.get("type") == "float"


def _checked_target(target: Any) -> str:
    if not isinstance(target, str) or len(target) > MAX_PATTERN:
        raise settings_error(METHOD, "targets", target, "a target is a name, or re: and a regular expression")
    if target.startswith("re:"):
        require_pattern(METHOD, "targets", target[3:])
    return target


def _scheme_of(module: str, schemes: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the scheme of a module: that for its name, else for a pattern of it, else for all of its class.

    Of several patterns it is the first by the alphabet, as in the library of that name.
    """
    if module in schemes:
        return schemes[module]
    patterns = sorted(target for target in schemes if target.startswith("re:"))
    fitting = next((target for target in patterns if re.match(target[3:], module)), "Linear")
    if fitting not in schemes:
        raise ValueError(
            f"{module} is packed, but no target of quantization_config.config_groups is its name, a regular expression"
            ' that fits it, or "Linear"; correct config.json'
        )
    return schemes[fitting]


def _weight(parts: Parts, schemes: Mapping[str, Mapping[str, Any]]) -> StoredQuantized:
    whole = _scheme_of(parts.module, schemes)
    activations, scheme = _activations(whole), whole["weights"]
    bits, strategy = scheme.get("num_bits", 8), scheme.get("strategy")
    if scheme.get("type") == "float":
        return _float_weight(parts, bits, strategy, scheme)
    if not is_int(bits) or bits not in BITS:
        raise settings_error(METHOD, "weights.num_bits", bits, "use a checkpoint of 2 to 8 bits")
    is_packed = "weight_packed" in parts
    if is_packed:
        outputs = parts.require("weight_packed", ["I32"], (None, None)).shape[0]
        inputs = _logical_inputs(parts, outputs)
        parts.require("weight_packed", ["I32"], (outputs, -(-inputs * bits // 32)))
    else:
        outputs, inputs = parts.require("weight", ["I8"], (None, None)).shape
    groups = _num_groups(parts.module, scheme, strategy, inputs)
    require_even(parts.module, inputs // groups, bits)
    of_scales = (outputs, groups)
    if strategy == "tensor":
        of_scales = (1,) * len(parts["weight_scale"].shape[:1])
    scales = parts.require("weight_scale", SCALE_TYPES, of_scales)
    middle = 2 ** (bits - 1)
    has_zeros = scheme.get("symmetric", True) is False
    if has_zeros:
        shape = (-(-outputs * bits // 32), groups) if is_packed else of_scales
        parts.require("weight_zero_point", ["I32" if is_packed else "I8"], shape)
    elif "weight_zero_point" in parts and parts["weight_zero_point"].map().any():
        raise ValueError(
            f"{parts.module} has zero points, but quantization_config says symmetric=true; set it to false"
        )
    if scheme.get("actorder") == "group" and "weight_g_idx" not in parts:
        raise ValueError(f"{parts.module} has no weight_g_idx, though actorder='group'; download the checkpoint again")
    g_idx = None if "weight_g_idx" not in parts else parts.require("weight_g_idx", ["I32"], (inputs,))
    has_order = g_idx is not None and groups > 1

    # Integers that meet integers are whole ones.
    code = code_of_integers(bits, inputs // groups) if activations is None else "int4" if bits <= 4 else "int8"

    @functools.cache
    def order() -> np.ndarray:
        assert g_idx is not None
        return order_of_groups(f"{parts.module}.weight_g_idx", g_idx.map(), groups, may_differ=True)

    def read_values(rows: slice) -> np.ndarray:
        if is_packed:
            values = centred(unpacked(parts["weight_packed"].map()[rows], bits, axis=1)[:, :inputs], bits)
        else:
            values = parts["weight"].map()[rows]
            if values.min() < -middle or values.max() >= middle:
                raise ValueError(f"{parts.module} has integers of more than {bits} bits; download the checkpoint again")
        return values[:, order()] if has_order else values

    def read_zeros() -> np.ndarray:
        stored = parts["weight_zero_point"].map()
        if is_packed:
            return centred(unpacked(stored, bits)[:outputs], bits)
        if stored.min() < -middle or stored.max() >= middle:
            raise ValueError(f"{parts.module} has zero points of more than {bits} bits; download the checkpoint again")
        return np.broadcast_to(stored, (outputs, groups))

    return StoredQuantized(
        shape=(outputs, inputs),
        grid=Grid(code, groups, scales.dtype, has_zeros, has_order, activations=activations),
        values=read_values,
        scales=lambda: np.broadcast_to(require_finite(parts.module, scales.map()), (outputs, groups)),
        zeros=read_zeros if has_zeros else None,
        order=order if has_order else None,
        input_range=None if activations is None else _input_range(parts, activations, inputs),
    )


def stated_parts(
    module: str, outputs: int, inputs: int, settings: Mapping[str, Any], dtype: str
) -> dict[str, StatedTensor] | None:
    """Returns the parts of a weight as the settings describe them, None if they leave it in floating point.

    Scales are of `dtype`, the model's.
    """
    ignored = settings.get("ignore")
    if not settings.get("config_groups") or is_listed(module, ignored) or _fits_pattern(module, ignored):
        return None
    schemes = _schemes(settings)
    if "Linear" not in schemes and not is_listed(module, schemes) and not _fits_pattern(module, schemes):
        return None
    scheme = _scheme_of(module, schemes)
    weights = scheme["weights"]
    if weights.get("type") == "float":
        return _stated_floats(module, outputs, inputs, weights, dtype)
    bits, strategy = weights.get("num_bits", 8), weights.get("strategy")
    bits = bits if is_int(bits) else 8  # which the weight refuses
    groups = _num_groups(module, weights, strategy, inputs)
    is_packed = (scheme.get("format") or settings.get("format")) == "pack-quantized"
    of_scales = (1,) if strategy == "tensor" else (outputs, groups)
    parts = {"weight_scale": stated(dtype, *of_scales)}
    if is_packed:
        parts["weight_packed"] = stated("I32", outputs, -(-inputs * bits // 32))
        parts["weight_shape"] = stated("I64", 2, numbers=(outputs, inputs))
    else:
        parts["weight"] = stated("I8", outputs, inputs)
    if weights.get("symmetric", True) is False:
        packed_zeros = stated("I32", -(-outputs * bits // 32), groups)
        parts["weight_zero_point"] = packed_zeros if is_packed else stated("I8", *of_scales)
    if weights.get("actorder") == "group":
        parts["weight_g_idx"] = stated("I32", inputs)
    activations = _activations(scheme)
    if activations is not None and not activations.is_dynamic:
        parts["input_scale"] = stated(dtype, 1)
        parts |= {} if activations.is_symmetric else {"input_zero_point": stated("I8", 1)}
    return parts


def _stated_floats(
    module: str, outputs: int, inputs: int, weights: Mapping[str, Any], dtype: str
) -> dict[str, StatedTensor]:
    strategy = weights.get("strategy")
    if weights.get("num_bits") == 4:
        groups = _num_groups(module, weights, "group", inputs)
        parts = {
            "weight_packed": stated("U8", outputs, inputs // 2),
            "weight_scale": stated(FLOAT4_SCALES.get(str(strategy), "U8"), outputs, groups),
        }
        return parts | ({"weight_global_scale": stated("F32", 1)} if strategy == "tensor_group" else {})
    block = require_block(weights.get("block_structure")) or (1, 1)
    shapes: dict[str, tuple[int, ...]] = {
        "tensor": (1,),
        "channel": (outputs, 1),
        "block": (-(-outputs // block[0]), -(-inputs // block[1])),
    }
    of_scales = shapes.get(str(strategy), ())
    if strategy == "group":
        of_scales = (outputs, _num_groups(module, weights, "group", inputs))
    is_mx = weights.get("scale_dtype") == "torch.uint8"
    return {"weight": stated("F8_E4M3", outputs, inputs), "weight_scale": stated("U8" if is_mx else dtype, *of_scales)}


def _fits_pattern(module: str, names: Any) -> bool:
    patterns = [name for name in names if str(name).startswith("re:")] if isinstance(names, list | Mapping) else []
    return any(re.match(_checked_target(pattern)[3:], module) for pattern in patterns)


def _input_range(parts: Parts, activations: Activations, inputs: int) -> Callable[[], np.ndarray] | None:
    if inputs > MAX_INPUTS:
        raise ValueError(
            f"{parts.module} has {inputs} inputs in 8 bits, more than {MAX_INPUTS}, whose sum may pass 32 bits;"
            f" {WEIGHTS_ALONE}"
        )
    if activations.is_dynamic:
        return None

    def require(name: str, dtypes: Collection[str]) -> StoredTensor:
        return parts.require(name, dtypes, (1,) * len(parts[name].shape[:1]) if name in parts else (1,))

    scale = require("input_scale", SCALE_TYPES)
    zero = None if activations.is_symmetric else require("input_zero_point", ["I8", "I32", "I64"])

    def read() -> np.ndarray:
        own = np.float32(scale.map().reshape(()))
        point = 0 if zero is None else int(zero.map().reshape(()))
        if not 2**-MAX_EXPONENT <= own <= 2**MAX_EXPONENT or not -128 <= point <= 127:
            raise ValueError(f"{parts.module} rounds inputs by {own} to {point}; download the checkpoint again")
        return np.array([own, 1 / own, point], np.float32)

    return read


def _float_weight(parts: Parts, bits: Any, strategy: Any, scheme: Mapping[str, Any]) -> StoredQuantized:
    if not is_int(bits) or bits not in (4, 8):
        raise settings_error(METHOD, "weights.num_bits", bits, "use a checkpoint with floats of 4 or 8 bits")
    if scheme.get("symmetric", True) is not True:
        raise settings_error(METHOD, "weights.symmetric", False, "floats have no zero points; correct config.json")
    if "weight_g_idx" in parts:
        raise ValueError(f"{parts.module} has a weight_g_idx, which floats have no use for; download it again")
    if bits == 4:
        return _float4_weight(parts, strategy, scheme)
    if strategy == "group":
        inputs = parts.require("weight", ["F8_E4M3"], (None, None)).shape[1]
        size = inputs // _num_groups(parts.module, scheme, strategy, inputs)
        return float8_weight(parts, "weight_scale", block=(1, size))
    if strategy not in ("tensor", "channel", "block"):
        raise settings_error(METHOD, "weights.strategy", strategy, "use tensor, channel, block or group")
    block = require_block(scheme.get("block_structure")) if strategy == "block" else None
    if strategy == "block" and block is None:
        raise settings_error(METHOD, "weights.block_structure", None, "it is two positive numbers")
    return float8_weight(parts, "weight_scale", block=block, is_by_channel=strategy == "channel")


def _float4_weight(parts: Parts, strategy: Any, scheme: Mapping[str, Any]) -> StoredQuantized:
    if not isinstance(strategy, str) or strategy not in FLOAT4_SCALES:
        raise settings_error(METHOD, "weights.strategy", strategy, "use group or tensor_group")
    outputs, octets = parts.require("weight_packed", ["U8"], (None, None)).shape
    inputs = 2 * octets
    groups = _num_groups(parts.module, scheme, "group", inputs)
    require_even(parts.module, inputs // groups, 4)
    scales = parts.require("weight_scale", [FLOAT4_SCALES[strategy]], (outputs, groups))
    has_multiplier = strategy == "tensor_group"
    if has_multiplier:
        parts.require("weight_global_scale", ["F32"], (1,))

    def read_multiplier() -> np.ndarray:
        (divisor,) = parts["weight_global_scale"].map()
        if not 2**-MAX_EXPONENT <= divisor <= 2**MAX_EXPONENT:
            raise ValueError(f"{parts.module}.weight_global_scale is {divisor}; download the checkpoint again")
        return split_multiplier(1 / np.float64(divisor))

    return StoredQuantized(
        shape=(outputs, inputs),
        grid=Grid(FP4, groups, scales.dtype, has_zeros=False, has_order=False, has_multiplier=has_multiplier),
        values=lambda rows: unpacked(parts["weight_packed"].map()[rows], 4, axis=1),
        scales=lambda: require_finite(parts.module, scales.map()),
        multiplier=read_multiplier if has_multiplier else None,
    )


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
