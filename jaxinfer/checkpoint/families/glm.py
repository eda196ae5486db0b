"""GLM-4, and models of experts that biased sigmoids choose in groups: GLM-4-MoE, GLM-4-MoE-Lite, Solar-Open, dots.llm1.

GLM-4 and GLM-4-MoE rotate half of each head, and the Lite one has DeepSeek-V3's latent attention. Solar-Open has the
attention of Llama, dots.llm1 that of Qwen3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    NEXTN,
    Family,
    Harmless,
    WeightTable,
    decoder_of,
    expert_weights,
    read_grouped_router,
    read_norm,
    read_num_layers,
    refuse_unsupported,
    require_harmless,
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
from jaxinfer.checkpoint.config_json.window import switched_windows
from jaxinfer.checkpoint.families import deepseek, llama, phi3
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.layers import Norm
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE
from jaxinfer.model.config import Layer, ModelConfig

_LAYER = "model.layers.{layer}"
MAX_POSITION = 131_072
PARTIAL = 0.5
LITE_MAX_POSITION = 202_752
DOTS_MAX_POSITION = 2048
SOLAR_THETA = 1_000_000.0
# Of transformers' classes, where they differ from DeepSeek-V3's and GLM-4-MoE's. None: config.json has to state it.
_LITE_DEFAULTS: Mapping[str, Any] = {
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
}
_DOTS_DEFAULTS: Mapping[str, Any] = {
    "n_routed_experts": None,
    "n_shared_experts": None,
    "num_experts_per_tok": None,
    "norm_topk_prob": False,
    "max_window_layers": 62,
}
# Settings that transformers does not read. Key -> (values of what it computes, what to do about any other).
_FIXED_IN_ROUTER: Harmless = {
    "topk_method": (("noaux_tc", None), "use a checkpoint whose experts are chosen with a bias"),
    "scoring_func": (("sigmoid", None), "use a checkpoint whose experts are chosen by sigmoids"),
}
_FIXED_IN_SOLAR: Harmless = {
    "first_k_dense_replace": ((0, None), "use a checkpoint with experts in every layer"),
    "use_qk_norm": ((False, None), "use a checkpoint without norms of queries and keys"),
}

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
# Whatever config.json says of the layers before it, this one has experts.
_LITE_NEXTN = replace(
    NEXTN,
    as_last=lambda num_layers: {
        "num_hidden_layers": num_layers + 1,
        "mlp_layer_types": ["sparse"] * (num_layers + 1),
    },
)


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
    return decoder_of(hf, [layer] * read_num_layers(hf), max_position=MAX_POSITION)


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
    num_dense = require_count(hf, "first_k_dense_replace", 1)
    attentions = [attention] * read_num_layers(hf)
    return _with_experts(
        hf, attentions, _experts(hf), num_dense=num_dense, max_position=MAX_POSITION, norm=read_norm(hf, default=1e-5)
    )


def config_from_hf_lite(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Glm4MoeLiteConfig.

    The layers past the last, for multi-token prediction, are loaded as a drafter only.
    """
    require_harmless(hf, _FIXED_IN_ROUTER)
    hf = {**_LITE_DEFAULTS, **hf}
    rotary = stated_head_dim(hf, 64, "qk_rope_head_dim")
    # transformers reads head_dim as qk_rope_head_dim.
    require_harmless(hf, {"head_dim": ((rotary, None), f"write qk_rope_head_dim={rotary} there too")})
    _, router = read_grouped_router(hf, 64, 4)
    return deepseek.latent_decoder(
        hf,
        router,
        architecture="Glm4MoeLiteForCausalLM",
        max_position=LITE_MAX_POSITION,
        is_sparse=_sparse_layers(hf),
        is_interleaved=is_enabled(hf, "rope_interleave", default=True),
    )


def _sparse_layers(hf: Mapping[str, Any]) -> Sequence[bool]:
    """Returns True for each layer with experts, as `mlp_layer_types` says, or else `first_k_dense_replace`."""
    kinds, num_layers = hf.get("mlp_layer_types"), read_num_layers(hf)
    if kinds is None:
        return deepseek.sparse_after(hf, 1)
    if not isinstance(kinds, list) or len(kinds) < num_layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise ValueError(
            f"mlp_layer_types={kinds!r} is not a list of num_hidden_layers={num_layers} or more names dense and sparse;"
            " download the checkpoint's config.json again"
        )
    # Further names are those of layers for multi-token prediction.
    return [kind == "sparse" for kind in kinds[:num_layers]]


def config_from_hf_solar(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' SolarOpenConfig."""
    refuse_unsupported(hf, "SolarOpenForCausalLM")
    require_harmless(hf, {**_FIXED_IN_ROUTER, **_FIXED_IN_SOLAR})
    head_dim = stated_head_dim(hf, 128)
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=8),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, MAX_POSITION, default_theta=SOLAR_THETA),
        has_qkv_bias=is_enabled(hf, "attention_bias"),
    )
    attentions, experts = [attention] * read_num_layers(hf), _experts(hf, default_size=1280)
    norm = read_norm(hf, default=1e-5)
    return _with_experts(hf, attentions, experts, num_dense=0, max_position=MAX_POSITION, norm=norm)


def config_from_hf_dots(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Dots1Config."""
    refuse_unsupported(hf, "Dots1ForCausalLM")
    require_harmless(hf, _FIXED_IN_ROUTER)
    hf = {**_DOTS_DEFAULTS, **hf}
    head_dim, has_bias = divided_head_dim(hf), is_enabled(hf, "attention_bias")
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=32),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, DOTS_MAX_POSITION),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm="head",
    )
    # A window needs no switch here.
    windows = switched_windows({**hf, "use_sliding_window": True}, read_num_layers(hf))
    attentions = [replace(attention, window=window) for window in windows]
    num_dense = require_count(hf, "first_k_dense_replace", 0)
    return _with_experts(
        hf, attentions, _experts(hf), num_dense=num_dense, max_position=DOTS_MAX_POSITION, norm=read_norm(hf)
    )


def _experts(hf: Mapping[str, Any], *, default_size: int = 1408) -> MoE:
    """Returns experts and a shared one; `default_size` is that of an expert."""
    size = require_size(hf, "moe_intermediate_size", default_size)
    num_experts, router = read_grouped_router(hf, 128, 8)
    return MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=size),
        router=router,
        shared=MLP(intermediate_size=size * require_size(hf, "n_shared_experts", 1)),
    )


def _with_experts(
    hf: Mapping[str, Any],
    attentions: Sequence[Attention],
    experts: MoE,
    *,
    num_dense: int,
    max_position: int,
    norm: Norm,
) -> ModelConfig:
    """Returns the model whose first `num_dense` layers have dense networks, and the others `experts`."""
    dense = MLP(intermediate_size=require_size(hf, "intermediate_size")) if num_dense else experts
    layers = [
        Layer(mixer=attention, feed_forward=dense if i < num_dense else experts, norm=norm)
        for i, attention in enumerate(attentions)
    ]
    return decoder_of(hf, layers, max_position=max_position)


FAMILY = Family(config_from_hf=config_from_hf, weights=WEIGHTS)
MOE_FAMILY = Family(config_from_hf=config_from_hf_moe, weights=MOE_WEIGHTS, draft_layer=NEXTN)
LITE_FAMILY = Family(
    config_from_hf=config_from_hf_lite,
    weights=deepseek.WEIGHTS,
    draft_layer=_LITE_NEXTN,
)
SOLAR_FAMILY = Family(config_from_hf=config_from_hf_solar, weights=MOE_WEIGHTS)
DOTS_FAMILY = Family(config_from_hf=config_from_hf_dots, weights=MOE_WEIGHTS)
