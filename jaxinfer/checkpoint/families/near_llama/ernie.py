"""ERNIE 4.5, dense and with experts: Llama with an interleaved rotation, and biases that choose the experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    Family,
    Harmless,
    WeightTable,
    decoder_of,
    expert_weights,
    read_norm,
    read_num_layers,
    refuse_unsupported,
    require_harmless,
)
from jaxinfer.checkpoint.config_json.fields import (
    divided_head_dim,
    expert_counts,
    is_enabled,
    num_kv_heads,
    require_count,
    require_number,
    require_size,
)
from jaxinfer.checkpoint.config_json.rope import read_whole_rope
from jaxinfer.checkpoint.families import llama
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.config import Layer, ModelConfig

_LAYER = "model.layers.{layer}"
MAX_POSITION = 131_072
THETA = 500_000.0
LEAST_SUM = 1e-12  # of the scores of a token's experts, which no token comes near
# transformers gives the logits a bias then. Key -> (values that change nothing, what to do about any other).
_HONOURED_WITH_EXPERTS: Harmless = {"use_bias": ((False,), "use a checkpoint without biases")}

_CHOICE_BIAS = ("layers.feed_forward.choice_bias", "1 E -> E")
MOE_WEIGHTS: WeightTable = {
    **llama.WEIGHTS,
    **expert_weights(f"{_LAYER}.mlp", shared="shared_experts"),
    # As published, and by the name of transformers' module.
    f"{_LAYER}.mlp.moe_statics.e_score_correction_bias": _CHOICE_BIAS,
    f"{_LAYER}.mlp.gate.moe_statics.e_score_correction_bias": _CHOICE_BIAS,
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Ernie4_5Config."""
    refuse_unsupported(hf, "Ernie4_5ForCausalLM")
    mlp = MLP(intermediate_size=require_size(hf, "intermediate_size"), has_bias=is_enabled(hf, "use_bias"))
    return _translate({"head_dim": 128, **hf}, [mlp] * read_num_layers(hf), default_kv_heads=2)


def config_from_hf_moe(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Ernie4_5_MoeConfig.

    The layers that predict several tokens (`mtp`) are not loaded.
    """
    refuse_unsupported(hf, "Ernie4_5_MoeForCausalLM")
    require_harmless(hf, _HONOURED_WITH_EXPERTS)
    least = require_number(hf, "moe_norm_min", LEAST_SUM)
    if least > LEAST_SUM:
        raise ValueError(f"moe_norm_min={least!r} is not supported; use a checkpoint with at most {LEAST_SUM}")
    # transformers takes these two by the names of other families too, and these go before.
    count, chosen = (
        theirs if theirs in hf else ours
        for theirs, ours in (("num_experts", "moe_num_experts"), ("num_experts_per_tok", "moe_k"))
    )
    num_experts, num_chosen = expert_counts(hf, count, 64, 6, chosen=chosen)
    size, num_shared = require_size(hf, "moe_intermediate_size", 1536), require_count(hf, "moe_num_shared_experts", 2)
    experts = MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=size),
        router=Router(num_chosen=num_chosen, has_choice_bias=True),
        shared=MLP(intermediate_size=size * num_shared) if num_shared else None,
    )
    dense = MLP(intermediate_size=require_size(hf, "intermediate_size"))
    feed_forwards = [experts if sparse else dense for sparse in _sparse_layers(hf, read_num_layers(hf))]
    return _translate(hf, feed_forwards, default_kv_heads=4)


def _sparse_layers(hf: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Returns True for each layer that has experts."""
    first, interval = require_count(hf, "moe_layer_start_index", 1), require_size(hf, "moe_layer_interval", 1)
    last = num_layers - 1 if hf.get("moe_layer_end_index", -1) == -1 else require_count(hf, "moe_layer_end_index", -1)
    return [(i + 1) % interval == 0 and first <= i <= last for i in range(num_layers)]


def _translate(hf: Mapping[str, Any], feed_forwards: list[Any], *, default_kv_heads: int) -> ModelConfig:
    head_dim, has_bias = divided_head_dim(hf), is_enabled(hf, "use_bias")
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=default_kv_heads),
        head_dim=head_dim,
        rope=read_whole_rope(hf, head_dim, MAX_POSITION, default_theta=THETA, is_interleaved=True),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )
    norm = read_norm(hf, default=1e-5)
    return decoder_of(
        hf,
        [Layer(mixer=attention, feed_forward=feed_forward, norm=norm) for feed_forward in feed_forwards],
        max_position=MAX_POSITION,
        is_tied=True,
    )


FAMILY = Family(config_from_hf=config_from_hf, weights=llama.WEIGHTS)
MOE_FAMILY = Family(config_from_hf=config_from_hf_moe, weights=MOE_WEIGHTS, skipped=("model.mtp_", "mtp_"))
