"""Llama 1 to 3.x, and what is published in its form (TinyLlama, SmolLM2, Yi, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.family import Family, WeightTable, translate_common
from jaxinfer.checkpoint.config_json.fields import divided_head_dim, is_enabled, num_kv_heads, require_size
from jaxinfer.checkpoint.config_json.window import no_window
from jaxinfer.model.config import ModelConfig, uniform_decoder

_LAYER = "model.layers.{layer}"

WEIGHTS: WeightTable = {
    "model.embed_tokens.weight": ("embedding", "V D -> V D"),
    "model.norm.weight": ("final_norm", "D -> D"),
    "lm_head.weight": ("unembedding", "V D -> V D"),
    f"{_LAYER}.input_layernorm.weight": ("layers.mixer_norm", "D -> D"),
    f"{_LAYER}.self_attn.q_proj.weight": ("layers.mixer.q", "(N H) D -> N H D"),
    f"{_LAYER}.self_attn.k_proj.weight": ("layers.mixer.k", "(K H) D -> K H D"),
    f"{_LAYER}.self_attn.v_proj.weight": ("layers.mixer.v", "(K H) D -> K H D"),
    f"{_LAYER}.self_attn.o_proj.weight": ("layers.mixer.o", "D (N H) -> D N H"),
    f"{_LAYER}.self_attn.q_proj.bias": ("layers.mixer.q_bias", "(N H) -> N H"),
    f"{_LAYER}.self_attn.k_proj.bias": ("layers.mixer.k_bias", "(K H) -> K H"),
    f"{_LAYER}.self_attn.v_proj.bias": ("layers.mixer.v_bias", "(K H) -> K H"),
    f"{_LAYER}.self_attn.o_proj.bias": ("layers.mixer.o_bias", "D -> D"),
    f"{_LAYER}.post_attention_layernorm.weight": ("layers.feed_forward_norm", "D -> D"),
    f"{_LAYER}.mlp.gate_proj.weight": ("layers.feed_forward.gate", "F D -> F D"),
    f"{_LAYER}.mlp.up_proj.weight": ("layers.feed_forward.up", "F D -> F D"),
    f"{_LAYER}.mlp.down_proj.weight": ("layers.feed_forward.down", "D F -> D F"),
    f"{_LAYER}.mlp.gate_proj.bias": ("layers.feed_forward.gate_bias", "F -> F"),
    f"{_LAYER}.mlp.up_proj.bias": ("layers.feed_forward.up_bias", "F -> F"),
    f"{_LAYER}.mlp.down_proj.bias": ("layers.feed_forward.down_bias", "D -> D"),
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' LlamaConfig."""
    no_window(hf)
    has_attention_bias = is_enabled(hf, "attention_bias")
    return uniform_decoder(
        **translate_common(hf, architecture="LlamaForCausalLM", max_position=2048),
        num_kv_heads=num_kv_heads(hf, default=require_size(hf, "num_attention_heads")),
        head_dim=divided_head_dim(hf),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=is_enabled(hf, "mlp_bias"),
    )


FAMILY = Family(config_from_hf=config_from_hf, weights=WEIGHTS)
