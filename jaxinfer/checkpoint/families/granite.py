"""Granite 3 and 4: Llama with four multipliers, mixtures of experts, and layers of state spaces among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    Either,
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
    multiplier,
    num_kv_heads,
    require_count,
    require_size,
)
from jaxinfer.checkpoint.config_json.rope import read_rope
from jaxinfer.checkpoint.config_json.window import FULL, LINEAR, hybrid_layer_types
from jaxinfer.checkpoint.families import llama
from jaxinfer.checkpoint.families.recurrent import mamba
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.components.recurrent.state_space import StateSpace
from jaxinfer.model.components.rope import Rope
from jaxinfer.model.config import Layer, ModelConfig
from jaxinfer.model.layer_parts import Mixer

_LAYER = "model.layers.{layer}"
MAX_POSITION = 2048

_SHARED_INPUT = Fused(
    (("layers.feed_forward.shared.gate", "F D -> F D"), ("layers.feed_forward.shared.up", "F D -> F D"))
)
_SHARED_OUTPUT = ("layers.feed_forward.shared.down", "D F -> D F")
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
    f"{_LAYER}.shared_mlp.input_linear.weight": _SHARED_INPUT,
    f"{_LAYER}.shared_mlp.output_linear.weight": _SHARED_OUTPUT,
}
_DENSE = Fused((("layers.feed_forward.gate", "F D -> F D"), ("layers.feed_forward.up", "F D -> F D")))
_SHARED = f"{_LAYER}.shared_mlp"
# Without experts the shared MLP is the feed-forward network.
HYBRID_WEIGHTS: WeightTable = {
    **MOE_WEIGHTS,
    f"{_SHARED}.input_linear.weight": Either((_SHARED_INPUT, _DENSE)),
    f"{_SHARED}.output_linear.weight": Either((_SHARED_OUTPUT, ("layers.feed_forward.down", "D F -> D F"))),
    **mamba.mixer_weights(f"{_LAYER}.mamba"),
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


def config_from_hf_hybrid(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' GraniteMoeHybridConfig."""
    refuse_unsupported(hf, "GraniteMoeHybridForCausalLM")
    shared = MLP(intermediate_size=require_size(hf, "shared_intermediate_size", 1024))
    feed_forward = shared if require_count(hf, "num_local_experts", 8) == 0 else _experts(hf, shared)
    kind = hf.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise ValueError(
            f"position_embedding_type={kind!r} is not supported; use a checkpoint with rotary embedding, or without"
            " positions"
        )
    rope = read_rope(hf, divided_head_dim(hf), MAX_POSITION) if kind == "rope" else None
    mixers: dict[str, Mixer] = {FULL: _attention(hf, rope), LINEAR: _state_space(hf)}
    kinds = hybrid_layer_types(hf, [LINEAR] * read_num_layers(hf))
    return _decoder(hf, [mixers[kind] for kind in kinds], feed_forward)


def _state_space(hf: Mapping[str, Any]) -> StateSpace:
    inner = require_size(hf, "hidden_size") * require_size(hf, "mamba_expand", 2)
    mixer = mamba.read_state_space(hf, inner, out_bias="mamba_proj_bias")
    sizes = (("mamba_n_heads", mixer.num_heads), ("mamba_d_head", mixer.head_dim))
    mamba.require_inner_size(hf, "mamba_expand", mixer.inner_size, *sizes)
    return mixer


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
    attention = _attention(hf, read_rope(hf, divided_head_dim(hf), MAX_POSITION))
    return _decoder(hf, [attention] * read_num_layers(hf), feed_forward)


def _attention(hf: Mapping[str, Any], rope: Rope | None) -> Attention:
    return Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=require_size(hf, "num_attention_heads")),
        head_dim=divided_head_dim(hf),
        rope=rope,
        scale=multiplier(hf, "attention_multiplier"),
        has_qkv_bias=is_enabled(hf, "attention_bias"),
        has_output_bias=is_enabled(hf, "attention_bias"),
    )


def _decoder(hf: Mapping[str, Any], mixers: Sequence[Mixer], feed_forward: MLP | MoE) -> ModelConfig:
    norm, scale = read_norm(hf), multiplier(hf, "residual_multiplier")
    return decoder_of(
        hf,
        [Layer(mixer=mixer, feed_forward=feed_forward, norm=norm, residual_scale=scale) for mixer in mixers],
        max_position=MAX_POSITION,
        embedding_scale=multiplier(hf, "embedding_multiplier"),
        logit_scale=1.0 / multiplier(hf, "logits_scaling"),
    )


FAMILY = Family(config_from_hf=config_from_hf, weights=llama.WEIGHTS)
MOE_FAMILY = Family(config_from_hf=config_from_hf_moe, weights=MOE_WEIGHTS)
SHARED_FAMILY = Family(config_from_hf=config_from_hf_shared, weights=MOE_WEIGHTS)
HYBRID_FAMILY = Family(config_from_hf=config_from_hf_hybrid, weights=HYBRID_WEIGHTS)
