"""Nemotron-H: layers of one half each: a state space, attention without positions, or a feed-forward network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    MAX_LAYERS,
    Either,
    Family,
    Harmless,
    WeightTable,
    decoder_of,
    read_grouped_router,
    refuse_unsupported,
    require_harmless,
)
from jaxinfer.checkpoint.config_json.fields import (
    is_enabled,
    num_kv_heads,
    require_number,
    require_size,
    stated_head_dim,
)
from jaxinfer.checkpoint.families.recurrent import mamba
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.layers import Norm
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE
from jaxinfer.model.components.recurrent.state_space import StateSpace
from jaxinfer.model.config import Layer, ModelConfig

_MIXER = "backbone.layers.{layer}.mixer"
_MLP = "layers.feed_forward"
MAX_POSITION = 4096
# Former names of the kinds of layers, and their letters in a pattern.
KINDS = {
    **{"linear_attention": "mamba", "mamba": "mamba", "M": "mamba"},
    **{"full_attention": "attention", "attention": "attention", "*": "attention"},
    **{"mlp": "mlp", "-": "mlp", "moe": "moe", "E": "moe"},
}
# Key -> (values that change nothing, what to do about any other).
_HONOURED: Harmless = {
    "mlp_hidden_act": (("relu2",), "use a checkpoint whose MLP has a squared ReLU"),
    "mamba_hidden_act": (("silu", "swish"), "use a checkpoint whose convolutions end in silu"),
    "attention_bias": ((False, None), "use a checkpoint without biases of attention"),
    "sliding_window": ((None,), "use a checkpoint whose layers attend to the whole context"),
    "moe_latent_size": ((None,), "use a checkpoint whose experts take the hidden state itself"),
}
# Keys of former configurations, which go before the present ones.
_FORMER_KEYS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}

WEIGHTS: WeightTable = {
    "backbone.embeddings.weight": ("embedding", "V D -> V D"),
    "backbone.norm_f.weight": ("final_norm", "D -> D"),
    "lm_head.weight": ("unembedding", "V D -> V D"),
    "backbone.layers.{layer}.norm.weight": Either(
        (("layers.mixer_norm", "D -> D"), ("layers.feed_forward_norm", "D -> D"))
    ),
    **mamba.mixer_weights(_MIXER),
    f"{_MIXER}.q_proj.weight": ("layers.mixer.q", "(N H) D -> N H D"),
    f"{_MIXER}.k_proj.weight": ("layers.mixer.k", "(K H) D -> K H D"),
    f"{_MIXER}.v_proj.weight": ("layers.mixer.v", "(K H) D -> K H D"),
    f"{_MIXER}.o_proj.weight": ("layers.mixer.o", "D C -> D C"),
    f"{_MIXER}.up_proj.weight": (f"{_MLP}.up", "F D -> F D"),
    f"{_MIXER}.up_proj.bias": (f"{_MLP}.up_bias", "F -> F"),
    f"{_MIXER}.down_proj.weight": (f"{_MLP}.down", "D F -> D F"),
    f"{_MIXER}.down_proj.bias": (f"{_MLP}.down_bias", "D -> D"),
    f"{_MIXER}.gate.weight": (f"{_MLP}.router", "E D -> E D"),
    f"{_MIXER}.gate.e_score_correction_bias": (f"{_MLP}.choice_bias", "E -> E"),
    f"{_MIXER}.experts.{{expert}}.up_proj.weight": (f"{_MLP}.experts.up", "F D -> F D"),
    f"{_MIXER}.experts.{{expert}}.down_proj.weight": (f"{_MLP}.experts.down", "D F -> D F"),
    f"{_MIXER}.shared_experts.up_proj.weight": (f"{_MLP}.shared.up", "F D -> F D"),
    f"{_MIXER}.shared_experts.up_proj.bias": (f"{_MLP}.shared.up_bias", "F -> F"),
    f"{_MIXER}.shared_experts.down_proj.weight": (f"{_MLP}.shared.down", "D F -> D F"),
    f"{_MIXER}.shared_experts.down_proj.bias": (f"{_MLP}.shared.down_bias", "D -> D"),
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' NemotronHConfig.

    The layers that predict several tokens (`mtp`) are not loaded.
    """
    refuse_unsupported(hf, "NemotronHForCausalLM")
    require_harmless(hf, _HONOURED)
    kinds, norm = _read_kinds(hf), Norm(epsilon=require_number(hf, "layer_norm_epsilon", 1e-5))
    halves: dict[str, Any] = {}
    if "mamba" in kinds:
        halves["mamba"] = {"mixer": _state_space(hf), "feed_forward": None}
    if "attention" in kinds:
        halves["attention"] = {"mixer": _attention(hf), "feed_forward": None}
    if "mlp" in kinds:
        halves["mlp"] = {"mixer": None, "feed_forward": _mlp(hf, "intermediate_size", 21504)}
    if "moe" in kinds:
        halves["moe"] = {"mixer": None, "feed_forward": _experts(hf)}
    layers = [Layer(**halves[kind], norm=norm) for kind in kinds]
    return decoder_of(hf, layers, max_position=MAX_POSITION)


def _read_kinds(hf: Mapping[str, Any]) -> list[str]:
    """Returns the kind of each layer, from a list of names or a pattern of letters."""
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    key = next((name for name in names if hf.get(name) is not None), names[0])
    stated = hf.get(key, ["linear_attention", "moe", "full_attention", "mlp"])
    is_sequence = isinstance(stated, list | str) and 0 < len(stated) <= MAX_LAYERS
    if not is_sequence or not all(isinstance(name, str) and name in KINDS for name in stated):
        raise ValueError(
            f"{key}={stated!r} does not name the kinds of layers, {', '.join(sorted(set(KINDS.values())))}; download"
            " the checkpoint's config.json again"
        )
    return [KINDS[name] for name in stated]


def _state_space(hf: Mapping[str, Any]) -> StateSpace:
    num_heads = require_size(hf, "mamba_num_heads", 128)
    named = {ours: former if former in hf else ours for former, ours in _FORMER_KEYS.items()}
    limits = {"time_step_limit": hf.get(named["time_step_limit"])}
    return StateSpace(
        num_heads=num_heads,
        head_dim=require_size(hf, "mamba_head_dim", 64),
        num_groups=mamba.read_num_groups(hf, named["n_groups"], 8, ("mamba_num_heads", num_heads)),
        state_size=require_size(hf, "ssm_state_size", 128),
        conv_size=mamba.read_conv_size(hf, named["conv_kernel"]),
        has_conv_bias=is_enabled(hf, named["use_conv_bias"], default=True),
        has_in_bias=is_enabled(hf, "use_bias"),
        has_out_bias=is_enabled(hf, "use_bias"),
        time_step_limits=mamba.read_time_step_limits(limits),
    )


def _attention(hf: Mapping[str, Any]) -> Attention:
    return Attention(
        num_heads=require_size(hf, "num_attention_heads", 32),
        num_kv_heads=num_kv_heads(hf, default=8),
        head_dim=stated_head_dim(hf, 128),
    )


def _mlp(hf: Mapping[str, Any], key: str, default: int) -> MLP:
    size = require_size(hf, key, default)
    return MLP(intermediate_size=size, activation="relu2", has_bias=is_enabled(hf, "mlp_bias"))


def _experts(hf: Mapping[str, Any]) -> MoE:
    num_experts, router = read_grouped_router(hf, 8, 2)
    return MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=require_size(hf, "moe_intermediate_size", 7688), activation="relu2"),
        router=router,
        shared=_mlp(hf, "moe_shared_expert_intermediate_size", 7688),
    )


FAMILY = Family(
    config_from_hf=config_from_hf, weights=WEIGHTS, spellings=({}, {"backbone.": "model."}), skipped=("mtp.",)
)
