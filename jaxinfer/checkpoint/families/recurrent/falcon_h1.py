"""Falcon-H1: attention and a state space side by side in every layer, with a multiplier at every product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    Family,
    WeightTable,
    decoder_of,
    read_norm,
    read_num_layers,
    refuse_unsupported,
)
from jaxinfer.checkpoint.config_json.fields import (
    divided_head_dim,
    is_enabled,
    multiplier,
    num_kv_heads,
    require_size,
)
from jaxinfer.checkpoint.config_json.rope import read_rope
from jaxinfer.checkpoint.families import llama
from jaxinfer.checkpoint.families.recurrent import jamba, mamba
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.recurrent.state_space import StateSpace
from jaxinfer.model.config import Branch, Layer, ModelConfig

MAX_POSITION = 8192
# The fields of the two mixers have different names, so their tensors are told apart by these alone.
WEIGHTS: WeightTable = {**llama.renamed_weights(jamba.PARTS), **mamba.mixer_weights("model.layers.{layer}.mamba")}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' FalconH1Config."""
    refuse_unsupported(hf, "FalconH1ForCausalLM")
    gate_scale, output_scale = _multipliers(hf, "mlp_multipliers", 2)
    mlp = MLP(
        intermediate_size=require_size(hf, "intermediate_size"),
        has_bias=is_enabled(hf, "mlp_bias"),
        gate_scale=gate_scale,
        output_scale=output_scale,
    )
    branches = (
        Branch(
            mixer=_attention(hf),
            input_scale=multiplier(hf, "attention_in_multiplier"),
            output_scale=multiplier(hf, "attention_out_multiplier"),
        ),
        Branch(
            mixer=_state_space(hf),
            input_scale=multiplier(hf, "ssm_in_multiplier"),
            output_scale=multiplier(hf, "ssm_out_multiplier"),
        ),
    )
    layer = Layer(mixer=branches, feed_forward=mlp, norm=read_norm(hf, default=1e-5))
    return decoder_of(
        hf,
        [layer] * read_num_layers(hf),
        max_position=MAX_POSITION,
        embedding_scale=multiplier(hf, "embedding_multiplier"),
        logit_scale=multiplier(hf, "lm_head_multiplier"),
    )


def _attention(hf: Mapping[str, Any]) -> Attention:
    head_dim, key_scale = divided_head_dim(hf), multiplier(hf, "key_multiplier")
    return Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=8),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, MAX_POSITION),
        scale=None if key_scale == 1.0 else head_dim**-0.5 * key_scale,
        has_qkv_bias=is_enabled(hf, "attention_bias"),
        has_output_bias=is_enabled(hf, "attention_bias"),
    )


def _state_space(hf: Mapping[str, Any]) -> StateSpace:
    stated = hf.get("mamba_d_ssm", 1024)
    source = f"mamba_d_ssm={stated!r}"
    if stated is None:
        expand, hidden_size = require_size(hf, "mamba_expand", 2), require_size(hf, "hidden_size")
        inner, source = expand * hidden_size, f"{source}, mamba_expand={expand} and hidden_size={hidden_size}"
    else:
        inner = require_size(hf, "mamba_d_ssm", 1024)
    norm = "plain" if is_enabled(hf, "mamba_norm_before_gate", default=True) else "gated"
    mixer = mamba.read_state_space(
        hf,
        inner,
        out_bias="projectors_bias",
        norm=norm if is_enabled(hf, "mamba_rms_norm") else None,
        scales=_multipliers(hf, "ssm_multipliers", 5),
    )
    if mixer.inner_size != inner:
        raise ValueError(
            f"mamba_n_heads={mixer.num_heads} and mamba_d_head={mixer.head_dim} do not make the {inner} numbers of"
            f" {source}; download the checkpoint's config.json again"
        )
    return mixer


def _multipliers(hf: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    """Returns `count` multipliers, which are 1 where config.json states none."""
    stated = hf.get(key)
    if stated is None:
        return (1.0,) * count
    if not isinstance(stated, list) or len(stated) != count:
        raise ValueError(
            f"{key}={stated!r} is not a list of {count} numbers; download the checkpoint's config.json again"
        )
    return tuple(multiplier({key: value}, key) for value in stated)


FAMILY = Family(config_from_hf=config_from_hf, weights=WEIGHTS)
