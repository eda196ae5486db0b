"""Gemma 4: two kinds of layers, whose heads differ in size, with embeddings for each layer, or experts beside the MLP.

Layers that see all tokens have larger heads than those with a window, and may take keys for values. In small models
the last layers read the keys and values of an earlier one, and every layer has an embedding of each token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.checkpoint.config_json.family import (
    Either,
    Family,
    Fused,
    Harmless,
    WeightTable,
    decoder_of,
    read_norm,
    read_num_layers,
    refuse_unsupported,
    require_harmless,
)
from jaxinfer.checkpoint.config_json.fields import (
    is_enabled,
    num_kv_heads,
    number_or_none,
    require_count,
    require_size,
    stated_head_dim,
)
from jaxinfer.checkpoint.config_json.rope import read_proportional_rope
from jaxinfer.checkpoint.config_json.text_model import text_model_family
from jaxinfer.checkpoint.config_json.window import FULL, SLIDING, layer_types
from jaxinfer.checkpoint.families import gemma
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.dense_and_experts import DenseAndExperts
from jaxinfer.model.components.layer_embedding import LayerEmbedding
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.config import Layer, ModelConfig

MAX_POSITION = 131_072
ROPES: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": gemma.GLOBAL_THETA},
    SLIDING: {"rope_type": "default", "rope_theta": gemma.LOCAL_THETA},
}
_HARMLESS: Harmless = {
    "hidden_activation": ((gemma.GELU, None), f"use a checkpoint with hidden_activation={gemma.GELU!r}"),
    # "vision" is for tokens of images alone.
    "use_bidirectional_attention": ((None, False, "vision"), "use a checkpoint whose text is causal"),
    "rope_scaling": ((None, {}), "write rope_parameters for each kind of layer"),
}
_LAYER = "model.layers.{layer}"
_EMBEDDING, _DENSE, _MOE = "layer_embedding", "layers.feed_forward.dense", "layers.feed_forward.experts"
WEIGHTS: WeightTable = {
    **gemma.WEIGHTS,
    f"{_LAYER}.layer_scalar": ("layers.scale", "one -> one"),
    # Embeddings for each layer.
    "model.embed_tokens_per_layer.weight": (f"{_EMBEDDING}.table", "V (L d) -> V L d"),
    "model.per_layer_model_projection.weight": (f"{_EMBEDDING}.projection", "(L d) D -> L d D"),
    "model.per_layer_projection_norm.weight": (f"{_EMBEDDING}.norm", "d -> d"),
    f"{_LAYER}.per_layer_input_gate.weight": ("layers.embedding.gate", "d D -> d D"),
    f"{_LAYER}.per_layer_projection.weight": ("layers.embedding.up", "D d -> D d"),
    f"{_LAYER}.post_per_layer_input_norm.weight": ("layers.embedding.norm", "D -> D"),
    # A dense network alone, or beside experts.
    **{
        f"{_LAYER}.mlp.{part}_proj.weight": Either(
            ((f"layers.feed_forward.{part}", pattern), (f"{_DENSE}.{part}", pattern))
        )
        for part, pattern in (("gate", "F D -> F D"), ("up", "F D -> F D"), ("down", "D F -> D F"))
    },
    f"{_LAYER}.post_feedforward_layernorm_1.weight": ("layers.feed_forward.dense_post_norm", "D -> D"),
    f"{_LAYER}.pre_feedforward_layernorm_2.weight": ("layers.feed_forward.experts_norm", "D -> D"),
    f"{_LAYER}.post_feedforward_layernorm_2.weight": ("layers.feed_forward.experts_post_norm", "D -> D"),
    f"{_LAYER}.router.proj.weight": (f"{_MOE}.router", "E D -> E D"),
    f"{_LAYER}.router.scale": (f"{_MOE}.router_norm", "D -> D"),
    f"{_LAYER}.router.per_expert_scale": (f"{_MOE}.expert_scales", "E -> E"),
    f"{_LAYER}.experts.gate_up_proj": Fused(
        ((f"{_MOE}.experts.gate", "E F D -> E F D"), (f"{_MOE}.experts.up", "E F D -> E F D")), axis=1
    ),
    f"{_LAYER}.experts.down_proj": (f"{_MOE}.experts.down", "E D F -> E D F"),
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translates config.json; what is absent gets the default of transformers' Gemma4TextConfig."""
    refuse_unsupported(hf, "Gemma4ForCausalLM", ("hidden_act",))
    require_harmless(hf, _HARMLESS)
    num_layers = read_num_layers(hf)
    kinds = layer_types(hf, [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(num_layers)])
    kinds = [*kinds[:-1], FULL]  # whatever config.json says, as in transformers
    norm, embedding = read_norm(hf), _layer_embedding(hf)
    width, is_wide = require_size(hf, "intermediate_size"), is_enabled(hf, "use_double_wide_mlp")

    def layer(attention: Attention) -> Layer:
        factor = 2 if is_wide and attention.source is not None else 1
        return Layer(
            mixer=attention,
            feed_forward=_feed_forward(hf, MLP(intermediate_size=width * factor, activation="gelu_tanh")),
            embedding=embedding,
            norm=norm,
            has_post_norms=True,
            has_scale=True,
        )

    return decoder_of(
        hf,
        [layer(attention) for attention in _attentions(hf, kinds)],
        max_position=MAX_POSITION,
        is_tied=True,
        embedding_scale=math.sqrt(require_size(hf, "hidden_size")),
        logit_softcap=number_or_none(hf, "final_logit_softcapping"),
    )


def _attentions(hf: Mapping[str, Any], kinds: Sequence[str]) -> list[Attention]:
    """Returns the attention of each layer, whose kinds are given."""
    stated, ropes = _settings_of_layers(hf, kinds), _with_ropes(hf, kinds)
    window, are_keys = require_size(hf, "sliding_window", 512), is_enabled(hf, "attention_k_eq_v")
    has_bias = is_enabled(hf, "attention_bias")

    def attention(kind: str, own: Mapping[str, Any], source: int | None) -> Attention:
        head_dim, theta = own["head_dim"], ROPES[kind]["rope_theta"]
        return Attention(
            num_heads=require_size(hf, "num_attention_heads"),
            num_kv_heads=own["num_key_value_heads"],
            head_dim=head_dim,
            rope=read_proportional_rope(ropes, head_dim, MAX_POSITION, layer_type=kind, default_theta=theta),
            window=window if kind == SLIDING else None,
            scale=1.0,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            qk_norm="head",
            has_value_norm=source is None,
            has_values=source is not None or kind == SLIDING or not are_keys,
            source=source,
        )

    sources = _sources(hf, kinds)
    for layer, source in enumerate(sources):
        if source is not None and stated[layer] != stated[source]:
            raise ValueError(
                f"per_layer_config={hf.get('per_layer_config')!r} gives layer {layer} other heads than layer {source},"
                " whose keys and values it reads; download the checkpoint's config.json again"
            )
    return [attention(*facts) for facts in zip(kinds, stated, sources, strict=True)]


def _sources(hf: Mapping[str, Any], kinds: Sequence[str]) -> list[int | None]:
    """Returns the layer whose keys and values each layer reads: None, or the last of its kind that has its own."""
    num_shared = require_count(hf, "num_kv_shared_layers", 0)
    num_own = max(len(kinds) - num_shared, 0)
    last = {kind: i for i, kind in enumerate(kinds[:num_own])}
    if not set(kinds[num_own:]) <= last.keys():
        raise ValueError(
            f"num_kv_shared_layers={num_shared} of num_hidden_layers={len(kinds)} with"
            f" layer_types={hf.get('layer_types')!r} leaves no layer of each kind for the others to read; download the"
            " checkpoint's config.json again"
        )
    return [None] * num_own + [last[kind] for kind in kinds[num_own:]]


def _settings_of_layers(hf: Mapping[str, Any], kinds: Sequence[str]) -> list[Mapping[str, Any]]:
    """Returns num_key_value_heads and head_dim of each layer.

    transformers lists them by layer. Published checkpoints have keys of their own for the layers that see all tokens.
    """
    local = {"num_key_value_heads": num_kv_heads(hf, 4), "head_dim": stated_head_dim(hf, 256)}
    if "per_layer_config" not in hf:
        of_all = {**local, "head_dim": stated_head_dim(hf, 512, "global_head_dim")}
        if is_enabled(hf, "attention_k_eq_v") and hf.get("num_global_key_value_heads") is not None:
            of_all["num_key_value_heads"] = num_kv_heads(hf, 4, "num_global_key_value_heads")
        return [of_all if kind == FULL else local for kind in kinds]
    stated = {} if hf["per_layer_config"] is None else hf["per_layer_config"]
    are_right = isinstance(stated, Mapping) and all(
        str(layer).isdecimal() and int(layer) < len(kinds) and isinstance(own, Mapping) and own.keys() <= local.keys()
        for layer, own in stated.items()
    )
    if not are_right:
        raise ValueError(
            f"per_layer_config={stated!r} is not an object with {' and '.join(sorted(local))} of some of"
            f" num_hidden_layers={len(kinds)} layers; download the checkpoint's config.json again"
        )
    of_layers = {int(layer): own for layer, own in stated.items()}  # their numbers may begin with zeros
    settings = [{**hf, **of_layers.get(layer, {})} for layer in range(len(kinds))]
    return [{"num_key_value_heads": num_kv_heads(own, 4), "head_dim": stated_head_dim(own, 256)} for own in settings]


def _with_ropes(hf: Mapping[str, Any], kinds: Sequence[str]) -> Mapping[str, Any]:
    """Returns config.json with the rotary embedding of each kind of layer."""
    stated = hf.get("rope_parameters")
    stated = ROPES if stated is None else stated
    if not isinstance(stated, Mapping) or not all(isinstance(stated.get(kind), Mapping) for kind in kinds):
        raise ValueError(
            f"rope_parameters={stated!r} has no object for each of {', '.join(sorted(set(kinds)))}; download the"
            " checkpoint's config.json again"
        )
    return {**hf, "rope_parameters": stated}


def _layer_embedding(hf: Mapping[str, Any]) -> LayerEmbedding | None:
    size = require_count(hf, "hidden_size_per_layer_input", 256)
    if size == 0:
        return None
    num_rows, vocab_size = require_size(hf, "vocab_size_per_layer_input", 262_144), require_size(hf, "vocab_size")
    if num_rows < vocab_size:
        raise ValueError(
            f"vocab_size_per_layer_input={num_rows} is less than vocab_size={vocab_size}, which is not supported; use a"
            " checkpoint with embeddings of all tokens for each layer"
        )
    return LayerEmbedding(vocab_size=num_rows, size=size, activation="gelu_tanh")


def _feed_forward(hf: Mapping[str, Any], dense: MLP) -> MLP | DenseAndExperts:
    if not is_enabled(hf, "enable_moe_block"):
        return dense
    try:
        num_experts = require_size(hf, "num_experts")
        num_chosen = require_size(hf, "top_k_experts", most=num_experts)
        intermediate_size = require_size(hf, "moe_intermediate_size")
    except ValueError as error:
        raise ValueError(f"enable_moe_block=True: {error}") from None
    router = Router(num_chosen=num_chosen, has_expert_scales=True, norm=read_norm(hf))
    expert = MLP(intermediate_size=intermediate_size, activation=dense.activation)
    return DenseAndExperts(dense=dense, experts=MoE(num_experts=num_experts, expert=expert, router=router))


FAMILY = Family(config_from_hf=config_from_hf, weights=WEIGHTS)
FAMILY_WITH_IMAGES = text_model_family(
    FAMILY,
    architecture="Gemma4ForConditionalGeneration",
    model_type="gemma4_text",
    sizes={  # those of transformers' Gemma4TextConfig
        **{"vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216},
        **{"num_hidden_layers": 30, "num_attention_heads": 8},
    },
    parts=("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
)
