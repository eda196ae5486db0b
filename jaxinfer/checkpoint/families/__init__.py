"""The model families whose Hugging Face checkpoints can be read, by their `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.families import llama, mistral, qwen2, qwen3
from jaxinfer.checkpoint.families.common import Family

FAMILIES: Mapping[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
}


def family_of(hf: Mapping[str, Any]) -> Family:
    """Returns the family that config.json names; an unknown one is a ValueError listing the known."""
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type={model_type!r} is not supported; use a checkpoint of one of these families:"
            f" {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
