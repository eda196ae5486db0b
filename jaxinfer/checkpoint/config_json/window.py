"""The sliding window of config.json, and which layers have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.checkpoint.config_json.fields import is_enabled, require_count, require_size

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
_FORMER_NAMES = {"attention": FULL, "mamba": LINEAR}
# The defaults of transformers, for Mistral, Qwen2 and Qwen3 alike.
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


def no_window(hf: Mapping[str, Any]) -> None:
    """Refuses a window, which the family does not have."""
    if hf.get("use_sliding_window") not in (None, False):
        raise ValueError(
            f"use_sliding_window={hf['use_sliding_window']!r} is not supported; use a checkpoint whose"
            " layers all attend to the whole context"
        )
    _check_layers(hf, FULL)


def stated_window(hf: Mapping[str, Any]) -> int | None:
    """Returns `sliding_window`, which all layers have unless it is null, as in Mistral."""
    window = _sliding_window(hf)
    _check_layers(hf, FULL if window is None else SLIDING)
    return window


def switched_windows(hf: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """Returns the window of each layer, None for one without, where `use_sliding_window` switches it on, as in Qwen2.

    The layers from `max_window_layers` on have it then, or those that `layer_types` names.
    """
    window = _sliding_window(hf) if is_enabled(hf, "use_sliding_window") else None
    if window is None:
        _check_layers(hf, FULL)
        return [None] * num_layers
    num_full = require_count(hf, "max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
    kinds = layer_types(hf, [FULL if i < num_full else SLIDING for i in range(num_layers)])
    return [window if kind == SLIDING else None for kind in kinds]


def layer_types(hf: Mapping[str, Any], default: Sequence[str]) -> list[str]:
    """Returns the kind of each layer, FULL or SLIDING, for families in which both occur."""
    return _layer_types_among(hf, default, SLIDING)


def hybrid_layer_types(hf: Mapping[str, Any], default: Sequence[str]) -> list[str]:
    """Returns the kind of each layer, FULL or LINEAR, for families with recurrent layers."""
    name = "layers_block_type" if hf.get("layer_types") is None else "layer_types"
    stated = hf.get(name)
    if isinstance(stated, list):
        hf = {**hf, name: [_FORMER_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in stated]}
    return _layer_types_among(hf, default, LINEAR, name)


def _layer_types_among(
    hf: Mapping[str, Any], default: Sequence[str], other: str, name: str = "layer_types"
) -> list[str]:
    stated = _layer_types(hf, name) or list(default)
    if len(stated) != len(default) or not set(stated) <= {FULL, other}:
        raise ValueError(
            f"{name}={stated!r} is not a list of num_hidden_layers={len(default)} names {FULL} and {other};"
            " download the checkpoint's config.json again"
        )
    return stated


def _sliding_window(hf: Mapping[str, Any]) -> int | None:
    if hf.get("sliding_window", DEFAULT_WINDOW) is None:
        return None
    return require_size(hf, "sliding_window", DEFAULT_WINDOW)


def _check_layers(hf: Mapping[str, Any], kind: str) -> None:
    """Raises ValueError where `layer_types` has others than this one."""
    others = sorted(set(_layer_types(hf)) - {kind})
    if others:
        raise ValueError(
            f"layer_types contains {others}, which is not supported; use a checkpoint whose layers are"
            f" all {kind}, as its other settings say"
        )


def _layer_types(hf: Mapping[str, Any], key: str = "layer_types") -> list[str]:
    """Returns the names in `layer_types`, none where it is absent or null."""
    value = hf.get(key)
    if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise ValueError(f"{key}={value!r} is not a list of names; download the checkpoint's config.json again")
    return value or []
