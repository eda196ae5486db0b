"""Mistral, Mixtral and Ministral 3.

Mistral is Llama with a sliding window, which later ones have no more. Mixtral has experts in every layer. Queries of
Ministral 3 grow with the position.
"""

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
    translate_common,
)
from jaxinfer.checkpoint.config_json.fields import (
    divided_head_dim,
    expert_counts,
    is_enabled,
    num_kv_heads,
    require_size,
)
from jaxinfer.checkpoint.config_json.rope import read_query_growth, read_rope, read_whole_rope
from jaxinfer.checkpoint.config_json.text_model import text_model_family
from jaxinfer.checkpoint.config_json.window import stated_window
from jaxinfer.checkpoint.families import llama
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.config import Layer, ModelConfig, uniform_decoder

MAX_POSITION = 131_072
MAX_POSITION_3 = 262_144  # of Ministral 3
ROPE_3: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MIXTRAL_THETA = 1_000_000.0
MIXTRAL_WEIGHTS: WeightTable = {
    **llama.WEIGHTS,
    **expert_weights("model.layers.{layer}.block_sparse_moe", names=("w1", "w3", "w2")),
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' MistralConfig."""
    return uniform_decoder(
        **translate_common(hf, architecture="MistralForCausalLM", max_position=MAX_POSITION),
        num_kv_heads=num_kv_heads(hf, default=8),
        head_dim=divided_head_dim(hf),
        sliding_window=stated_window(hf),
    )


def config_from_hf_3(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Ministral3Config.

    transformers cannot run a checkpoint without `llama_4_scaling_beta`; here its queries do not grow.
    """
    refuse_unsupported(hf, "Ministral3ForCausalLM")
    if hf.get("rope_parameters") is None and not hf.get("rope_scaling"):
        hf = {**hf, "rope_parameters": ROPE_3}
    head_dim = divided_head_dim({"head_dim": 128, **hf})
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=8),
        head_dim=head_dim,
        rope=read_whole_rope(hf, head_dim, MAX_POSITION_3),
        window=stated_window({"sliding_window": None, **hf}),
        query_growth=read_query_growth(hf, MAX_POSITION_3),
    )
    mlp = MLP(intermediate_size=require_size(hf, "intermediate_size"))
    layer = Layer(mixer=attention, feed_forward=mlp, norm=read_norm(hf, default=1e-5))
    return decoder_of(
        hf,
        [layer] * read_num_layers(hf),
        max_position=MAX_POSITION_3,
        has_tied_embeddings=is_enabled(hf, "tie_word_embeddings"),
    )


def config_from_hf_mixtral(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' MixtralConfig."""
    refuse_unsupported(hf, "MixtralForCausalLM")
    head_dim = divided_head_dim(hf)
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=8),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, MAX_POSITION, default_theta=MIXTRAL_THETA),
        window=None if hf.get("sliding_window") is None else require_size(hf, "sliding_window"),
    )
    num_experts, num_chosen = expert_counts(hf, "num_local_experts", 8, 2)
    experts = MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=require_size(hf, "intermediate_size")),
        router=Router(num_chosen=num_chosen),
    )
    layer = Layer(mixer=attention, feed_forward=experts, norm=read_norm(hf, default=1e-5))
    return decoder_of(
        hf,
        [layer] * read_num_layers(hf),
        max_position=MAX_POSITION,
        has_tied_embeddings=is_enabled(hf, "tie_word_embeddings"),
    )


FAMILY = Family(config_from_hf=config_from_hf, weights=llama.WEIGHTS)
MIXTRAL = Family(config_from_hf=config_from_hf_mixtral, weights=MIXTRAL_WEIGHTS)
FAMILY_3 = Family(config_from_hf=config_from_hf_3, weights=llama.WEIGHTS)
FAMILY_3_WITH_IMAGES = text_model_family(
    FAMILY, architecture="Mistral3ForConditionalGeneration", model_type="mistral", others={"ministral3": FAMILY_3}
)
