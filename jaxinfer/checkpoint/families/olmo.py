"""OLMo 2 and 3: norms after attention and MLP instead of before, and over all heads of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    Family,
    WeightTable,
    decoder_of,
    read_norm,
    read_num_layers,
    refuse_unsupported,
)
from jaxinfer.checkpoint.config_json.fields import divided_head_dim, is_enabled, num_kv_heads, require_size
from jaxinfer.checkpoint.config_json.rope import DEFAULT_THETA, read_rope
from jaxinfer.checkpoint.config_json.window import FULL, SLIDING, layer_types
from jaxinfer.checkpoint.families import llama
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.config import Layer, ModelConfig

_LAYER = "model.layers.{layer}"
MAX_POSITION = 2048
THETA_3 = 500_000.0  # of OLMo 3

WEIGHTS: WeightTable = {
    **llama.WEIGHTS,
    f"{_LAYER}.post_attention_layernorm.weight": ("layers.mixer_post_norm", "D -> D"),
    f"{_LAYER}.post_feedforward_layernorm.weight": ("layers.feed_forward_post_norm", "D -> D"),
    f"{_LAYER}.self_attn.q_norm.weight": ("layers.mixer.q_norm", "(N H) -> N H"),
    f"{_LAYER}.self_attn.k_norm.weight": ("layers.mixer.k_norm", "(K H) -> K H"),
}


def config_from_hf_2(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Olmo2Config."""
    refuse_unsupported(hf, "Olmo2ForCausalLM")
    return _translate(hf, [FULL] * read_num_layers(hf), window=None)


def config_from_hf_3(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Olmo3Config."""
    refuse_unsupported(hf, "Olmo3ForCausalLM")
    default = [FULL if (i + 1) % 4 == 0 else SLIDING for i in range(read_num_layers(hf))]
    return _translate(hf, layer_types(hf, default), window=require_size(hf, "sliding_window", 4096))


def _translate(hf: Mapping[str, Any], kinds: list[str], window: int | None) -> ModelConfig:
    head_dim, norm = divided_head_dim(hf), read_norm(hf, default=1e-5)
    has_kinds = window is not None

    def layer(kind: str) -> Layer:
        attention = Attention(
            num_heads=require_size(hf, "num_attention_heads"),
            num_kv_heads=num_kv_heads(hf, default=require_size(hf, "num_attention_heads")),
            head_dim=head_dim,
            rope=read_rope(
                hf,
                head_dim,
                MAX_POSITION,
                layer_type=kind if has_kinds else None,
                default_theta=THETA_3 if has_kinds else DEFAULT_THETA,
            ),
            window=window if kind == SLIDING else None,
            has_qkv_bias=is_enabled(hf, "attention_bias"),
            has_output_bias=is_enabled(hf, "attention_bias"),
            qk_norm="all",
        )
        mlp = MLP(intermediate_size=require_size(hf, "intermediate_size"))
        return Layer(mixer=attention, feed_forward=mlp, norm=norm, has_pre_norms=False, has_post_norms=True)

    return decoder_of(
        hf,
        [layer(kind) for kind in kinds],
        max_position=MAX_POSITION,
        has_tied_embeddings=is_enabled(hf, "tie_word_embeddings"),
    )


FAMILY_2 = Family(config_from_hf=config_from_hf_2, weights=WEIGHTS)
FAMILY_3 = Family(config_from_hf=config_from_hf_3, weights=WEIGHTS)
