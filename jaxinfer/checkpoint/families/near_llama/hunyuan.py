"""Hunyuan (dense): Llama with norms of queries and keys after their rotation, and a stretched base of the rotation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
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
from jaxinfer.checkpoint.config_json.fields import (
    divided_head_dim,
    is_enabled,
    num_kv_heads,
    number_or_none,
    require_size,
)
from jaxinfer.checkpoint.config_json.rope import read_whole_rope, rope_kind, rope_parameters
from jaxinfer.checkpoint.families import llama
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.rope import Rope
from jaxinfer.model.config import Layer, ModelConfig
from jaxinfer.validation import MAX_FLOAT

_LAYER = "model.layers.{layer}"
MAX_POSITION = 2048
# Settings that transformers does not read. Key -> (values of what it computes, what to do about any other).
_FIXED: Harmless = {
    "use_qk_norm": ((True, None), "use a checkpoint with norms of queries and keys"),
    "use_cla": ((False, None), "use a checkpoint whose layers have keys and values of their own"),
}

WEIGHTS: WeightTable = {
    **llama.WEIGHTS,
    f"{_LAYER}.self_attn.query_layernorm.weight": ("layers.mixer.q_norm", "H -> H"),
    f"{_LAYER}.self_attn.key_layernorm.weight": ("layers.mixer.k_norm", "H -> H"),
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' HunYuanDenseV1Config."""
    refuse_unsupported(hf, "HunYuanDenseV1ForCausalLM")
    require_harmless(hf, _FIXED)
    head_dim, has_bias = divided_head_dim(hf), is_enabled(hf, "attention_bias")
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=require_size(hf, "num_attention_heads")),
        head_dim=head_dim,
        rope=_with_alpha(hf, read_whole_rope(hf, head_dim, MAX_POSITION)),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm="head",
        has_rotated_norm=True,
    )
    mlp = MLP(intermediate_size=require_size(hf, "intermediate_size"))
    layer = Layer(mixer=attention, feed_forward=mlp, norm=read_norm(hf, default=1e-5))
    return decoder_of(hf, [layer] * read_num_layers(hf), max_position=MAX_POSITION)


def _with_alpha(hf: Mapping[str, Any], rope: Rope) -> Rope:
    """Returns the rope with theta times alpha^(R / (R - 2)), if the parameters are of dynamic NTK and have an alpha."""
    parameters = rope_parameters(hf)
    alpha = parameters.get("alpha")
    if rope_kind(parameters) != "dynamic" or alpha in (None, 0, False):
        return rope
    alpha = number_or_none(parameters, "alpha")
    assert alpha is not None
    exponent = rope.dim / (rope.dim - 2) if rope.dim > 2 else math.inf
    digits = math.log10(rope.theta) + exponent * math.log10(alpha)
    if not 0 <= digits < math.log10(MAX_FLOAT):
        raise ValueError(
            f"alpha={alpha!r} makes a base of 10^{digits:.0f} of heads of {rope.dim} numbers; download the checkpoint's"
            " config.json again"
        )
    return replace(rope, theta=rope.theta * alpha**exponent)


FAMILY = Family(config_from_hf=config_from_hf, weights=WEIGHTS)
