"""Qwen2-MoE and Qwen3-MoE: mixtures of experts, the former with a gated shared one, and dense layers among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from jaxinfer.checkpoint.config_json.fields import (
    divided_head_dim,
    expert_counts,
    is_enabled,
    num_kv_heads,
    require_size,
    stated_head_dim,
)
from jaxinfer.checkpoint.config_json.rope import read_rope
from jaxinfer.checkpoint.config_json.window import switched_windows
from jaxinfer.checkpoint.families import qwen
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.config import Layer, ModelConfig
from jaxinfer.validation import is_int

_MLP = "model.layers.{layer}.mlp"
MAX_POSITION = 32_768
WEIGHTS: WeightTable = {
    **qwen.WEIGHTS_3,
    **expert_weights(_MLP, shared="shared_expert"),
    f"{_MLP}.shared_expert_gate.weight": ("layers.feed_forward.shared_gate", "one D -> one D"),
}


def config_from_hf_2(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Qwen2MoeConfig."""
    refuse_unsupported(hf, "Qwen2MoeForCausalLM")
    head_dim = divided_head_dim(hf)
    attention = {"head_dim": head_dim, "has_qkv_bias": is_enabled(hf, "qkv_bias", default=True)}
    num_experts, num_chosen = expert_counts(hf, "num_experts", 60, 4)
    experts = MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=require_size(hf, "moe_intermediate_size", 1408)),
        router=Router(num_chosen=num_chosen, normalizes=is_enabled(hf, "norm_topk_prob")),
        shared=MLP(intermediate_size=require_size(hf, "shared_expert_intermediate_size", 5632)),
        has_shared_gate=True,
    )
    return _translate(hf, attention, experts, switched_windows(hf, read_num_layers(hf)), default_kv_heads=16)


def config_from_hf_3(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Qwen3MoeConfig."""
    refuse_unsupported(hf, "Qwen3MoeForCausalLM")
    has_bias = is_enabled(hf, "attention_bias")
    head_dim = divided_head_dim(hf) if hf.get("head_dim") is None else stated_head_dim(hf)
    attention = {"head_dim": head_dim, "has_qkv_bias": has_bias, "has_output_bias": has_bias, "qk_norm": "head"}
    name = "num_experts" if "num_experts" in hf else "num_local_experts"
    num_experts, num_chosen = expert_counts(hf, name, 128, 8)
    experts = MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=require_size(hf, "moe_intermediate_size", 768)),
        router=Router(num_chosen=num_chosen, normalizes=is_enabled(hf, "norm_topk_prob")),
    )
    # A window that is switched on is that of all layers, whatever the keys of Qwen2 say.
    windows = switched_windows({**hf, "max_window_layers": 0, "layer_types": None}, read_num_layers(hf))
    return _translate(hf, attention, experts, windows, default_kv_heads=4)


def read_dense_layers(hf: Mapping[str, Any]) -> list[int]:
    """Returns the layers that have no experts whatever the others have."""
    dense_layers = hf.get("mlp_only_layers")
    dense_layers = [] if dense_layers is None else dense_layers
    if not isinstance(dense_layers, list) or not all(map(is_int, dense_layers)):
        raise ValueError(f"mlp_only_layers={dense_layers!r} is not a list of layers; download config.json again")
    return dense_layers


def _translate(
    hf: Mapping[str, Any],
    attention: dict[str, Any],
    experts: MoE,
    windows: Sequence[int | None],
    *,
    default_kv_heads: int,
) -> ModelConfig:
    sparse_step, dense_layers = require_size(hf, "decoder_sparse_step", 1), read_dense_layers(hf)
    dense = MLP(intermediate_size=require_size(hf, "intermediate_size"))
    rope, norm = read_rope(hf, attention["head_dim"], MAX_POSITION), read_norm(hf)

    def layer(i: int, window: int | None) -> Layer:
        mixer = Attention(
            num_heads=require_size(hf, "num_attention_heads"),
            num_kv_heads=num_kv_heads(hf, default_kv_heads),
            rope=rope,
            window=window,
            **attention,
        )
        is_sparse = i not in dense_layers and (i + 1) % sparse_step == 0
        return Layer(mixer=mixer, feed_forward=experts if is_sparse else dense, norm=norm)

    return decoder_of(
        hf,
        [layer(i, window) for i, window in enumerate(windows)],
        max_position=MAX_POSITION,
        has_tied_embeddings=is_enabled(hf, "tie_word_embeddings"),
    )


FAMILY_2 = Family(config_from_hf=config_from_hf_2, weights=WEIGHTS)
FAMILY_3 = Family(config_from_hf=config_from_hf_3, weights=WEIGHTS)
