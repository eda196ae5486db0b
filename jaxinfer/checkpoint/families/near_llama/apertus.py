"""Apertus: Llama with norms of queries and keys, and with a learned activation (xIELU) and no gate in the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    Family,
    Harmless,
    WeightTable,
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

_LAYER = "model.layers.{layer}"
MAX_POSITION = 65_536
THETA = 12_000_000.0
ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
# Key -> (values that change nothing, what to do about any other). transformers does not read the last three.
_HONOURED: Harmless = {
    "hidden_act": (("xielu",), "use a checkpoint whose MLP has xIELU"),
    "mlp_bias": ((False, None), "use a checkpoint without biases in the MLP"),
    "qk_norm": ((True, None), "use a checkpoint with norms of queries and keys"),
    "post_norm": ((False, None), "use a checkpoint with norms before attention and MLP"),
}

WEIGHTS: WeightTable = {
    **llama.renamed_weights(
        {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}
    ),
    f"{_LAYER}.self_attn.q_norm.weight": ("layers.mixer.q_norm", "H -> H"),
    f"{_LAYER}.self_attn.k_norm.weight": ("layers.mixer.k_norm", "H -> H"),
    **{
        f"{_LAYER}.mlp.act_fn.{name}": (f"layers.feed_forward.curve.{name}", "one -> one")
        for name in ("alpha_p", "alpha_n")
    },
    **{f"{_LAYER}.mlp.act_fn.{name}": (f"layers.feed_forward.curve.{name}", " -> ") for name in ("beta", "eps")},
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' ApertusConfig."""
    refuse_unsupported(hf, "ApertusForCausalLM", ("hidden_act",))
    require_harmless(hf, _HONOURED)
    if hf.get("rope_parameters") is None and not hf.get("rope_scaling"):
        hf = {**hf, "rope_parameters": ROPE}
    head_dim, has_bias = divided_head_dim(hf), is_enabled(hf, "attention_bias")
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=require_size(hf, "num_attention_heads")),
        head_dim=head_dim,
        rope=read_whole_rope(hf, head_dim, MAX_POSITION, default_theta=THETA),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm="head",
    )
    mlp = MLP(intermediate_size=require_size(hf, "intermediate_size"), activation="xielu")
    layer = Layer(mixer=attention, feed_forward=mlp, norm=read_norm(hf, default=1e-5))
    return decoder_of(hf, [layer] * read_num_layers(hf), max_position=MAX_POSITION)


FAMILY = Family(config_from_hf=config_from_hf, weights=WEIGHTS)
