"""Mamba and Mamba-2: layers of a state space alone.

Jamba has Mamba's mixer. Granite 4, Nemotron-H and Falcon-H1 have Mamba-2's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    Family,
    WeightTable,
    decoder_of,
    read_num_layers,
    refuse_unsupported,
)
from jaxinfer.checkpoint.config_json.fields import is_enabled, require_number, require_size
from jaxinfer.model.components.layers import Norm
from jaxinfer.model.components.recurrent.selective_scan import SelectiveScan
from jaxinfer.model.components.recurrent.state_space import StateSpace
from jaxinfer.model.config import Layer, ModelConfig
from jaxinfer.model.layer_parts import Mixer
from jaxinfer.validation import MAX_FLOAT

# Nothing in the model depends on a position: this bounds the tables of the engine alone.
MAX_POSITION = 131_072
INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it


def mixer_weights(prefix: str) -> WeightTable:
    """Returns the table of a state space that is stored under `prefix`."""
    return {
        f"{prefix}.in_proj.weight": ("layers.mixer.in_proj", "F D -> F D"),
        f"{prefix}.in_proj.bias": ("layers.mixer.in_bias", "F -> F"),
        f"{prefix}.conv1d.weight": ("layers.mixer.conv", "C 1 W -> C W"),
        f"{prefix}.conv1d.bias": ("layers.mixer.conv_bias", "C -> C"),
        f"{prefix}.dt_bias": ("layers.mixer.dt_bias", "H -> H"),
        f"{prefix}.A_log": ("layers.mixer.a_log", "H -> H"),
        f"{prefix}.D": ("layers.mixer.d", "H -> H"),
        f"{prefix}.norm.weight": ("layers.mixer.norm", "I -> I"),
        f"{prefix}.out_proj.weight": ("layers.mixer.out_proj", "D I -> D I"),
        f"{prefix}.out_proj.bias": ("layers.mixer.out_bias", "D -> D"),
    }


def scan_weights(prefix: str) -> WeightTable:
    """Returns the table of a selective scan that is stored under `prefix`."""
    return {
        f"{prefix}.in_proj.weight": ("layers.mixer.in_proj", "F D -> F D"),
        f"{prefix}.in_proj.bias": ("layers.mixer.in_bias", "F -> F"),
        f"{prefix}.conv1d.weight": ("layers.mixer.conv", "I 1 W -> I W"),
        f"{prefix}.conv1d.bias": ("layers.mixer.conv_bias", "I -> I"),
        f"{prefix}.x_proj.weight": ("layers.mixer.x_proj", "F I -> F I"),
        f"{prefix}.dt_proj.weight": ("layers.mixer.dt_proj", "I R -> I R"),
        f"{prefix}.dt_proj.bias": ("layers.mixer.dt_bias", "I -> I"),
        f"{prefix}.A_log": ("layers.mixer.a_log", "I N -> N I"),
        f"{prefix}.D": ("layers.mixer.d", "I -> I"),
        f"{prefix}.out_proj.weight": ("layers.mixer.out_proj", "D I -> D I"),
        f"{prefix}.out_proj.bias": ("layers.mixer.out_bias", "D -> D"),
    }


_LAYER = "backbone.layers.{layer}"
_OUTER: WeightTable = {
    "backbone.embeddings.weight": ("embedding", "V D -> V D"),
    "backbone.norm_f.weight": ("final_norm", "D -> D"),
    "lm_head.weight": ("unembedding", "V D -> V D"),
    f"{_LAYER}.norm.weight": ("layers.mixer_norm", "D -> D"),
}
WEIGHTS_1: WeightTable = {**_OUTER, **scan_weights(f"{_LAYER}.mixer")}
WEIGHTS_2: WeightTable = {**_OUTER, **mixer_weights(f"{_LAYER}.mixer")}


def config_from_hf_1(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' MambaConfig."""
    refuse_unsupported(hf, "MambaForCausalLM")
    inner_size = require_size(hf, "expand", 2) * require_size(hf, "hidden_size")
    mixer = SelectiveScan(
        inner_size=require_size(hf, "intermediate_size", inner_size),
        state_size=require_size(hf, "state_size", 16),
        time_step_rank=read_time_step_rank(hf, "time_step_rank"),
        conv_size=read_conv_size(hf, "conv_kernel"),
        has_conv_bias=is_enabled(hf, "use_conv_bias", default=True),
        has_bias=is_enabled(hf, "use_bias"),
    )
    return _decoder(hf, mixer, is_tied=True)


def config_from_hf_2(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Mamba2Config."""
    refuse_unsupported(hf, "Mamba2ForCausalLM")
    num_heads, head_dim = require_size(hf, "num_heads", 128), require_size(hf, "head_dim", 64)
    require_inner_size(hf, "expand", num_heads * head_dim, ("num_heads", num_heads), ("head_dim", head_dim))
    mixer = StateSpace(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=read_num_groups(hf, "n_groups", 8, ("num_heads", num_heads)),
        state_size=require_size(hf, "state_size", 128),
        conv_size=read_conv_size(hf, "conv_kernel"),
        has_conv_bias=is_enabled(hf, "use_conv_bias", default=True),
        has_in_bias=is_enabled(hf, "use_bias"),
        has_out_bias=is_enabled(hf, "use_bias"),
        time_step_limits=read_time_step_limits(hf),
    )
    return _decoder(hf, mixer)


def _decoder(hf: Mapping[str, Any], mixer: Mixer, *, is_tied: bool = False) -> ModelConfig:
    norm = Norm(epsilon=require_number(hf, "layer_norm_epsilon", 1e-5))
    layers = [Layer(mixer=mixer, feed_forward=None, norm=norm)] * read_num_layers(hf)
    return decoder_of(hf, layers, max_position=MAX_POSITION, is_tied=is_tied)


def read_state_space(hf: Mapping[str, Any], inner_size: int, *, out_bias: str, **others: Any) -> StateSpace:
    """Returns Mamba-2's mixer of a hybrid model; a `mamba_d_head` of "auto" shares out `inner_size` among the heads.

    `out_bias` is the key of the output's bias.
    """
    num_heads, is_derived = require_size(hf, "mamba_n_heads", 128), hf.get("mamba_d_head", "auto") == "auto"
    return StateSpace(
        num_heads=num_heads,
        head_dim=max(inner_size // num_heads, 1) if is_derived else require_size(hf, "mamba_d_head"),
        num_groups=read_num_groups(hf, "mamba_n_groups", 1, ("mamba_n_heads", num_heads)),
        state_size=require_size(hf, "mamba_d_state", 256),
        conv_size=read_conv_size(hf, "mamba_d_conv"),
        has_conv_bias=is_enabled(hf, "mamba_conv_bias", default=True),
        has_in_bias=is_enabled(hf, "mamba_proj_bias"),
        has_out_bias=is_enabled(hf, out_bias),
        time_step_limits=read_time_step_limits(hf),
        **others,
    )


def read_time_step_rank(hf: Mapping[str, Any], key: str) -> int:
    """Returns the number of numbers of which all time steps are made; "auto" is a sixteenth of the hidden size."""
    if hf.get(key, "auto") == "auto":
        return -(-require_size(hf, "hidden_size") // 16)
    return require_size(hf, key)


def require_inner_size(hf: Mapping[str, Any], key: str, size: int, *factors: tuple[str, int]) -> None:
    """Raises ValueError unless the factors' product `size` is the hidden size times the number under `key`."""
    hidden_size, expand = require_size(hf, "hidden_size"), require_size(hf, key, 2)
    if hidden_size * expand != size:
        named = " and ".join(f"{name}={value}" for name, value in factors)
        raise ValueError(
            f"{named} do not fit {key}={expand} times hidden_size={hidden_size}; download the checkpoint's"
            " config.json again"
        )


def read_num_groups(hf: Mapping[str, Any], key: str, default: int, heads: tuple[str, int]) -> int:
    """Returns the number of groups, which divides that of `heads`, a key and its value."""
    num_groups = require_size(hf, key, default)
    name, num_heads = heads
    if num_heads % num_groups:
        raise ValueError(
            f"{key}={num_groups} does not divide {name}={num_heads}; download the checkpoint's config.json again"
        )
    return num_groups


def read_conv_size(hf: Mapping[str, Any], key: str) -> int:
    """Returns the number of inputs of the convolution."""
    size = require_size(hf, key, 4)
    if size < 2:
        raise ValueError(f"{key}={size} is not supported; use a checkpoint with a convolution of at least 2 tokens")
    return size


def read_time_step_limits(hf: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the least and the largest time step."""
    stated = hf.get("time_step_limit")
    if stated is None:
        return 0.0, math.inf
    limits = [math.inf if limit == INFINITY else limit for limit in stated] if isinstance(stated, list) else []
    if len(limits) != 2 or not all(map(_is_real, limits)) or not 0 <= limits[0] <= limits[1]:
        raise ValueError(
            f"time_step_limit={stated!r} is not a list of two numbers in order; download the checkpoint's config.json"
            " again"
        )
    return float(limits[0]), float(limits[1])


def _is_real(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (value == math.inf or -MAX_FLOAT <= value <= MAX_FLOAT)


# Checkpoints of the time before transformers had the family call the embedding so.
FORMER_SPELLING = {"backbone.embeddings.": "backbone.embedding."}
FAMILY_1 = Family(config_from_hf=config_from_hf_1, weights=WEIGHTS_1, spellings=({}, FORMER_SPELLING))
FAMILY_2 = Family(config_from_hf=config_from_hf_2, weights=WEIGHTS_2)
