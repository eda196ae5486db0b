"""Gemma 1, 2 and 3: norms that add one, scaled embeddings, and from Gemma 2 on windows and norms after."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    Family,
    WeightTable,
    decoder_of,
    read_norm,
    read_num_layers,
    refuse_unsupported,
)
from jaxinfer.checkpoint.config_json.fields import (
    is_enabled,
    num_kv_heads,
    number_or_none,
    require_number,
    require_size,
    stated_head_dim,
)
from jaxinfer.checkpoint.config_json.rope import read_rope
from jaxinfer.checkpoint.config_json.text_model import text_model_family
from jaxinfer.checkpoint.config_json.window import FULL, SLIDING, layer_types
from jaxinfer.checkpoint.families import llama
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.config import Layer, ModelConfig

_LAYER = "model.layers.{layer}"
_HONOURS = ("hidden_act",)
GELU = "gelu_pytorch_tanh"
NO_SOFTCAPS: Mapping[str, float | None] = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
SOFTCAPS_2: Mapping[str, float | None] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0  # of Gemma 3

WEIGHTS: WeightTable = {
    **{name: target for name, target in llama.WEIGHTS.items() if "post_attention_layernorm" not in name},
    f"{_LAYER}.post_attention_layernorm.weight": ("layers.mixer_post_norm", "D -> D"),
    f"{_LAYER}.pre_feedforward_layernorm.weight": ("layers.feed_forward_norm", "D -> D"),
    f"{_LAYER}.post_feedforward_layernorm.weight": ("layers.feed_forward_post_norm", "D -> D"),
    f"{_LAYER}.self_attn.q_norm.weight": ("layers.mixer.q_norm", "H -> H"),
    f"{_LAYER}.self_attn.k_norm.weight": ("layers.mixer.k_norm", "H -> H"),
}


def config_from_hf_1(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' GemmaConfig."""
    return _translate(hf, "GemmaForCausalLM", max_position=8192, default_kv_heads=16)


def config_from_hf_2(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Gemma2Config."""
    return _translate(
        hf, "Gemma2ForCausalLM", max_position=8192, pattern=2, default_softcaps=SOFTCAPS_2, has_post_norms=True
    )


def config_from_hf_3(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Gemma3TextConfig."""
    pattern = require_size(hf, "sliding_window_pattern" if "sliding_window_pattern" in hf else "_", 6)
    return _translate(
        hf,
        "Gemma3ForCausalLM",
        max_position=131_072,
        pattern=pattern,
        has_post_norms=True,
        qk_norm="head",
        has_two_ropes=True,
    )


def _translate(
    hf: Mapping[str, Any],
    architecture: str,
    *,
    max_position: int,
    default_kv_heads: int = 4,
    pattern: int | None = None,
    default_softcaps: Mapping[str, float | None] = NO_SOFTCAPS,
    has_post_norms: bool = False,
    qk_norm: str | None = None,
    has_two_ropes: bool = False,
) -> ModelConfig:
    refuse_unsupported(hf, architecture, _HONOURS)
    # `hidden_act` of Gemma 1 is a leftover: transformers computes GELU by tanh whatever it says.
    for key, value in (("hidden_activation", GELU), ("use_bidirectional_attention", False)):
        if hf.get(key) not in (None, value):
            raise ValueError(f"{key}={hf[key]!r} is not supported; use a checkpoint with {key}={value!r}")
    num_layers, head_dim = read_num_layers(hf), stated_head_dim(hf, 256)
    local = [FULL if pattern is None or (i + 1) % pattern == 0 else SLIDING for i in range(num_layers)]
    kinds = layer_types(hf, local) if pattern is not None else local
    window = None if pattern is None else require_size(hf, "sliding_window", 4096)
    # transformers' Gemma 1 bounds neither scores nor logits.
    caps = [None if pattern is None else number_or_none(hf, key, cap) for key, cap in default_softcaps.items()]
    scale = require_number(hf, "query_pre_attn_scalar", 256.0, least=1e-6) ** -0.5 if pattern else None
    norm = read_norm(hf, adds_one=True)

    def layer(kind: str) -> Layer:
        theta = require_number(hf, "rope_local_base_freq", LOCAL_THETA, least=1.0)
        rope = read_rope(
            hf if kind == FULL or not has_two_ropes else {**hf, "rope_theta": theta},
            head_dim,
            max_position,
            layer_type=kind if has_two_ropes else None,
            default_theta=GLOBAL_THETA if has_two_ropes else LOCAL_THETA,
        )
        attention = Attention(
            num_heads=require_size(hf, "num_attention_heads"),
            num_kv_heads=num_kv_heads(hf, default_kv_heads),
            head_dim=head_dim,
            rope=rope,
            window=window if kind == SLIDING else None,
            scale=scale,
            softcap=caps[0],
            has_qkv_bias=is_enabled(hf, "attention_bias"),
            has_output_bias=is_enabled(hf, "attention_bias"),
            qk_norm=qk_norm,
        )
        mlp = MLP(intermediate_size=require_size(hf, "intermediate_size"), activation="gelu_tanh")
        return Layer(mixer=attention, feed_forward=mlp, norm=norm, has_post_norms=has_post_norms)

    return decoder_of(
        hf,
        [layer(kind) for kind in kinds],
        max_position=max_position,
        is_tied=True,
        embedding_scale=math.sqrt(require_size(hf, "hidden_size")),
        logit_softcap=caps[1],
    )


FAMILY_1 = Family(config_from_hf=config_from_hf_1, weights=llama.WEIGHTS)
FAMILY_2, FAMILY_3 = map(partial(Family, weights=WEIGHTS), (config_from_hf_2, config_from_hf_3))
# Published checkpoints leave out sizes that equal those of transformers' Gemma3TextConfig.
FAMILY_3_WITH_IMAGES = text_model_family(
    FAMILY_3,
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3_text",
    sizes={"vocab_size": 262_208, "num_attention_heads": 8},
)
