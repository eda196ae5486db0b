"""Single values of config.json, checked; a message names the key, the value and the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.validation import MAX_FLOAT, MAX_INT, is_int


def require_size(hf: Mapping[str, Any], key: str, default: int | None = None, most: int = MAX_INT) -> int:
    """Returns a positive integer, which config.json has to state unless there is a default."""
    value = hf.get(key, default)
    if not is_int(value) or not 1 <= value <= most:
        raise ValueError(
            f"{key}={value!r} is not an integer from 1 to {most}; download the checkpoint's config.json again"
        )
    return value


def is_enabled(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Returns a switch of config.json."""
    value = hf.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} is neither true nor false; write the one that is meant")
    return value


def divided_head_dim(hf: Mapping[str, Any]) -> int:
    """Returns the explicit head_dim, or the hidden size shared out among the heads where there is none."""
    if hf.get("head_dim") is not None:
        return stated_head_dim(hf)
    hidden_size, num_heads = require_size(hf, "hidden_size"), require_size(hf, "num_attention_heads")
    if (head_dim := hidden_size // num_heads) == 0 or head_dim % 2:
        raise ValueError(
            f"hidden_size={hidden_size} and num_attention_heads={num_heads} make heads of {head_dim}, and rotary"
            " embedding turns pairs; use a checkpoint with heads of an even size"
        )
    return head_dim


def stated_head_dim(hf: Mapping[str, Any], default: int | None = None, key: str = "head_dim") -> int:
    """Returns the size of heads, which has to be even."""
    head_dim = require_size(hf, key, default)
    if head_dim % 2:
        raise ValueError(
            f"{key}={head_dim} is odd, and rotary embedding turns pairs; use a checkpoint with even head sizes"
        )
    return head_dim


def num_kv_heads(hf: Mapping[str, Any], default: int, key: str = "num_key_value_heads") -> int:
    """Returns the number of KV heads: `default` without the key, that of the heads where it is null."""
    num_heads = require_size(hf, "num_attention_heads")
    if key in hf and hf[key] is None:
        return num_heads
    count = require_size(hf, key, default)
    if num_heads % count:
        raise ValueError(
            f"num_attention_heads={num_heads} is not a multiple of {key}={count}; download the checkpoint's config.json"
            " again"
        )
    return count


def require_number(place: Mapping[str, Any], key: str, default: float | None = None, least: float = 0.0) -> float:
    """Returns a finite number of at least `least`, `default` if the key is absent."""
    value = place.get(key, default)
    # NaN fails every comparison, so it is refused here as well.
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= MAX_FLOAT:
        raise ValueError(
            f"{key}={value!r} is not a finite number of at least {least}; download the checkpoint's config.json again"
        )
    return value


def multiplier(hf: Mapping[str, Any], key: str) -> float:
    """Returns a positive number, 1 if the key is absent."""
    return require_number(hf, key, 1.0, least=1e-9)


def number_or_default(place: Mapping[str, Any], key: str, default: float | None = None, least: float = 0.0) -> float:
    """Returns the same, and `default` for null as well."""
    return require_number({key: default if place.get(key) is None else place[key]}, key, least=least)


def number_or_none(place: Mapping[str, Any], key: str, default: float | None = None) -> float | None:
    """Returns a positive number, None for null, and `default` if the key is absent."""
    value = place.get(key, default)
    return None if value is None else require_number({key: value}, key, least=1e-9)


def require_count(hf: Mapping[str, Any], key: str, default: int) -> int:
    """Returns an integer of at least 0, `default` if the key is absent."""
    return 0 if hf.get(key, default) == 0 else require_size(hf, key, default)


def expert_counts(
    hf: Mapping[str, Any], key: str, default: int, default_chosen: int, chosen: str = "num_experts_per_tok"
) -> tuple[int, int]:
    """Returns the number of experts, which `key` states, and the number of them that a token chooses, of `chosen`."""
    num_experts, num_chosen = require_size(hf, key, default), require_size(hf, chosen, default_chosen)
    if num_chosen > num_experts:
        raise ValueError(
            f"{chosen}={num_chosen} is more than {key}={num_experts}; download the checkpoint's config.json again"
        )
    return num_experts, num_chosen
