"""Qwen2, Qwen2.5, Qwen3, Qwen3-VL, Qwen3-Next and Qwen3.5, dense and as mixtures of experts.

Dense ones are Llama with biases on queries, keys and values, or with norms on their heads. The text models of Qwen3-VL
are those of Qwen3. Qwen3-Next and Qwen3.5 have three gated delta nets, then gated attention. They store the same
tensors, fused in different ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    DraftLayer,
    Family,
    Fused,
    Harmless,
    WeightTable,
    decoder_of,
    expert_weights,
    read_norm,
    read_num_layers,
    refuse_unsupported,
    require_harmless,
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
from jaxinfer.checkpoint.config_json.rope import DEFAULT_THETA, read_rope
from jaxinfer.checkpoint.config_json.text_model import text_model_family
from jaxinfer.checkpoint.config_json.window import FULL, LINEAR, hybrid_layer_types, switched_windows
from jaxinfer.checkpoint.families import llama
from jaxinfer.checkpoint.families.recurrent.mamba import read_conv_size
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.components.recurrent.gated_delta_net import GatedDeltaNet
from jaxinfer.model.config import Layer, ModelConfig, uniform_decoder
from jaxinfer.validation import is_int

MAX_POSITION = 32_768
DEFAULT_PARTIAL = 0.25
VL_MAX_POSITION, VL_THETA = 128_000, 500_000.0
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
_EXPERTS = "layers.feed_forward.experts"
# The experts of a layer in two tensors, beside the table of those that are stored one by one.
_STACKED_EXPERTS: WeightTable = {
    f"{_LAYER}.mlp.experts.gate_up_proj": Fused(
        ((f"{_EXPERTS}.gate", "E F D -> E F D"), (f"{_EXPERTS}.up", "E F D -> E F D")), axis=1
    ),
    f"{_LAYER}.mlp.experts.down_proj": (f"{_EXPERTS}.down", "E D F -> E D F"),
}
WEIGHTS_OF_VL_MOE: WeightTable = {**WEIGHTS_OF_MOE, **_STACKED_EXPERTS}
_WITH_DELTA_NETS: WeightTable = {
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
    f"{_DELTA}.conv1d.weight": ("layers.mixer.conv", "C 1 W -> C W"),
    f"{_DELTA}.dt_bias": ("layers.mixer.dt_bias", "H -> H"),
    f"{_DELTA}.A_log": ("layers.mixer.a_log", "H -> H"),
    f"{_DELTA}.norm.weight": ("layers.mixer.norm", "V -> V"),
    f"{_DELTA}.out_proj.weight": ("layers.mixer.out_proj", "D I -> D I"),
}
WEIGHTS_OF_NEXT: WeightTable = {
    **_WITH_DELTA_NETS,
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
}
WEIGHTS_OF_3_5: WeightTable = {
    **_WITH_DELTA_NETS,
    **_STACKED_EXPERTS,  # as published; transformers saves them one by one
    f"{_DELTA}.in_proj_qkv.weight": Fused(
        (
            ("layers.mixer.query", "(G K) D -> G K D"),
            ("layers.mixer.key", "(G K) D -> G K D"),
            ("layers.mixer.value", "(G R V) D -> G R V D"),
        )
    ),
    f"{_DELTA}.in_proj_z.weight": ("layers.mixer.z", "(G R V) D -> G R V D"),
    f"{_DELTA}.in_proj_b.weight": ("layers.mixer.beta", "(G R) D -> G R D"),
    f"{_DELTA}.in_proj_a.weight": ("layers.mixer.dt", "(G R) D -> G R D"),
}
# Settings that transformers does not read. Key -> (values of what it computes, what to do about any other).
_FIXED_IN_3_5: Harmless = {
    "attn_output_gate": ((True, None), "use a checkpoint whose attention has gates"),
    "output_gate_type": (("silu", "swish", None), "use a checkpoint whose delta nets have silu gates"),
}
_FIXED_IN_VL_MOE: Harmless = {
    "norm_topk_prob": ((True, None), "use a checkpoint whose weights of experts add up to 1"),
}
_FIXED_IN_MOE_3_5: Harmless = {
    **_FIXED_IN_3_5,
    **_FIXED_IN_VL_MOE,
    "decoder_sparse_step": ((1, None), "use a checkpoint with experts in every layer"),
    "mlp_only_layers": (([], None), "use a checkpoint with experts in every layer"),
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
    return decoder_of(hf, layers, max_position=MAX_POSITION)


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
    num_experts, num_chosen = expert_counts(hf, _name_of_count(hf), 128, 8)
    experts = MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=require_size(hf, "moe_intermediate_size", 768)),
        router=Router(num_chosen=num_chosen, normalizes=is_enabled(hf, "norm_topk_prob")),
    )
    # A window that is switched on is that of all layers, whatever the keys of Qwen2 say.
    windows = switched_windows({**hf, "max_window_layers": 0, "layer_types": None}, read_num_layers(hf))
    return _with_experts(hf, _normed_attention(hf), experts, windows, default_kv_heads=4)


def vl_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Qwen3VLTextConfig.

    Its rotary embedding has three positions of a token, for images. Those of text are equal.
    """
    refuse_unsupported(hf, "Qwen3VLForCausalLM")
    head_dim, has_bias = stated_head_dim(hf, 128), is_enabled(hf, "attention_bias")
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default=32),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, VL_MAX_POSITION, default_theta=VL_THETA),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm="head",
    )
    layer = Layer(
        mixer=attention, feed_forward=MLP(intermediate_size=require_size(hf, "intermediate_size")), norm=read_norm(hf)
    )
    return decoder_of(hf, [layer] * read_num_layers(hf), max_position=VL_MAX_POSITION)


def vl_moe_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Qwen3VLMoeTextConfig."""
    refuse_unsupported(hf, "Qwen3VLMoeForCausalLM")
    require_harmless(hf, _FIXED_IN_VL_MOE)
    num_experts, num_chosen = expert_counts(hf, _name_of_count(hf), 60, 4)
    experts = MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=require_size(hf, "moe_intermediate_size", 1408)),
        router=Router(num_chosen=num_chosen),
    )
    return _with_experts(
        {"tie_word_embeddings": True, **hf},
        _normed_attention(hf),
        experts,
        [None] * read_num_layers(hf),
        default_kv_heads=16,
        max_position=VL_MAX_POSITION,
        default_theta=VL_THETA,
    )


def _normed_attention(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `Attention` for a mixture of experts with norms on its heads."""
    has_bias = is_enabled(hf, "attention_bias")
    head_dim = divided_head_dim(hf) if hf.get("head_dim") is None else stated_head_dim(hf)
    return {"head_dim": head_dim, "has_qkv_bias": has_bias, "has_output_bias": has_bias, "qk_norm": "head"}


def _name_of_count(hf: Mapping[str, Any]) -> str:
    """Returns the key of the number of experts, of two that mean the same."""
    return "num_experts" if "num_experts" in hf else "num_local_experts"


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
    max_position: int = MAX_POSITION,
    default_theta: float = DEFAULT_THETA,
) -> ModelConfig:
    sparse_step, dense_layers = require_size(hf, "decoder_sparse_step", 1), _dense_layers(hf)
    dense = MLP(intermediate_size=require_size(hf, "intermediate_size"))
    rope = read_rope(hf, attention["head_dim"], max_position, default_theta=default_theta)
    norm = read_norm(hf)

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

    return decoder_of(hf, [layer(i, window) for i, window in enumerate(windows)], max_position=max_position)


def next_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Qwen3NextConfig."""
    refuse_unsupported(hf, "Qwen3NextForCausalLM", ("partial_rotary_factor",))
    is_sparse = _sparse_layers(hf, read_num_layers(hf))
    dense = MLP(intermediate_size=require_size(hf, "intermediate_size", 5632))
    normalizes = is_enabled(hf, "norm_topk_prob", default=True)
    experts = _gated_experts(hf, 512, 10, normalizes=normalizes) if any(is_sparse) else dense
    return _with_delta_nets(hf, [experts if sparse else dense for sparse in is_sparse], default_kv_heads=2)


def dense_from_hf_3_5(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Qwen3_5TextConfig.

    Its rotary embedding has three positions of a token, for images. Those of text are equal.
    """
    refuse_unsupported(hf, "Qwen3_5ForCausalLM", ("partial_rotary_factor",))
    require_harmless(hf, _FIXED_IN_3_5)
    dense = MLP(intermediate_size=require_size(hf, "intermediate_size", 12288))
    return _with_delta_nets(hf, [dense] * read_num_layers(hf), default_kv_heads=4)


def moe_from_hf_3_5(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Qwen3_5MoeTextConfig."""
    refuse_unsupported(hf, "Qwen3_5MoeForCausalLM", ("partial_rotary_factor",))
    require_harmless(hf, _FIXED_IN_MOE_3_5)
    return _with_delta_nets(hf, [_gated_experts(hf, 256, 8)] * read_num_layers(hf), default_kv_heads=2)


def _with_delta_nets(
    hf: Mapping[str, Any], feed_forwards: Sequence[MLP | MoE], *, default_kv_heads: int
) -> ModelConfig:
    """Returns the model with these feed-forward networks, whose mixers are gated delta nets and gated attention."""
    head_dim, has_bias = stated_head_dim(hf, 256), is_enabled(hf, "attention_bias")
    interval = require_size(hf, "full_attention_interval", 4)
    default = [LINEAR if (i + 1) % interval else FULL for i in range(len(feed_forwards))]
    attention = Attention(
        num_heads=require_size(hf, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf, default_kv_heads),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, MAX_POSITION, default_partial=DEFAULT_PARTIAL),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm="head",
        has_gate=True,
    )
    mixers = {FULL: attention, LINEAR: _gated_delta_net(hf)}
    norm, kinds = read_norm(hf, adds_one=True), hybrid_layer_types(hf, default)
    layers = [
        Layer(mixer=mixers[kind], feed_forward=feed_forward, norm=norm)
        for kind, feed_forward in zip(kinds, feed_forwards, strict=True)
    ]
    return decoder_of(hf, layers, max_position=MAX_POSITION)


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


def _gated_experts(hf: Mapping[str, Any], default: int, default_chosen: int, *, normalizes: bool = True) -> MoE:
    """Returns experts and a gated shared one; `default` is the number of experts, of which a token chooses some."""
    num_experts, num_chosen = expert_counts(hf, "num_experts", default, default_chosen)
    return MoE(
        num_experts=num_experts,
        expert=MLP(intermediate_size=require_size(hf, "moe_intermediate_size", 512)),
        router=Router(num_chosen=num_chosen, normalizes=normalizes),
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
MTP_OF_3_5 = replace(MTP_OF_NEXT, count="mtp_num_hidden_layers", own_embedding="mtp_use_dedicated_embeddings")
FAMILY_2 = Family(config_from_hf=config_from_hf_2, weights=llama.WEIGHTS)
FAMILY_3 = Family(config_from_hf=config_from_hf_3, weights=WEIGHTS_3)
MOE_FAMILY_2 = Family(config_from_hf=moe_from_hf_2, weights=WEIGHTS_OF_MOE)
MOE_FAMILY_3 = Family(config_from_hf=moe_from_hf_3, weights=WEIGHTS_OF_MOE)
NEXT_FAMILY = Family(config_from_hf=next_from_hf, weights=WEIGHTS_OF_NEXT, draft_layer=MTP_OF_NEXT)
# A text model keeps the names that it has beside one for images.
_BESIDE_IMAGES: dict[str, Any] = {
    "spellings": ({}, {"model.": "model.language_model."}),
    "skipped": ("model.visual.",),
}
# Published checkpoints have a token's state before the outputs of all experts.
_TURNED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
VL_TEXT_FAMILY = Family(config_from_hf=vl_from_hf, weights=WEIGHTS_3, **_BESIDE_IMAGES)
VL_MOE_TEXT_FAMILY = Family(config_from_hf=vl_moe_from_hf, weights=WEIGHTS_OF_VL_MOE, turned=_TURNED, **_BESIDE_IMAGES)
VL_FAMILY = text_model_family(
    VL_TEXT_FAMILY, architecture="Qwen3VLForConditionalGeneration", model_type="qwen3_vl_text", parts=("visual",)
)
VL_MOE_FAMILY = text_model_family(
    # The whole model is untied unless it says so, a text model by itself is tied.
    replace(VL_MOE_TEXT_FAMILY, config_from_hf=lambda hf: vl_moe_from_hf({"tie_word_embeddings": False, **hf})),
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe_text",
    parts=("visual",),
)
_TEXT_3_5: dict[str, Any] = {"weights": WEIGHTS_OF_3_5, "draft_layer": MTP_OF_3_5, **_BESIDE_IMAGES}
TEXT_FAMILY_3_5 = Family(config_from_hf=dense_from_hf_3_5, **_TEXT_3_5)
MOE_TEXT_FAMILY_3_5 = Family(config_from_hf=moe_from_hf_3_5, **_TEXT_3_5)
FAMILY_3_5 = text_model_family(
    TEXT_FAMILY_3_5, architecture="Qwen3_5ForConditionalGeneration", model_type="qwen3_5_text", parts=("visual",)
)
MOE_FAMILY_3_5 = text_model_family(
    MOE_TEXT_FAMILY_3_5,
    architecture="Qwen3_5MoeForConditionalGeneration",
    model_type="qwen3_5_moe_text",
    parts=("visual",),
)
