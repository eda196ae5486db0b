"""Qwen2, Qwen2.5 and Qwen3 (dense): Llama with biases on queries, keys and values, or with norms on their heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.checkpoint.config_json.family import Family, WeightTable, decoder_of, translate_common
from jaxinfer.checkpoint.config_json.fields import divided_head_dim, is_enabled, num_kv_heads, stated_head_dim
from jaxinfer.checkpoint.config_json.window import switched_windows
from jaxinfer.checkpoint.families import llama
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.config import ModelConfig, uniform_decoder

MAX_POSITION = 32_768
WEIGHTS_3: WeightTable = {
    **llama.WEIGHTS,
    "model.layers.{layer}.self_attn.q_norm.weight": ("layers.mixer.q_norm", "H -> H"),
    "model.layers.{layer}.self_attn.k_norm.weight": ("layers.mixer.k_norm", "H -> H"),
}


def config_from_hf_2(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Qwen2Config."""
    config = uniform_decoder(
        **translate_common(hf, architecture="Qwen2ForCausalLM", max_position=MAX_POSITION),
        num_kv_heads=num_kv_heads(hf, default=32),
        head_dim=divided_head_dim(hf),
        has_qkv_bias=True,
    )
    return _with_windows(hf, config)


def config_from_hf_3(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Qwen3Config."""
    has_attention_bias = is_enabled(hf, "attention_bias")
    config = uniform_decoder(
        **translate_common(hf, architecture="Qwen3ForCausalLM", max_position=MAX_POSITION),
        num_kv_heads=num_kv_heads(hf, default=32),
        # Not the hidden size shared out among the heads: Qwen3-4B has 2560 / 32 = 80 but heads of 128.
        head_dim=stated_head_dim(hf, 128),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_qk_norm=True,
    )
    return _with_windows(hf, config)


def _with_windows(hf: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    layer, windows = config.layers[0], switched_windows(hf, config.num_layers)
    assert isinstance(layer.mixer, Attention)
    layers = [replace(layer, mixer=replace(layer.mixer, window=window)) for window in windows]
    return decoder_of(hf, layers, max_position=MAX_POSITION, has_tied_embeddings=config.has_tied_embeddings)


FAMILY_2 = Family(config_from_hf=config_from_hf_2, weights=llama.WEIGHTS)
FAMILY_3 = Family(config_from_hf=config_from_hf_3, weights=WEIGHTS_3)
