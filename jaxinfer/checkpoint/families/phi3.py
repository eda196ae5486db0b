"""Phi-3 and Phi-4: Llama with fused weights, of which Phi-4-mini rotates a part of each head."""

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
from jaxinfer.checkpoint.config_json.fields import divided_head_dim, num_kv_heads, require_size
from jaxinfer.checkpoint.config_json.rope import read_rope
from jaxinfer.checkpoint.families import llama
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.config import Layer, ModelConfig

_LAYER = "model.layers.{layer}"
MAX_POSITION = 4096

FUSED_MLP = Fused((("layers.feed_forward.gate", "F D -> F D"), ("layers.feed_forward.up", "F D -> F D")))
FUSED_QKV = Fused(
    (
        ("layers.mixer.q", "(N H) D -> N H D"),
        ("layers.mixer.k", "(K H) D -> K H D"),
        ("layers.mixer.v", "(K H) D -> K H D"),
    )
)
WEIGHTS: WeightTable = {
    **llama.WEIGHTS,
    f"{_LAYER}.self_attn.qkv_proj.weight": FUSED_QKV,
    f"{_LAYER}.mlp.gate_up_proj.weight": FUSED_MLP,
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Phi3Config."""
    refuse_unsupported(hf, "Phi3ForCausalLM", ("partial_rotary_factor",))
    hf = _with_longrope(hf)
    head_dim = divided_head_dim(hf)
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=require_size(hf, "num_attention_heads")),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, MAX_POSITION),
        window=None if hf.get("sliding_window") is None else require_size(hf, "sliding_window"),
    )
    mlp = MLP(intermediate_size=require_size(hf, "intermediate_size"))
    layer = Layer(mixer=attention, feed_forward=mlp, norm=read_norm(hf, default=1e-5))
    return decoder_of(hf, [layer] * read_num_layers(hf), max_position=MAX_POSITION)


def _with_longrope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns config.json with LongRoPE under its own name: in this family "su" and "yarn" are older ones of it."""

    def renamed(parameters: Any) -> Any:
        if not isinstance(parameters, Mapping):
            return parameters
        kind = parameters.get("rope_type", parameters.get("type"))
        is_old = kind == "su" or (kind == "yarn" and "short_factor" in parameters)
        return {**parameters, "rope_type": "longrope"} if is_old else parameters

    return {**hf, **{key: renamed(hf[key]) for key in ("rope_scaling", "rope_parameters") if key in hf}}


FAMILY = Family(config_from_hf=config_from_hf, weights=WEIGHTS)
