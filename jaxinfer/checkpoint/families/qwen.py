"""Qwen2, Qwen2.5, Qwen3 and Qwen3-Next, dense and as mixtures of experts.

Dense ones are Llama with biases on queries, keys and values, or with norms on their heads. Qwen3-Next has three gated
delta nets, then gated attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    DraftLayer,
    Family,
    Fused,
    WeightTable,
    decoder_of,
    expert_weights,
    read_norm,
    read_num_layers,
    refuse_unsupported,
    translate_common,
)
from jaxinfer.checkpoint.config_json.fields import (
    divided_head_dim,
    expert_counts,
    is_enabled,
    num_kv_heads,
    require_count,
    require_size,
    stated_head_dim,
)
from jaxinfer.checkpoint.config_json.rope import read_rope
from jaxinfer.checkpoint.config_json.window import FULL, LINEAR, hybrid_layer_types, switched_windows
from jaxinfer.checkpoint.families import llama
from jaxinfer.checkpoint.families.mamba import read_conv_size
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.gated_delta_net import GatedDeltaNet
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.config import Layer, ModelConfig, uniform_decoder
from jaxinfer.validation import is_int

MAX_POSITION = 32_768
PARTIAL_OF_NEXT = 0.25
_LAYER = "model.layers.{layer}"
_DELTA = f"{_LAYER}.linear_attn"

WEIGHTS_3: WeightTable = {
    **llama.WEIGHTS,
    f"{_LAYER}.self_attn.q_norm.weight": ("layers.mixer.q_norm", "H -> H"),
    f"{_LAYER}.self_attn.k_norm.weight": ("layers.mixer.k_norm", "H -> H"),
}
WEIGHTS_OF_MOE: WeightTable = {
    **WEIGHTS_3,
    **expert_weights(f"{_LAYER}.mlp", shared="shared_expert"),
    f"{_LAYER}.mlp.shared_expert_gate.weight": ("layers.feed_forward.shared_gate", "one D -> one D"),
}
WEIGHTS_OF_NEXT: WeightTable = {
    **WEIGHTS_OF_MOE,
    # Each head's query lies before its gate.
    f"{_LAYER}.self_attn.q_proj.weight": Fused(
        (("layers.mixer.q", "N H D -> N H D"), ("layers.mixer.gate", "N H D -> N H D")),
        axis=1,
        unfold="(N H) D -> N H D",
    ),
    f"{_LAYER}.self_attn.q_proj.bias": Fused(
        (("layers.mixer.q_bias", "N H -> N H"), ("layers.mixer.gate_bias", "N H -> N H")),
        axis=1,
        unfold="(N H) -> N H",
    ),
    # Of each key head: its query and key, then the values and gates of its value heads.
    f"{_DELTA}.in_proj_qkvz.weight": Fused(
        (
            ("layers.mixer.query", "G K D -> G K D"),
            ("layers.mixer.key", "G K D -> G K D"),
            ("layers.mixer.value", "G (R V) D -> G R V D"),
            ("layers.mixer.z", "G (R V) D -> G R V D"),
        ),
        axis=1,
        unfold="(G C) D -> G C D",
    ),
    f"{_DELTA}.in_proj_ba.weight": Fused(
        (("layers.mixer.beta", "G R D -> G R D"), ("layers.mixer.dt", "G R D -> G R D")),
        axis=1,
        unfold="(G C) D -> G C D",
    ),
    f"{_DELTA}.conv1d.weight": ("layers.mixer.conv", "C 1 W -> C W"),
    f"{_DELTA}.dt_bias": ("layers.mixer.dt_bias", "H -> H"),
    f"{_DELTA}.A_log": ("layers.mixer.a_log", "H -> H"),
    f"{_DELTA}.norm.weight": ("layers.mixer.norm", "V -> V"),
    f"{_DELTA}.out_proj.weight": ("layers.mixer.out_proj", "D I -> D I"),
}


def config_from_hf_2(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Qwen2Config."""
    config = uniform_decoder(
        **translate_common(hf, architecture="Qwen2ForCausalLM", max_position=MAX_POSITION),
        num_kv_heads=num_kv_heads(hf, default=32),
        head_dim=divided_head_dim(hf),
        has_qkv_bias=True,
    )
    return _with_windows(hf, config)


def config_from_hf_3(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Qwen3Config."""
    has_attention_bias = is_enabled(hf, "attention_bias")
    config = uniform_decoder(
        **translate_common(hf, architecture="Qwen3ForCausalLM", max_position=MAX_POSITION),
        num_kv_heads=num_kv_heads(hf, default=32),
        # Not the hidden size shared out among the heads: Qwen3-4B has 2560 / 32 = 80 but heads of 128.
        head_dim=stated_head_dim(hf, 128),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_qk_norm=True,
    )
    return _with_windows(hf, config)


def _with_windows(hf: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    layer, windows = config.layers[0], switched_windows(hf, config.num_layers)
    assert isinstance(layer.mixer, Attention)
    layers = [replace(layer, mixer=replace(layer.mixer, window=window)) for window in windows]
    return decoder_of(hf, layers, max_position=MAX_POSITION, has_tied_embeddings=config.has_tied_embeddings)


def moe_from_hf_2(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Qwen2MoeConfig."""
    refuse_unsupported(hf, "Qwen2MoeForCausalLM")
    head_dim = divided_head_dim(hf)
    attention = {"head_dim": head_dim, "has_qkv_bias": is_enabled(hf, "qkv_bias", default=True)}
    num_experts, num_chosen = expert_counts(hf, "num_experts", 60, 4)
    experts = MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=require_size(hf, "moe_intermediate_size", 1408)),
        router=Router(num_chosen=num_chosen, normalizes=is_enabled(hf, "norm_topk_prob")),
        shared=MLP(intermediate_size=require_size(hf, "shared_expert_intermediate_size", 5632)),
        has_shared_gate=True,
    )
    return _with_experts(hf, attention, experts, switched_windows(hf, read_num_layers(hf)), default_kv_heads=16)


def moe_from_hf_3(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Qwen3MoeConfig."""
    refuse_unsupported(hf, "Qwen3MoeForCausalLM")
    has_bias = is_enabled(hf, "attention_bias")
    head_dim = divided_head_dim(hf) if hf.get("head_dim") is None else stated_head_dim(hf)
    attention = {"head_dim": head_dim, "has_qkv_bias": has_bias, "has_output_bias": has_bias, "qk_norm": "head"}
    name = "num_experts" if "num_experts" in hf else "num_local_experts"
    num_experts, num_chosen = expert_counts(hf, name, 128, 8)
    experts = MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=require_size(hf, "moe_intermediate_size", 768)),
        router=Router(num_chosen=num_chosen, normalizes=is_enabled(hf, "norm_topk_prob")),
    )
    # A window that is switched on is that of all layers, whatever the keys of Qwen2 say.
    windows = switched_windows({**hf, "max_window_layers": 0, "layer_types": None}, read_num_layers(hf))
    return _with_experts(hf, attention, experts, windows, default_kv_heads=4)


def _dense_layers(hf: Mapping[str, Any]) -> list[int]:
    """Returns the layers that have no experts whatever the others have."""
    dense_layers = hf.get("mlp_only_layers")
    dense_layers = [] if dense_layers is None else dense_layers
    if not isinstance(dense_layers, list) or not all(map(is_int, dense_layers)):
        raise ValueError(f"mlp_only_layers={dense_layers!r} is not a list of layers; download config.json again")
    return dense_layers


def _with_experts(
    hf: Mapping[str, Any],
    attention: dict[str, Any],
    experts: MoE,
    windows: Sequence[int | None],
    *,
    default_kv_heads: int,
) -> ModelConfig:
    sparse_step, dense_layers = require_size(hf, "decoder_sparse_step", 1), _dense_layers(hf)
    dense = MLP(intermediate_size=require_size(hf, "intermediate_size"))
    rope, norm = read_rope(hf, attention["head_dim"], MAX_POSITION), read_norm(hf)

    def layer(i: int, window: int | None) -> Layer:
        mixer = Attention(
            num_heads=require_size(hf, "num_attention_heads"),
            num_kv_heads=num_kv_heads(hf, default_kv_heads),
            rope=rope,
            window=window,
            **attention,
        )
        is_sparse = i not in dense_layers and (i + 1) % sparse_step == 0
        return Layer(mixer=mixer, feed_forward=experts if is_sparse else dense, norm=norm)

    return decoder_of(
        hf,
        [layer(i, window) for i, window in enumerate(windows)],
        max_position=MAX_POSITION,
        has_tied_embeddings=is_enabled(hf, "tie_word_embeddings"),
    )


def next_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Qwen3NextConfig."""
    refuse_unsupported(hf, "Qwen3NextForCausalLM", ("partial_rotary_factor",))
    head_dim, has_bias = stated_head_dim(hf, 256), is_enabled(hf, "attention_bias")
    num_layers = read_num_layers(hf)
    interval = require_size(hf, "full_attention_interval", 4)
    default = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=2),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, MAX_POSITION, default_partial=PARTIAL_OF_NEXT),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm="head",
        has_gate=True,
    )
    mixers = {FULL: attention, LINEAR: _gated_delta_net(hf)}
    norm, is_sparse = read_norm(hf, adds_one=True), _sparse_layers(hf, num_layers)
    dense, experts = MLP(intermediate_size=require_size(hf, "intermediate_size", 5632)), None
    if any(is_sparse):
        experts = _experts_of_next(hf)
    layers = [
        Layer(mixer=mixers[kind], feed_forward=experts if experts is not None and is_sparse[i] else dense, norm=norm)
        for i, kind in enumerate(hybrid_layer_types(hf, default))
    ]
    return decoder_of(hf, layers, max_position=MAX_POSITION, has_tied_embeddings=is_enabled(hf, "tie_word_embeddings"))


def _gated_delta_net(hf: Mapping[str, Any]) -> GatedDeltaNet:
    num_keys, num_values = (
        require_size(hf, "linear_num_key_heads", 16),
        require_size(hf, "linear_num_value_heads", 32),
    )
    if num_values % num_keys:
        raise ValueError(
            f"linear_num_value_heads={num_values} is not a multiple of linear_num_key_heads={num_keys}; download the"
            " checkpoint's config.json again"
        )
    return GatedDeltaNet(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_head_dim=require_size(hf, "linear_key_head_dim", 128),
        value_head_dim=require_size(hf, "linear_value_head_dim", 128),
        conv_size=read_conv_size(hf, "linear_conv_kernel_dim"),
    )


def _sparse_layers(hf: Mapping[str, Any], num_layers: int) -> Sequence[bool]:
    """Returns True for each layer that has experts."""
    has_experts = require_count(hf, "num_experts", 512) > 0
    step, dense_layers = require_size(hf, "decoder_sparse_step", 1), _dense_layers(hf)
    return [has_experts and i not in dense_layers and (i + 1) % step == 0 for i in range(num_layers)]


def _experts_of_next(hf: Mapping[str, Any]) -> MoE:
    num_experts, num_chosen = expert_counts(hf, "num_experts", 512, 10)
    return MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=require_size(hf, "moe_intermediate_size", 512)),
        router=Router(num_chosen=num_chosen, normalizes=is_enabled(hf, "norm_topk_prob", default=True)),
        shared=MLP(intermediate_size=require_size(hf, "shared_expert_intermediate_size", 512)),
        has_shared_gate=True,
    )


# A layer of full attention, which config.json does not mention; with experts if the first of all layers may have them.
MTP_OF_NEXT = DraftLayer(
    count="num_nextn_predict_layers",
    default_count=1,
    beginning="mtp.",
    prefix="mtp.layers.0.",
    as_last=lambda _: {"num_hidden_layers": 1, "layer_types": [FULL]},
    input="mtp.fc.weight",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    final_norm="mtp.norm.weight",
    embedding="mtp.embed_tokens.weight",
    unembedding="mtp.shared_head.head.weight",
)
FAMILY_2 = Family(config_from_hf=config_from_hf_2, weights=llama.WEIGHTS)
FAMILY_3 = Family(config_from_hf=config_from_hf_3, weights=WEIGHTS_3)
MOE_FAMILY_2 = Family(config_from_hf=moe_from_hf_2, weights=WEIGHTS_OF_MOE)
MOE_FAMILY_3 = Family(config_from_hf=moe_from_hf_3, weights=WEIGHTS_OF_MOE)
NEXT_FAMILY = Family(config_from_hf=next_from_hf, weights=WEIGHTS_OF_NEXT, draft_layer=MTP_OF_NEXT)
