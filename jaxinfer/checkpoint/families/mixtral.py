"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    Family,
    WeightTable,
    decoder_of,
    expert_weights,
    read_norm,
    read_num_layers,
    refuse_unsupported,
)
from jaxinfer.checkpoint.config_json.fields import divided_head_dim, is_enabled, num_kv_heads, require_size
from jaxinfer.checkpoint.config_json.rope import read_rope
from jaxinfer.checkpoint.families import llama
from jaxinfer.model.attention import Attention
from jaxinfer.model.config import Layer, ModelConfig
from jaxinfer.model.mlp import MLP
from jaxinfer.model.moe import MoE, Router

MAX_POSITION = 131_072
DEFAULT_THETA = 1_000_000.0
WEIGHTS: WeightTable = {
    **llama.WEIGHTS,
    **expert_weights("model.layers.{layer}.block_sparse_moe", names=("w1", "w3", "w2")),
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' MixtralConfig."""
    refuse_unsupported(hf, "MixtralForCausalLM")
    head_dim = divided_head_dim(hf)
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=8),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, MAX_POSITION, default_theta=DEFAULT_THETA),
        window=None if hf.get("sliding_window") is None else require_size(hf, "sliding_window"),
    )
    experts = MoE(
        num_experts=require_size(hf, "num_local_experts", 8),
        expert=MLP(intermediate_size=require_size(hf, "intermediate_size")),
        router=Router(num_chosen=require_size(hf, "num_experts_per_tok", 2)),
    )
    layer = Layer(mixer=attention, feed_forward=experts, norm=read_norm({"rms_norm_eps": 1e-5, **hf}))
    return decoder_of(
        hf,
        [layer] * read_num_layers(hf),
        max_position=MAX_POSITION,
        has_tied_embeddings=is_enabled(hf, "tie_word_embeddings"),
    )


FAMILY = Family(config_from_hf=config_from_hf, weights=WEIGHTS)
