"""Qwen3-Next: three gated delta nets, then gated attention; mixtures of experts, the shared one gated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    DraftLayer,
    Family,
    Fused,
    WeightTable,
    decoder_of,
    expert_weights,
    read_norm,
    read_num_layers,
    refuse_unsupported,
)
from jaxinfer.checkpoint.config_json.fields import (
    expert_counts,
    is_enabled,
    num_kv_heads,
    require_count,
    require_size,
    stated_head_dim,
)
from jaxinfer.checkpoint.config_json.rope import read_rope
from jaxinfer.checkpoint.config_json.window import FULL, LINEAR, hybrid_layer_types
from jaxinfer.checkpoint.families import llama
from jaxinfer.checkpoint.families.mamba import read_conv_size
from jaxinfer.checkpoint.families.qwen_moe import read_dense_layers
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.gated_delta_net import GatedDeltaNet
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.config import Layer, ModelConfig

_LAYER = "model.layers.{layer}"
_DELTA = f"{_LAYER}.linear_attn"
MAX_POSITION = 32_768
PARTIAL = 0.25

WEIGHTS: WeightTable = {
    **llama.WEIGHTS,
    # Each head's query lies before its gate.
    f"{_LAYER}.self_attn.q_proj.weight": Fused(
        (("layers.mixer.q", "N H D -> N H D"), ("layers.mixer.gate", "N H D -> N H D")),
        axis=1,
        unfold="(N H) D -> N H D",
    ),
    f"{_LAYER}.self_attn.q_proj.bias": Fused(
        (("layers.mixer.q_bias", "N H -> N H"), ("layers.mixer.gate_bias", "N H -> N H")),
        axis=1,
        unfold="(N H) -> N H",
    ),
    f"{_LAYER}.self_attn.q_norm.weight": ("layers.mixer.q_norm", "H -> H"),
    f"{_LAYER}.self_attn.k_norm.weight": ("layers.mixer.k_norm", "H -> H"),
    f"{_DELTA}.in_proj_qkvz.weight": ("layers.mixer.qkvz", "(G C) D -> G C D"),
    f"{_DELTA}.in_proj_ba.weight": ("layers.mixer.ba", "(G C) D -> G C D"),
    f"{_DELTA}.conv1d.weight": ("layers.mixer.conv", "C 1 W -> C W"),
    f"{_DELTA}.dt_bias": ("layers.mixer.dt_bias", "H -> H"),
    f"{_DELTA}.A_log": ("layers.mixer.a_log", "H -> H"),
    f"{_DELTA}.norm.weight": ("layers.mixer.norm", "V -> V"),
    f"{_DELTA}.out_proj.weight": ("layers.mixer.out_proj", "D I -> D I"),
    **expert_weights(f"{_LAYER}.mlp", shared="shared_expert"),
    f"{_LAYER}.mlp.shared_expert_gate.weight": ("layers.feed_forward.shared_gate", "one D -> one D"),
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Qwen3NextConfig."""
    refuse_unsupported(hf, "Qwen3NextForCausalLM", ("partial_rotary_factor",))
    head_dim, has_bias = stated_head_dim(hf, 256), is_enabled(hf, "attention_bias")
    num_layers = read_num_layers(hf)
    interval = require_size(hf, "full_attention_interval", 4)
    default = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=2),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, MAX_POSITION, default_partial=PARTIAL),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm="head",
        has_gate=True,
    )
    mixers = {FULL: attention, LINEAR: _gated_delta_net(hf)}
    norm, is_sparse = read_norm(hf, adds_one=True), _sparse_layers(hf, num_layers)
    dense, experts = MLP(intermediate_size=require_size(hf, "intermediate_size", 5632)), None
    if any(is_sparse):
        experts = _experts(hf)
    layers = [
        Layer(mixer=mixers[kind], feed_forward=experts if experts is not None and is_sparse[i] else dense, norm=norm)
        for i, kind in enumerate(hybrid_layer_types(hf, default))
    ]
    return decoder_of(hf, layers, max_position=MAX_POSITION, has_tied_embeddings=is_enabled(hf, "tie_word_embeddings"))


def _gated_delta_net(hf: Mapping[str, Any]) -> GatedDeltaNet:
    num_keys, num_values = (
        require_size(hf, "linear_num_key_heads", 16),
        require_size(hf, "linear_num_value_heads", 32),
    )
    if num_values % num_keys:
        raise ValueError(
            f"linear_num_value_heads={num_values} is not a multiple of linear_num_key_heads={num_keys}; download the"
            " checkpoint's config.json again"
        )
    return GatedDeltaNet(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_head_dim=require_size(hf, "linear_key_head_dim", 128),
        value_head_dim=require_size(hf, "linear_value_head_dim", 128),
        conv_size=read_conv_size(hf, "linear_conv_kernel_dim"),
    )


def _sparse_layers(hf: Mapping[str, Any], num_layers: int) -> Sequence[bool]:
    """Returns True for each layer that has experts."""
    has_experts = require_count(hf, "num_experts", 512) > 0
    step, dense_layers = require_size(hf, "decoder_sparse_step", 1), read_dense_layers(hf)
    return [has_experts and i not in dense_layers and (i + 1) % step == 0 for i in range(num_layers)]


def _experts(hf: Mapping[str, Any]) -> MoE:
    num_experts, num_chosen = expert_counts(hf, "num_experts", 512, 10)
    return MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=require_size(hf, "moe_intermediate_size", 512)),
        router=Router(num_chosen=num_chosen, normalizes=is_enabled(hf, "norm_topk_prob", default=True)),
        shared=MLP(intermediate_size=require_size(hf, "shared_expert_intermediate_size", 512)),
        has_shared_gate=True,
    )


# A layer of full attention, which config.json does not mention; with experts if the first of all layers may have them.
MTP = DraftLayer(
    count="num_nextn_predict_layers",
    default_count=1,
    beginning="mtp.",
    prefix="mtp.layers.0.",
    as_last=lambda _: {"num_hidden_layers": 1, "layer_types": [FULL]},
    input="mtp.fc.weight",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    final_norm="mtp.norm.weight",
    embedding="mtp.embed_tokens.weight",
    unembedding="mtp.shared_head.head.weight",
)
FAMILY = Family(config_from_hf=config_from_hf, weights=WEIGHTS, draft_layer=MTP)
