"""Single values of config.json, checked; a message names the key, the value and the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def require_size(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Returns a positive integer, which config.json has to state unless there is a default."""
    value = hf.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{key}={value!r} in config.json is not a positive integer; download the checkpoint's config.json again"
        )
    return value


def is_enabled(hf: Mapping[str, Any], key: str) -> bool:
    """Returns a switch of config.json that is off unless stated."""
    value = hf.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} in config.json is neither true nor false; write the one that is meant")
    return value


def divided_head_dim(hf: Mapping[str, Any]) -> int:
    """Returns the explicit head_dim, or the hidden size shared out among the heads where there is none."""
    if hf.get("head_dim") is not None:
        return require_size(hf, "head_dim")
    return require_size(hf, "hidden_size") // require_size(hf, "num_attention_heads")


def num_kv_heads(hf: Mapping[str, Any], default: int) -> int:
    """Returns the number of KV heads: `default` without the key, that of the heads where it is null."""
    if "num_key_value_heads" in hf and hf["num_key_value_heads"] is None:
        return require_size(hf, "num_attention_heads")
    return require_size(hf, "num_key_value_heads", default)


def require_number(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Returns a number of the rope parameters, `default` where the key is absent or null."""
    value = default if parameters.get(key) is None else parameters[key]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(
            f"{key}={value!r} in the rope parameters {dict(parameters)!r} of config.json is not a number;"
            " download the checkpoint's config.json again"
        )
    return value
