"""Llama 1 to 3.x and what is published in its form (TinyLlama, SmolLM2, Yi, ...), SmolLM3 and Seed-OSS.

SmolLM3 is Llama without rotary embedding in every fourth layer. Seed-OSS is Llama with biases on queries, keys and
values, and with a switch of its own for that of the attention's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    Family,
    WeightTable,
    decoder_of,
    read_norm,
    read_num_layers,
    refuse_unsupported,
    translate_common,
)
from jaxinfer.checkpoint.config_json.fields import divided_head_dim, is_enabled, num_kv_heads, require_size
from jaxinfer.checkpoint.config_json.rope import read_rope
from jaxinfer.checkpoint.config_json.window import FULL, SLIDING, layer_types, no_window
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.config import Layer, ModelConfig, uniform_decoder

SMOLLM3_MAX_POSITION = 32_768
SMOLLM3_THETA = 2_000_000.0
SEED_OSS_MAX_POSITION = 524_288
SEED_OSS_HEAD_DIM = 128
_LAYER = "model.layers.{layer}"

WEIGHTS: WeightTable = {
    "model.embed_tokens.weight": ("embedding", "V D -> V D"),
    "model.norm.weight": ("final_norm", "D -> D"),
    "lm_head.weight": ("unembedding", "V D -> V D"),
    f"{_LAYER}.input_layernorm.weight": ("layers.mixer_norm", "D -> D"),
    f"{_LAYER}.self_attn.q_proj.weight": ("layers.mixer.q", "(N H) D -> N H D"),
    f"{_LAYER}.self_attn.k_proj.weight": ("layers.mixer.k", "(K H) D -> K H D"),
    f"{_LAYER}.self_attn.v_proj.weight": ("layers.mixer.v", "(K H) D -> K H D"),
    f"{_LAYER}.self_attn.o_proj.weight": ("layers.mixer.o", "D C -> D C"),
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


def renamed_weights(parts: Mapping[str, str]) -> WeightTable:
    """Returns WEIGHTS with other names for some parts of the stored names, such as {".mlp.": ".feed_forward."}."""
    table = {}
    for name, target in WEIGHTS.items():
        for theirs, ours in parts.items():
            name = name.replace(theirs, ours)
        table[name] = target
    return table


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


def smollm3_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' SmolLM3Config."""
    refuse_unsupported(hf, "SmolLM3ForCausalLM")
    num_layers, head_dim = read_num_layers(hf), divided_head_dim(hf)
    interval = require_size(hf, "no_rope_layer_interval", 4)
    has_rope = hf.get("no_rope_layers")
    if has_rope is None:
        has_rope = [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not isinstance(has_rope, list) or len(has_rope) != num_layers or not all(i in (0, 1) for i in has_rope):
        raise ValueError(
            f"no_rope_layers={has_rope!r} is not a list of num_hidden_layers={num_layers} numbers 0 and 1;"
            " download the checkpoint's config.json again"
        )
    window = None
    if is_enabled(hf, "use_sliding_window") and hf.get("sliding_window") is not None:
        window = require_size(hf, "sliding_window")
    kinds = layer_types(hf, [FULL if window is None or rotates else SLIDING for rotates in has_rope])
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=4),
        head_dim=head_dim,
        has_qkv_bias=is_enabled(hf, "attention_bias"),
        has_output_bias=is_enabled(hf, "attention_bias"),
    )
    rope = read_rope(hf, head_dim, SMOLLM3_MAX_POSITION, default_theta=SMOLLM3_THETA)
    mlp = MLP(intermediate_size=require_size(hf, "intermediate_size"), has_bias=is_enabled(hf, "mlp_bias"))
    norm = read_norm(hf)

    def layer(rotates: int, kind: str) -> Layer:
        mixer = replace(attention, rope=rope if rotates else None, window=window if kind == SLIDING else None)
        return Layer(mixer=mixer, feed_forward=mlp, norm=norm)

    return decoder_of(
        hf,
        [layer(*pair) for pair in zip(has_rope, kinds, strict=True)],
        max_position=SMOLLM3_MAX_POSITION,
        is_tied=True,
    )


def seed_oss_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' SeedOssConfig."""
    return uniform_decoder(
        **translate_common(hf, architecture="SeedOssForCausalLM", max_position=SEED_OSS_MAX_POSITION),
        num_kv_heads=num_kv_heads(hf, default=8),
        # As in transformers, null divides the hidden size among the heads, and an absent key does not.
        head_dim=divided_head_dim(hf) if "head_dim" in hf else SEED_OSS_HEAD_DIM,
        has_qkv_bias=is_enabled(hf, "attention_bias", default=True),
        has_output_bias=is_enabled(hf, "attention_out_bias"),
        has_mlp_bias=is_enabled(hf, "mlp_bias"),
    )


FAMILY = Family(config_from_hf=config_from_hf, weights=WEIGHTS)
SMOLLM3_FAMILY = Family(config_from_hf=smollm3_from_hf, weights=WEIGHTS)
SEED_OSS_FAMILY = Family(config_from_hf=seed_oss_from_hf, weights=WEIGHTS)
