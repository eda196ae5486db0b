"""Mistral, Mixtral, MiniMax-M2 and Ministral 3.

Mistral is Llama with a sliding window, which later ones have no more. Mixtral and MiniMax-M2 have experts in every
layer, stored by the same names. MiniMax-M2 chooses them by biased sigmoids, and rotates a part of each head after a
norm over all heads. Queries of Ministral 3 grow with the position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    Family,
    Harmless,
    WeightTable,
    decoder_of,
    expert_weights,
    read_norm,
    read_num_layers,
    refuse_unsupported,
    require_harmless,
    translate_common,
)
from jaxinfer.checkpoint.config_json.fields import (
    divided_head_dim,
    expert_counts,
    num_kv_heads,
    require_size,
    stated_head_dim,
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
MINIMAX_MAX_POSITION = 196_608
MINIMAX_THETA = 5_000_000.0
_LAYER = "model.layers.{layer}"
MIXTRAL_WEIGHTS: WeightTable = {
    **llama.WEIGHTS,
    **expert_weights(f"{_LAYER}.block_sparse_moe", names=("w1", "w3", "w2")),
}
MINIMAX_WEIGHTS: WeightTable = {
    **MIXTRAL_WEIGHTS,
    f"{_LAYER}.self_attn.q_norm.weight": ("layers.mixer.q_norm", "(N H) -> N H"),
    f"{_LAYER}.self_attn.k_norm.weight": ("layers.mixer.k_norm", "(K H) -> K H"),
    f"{_LAYER}.block_sparse_moe.e_score_correction_bias": ("layers.feed_forward.choice_bias", "E -> E"),
}
# Settings that transformers does not read. Key -> (values of what it computes, what to do about any other).
_FIXED_IN_MINIMAX: Harmless = {
    "use_qk_norm": ((True, None), "use a checkpoint with norms of queries and keys"),
    "qk_norm_type": (("per_layer", None), "use a checkpoint whose norms are over all heads of a layer"),
    "scoring_func": (("sigmoid", None), "use a checkpoint whose experts are chosen by sigmoids"),
    "use_routing_bias": ((True, None), "use a checkpoint whose experts are chosen with a bias"),
    "shared_intermediate_size": ((0, None), "use a checkpoint without a shared expert"),
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
    return decoder_of(hf, [layer] * read_num_layers(hf), max_position=MAX_POSITION_3)


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
    return decoder_of(hf, [layer] * read_num_layers(hf), max_position=MAX_POSITION)


def config_from_hf_minimax(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' MiniMaxM2Config."""
    refuse_unsupported(hf, "MiniMaxM2ForCausalLM", ("partial_rotary_factor",))
    num_layers, head_dim = read_num_layers(hf), stated_head_dim(hf, 128)
    full = {"attn_type_list": (([1] * num_layers, None), "use a checkpoint whose layers all have full attention")}
    require_harmless(hf, {**_FIXED_IN_MINIMAX, **full})
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=8),
        head_dim=head_dim,
        rope=read_rope(
            hf,
            head_dim,
            MINIMAX_MAX_POSITION,
            default_theta=MINIMAX_THETA,
            default_partial=_rotary_dim(hf, head_dim) / head_dim,
        ),
        qk_norm="all",
    )
    num_experts, num_chosen = expert_counts(hf, "num_local_experts", 256, 8)
    experts = MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=require_size(hf, "intermediate_size")),
        router=Router(num_chosen=num_chosen, scoring="sigmoid", has_choice_bias=True),
    )
    return decoder_of(
        hf,
        [Layer(mixer=attention, feed_forward=experts, norm=read_norm(hf))] * num_layers,
        max_position=MINIMAX_MAX_POSITION,
    )


def _rotary_dim(hf: Mapping[str, Any], head_dim: int) -> int:
    """Returns the rotated dimensions of a head, as published checkpoints state them."""
    if hf.get("rotary_dim") is None:
        return head_dim
    rotary_dim = require_size(hf, "rotary_dim")
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"rotary_dim={rotary_dim} dimensions are no pairs of a head of head_dim={head_dim}; download the"
            " checkpoint's config.json again"
        )
    return rotary_dim


FAMILY = Family(config_from_hf=config_from_hf, weights=llama.WEIGHTS)
MIXTRAL = Family(config_from_hf=config_from_hf_mixtral, weights=MIXTRAL_WEIGHTS)
MINIMAX_M2 = Family(config_from_hf=config_from_hf_minimax, weights=MINIMAX_WEIGHTS)
FAMILY_3 = Family(config_from_hf=config_from_hf_3, weights=llama.WEIGHTS)
FAMILY_3_WITH_IMAGES = text_model_family(
    FAMILY, architecture="Mistral3ForConditionalGeneration", model_type="mistral", others={"ministral3": FAMILY_3}
)
