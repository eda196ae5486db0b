"""OLMo 2 and 3, EXAONE 4 and OLMoE.

OLMo 2 and 3 have norms after attention and MLP instead of before, and over all heads of queries and keys. EXAONE 4 has
the norms after too, over each head, and its layers without a window know no positions if others have one. OLMoE is
Llama with the norms over all heads, and with experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    Family,
    Harmless,
    Target,
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
    require_size,
)
from jaxinfer.checkpoint.config_json.rope import DEFAULT_THETA, read_rope
from jaxinfer.checkpoint.config_json.window import FULL, SLIDING, layer_types
from jaxinfer.checkpoint.families import llama
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.config import Layer, ModelConfig

_LAYER = "model.layers.{layer}"
MAX_POSITION = 2048
THETA_3 = 500_000.0  # of OLMo 3
MOE_MAX_POSITION = 4096
EXAONE_MAX_POSITION = 2048

_POST_NORMS: dict[str, Target] = {
    f"{_LAYER}.post_attention_layernorm.weight": ("layers.mixer_post_norm", "D -> D"),
    f"{_LAYER}.post_feedforward_layernorm.weight": ("layers.feed_forward_post_norm", "D -> D"),
}
_NORMS_OF_ALL_HEADS: dict[str, Target] = {
    f"{_LAYER}.self_attn.q_norm.weight": ("layers.mixer.q_norm", "(N H) -> N H"),
    f"{_LAYER}.self_attn.k_norm.weight": ("layers.mixer.k_norm", "(K H) -> K H"),
}
WEIGHTS: WeightTable = {**llama.WEIGHTS, **_POST_NORMS, **_NORMS_OF_ALL_HEADS}
MOE_WEIGHTS: WeightTable = {**llama.WEIGHTS, **_NORMS_OF_ALL_HEADS, **expert_weights(f"{_LAYER}.mlp")}
EXAONE_WEIGHTS: WeightTable = {
    **llama.WEIGHTS,
    **_POST_NORMS,
    f"{_LAYER}.self_attn.q_norm.weight": ("layers.mixer.q_norm", "H -> H"),
    f"{_LAYER}.self_attn.k_norm.weight": ("layers.mixer.k_norm", "H -> H"),
}
_WITHOUT_BOUNDS: Harmless = {"clip_qkv": ((None,), "use a checkpoint without bounds of queries, keys and values")}


def config_from_hf_2(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Olmo2Config."""
    refuse_unsupported(hf, "Olmo2ForCausalLM")
    return _translate(hf, [FULL] * read_num_layers(hf), window=None)


def config_from_hf_3(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Olmo3Config."""
    refuse_unsupported(hf, "Olmo3ForCausalLM")
    default = [FULL if (i + 1) % 4 == 0 else SLIDING for i in range(read_num_layers(hf))]
    return _translate(hf, layer_types(hf, default), window=require_size(hf, "sliding_window", 4096))


def _translate(hf: Mapping[str, Any], kinds: list[str], window: int | None) -> ModelConfig:
    head_dim, norm = divided_head_dim(hf), read_norm(hf, default=1e-5)
    has_kinds = window is not None

    def layer(kind: str) -> Layer:
        attention = Attention(
            num_heads=require_size(hf, "num_attention_heads"),
            num_kv_heads=num_kv_heads(hf, default=require_size(hf, "num_attention_heads")),
            head_dim=head_dim,
            rope=read_rope(
                hf,
                head_dim,
                MAX_POSITION,
                layer_type=kind if has_kinds else None,
                default_theta=THETA_3 if has_kinds else DEFAULT_THETA,
            ),
            window=window if kind == SLIDING else None,
            has_qkv_bias=is_enabled(hf, "attention_bias"),
            has_output_bias=is_enabled(hf, "attention_bias"),
            qk_norm="all",
        )
        mlp = MLP(intermediate_size=require_size(hf, "intermediate_size"))
        return Layer(mixer=attention, feed_forward=mlp, norm=norm, has_pre_norms=False, has_post_norms=True)

    return decoder_of(hf, [layer(kind) for kind in kinds], max_position=MAX_POSITION)


def moe_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' OlmoeConfig."""
    refuse_unsupported(hf, "OlmoeForCausalLM")
    require_harmless(hf, _WITHOUT_BOUNDS)
    head_dim, has_bias = divided_head_dim(hf), is_enabled(hf, "attention_bias")
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=require_size(hf, "num_attention_heads")),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, MOE_MAX_POSITION),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm="all",
    )
    name = "num_experts" if "num_experts" in hf else "num_local_experts"
    num_experts, num_chosen = expert_counts(hf, name, 64, 8)
    experts = MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=require_size(hf, "intermediate_size")),
        router=Router(num_chosen=num_chosen, normalizes=is_enabled(hf, "norm_topk_prob")),
    )
    layer = Layer(mixer=attention, feed_forward=experts, norm=read_norm(hf, default=1e-5))
    return decoder_of(hf, [layer] * read_num_layers(hf), max_position=MOE_MAX_POSITION)


def exaone_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Exaone4Config."""
    refuse_unsupported(hf, "Exaone4ForCausalLM")
    head_dim, norm = divided_head_dim(hf), read_norm(hf, default=1e-5)
    window = None if hf.get("sliding_window", 4096) is None else require_size(hf, "sliding_window", 4096)
    rope = read_rope(hf, head_dim, EXAONE_MAX_POSITION)
    mlp = MLP(intermediate_size=require_size(hf, "intermediate_size"))

    def layer(kind: str) -> Layer:
        attention = Attention(
            num_heads=require_size(hf, "num_attention_heads"),
            num_kv_heads=num_kv_heads(hf, default=32),
            head_dim=head_dim,
            rope=rope if window is None or kind == SLIDING else None,
            window=window if kind == SLIDING else None,
            qk_norm="head",
        )
        return Layer(mixer=attention, feed_forward=mlp, norm=norm, has_pre_norms=False, has_post_norms=True)

    return decoder_of(hf, [layer(kind) for kind in _exaone_layer_types(hf, window)], max_position=EXAONE_MAX_POSITION)


def _exaone_layer_types(hf: Mapping[str, Any], window: int | None) -> list[str]:
    """Returns the kind of each layer: those that `layer_types` names, or every n-th full by the pattern n."""
    default, pattern = [FULL] * read_num_layers(hf), hf.get("sliding_window_pattern", 4)
    if window is not None and hf.get("layer_types") is None:
        if pattern is None or isinstance(pattern, str):  # transformers fails too
            raise ValueError(
                f"sliding_window_pattern={pattern!r} without layer_types is not supported; write layer_types, the list"
                " of the layers' kinds"
            )
        interval = require_size(hf, "sliding_window_pattern", 4)
        default = [FULL if (i + 1) % interval == 0 else SLIDING for i in range(len(default))]
    kinds = layer_types(hf, default)
    if window is None and SLIDING in kinds:
        raise ValueError(
            f"layer_types={kinds!r} need a window, and sliding_window=None; download the checkpoint's config.json again"
        )
    return kinds


FAMILY_2 = Family(config_from_hf=config_from_hf_2, weights=WEIGHTS)
FAMILY_3 = Family(config_from_hf=config_from_hf_3, weights=WEIGHTS)
MOE_FAMILY = Family(config_from_hf=moe_from_hf, weights=MOE_WEIGHTS)
EXAONE_FAMILY = Family(config_from_hf=exaone_from_hf, weights=EXAONE_WEIGHTS)
