"""GLM-4 and GLM-4-MoE: rotary embedding of half of each head; experts chosen by biased sigmoids in groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    NEXTN,
    Family,
    WeightTable,
    decoder_of,
    expert_weights,
    read_grouped_router,
    read_norm,
    read_num_layers,
    refuse_unsupported,
)
from jaxinfer.checkpoint.config_json.fields import (
    divided_head_dim,
    is_enabled,
    num_kv_heads,
    require_count,
    require_size,
    stated_head_dim,
)
from jaxinfer.checkpoint.config_json.rope import read_rope
from jaxinfer.checkpoint.families import llama, phi3
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE
from jaxinfer.model.config import Layer, ModelConfig

_LAYER = "model.layers.{layer}"
MAX_POSITION = 131_072
PARTIAL = 0.5

WEIGHTS: WeightTable = {
    **llama.WEIGHTS,
    f"{_LAYER}.mlp.gate_up_proj.weight": phi3.FUSED_MLP,
    f"{_LAYER}.post_self_attn_layernorm.weight": ("layers.mixer_post_norm", "D -> D"),
    f"{_LAYER}.post_mlp_layernorm.weight": ("layers.feed_forward_post_norm", "D -> D"),
}
MOE_WEIGHTS: WeightTable = {
    **llama.WEIGHTS,
    f"{_LAYER}.self_attn.q_norm.weight": ("layers.mixer.q_norm", "H -> H"),
    f"{_LAYER}.self_attn.k_norm.weight": ("layers.mixer.k_norm", "H -> H"),
    f"{_LAYER}.mlp.gate.e_score_correction_bias": ("layers.feed_forward.choice_bias", "E -> E"),
    **expert_weights(f"{_LAYER}.mlp", shared="shared_experts"),
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Glm4Config."""
    refuse_unsupported(hf, "Glm4ForCausalLM", ("partial_rotary_factor",))
    head_dim = stated_head_dim(hf, 128)
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=2),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, MAX_POSITION, default_partial=PARTIAL, is_interleaved=True),
        has_qkv_bias=is_enabled(hf, "attention_bias", default=True),
    )
    mlp = MLP(intermediate_size=require_size(hf, "intermediate_size"))
    norm = read_norm(hf, default=1.5625e-07)
    layer = Layer(mixer=attention, feed_forward=mlp, norm=norm, has_post_norms=True)
    return decoder_of(
        hf,
        [layer] * read_num_layers(hf),
        max_position=MAX_POSITION,
        has_tied_embeddings=is_enabled(hf, "tie_word_embeddings"),
    )


def config_from_hf_moe(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Glm4MoeConfig.

    The layers past the last, for multi-token prediction, are loaded as a drafter only.
    """
    refuse_unsupported(hf, "Glm4MoeForCausalLM", ("partial_rotary_factor",))
    head_dim = divided_head_dim(hf)
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=8),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, MAX_POSITION, default_partial=PARTIAL),
        has_qkv_bias=is_enabled(hf, "attention_bias"),
        qk_norm="head" if is_enabled(hf, "use_qk_norm") else None,
    )
    size = require_size(hf, "moe_intermediate_size", 1408)
    num_experts, router = read_grouped_router(hf, 128, 8)
    experts = MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=size),
        router=router,
        shared=MLP(intermediate_size=size * require_size(hf, "n_shared_experts", 1)),
    )
    dense = MLP(intermediate_size=require_size(hf, "intermediate_size"))
    num_layers, num_dense = read_num_layers(hf), require_count(hf, "first_k_dense_replace", 1)
    norm = read_norm(hf, default=1e-5)
    layers = [
        Layer(mixer=attention, feed_forward=dense if i < num_dense else experts, norm=norm) for i in range(num_layers)
    ]
    return decoder_of(hf, layers, max_position=MAX_POSITION, has_tied_embeddings=is_enabled(hf, "tie_word_embeddings"))


FAMILY = Family(config_from_hf=config_from_hf, weights=WEIGHTS)
MOE_FAMILY = Family(config_from_hf=config_from_hf_moe, weights=MOE_WEIGHTS, draft_layer=NEXTN)
