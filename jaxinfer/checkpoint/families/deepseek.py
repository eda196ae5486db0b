"""DeepSeek-V2 and V3: latent attention, and experts chosen in groups beside a shared one; Kimi-K2 is a V3."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    NEXTN,
    Family,
    Fused,
    WeightTable,
    decoder_of,
    expert_weights,
    read_grouped_router,
    read_norm,
    read_num_layers,
    refuse_unsupported,
)
from jaxinfer.checkpoint.config_json.fields import (
    is_enabled,
    number_or_default,
    require_count,
    require_number,
    require_size,
    stated_head_dim,
)
from jaxinfer.checkpoint.config_json.rope import read_rope
from jaxinfer.checkpoint.config_json.text_model import text_model_family
from jaxinfer.checkpoint.families import llama
from jaxinfer.model.components.latent_attention import LatentAttention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.components.rope import Rope
from jaxinfer.model.config import Layer, ModelConfig

_LAYER = "model.layers.{layer}"
_ATTENTION, _MIXER = f"{_LAYER}.self_attn", "layers.mixer"

WEIGHTS: WeightTable = {
    **llama.WEIGHTS,
    f"{_ATTENTION}.q_a_proj.weight": (f"{_MIXER}.q_down", "Q D -> Q D"),
    f"{_ATTENTION}.q_a_proj.bias": (f"{_MIXER}.q_down_bias", "Q -> Q"),
    f"{_ATTENTION}.q_a_layernorm.weight": (f"{_MIXER}.q_norm", "Q -> Q"),
    f"{_ATTENTION}.q_b_proj.weight": (f"{_MIXER}.q_up", "(N H) Q -> N H Q"),
    f"{_ATTENTION}.kv_a_proj_with_mqa.weight": (f"{_MIXER}.kv_down", "R D -> R D"),
    f"{_ATTENTION}.kv_a_proj_with_mqa.bias": (f"{_MIXER}.kv_down_bias", "R -> R"),
    f"{_ATTENTION}.kv_a_layernorm.weight": (f"{_MIXER}.kv_norm", "R -> R"),
    f"{_ATTENTION}.kv_b_proj.weight": Fused(
        ((f"{_MIXER}.k_up", "N H R -> N H R"), (f"{_MIXER}.v_up", "N V R -> N R V")), axis=1, unfold="(N C) R -> N C R"
    ),
    f"{_LAYER}.mlp.gate.e_score_correction_bias": ("layers.feed_forward.choice_bias", "E -> E"),
    **expert_weights(f"{_LAYER}.mlp", shared="shared_experts"),
}
# Of transformers' DeepseekV3Config.
_DEFAULTS_3: Mapping[str, Any] = {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}


def config_from_hf_v2(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' DeepseekV2Config."""
    methods = {"greedy": False, "group_limited_greedy": True}
    method = hf.get("topk_method", "greedy")
    _require(hf, "topk_method", "greedy", tuple(methods))
    _require(hf, "scoring_func", "softmax", ("softmax",))
    # transformers ignores it, and DeepSeek's own code does not scale weights that it normalises.
    _require(hf, "norm_topk_prob", False, (False, None))
    _require(hf, "mlp_bias", False, (False,))
    router = Router(
        num_chosen=require_size(hf, "num_experts_per_tok"),
        normalizes=False,
        scale=require_number(hf, "routed_scaling_factor", 1.0, least=1e-9),
        num_groups=require_size(hf, "n_group") if methods[method] else 1,
        num_chosen_groups=require_size(hf, "topk_group") if methods[method] else 1,
        num_scores_of_group=1,
    )
    return latent_decoder(
        {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, **hf},
        router,
        architecture="DeepseekV2ForCausalLM",
        max_position=2048,
        is_sparse=sparse_after(hf, 0),
        is_interleaved=True,
    )


def config_from_hf_v3(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' DeepseekV3Config.

    The layers past the last, for multi-token prediction, are loaded as a drafter only.
    """
    _require(hf, "topk_method", "noaux_tc", ("noaux_tc",))
    _require(hf, "scoring_func", "sigmoid", ("sigmoid",))
    hf = {**_DEFAULTS_3, **hf}
    _, router = read_grouped_router(hf, 256, 8)
    return latent_decoder(
        hf,
        router,
        architecture="DeepseekV3ForCausalLM",
        max_position=4096,
        is_sparse=sparse_after(hf, 3),
        is_interleaved=is_enabled(hf, "rope_interleave", default=True),
    )


def sparse_after(hf: Mapping[str, Any], default: int) -> list[bool]:
    """Returns True for each layer with experts: those after the first `first_k_dense_replace`."""
    num_dense = require_count(hf, "first_k_dense_replace", default)
    return [i >= num_dense for i in range(read_num_layers(hf))]


def latent_decoder(
    hf: Mapping[str, Any],
    router: Router,
    *,
    architecture: str,
    max_position: int,
    is_sparse: Sequence[bool],
    is_interleaved: bool,
) -> ModelConfig:
    """Returns a model of latent attention, whose layers have experts or a dense network.

    `hf` is config.json with the family's own defaults, `max_position` another of them.
    """
    refuse_unsupported(hf, architecture)
    _require(hf, "moe_layer_freq", 1, (1,))
    num_heads = require_size(hf, "num_attention_heads")
    if hf.get("num_key_value_heads") not in (None, num_heads):
        raise ValueError(
            f"num_key_value_heads={hf['num_key_value_heads']!r} differs from num_attention_heads={num_heads}, but each"
            " head has its own key and value; download the checkpoint's config.json again"
        )
    nope, rotary = require_size(hf, "qk_nope_head_dim", 128), stated_head_dim(hf, 64, "qk_rope_head_dim")
    rope = read_rope(hf, rotary, max_position, is_interleaved=is_interleaved)
    attention = LatentAttention(
        num_heads=num_heads,
        q_lora_rank=None if hf.get("q_lora_rank", 1536) is None else require_size(hf, "q_lora_rank", 1536),
        kv_lora_rank=require_size(hf, "kv_lora_rank", 512),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotary,
        v_head_dim=require_size(hf, "v_head_dim", 128),
        rope=rope,
        scale=(nope + rotary) ** -0.5 * _scale_of_yarn(hf, rope) ** 2,
        has_bias=is_enabled(hf, "attention_bias"),
    )
    size = require_size(hf, "moe_intermediate_size")
    experts = MoE(
        num_experts=require_size(hf, "n_routed_experts"),
        expert=MLP(intermediate_size=size),
        router=router,
        shared=MLP(intermediate_size=size * require_size(hf, "n_shared_experts")),
    )
    dense = Layer(
        mixer=attention, feed_forward=MLP(intermediate_size=require_size(hf, "intermediate_size")), norm=read_norm(hf)
    )
    sparse = replace(dense, feed_forward=experts)
    layers = [sparse if has_experts else dense for has_experts in is_sparse]
    return decoder_of(hf, layers, max_position=max_position)


def _scale_of_yarn(hf: Mapping[str, Any], rope: Rope) -> float:
    """Returns the factor on queries and keys by which `mscale_all_dim` makes up for the scaling of frequencies."""
    parameters = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    mscale = number_or_default(parameters, "mscale_all_dim", 0.0)
    if rope.scaling is None or not mscale or rope.scaling.factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(rope.scaling.factor) + 1.0


def _require(hf: Mapping[str, Any], key: str, default: Any, honoured: tuple[Any, ...]) -> None:
    """Raises ValueError for a setting that would change the result."""
    if hf.get(key, default) not in honoured:
        raise ValueError(f"{key}={hf[key]!r} is not supported; use a checkpoint with {key}={honoured[-1]!r}")


FAMILY_2 = Family(config_from_hf=config_from_hf_v2, weights=WEIGHTS)
FAMILY_3 = Family(config_from_hf=config_from_hf_v3, weights=WEIGHTS, draft_layer=NEXTN)
KIMI_K2 = replace(FAMILY_3, draft_layer=None)  # its layers are those of V3
_KIMI_K2_5 = text_model_family(
    KIMI_K2,
    architecture="Kimi_K25ForConditionalGeneration",
    model_type="deepseek_v3",
    others={"kimi_k2": KIMI_K2},  # as it is published
    parts=("vision_tower", "mm_projector"),
)


def kimi_k2_5_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json of published checkpoints, or of transformers, which has another name of the class."""
    if hf.get("architectures") == ["KimiK25ForConditionalGeneration"]:
        hf = {**hf, "architectures": None}
    return _KIMI_K2_5.config_from_hf({"tie_word_embeddings": True, **hf})


KIMI_K2_5 = replace(_KIMI_K2_5, config_from_hf=kimi_k2_5_from_hf)
