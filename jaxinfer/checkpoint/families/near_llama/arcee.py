"""Arcee (AFM): Llama with a squared ReLU and no gate in the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    Family,
    Harmless,
    decoder_of,
    read_norm,
    read_num_layers,
    refuse_unsupported,
    require_harmless,
)
from jaxinfer.checkpoint.config_json.fields import divided_head_dim, is_enabled, num_kv_heads, require_size
from jaxinfer.checkpoint.config_json.rope import read_whole_rope
from jaxinfer.checkpoint.families import llama
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.config import Layer, ModelConfig

MAX_POSITION = 4096
# Key -> (values that change nothing, what to do about any other).
_HONOURED: Harmless = {"hidden_act": (("relu2",), "use a checkpoint whose MLP has a squared ReLU")}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' ArceeConfig."""
    refuse_unsupported(hf, "ArceeForCausalLM", ("hidden_act",))
    require_harmless(hf, _HONOURED)
    head_dim, has_bias = divided_head_dim(hf), is_enabled(hf, "attention_bias")
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=require_size(hf, "num_attention_heads")),
        head_dim=head_dim,
        rope=read_whole_rope(hf, head_dim, MAX_POSITION),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )
    mlp = MLP(
        intermediate_size=require_size(hf, "intermediate_size"),
        activation="relu2",
        has_bias=is_enabled(hf, "mlp_bias"),
    )
    layer = Layer(mixer=attention, feed_forward=mlp, norm=read_norm(hf, default=1e-5))
    return decoder_of(hf, [layer] * read_num_layers(hf), max_position=MAX_POSITION)


FAMILY = Family(config_from_hf=config_from_hf, weights=llama.WEIGHTS)
