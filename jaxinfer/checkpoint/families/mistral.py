"""Mistral: Llama with a sliding window, which later ones have no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.family import Family, translate_common
from jaxinfer.checkpoint.config_json.fields import divided_head_dim, num_kv_heads
from jaxinfer.checkpoint.config_json.window import stated_window
from jaxinfer.checkpoint.families import llama
from jaxinfer.model.config import ModelConfig, uniform_decoder


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' MistralConfig."""
    return uniform_decoder(
        **translate_common(hf, architecture="MistralForCausalLM", max_position=131072),
        num_kv_heads=num_kv_heads(hf, default=8),
        head_dim=divided_head_dim(hf),
        sliding_window=stated_window(hf),
    )


FAMILY = Family(config_from_hf=config_from_hf, weights=llama.WEIGHTS)
