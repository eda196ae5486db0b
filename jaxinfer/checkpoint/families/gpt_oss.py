"""GPT-OSS: a sink per head, a window in every other layer, and experts with biases and a clamped gate."""

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
    expert_counts,
    is_enabled,
    num_kv_heads,
    require_size,
    stated_head_dim,
)
from jaxinfer.checkpoint.config_json.rope import read_rope
from jaxinfer.checkpoint.config_json.window import FULL, SLIDING, layer_types
from jaxinfer.checkpoint.families import llama
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.config import Layer, ModelConfig

_MLP = "model.layers.{layer}.mlp"
_EXPERTS = "layers.feed_forward.experts"
MAX_POSITION = 131_072
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

WEIGHTS: WeightTable = {
    **llama.WEIGHTS,
    "model.layers.{layer}.self_attn.sinks": ("layers.mixer.sinks", "N -> N"),
    f"{_MLP}.router.weight": ("layers.feed_forward.router", "E D -> E D"),
    f"{_MLP}.router.bias": ("layers.feed_forward.router_bias", "E -> E"),
    f"{_MLP}.experts.gate_up_proj": Fused(
        ((f"{_EXPERTS}.gate", "E D F -> E F D"), (f"{_EXPERTS}.up", "E D F -> E F D")), axis=2, is_interleaved=True
    ),
    f"{_MLP}.experts.gate_up_proj_bias": Fused(
        ((f"{_EXPERTS}.gate_bias", "E F -> E F"), (f"{_EXPERTS}.up_bias", "E F -> E F")), axis=1, is_interleaved=True
    ),
    f"{_MLP}.experts.down_proj": (f"{_EXPERTS}.down", "E F D -> E D F"),
    # In MXFP4.
    f"{_MLP}.experts.gate_up_proj_blocks": Fused(
        ((f"{_EXPERTS}.gate", "E F D -> E F D"), (f"{_EXPERTS}.up", "E F D -> E F D")), axis=1, is_interleaved=True
    ),
    f"{_MLP}.experts.down_proj_blocks": (f"{_EXPERTS}.down", "E D F -> E D F"),
    f"{_MLP}.experts.down_proj_bias": (f"{_EXPERTS}.down_bias", "E D -> E D"),
    # In a GGUF.
    f"{_MLP}.experts.gate_proj.weight": (f"{_EXPERTS}.gate", "E F D -> E F D"),
    f"{_MLP}.experts.up_proj.weight": (f"{_EXPERTS}.up", "E F D -> E F D"),
    f"{_MLP}.experts.down_proj.weight": (f"{_EXPERTS}.down", "E D F -> E D F"),
    f"{_MLP}.experts.gate_proj.bias": (f"{_EXPERTS}.gate_bias", "E F -> E F"),
    f"{_MLP}.experts.up_proj.bias": (f"{_EXPERTS}.up_bias", "E F -> E F"),
    f"{_MLP}.experts.down_proj.bias": (f"{_EXPERTS}.down_bias", "E D -> E D"),
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' GptOssConfig."""
    refuse_unsupported(hf, "GptOssForCausalLM")
    for name, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if hf.get(name, value) != value:
            raise ValueError(f"{name}={hf[name]!r} is not supported; use a checkpoint with {name}={value}")
    num_layers, head_dim = read_num_layers(hf), stated_head_dim(hf, 64)
    window = require_size(hf, "sliding_window", 128)
    default = [SLIDING if (i + 1) % 2 else FULL for i in range(num_layers)]
    has_bias, norm = is_enabled(hf, "attention_bias", default=True), read_norm(hf, default=1e-5)
    has_rope = bool(hf.get("rope_scaling") or hf.get("rope_parameters"))
    rope = read_rope(hf if has_rope else {**hf, "rope_parameters": DEFAULT_ROPE}, head_dim, MAX_POSITION)
    num_experts, num_chosen = expert_counts(hf, "num_local_experts", 128, 4)
    experts = MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=require_size(hf, "intermediate_size"), activation="clamped_silu", has_bias=True),
        router=Router(num_chosen=num_chosen, has_bias=True),
    )

    def layer(kind: str) -> Layer:
        attention = Attention(
            num_heads=require_size(hf, "num_attention_heads"),
            num_kv_heads=num_kv_heads(hf, default=8),
            head_dim=head_dim,
            rope=rope,
            window=window if kind == SLIDING else None,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            has_sinks=True,
        )
        return Layer(mixer=attention, feed_forward=experts, norm=norm)

    return decoder_of(hf, [layer(kind) for kind in layer_types(hf, default)], max_position=MAX_POSITION)


FAMILY = Family(config_from_hf=config_from_hf, weights=WEIGHTS)
