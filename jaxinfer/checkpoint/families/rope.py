"""Rotary embedding settings of config.json, in the words of transformers 4 and of transformers 5."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.checkpoint.families.fields import is_enabled, number_or_default, require_number, require_size
from jaxinfer.model.rope import RopeScaling

DEFAULT_THETA = 10_000.0


def translate_rope(hf: Mapping[str, Any], max_position: int) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling` of a `ModelConfig`.

    transformers 4 writes `rope_theta` and an optional `rope_scaling`, transformers 5 puts both into
    `rope_parameters`. Precedence and defaults follow transformers' modeling_rope_utils.py; `max_position` is
    the family's default.
    """
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    parameters = hf.get(name) or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{name}={parameters!r} is not an object; download the checkpoint's config.json again")
    if nested := {key: value for key, value in parameters.items() if isinstance(value, Mapping)}:
        raise ValueError(
            f"{name} per layer type, {nested!r}, is not supported; use a checkpoint with one rope for all layers"
        )
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(
            f"partial_rotary_factor={parameters['partial_rotary_factor']!r} is not supported;"
            " use a checkpoint that rotates whole heads"
        )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", *_SCALINGS):
        raise ValueError(
            f"rope_type={kind!r} is not supported; use a checkpoint with one of: default, {', '.join(_SCALINGS)}"
        )
    place = parameters if "rope_theta" in parameters else hf
    return {
        "rope_theta": require_number(place, "rope_theta", DEFAULT_THETA, least=1.0),
        "rope_scaling": None if kind == "default" else _SCALINGS[kind](parameters, hf, max_position),
    }


def _linear(parameters: Mapping[str, Any], hf: Mapping[str, Any], max_position: int) -> RopeScaling:
    return RopeScaling(kind="linear", factor=number_or_default(parameters, "factor"))


def _llama3(parameters: Mapping[str, Any], hf: Mapping[str, Any], max_position: int) -> RopeScaling:
    low, high = (number_or_default(parameters, key) for key in ("low_freq_factor", "high_freq_factor"))
    if not 0 < low < high:
        raise ValueError(
            f"low_freq_factor={low!r} and high_freq_factor={high!r} do not bound a range;"
            " the low one has to be positive and smaller than the high one"
        )
    return RopeScaling(
        kind="llama3",
        factor=number_or_default(parameters, "factor"),
        original_max_position=_original_max_position(parameters, hf, max_position),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(parameters: Mapping[str, Any], hf: Mapping[str, Any], max_position: int) -> RopeScaling:
    original = _original_max_position(parameters, hf, max_position)
    stretched = require_size(hf, "max_position_embeddings", max_position) / original
    factor = number_or_default(parameters, "factor", stretched)
    mscale, mscale_all_dim = (number_or_default(parameters, key, 0.0) for key in ("mscale", "mscale_all_dim"))
    default_attention_factor = _yarn_attention_factor(factor, mscale, mscale_all_dim)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        # 0 and null mean the paper's values, as in transformers.
        beta_fast=number_or_default(parameters, "beta_fast", 32.0) or 32.0,
        beta_slow=number_or_default(parameters, "beta_slow", 1.0) or 1.0,
        attention_factor=number_or_default(parameters, "attention_factor", default_attention_factor),
        truncate=is_enabled(parameters, "truncate", default=True),
    )


def _yarn_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """Returns 0.1 ln(factor) + 1 (Peng et al. 2023), or DeepSeek's quotient of two given both mscales."""

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)


def _original_max_position(parameters: Mapping[str, Any], hf: Mapping[str, Any], max_position: int) -> int:
    # Some checkpoints state it outside the rope parameters; transformers gives that place priority.
    for place in (hf, parameters):
        if place.get("original_max_position_embeddings") is not None:
            return require_size(place, "original_max_position_embeddings")
    return require_size(hf, "max_position_embeddings", max_position)


_SCALINGS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any], int], RopeScaling]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
