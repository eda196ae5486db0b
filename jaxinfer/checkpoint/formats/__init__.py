"""The formats of quantized checkpoints: each turns stored parts into weights of integers, by Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.text_model import TEXT
from jaxinfer.checkpoint.formats import awq, compressed_tensors, fp8, gptq
from jaxinfer.checkpoint.formats.mxfp4 import mxfp4_tensors
from jaxinfer.checkpoint.safetensors_file import StatedTensor, StoredTensor
from jaxinfer.checkpoint.stored import Stored
from jaxinfer.validation import shown

# (stored tensors by name, settings) -> the model's tensors by name
Format = Callable[[Mapping[str, StoredTensor], Mapping[str, Any]], dict[str, Stored]]
# By `quant_method`.
FORMATS: dict[str, Format] = {
    "awq": awq.awq_tensors,
    "compressed-tensors": compressed_tensors.compressed_tensors,
    "fp8": fp8.fp8_tensors,
    "gptq": gptq.gptq_tensors,
    "mxfp4": mxfp4_tensors,
}
# (module, outputs, inputs, settings, type of the model's scales) -> parts of its weight, None if it is floating point
StatedParts = Callable[[str, int, int, Mapping[str, Any], str], dict[str, StatedTensor] | None]
STATED_PARTS: dict[str, StatedParts] = {
    "awq": awq.stated_parts,
    "compressed-tensors": compressed_tensors.stated_parts,
    "fp8": fp8.stated_parts,
    "gptq": gptq.stated_parts,
}
# Keys of config.json that describe a format; the second is an older name.
SETTINGS_KEYS = ("quantization_config", "compression_config")


def settings_of(hf: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns what config.json says of the format of its weights; None if they are floating point.

    In a checkpoint of several models it may stand among the settings of the text model. Raises ValueError for a format
    that is not read.
    """
    places = [hf, hf[TEXT]] if isinstance(hf.get(TEXT), Mapping) else [hf]
    stated = ((key, place.get(key)) for place in places for key in SETTINGS_KEYS)
    key, settings = next(((key, settings) for key, settings in stated if settings not in (None, {})), (None, None))
    if key is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if not isinstance(method, str) or method not in FORMATS:
        raise ValueError(
            f"{key}={shown(settings)} is not supported: quant_method is none of {', '.join(FORMATS)}; use"
            " the unquantized checkpoint, with EngineConfig.quantization if it shall take less memory"
        )
    return settings


def without_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json as that of the unquantized model."""
    plain = {key: value for key, value in hf.items() if key not in SETTINGS_KEYS}
    return plain | ({TEXT: without_settings(plain[TEXT])} if isinstance(plain.get(TEXT), Mapping) else {})


def logical_tensors(stored: Mapping[str, StoredTensor], settings: Mapping[str, Any] | None) -> dict[str, Stored]:
    """Returns the model's tensors by name, packed weights as `StoredQuantized`.

    Raises ValueError for settings that are not honoured, and for parts that do not fit together.
    """
    if settings is None:
        return dict(stored)
    return FORMATS[settings["quant_method"]](stored, settings)
