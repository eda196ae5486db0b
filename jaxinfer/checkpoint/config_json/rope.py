"""Rotary embedding settings of config.json, in the words of transformers 4 and of transformers 5."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.checkpoint.config_json.fields import is_enabled, number_or_default, require_number, require_size
from jaxinfer.checkpoint.config_json.window import FULL
from jaxinfer.model.components.attention import QueryGrowth
from jaxinfer.model.components.rope import Rope, RopeScaling
from jaxinfer.validation import MAX_INT

DEFAULT_THETA = 10_000.0


def read_rope(
    hf: Mapping[str, Any],
    head_dim: int,
    max_position: int,
    *,
    layer_type: str | None = None,
    default_theta: float = DEFAULT_THETA,
    default_partial: float = 1.0,
    is_interleaved: bool = False,
) -> Rope:
    """Returns the rotary embedding of a family's layers; `max_position` is the family's default.

    `layer_type`: the kind of layer, for families whose kinds have parameters of their own. `default_partial` is the
    part of each head that is rotated where config.json states none.
    """
    stated = rope_parameters(hf)
    parameters = stated if layer_type is None else _of_layer_type(stated, layer_type)
    partial = next(
        (
            place["partial_rotary_factor"]
            for place in (parameters, hf)
            if place.get("partial_rotary_factor") is not None
        ),
        default_partial,
    )
    dim = int(head_dim * require_number({"partial_rotary_factor": partial}, "partial_rotary_factor"))
    if not 2 <= dim <= head_dim or dim % 2:
        raise ValueError(
            f"partial_rotary_factor={partial!r} rotates {dim} of {head_dim} dimensions of a head, which are no pairs;"
            " download the checkpoint's config.json again"
        )
    parameters = {key: value for key, value in parameters.items() if key != "partial_rotary_factor"}
    own = {key: value for key, value in hf.items() if key not in ("rope_scaling", "rope_parameters")}
    rope = translate_rope({**own, _place(hf): parameters}, max_position, default_theta)
    return Rope(
        dim=dim,
        max_position=_longest(hf, max_position),
        theta=rope["rope_theta"],
        scaling=rope["rope_scaling"],
        is_interleaved=is_interleaved,
    )


def read_whole_rope(
    hf: Mapping[str, Any],
    head_dim: int,
    max_position: int,
    *,
    default_theta: float = DEFAULT_THETA,
    is_interleaved: bool = False,
) -> Rope:
    """Returns the same for a family whose layers all rotate whole heads; ValueError for a part of a head."""
    rope = translate_rope(hf, max_position, default_theta)
    return Rope(
        dim=head_dim,
        max_position=_longest(hf, max_position),
        theta=rope["rope_theta"],
        scaling=rope["rope_scaling"],
        is_interleaved=is_interleaved,
    )


def read_query_growth(hf: Mapping[str, Any], max_position: int) -> QueryGrowth | None:
    """Returns the factor on queries that the parameters of rotary embedding state, as in Ministral 3."""
    parameters = rope_parameters(hf)
    beta = number_or_default(parameters, "llama_4_scaling_beta", 0.0)
    return QueryGrowth(beta=beta, length=_original_max_position(parameters, hf, max_position)) if beta else None


def read_proportional_rope(
    hf: Mapping[str, Any], head_dim: int, max_position: int, *, layer_type: str, default_theta: float
) -> Rope:
    """Returns the same for a kind of layer whose parameters may have the type "proportional", as in Gemma 4.

    Of this type a part of the pairs turns, with the frequencies that they have among all pairs of the head.
    """
    parameters = _of_layer_type(rope_parameters(hf), layer_type)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = number_or_default(parameters, "partial_rotary_factor", 1.0)
    num_turned = int(partial * head_dim // 2)
    if kind != "proportional" and partial != 1.0:
        raise ValueError(
            f"partial_rotary_factor={partial!r} with rope_type={kind!r} is not supported; use a checkpoint in which"
            ' layers that rotate a part of a head have the type "proportional"'
        )
    if not 1 <= num_turned <= head_dim // 2:
        raise ValueError(
            f"partial_rotary_factor={partial!r} turns {num_turned} of the {head_dim // 2} pairs of a head; download the"
            " checkpoint's config.json again"
        )
    own = {key: value for key, value in parameters.items() if key != "partial_rotary_factor"}
    if kind == "proportional":
        own |= {"rope_type": "default" if own.get("factor") is None else "linear"}
    hf = {**hf, "rope_parameters": {layer_type: own}}
    rope = read_rope(hf, head_dim, max_position, layer_type=layer_type, default_theta=default_theta)
    return rope if num_turned == head_dim // 2 else replace(rope, num_turned=num_turned)


def _of_layer_type(stated: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    """Returns the parameters of one kind of layer; parameters without kinds are those of the full layers."""
    is_nested = any(isinstance(value, Mapping) for value in stated.values())
    if not is_nested:
        return stated if layer_type == FULL else {}
    parameters = stated.get(layer_type) or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(
            f"rope_parameters of {layer_type} are {parameters!r}, not an object; download config.json again"
        )
    return parameters


def _place(hf: Mapping[str, Any]) -> str:
    return "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"


def rope_parameters(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the object of config.json with the parameters of rotary embedding; {} if there is none."""
    name = _place(hf)
    parameters = hf.get(name) or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{name}={parameters!r} is not an object; download the checkpoint's config.json again")
    return parameters


def translate_rope(hf: Mapping[str, Any], max_position: int, default_theta: float = DEFAULT_THETA) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling` of `uniform_decoder`.

    transformers 4 writes `rope_theta` and an optional `rope_scaling`, transformers 5 puts both into
    `rope_parameters`. Precedence and defaults follow transformers' modeling_rope_utils.py; `max_position` is
    the family's default.
    """
    name, parameters = _place(hf), rope_parameters(hf)
    if nested := {key: value for key, value in parameters.items() if isinstance(value, Mapping)}:
        raise ValueError(
            f"{name} per layer type, {nested!r}, is not supported; use a checkpoint with one rope for all layers"
        )
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(
            f"partial_rotary_factor={parameters['partial_rotary_factor']!r} is not supported;"
            " use a checkpoint that rotates whole heads"
        )
    kind = rope_kind(parameters)
    # Dynamic NTK changes nothing up to max_position_embeddings, and no request is longer.
    if kind not in ("default", "dynamic", *_SCALINGS):
        raise ValueError(
            f"rope_type={kind!r} is not supported; use a checkpoint with one of: default, dynamic,"
            f" {', '.join(_SCALINGS)}"
        )
    place = parameters if "rope_theta" in parameters else hf
    return {
        "rope_theta": require_number(place, "rope_theta", default_theta, least=1.0),
        "rope_scaling": None if kind in ("default", "dynamic") else _SCALINGS[kind](parameters, hf, max_position),
    }


def rope_kind(parameters: Mapping[str, Any]) -> Any:
    """Returns the stated type of rotary scaling, such as "yarn"."""
    return parameters.get("rope_type", parameters.get("type", "default"))


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
    original, factor = _yarn_stretch(parameters, hf, max_position)
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


def _yarn_stretch(parameters: Mapping[str, Any], hf: Mapping[str, Any], max_position: int) -> tuple[int, float]:
    """Returns the native length in tokens, and the factor on it."""
    original = _original_max_position(parameters, hf, max_position)
    stretched = require_size(hf, "max_position_embeddings", max_position) / original
    return original, number_or_default(parameters, "factor", stretched)


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


def _longrope(parameters: Mapping[str, Any], hf: Mapping[str, Any], max_position: int) -> RopeScaling:
    original = _original_max_position(parameters, hf, max_position)
    longest = require_size(hf, "max_position_embeddings", max_position)
    factor = max(number_or_default(parameters, "factor", longest / original), 1.0)

    def factors(name: str) -> tuple[float, ...]:
        stated = parameters.get(name)
        if not isinstance(stated, list):
            raise ValueError(f"{name}={stated!r} is not a list of numbers; download the checkpoint's config.json again")
        return tuple(require_number({name: item}, name, least=1e-9) for item in stated)

    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=number_or_default(parameters, "attention_factor", attention_factor),
        factors=factors("short_factor"),
        long_factors=factors("long_factor") if longest > original else (),
        long_max_position=longest,
    )


def read_max_position(hf: Mapping[str, Any], default: int, scalings: Iterable[RopeScaling | None]) -> int:
    """Returns the tokens of a model, with LongRoPE those of its short factors."""
    ends = (scaling.original_max_position for scaling in scalings if scaling is not None and scaling.kind == "longrope")
    return min((_longest(hf, default), *ends))


def _longest(hf: Mapping[str, Any], default: int) -> int:
    """Returns `max_position_embeddings`, or the length that YaRN stretches some layers to if that is more.

    Recipes for long texts add YaRN to config.json, and leave `max_position_embeddings` at the native length.
    """
    longest = require_size(hf, "max_position_embeddings", default)
    stated = rope_parameters(hf)
    for parameters in [value for value in stated.values() if isinstance(value, Mapping)] or [stated]:
        if rope_kind(parameters) == "yarn":
            original, factor = _yarn_stretch(parameters, hf, default)
            if factor * original > MAX_INT:
                raise ValueError(
                    f"factor={factor!r} times original_max_position_embeddings={original} tokens is no length of a"
                    " model; download the checkpoint's config.json again"
                )
            longest = max(longest, round(factor * original))
    return longest


_SCALINGS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any], int], RopeScaling]] = {
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
