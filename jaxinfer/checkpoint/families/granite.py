"""Granite 3: Llama with four multipliers, and its mixtures of experts, with a shared one or without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    Family,
    Fused,
    WeightTable,
    decoder_of,
    read_norm,
    read_num_layers,
    refuse_unsupported,
)
from jaxinfer.checkpoint.config_json.fields import (
    divided_head_dim,
    expert_counts,
    is_enabled,
    num_kv_heads,
    require_number,
    require_size,
)
from jaxinfer.checkpoint.config_json.rope import read_rope
from jaxinfer.checkpoint.families import llama
from jaxinfer.model.attention import Attention
from jaxinfer.model.config import Layer, ModelConfig
from jaxinfer.model.mlp import MLP
from jaxinfer.model.moe import MoE, Router

_LAYER = "model.layers.{layer}"
MAX_POSITION = 2048
LEAST = 1e-9  # of a multiplier

MOE_WEIGHTS: WeightTable = {
    **llama.WEIGHTS,
    f"{_LAYER}.block_sparse_moe.router.layer.weight": ("layers.feed_forward.router", "E D -> E D"),
    f"{_LAYER}.block_sparse_moe.input_linear.weight": Fused(
        (
            ("layers.feed_forward.experts.gate", "E F D -> E F D"),
            ("layers.feed_forward.experts.up", "E F D -> E F D"),
        ),
        axis=1,
    ),
    f"{_LAYER}.block_sparse_moe.output_linear.weight": ("layers.feed_forward.experts.down", "E D F -> E D F"),
    f"{_LAYER}.shared_mlp.input_linear.weight": Fused(
        (("layers.feed_forward.shared.gate", "F D -> F D"), ("layers.feed_forward.shared.up", "F D -> F D"))
    ),
    f"{_LAYER}.shared_mlp.output_linear.weight": ("layers.feed_forward.shared.down", "D F -> D F"),
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' GraniteConfig."""
    mlp = MLP(intermediate_size=require_size(hf, "intermediate_size"), has_bias=is_enabled(hf, "mlp_bias"))
    return _translate(hf, "GraniteForCausalLM", mlp)


def config_from_hf_moe(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' GraniteMoeConfig."""
    return _translate(hf, "GraniteMoeForCausalLM", _experts(hf))


def config_from_hf_shared(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' GraniteMoeSharedConfig."""
    shared = None
    if hf.get("shared_intermediate_size", 0) != 0:
        shared = MLP(intermediate_size=require_size(hf, "shared_intermediate_size"))
    return _translate(hf, "GraniteMoeSharedForCausalLM", _experts(hf, shared))


def _experts(hf: Mapping[str, Any], shared: MLP | None = None) -> MoE:
    num_experts, num_chosen = expert_counts(hf, "num_local_experts", 8, 2)
    return MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=require_size(hf, "intermediate_size")),
        router=Router(num_chosen=num_chosen),
        shared=shared,
    )


def _translate(hf: Mapping[str, Any], architecture: str, feed_forward: MLP | MoE) -> ModelConfig:
    refuse_unsupported(hf, architecture)
    head_dim = divided_head_dim(hf)

    def multiplier(name: str) -> float:
        return require_number(hf, name, 1.0, least=LEAST)

    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=require_size(hf, "num_attention_heads")),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, MAX_POSITION),
        scale=multiplier("attention_multiplier"),
        has_qkv_bias=is_enabled(hf, "attention_bias"),
        has_output_bias=is_enabled(hf, "attention_bias"),
    )
    layer = Layer(
        mixer=attention,
        feed_forward=feed_forward,
        norm=read_norm(hf),
        residual_scale=multiplier("residual_multiplier"),
    )
    return decoder_of(
        hf,
        [layer] * read_num_layers(hf),
        max_position=MAX_POSITION,
        has_tied_embeddings=is_enabled(hf, "tie_word_embeddings"),
        embedding_scale=multiplier("embedding_multiplier"),
        logit_scale=1.0 / multiplier("logits_scaling"),
    )


FAMILY = Family(config_from_hf=config_from_hf, weights=llama.WEIGHTS)
MOE_FAMILY = Family(config_from_hf=config_from_hf_moe, weights=MOE_WEIGHTS)
SHARED_FAMILY = Family(config_from_hf=config_from_hf_shared, weights=MOE_WEIGHTS)
