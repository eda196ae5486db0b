"""Jamba: selective scans, attention without positions in every eighth layer, and experts in every other one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    require_count,
    require_size,
)
from jaxinfer.checkpoint.families import llama
from jaxinfer.checkpoint.families.recurrent import mamba
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.components.recurrent.selective_scan import SelectiveScan
from jaxinfer.model.config import Layer, ModelConfig
from jaxinfer.model.layer_parts import Mixer

MAX_POSITION = 262_144
_LAYER = "model.layers.{layer}"
# Names of parts where Llama has others; Falcon-H1 has them too.
PARTS = {
    "model.norm.": "model.final_layernorm.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    ".mlp.": ".feed_forward.",
}
WEIGHTS: WeightTable = {
    **llama.renamed_weights(PARTS),
    **expert_weights(f"{_LAYER}.feed_forward", router="router"),
    **mamba.scan_weights(f"{_LAYER}.mamba"),
    f"{_LAYER}.mamba.dt_layernorm.weight": ("layers.mixer.dt_norm", "R -> R"),
    f"{_LAYER}.mamba.b_layernorm.weight": ("layers.mixer.b_norm", "N -> N"),
    f"{_LAYER}.mamba.c_layernorm.weight": ("layers.mixer.c_norm", "N -> N"),
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' JambaConfig."""
    refuse_unsupported(hf, "JambaForCausalLM")
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=8),
        head_dim=divided_head_dim(hf),
    )
    scan = SelectiveScan(
        inner_size=require_size(hf, "mamba_expand", 2) * require_size(hf, "hidden_size"),
        state_size=require_size(hf, "mamba_d_state", 16),
        time_step_rank=mamba.read_time_step_rank(hf, "mamba_dt_rank"),
        conv_size=mamba.read_conv_size(hf, "mamba_d_conv"),
        has_conv_bias=is_enabled(hf, "mamba_conv_bias", default=True),
        has_bias=is_enabled(hf, "mamba_proj_bias"),
        has_norms=True,
    )
    mlp = MLP(intermediate_size=require_size(hf, "intermediate_size"))
    name = "num_experts" if "num_experts" in hf else "num_local_experts"
    experts: MLP | MoE = mlp
    if require_size(hf, name, 16) > 1:
        num_experts, num_chosen = expert_counts(hf, name, 16, 2)
        experts = MoE(num_experts=num_experts, expert=mlp, router=Router(num_chosen=num_chosen, normalizes=False))
    norm, attends, has_experts = read_norm(hf), _places(hf, "attn_layer", 8, 4), _places(hf, "expert_layer", 2, 1)

    def layer(i: int) -> Layer:
        mixer: Mixer = attention if attends(i) else scan
        return Layer(mixer=mixer, feed_forward=experts if has_experts(i) else mlp, norm=norm)

    return decoder_of(
        hf,
        [layer(i) for i in range(read_num_layers(hf))],
        max_position=MAX_POSITION,
    )


def _places(hf: Mapping[str, Any], name: str, default_period: int, default_offset: int) -> Callable[[int], bool]:
    """Returns a function that is true for every period-th layer, from the offset on."""
    period = require_size(hf, f"{name}_period", default_period)
    offset = require_count(hf, f"{name}_offset", default_offset)
    if offset >= period:
        raise ValueError(
            f"{name}_offset={offset} is not less than {name}_period={period}; download the checkpoint's config.json"
            " again"
        )
    return lambda i: i % period == offset


FAMILY = Family(config_from_hf=config_from_hf, weights=WEIGHTS)
