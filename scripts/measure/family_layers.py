"""Names the layer features of each family, for the second table of docs/families.md.

No list can get out of step: every entry comes from the translation of small configurations by the family itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.checkpoint.config_json.family import ArchitectureError, Family
from jaxinfer.checkpoint.config_json.window import FULL, LINEAR, SLIDING
from jaxinfer.checkpoint.families import FAMILIES
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.dense_and_experts import DenseAndExperts
from jaxinfer.model.components.moe import MoE
from jaxinfer.model.config import Layer, ModelConfig
from jaxinfer.model.layer_parts import Mixer, functions_of

HEADING = "## Layers of each family"
NUM_LAYERS, HEAD_DIM = 8, 16
SIZES: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "qk_rope_head_dim": HEAD_DIM,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "global_head_dim": 2 * HEAD_DIM,
    "num_heads": 8,  # of a state space
}
# The parameters of each kind of rotary scaling.
ROPES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "dynamic": {"factor": 2.0},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"factor": 2.0, "short_factor": [1.0] * (HEAD_DIM // 2)},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 64},
}
WINDOW = {"sliding_window": 8, "use_sliding_window": True}
# Settings by which a family has windows in all layers, or in some.
WINDOWS: tuple[Mapping[str, Any], ...] = (
    WINDOW,
    {**WINDOW, "max_window_layers": 0},
    {**WINDOW, "max_window_layers": NUM_LAYERS // 2},
    {**WINDOW, "layer_types": [SLIDING] * NUM_LAYERS},
    {**WINDOW, "layer_types": [SLIDING, FULL] * (NUM_LAYERS // 2)},
)
# Settings that families without them ignore or refuse.
SWITCHES: tuple[Mapping[str, Any], ...] = (
    {},
    {"attention_bias": True},
    {"attention_out_bias": True},
    {"mlp_bias": True},
    {"use_qk_norm": True},
    {"partial_rotary_factor": 0.5},
    {"mlp_only_layers": [0]},
    {"shared_intermediate_size": 32},
    {"layer_types": [LINEAR, FULL] * (NUM_LAYERS // 2)},
    {"num_local_experts": 0},
    {"position_embedding_type": "rope"},
    {"mlp_bias": True, "use_bias": True},
    {"use_bias": True},
    {"moe_layer_interval": 2},
    {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
    {"attention_k_eq_v": True},
    {"num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL] * (NUM_LAYERS // 2)},
    {"enable_moe_block": True},
    {"attn_logit_softcapping": 50.0},
    {"final_logit_softcapping": 30.0},
    {"residual_multiplier": 0.5},
    {"embedding_multiplier": 2.0},
    {"attention_multiplier": 0.5},
    {"logits_scaling": 2.0},
    {"key_multiplier": 0.5},
    {"ssm_out_multiplier": 0.5},
    {"mlp_multipliers": [0.5, 0.5]},
    {"lm_head_multiplier": 0.5},
    {"first_k_dense_replace": 1},
    {"n_group": 2},
)


@dataclass(frozen=True)
class Facts:
    """What one family honours."""

    model_type: str
    architecture: str
    windows: str  # of which layers
    ropes: tuple[str, ...]  # kinds of rotary scaling
    features: tuple[str, ...]


def layers_section() -> str:
    """Returns the section of the page that lists the layer features of all families."""
    facts = [facts_of(model_type, family) for model_type, family in sorted(FAMILIES.items())]
    text = (
        "A model beside Llama has what the last column says, if its `config.json` asks for it. Windows are those of all"
        " layers or of some."
    )
    rows = ["| `model_type` | architecture | windows | honours, beside what a Llama has |", "| --- | --- | --- | --- |"]
    rows += [
        f"| `{each.model_type}` | `{each.architecture}` | {each.windows} | {', '.join(each.features)} |"
        for each in facts
    ]
    ropes = sorted({each.ropes for each in facts} - {()})
    members = [[f"`{each.model_type}`" for each in facts if each.ropes == kinds] for kinds in ropes]
    scaling = [
        f"* {', '.join(kinds)}: {'all' if len(ropes) == 1 else ', '.join(names)}."
        for kinds, names in zip(ropes, members, strict=True)
    ]
    return "\n\n".join((HEADING, text, "\n".join(rows), "Kinds of rotary scaling:", "\n".join(scaling))) + "\n"


def facts_of(model_type: str, family: Family) -> Facts:
    """Returns what a family honours."""
    try:
        _read(family, {})
    except (KeyError, ValueError) as error:
        raise RuntimeError(
            f"{model_type} cannot be described ({error}); add its sizes to SIZES of {__name__}"
        ) from error
    features = (feature for keys in SWITCHES if (config := _translated(family, keys)) for feature in _features(config))
    return Facts(
        model_type=model_type,
        architecture=_architecture(family),
        windows=_windows(family),
        ropes=tuple(kind for kind in ROPES if _honours_rope(family, kind)),
        features=tuple(dict.fromkeys(features)),
    )


def _read(family: Family, keys: Mapping[str, Any]) -> ModelConfig:
    hf = {**SIZES, **keys}
    return family.config_from_hf({**hf, "text_config": hf})


def _translated(family: Family, keys: Mapping[str, Any]) -> ModelConfig | None:
    """Returns the family's model for the sizes and these keys; None if it refuses them."""
    try:
        return _read(family, keys)
    except ValueError:
        return None


def _architecture(family: Family) -> str:
    try:
        _read(family, {"architectures": ["?"]})
    except ArchitectureError as refusal:
        return refusal.supported
    raise RuntimeError("the family takes any architecture; let it call refuse_unsupported")


def _windows(family: Family) -> str:
    found = set()
    for keys in WINDOWS:
        config = _translated(family, keys)
        have_windows = {mixer.window is not None for mixer in config.mixers} if config else {False}
        found |= {"some"} if len(have_windows) == 2 else {"all"} if have_windows == {True} else set()
    return " or ".join(sorted(found)) or "-"


def _honours_rope(family: Family, kind: str) -> bool:
    scaling = {"rope_type": kind, **ROPES[kind]}
    # Parts of heads have fewer frequencies.
    shorter = [
        {key: value[: len(value) // part] if isinstance(value, list) else value for key, value in scaling.items()}
        for part in (1, 2, 4)
    ]
    layers = {"layer_types": [FULL] * NUM_LAYERS}
    further = ({}, layers, {**layers, "position_embedding_type": "rope"})
    tried = [{"rope_scaling": rope, **keys} for rope in shorter for keys in further]
    tried += [{"rope_parameters": {FULL: rope, SLIDING: {}}} for rope in shorter]
    return any(_has_scaling(_translated(family, keys), kind) for keys in tried)


def _has_scaling(config: ModelConfig | None, kind: str) -> bool:
    ropes = [] if config is None else [mixer.rope for mixer in config.mixers if mixer.rope is not None]
    if kind in ("default", "dynamic"):  # dynamic scaling changes nothing up to the model's length
        return bool(ropes)
    return any(rope.scaling is not None and rope.scaling.kind == kind for rope in ropes)


def _features(config: ModelConfig) -> Iterator[str]:
    """Yields what a model has that a Llama without biases lacks."""
    for layer in config.layers:
        for mixer in layer.mixers:
            yield from _of_mixer(mixer)
        yield from _of_feed_forward(layer)
        if layer.embedding is not None:
            yield "embeddings for each layer"
        if layer.has_scale:
            yield "layer scales"
        if layer.has_post_norms:
            yield "norms before and after" if layer.has_pre_norms else "norms after"
        if len(layer.mixers) > 1:
            yield " beside ".join(functions_of(mixer).name for mixer in layer.mixers)
        if any((branch.input_scale, branch.output_scale) != (1.0, 1.0) for branch in layer.branches):
            yield "mixer multipliers"
    if any(layer.mixer is None or layer.feed_forward is None for layer in config.layers):
        yield "layers of one half"
    are_sparse = {isinstance(layer.feed_forward, MoE) for layer in config.layers if layer.feed_forward is not None}
    if len(are_sparse) == 2:
        yield "dense layers among them"
    ropes = {mixer.rope for mixer in config.mixers if not functions_of(mixer).is_recurrent}
    if ropes == {None}:
        yield "attention without positions"
    if len(ropes) > 1:
        yield "layers without positions" if None in ropes else "two rotary embeddings"
    if config.logit_softcap is not None:
        yield "bounded logits"
    multipliers = {
        "embedding": config.embedding_scale,
        "residual": config.layers[0].residual_scale,
        "logit": config.logit_scale,
    }
    yield from (f"{name} multiplier" for name, value in multipliers.items() if value != 1.0)


def _of_mixer(mixer: Mixer) -> Iterator[str]:
    if not isinstance(mixer, Attention):
        yield functions_of(mixer).name
        return
    if mixer.has_gate:
        yield "gated attention"
    if mixer.qk_norm is not None:
        where = " after rotation" if mixer.has_rotated_norm else ""
        yield "norms of queries and keys" + (" over all heads" if mixer.qk_norm == "all" else "") + where
    if mixer.has_value_norm:
        yield "norms of values"
    if not mixer.has_values:
        yield "keys as values"
    if mixer.source is not None:
        yield "keys and values of earlier layers"
    if mixer.has_sinks:
        yield "sinks"
    if mixer.query_growth is not None:
        yield "queries that grow with the position"
    if mixer.softcap is not None:
        yield "bounded scores"
    if mixer.scale is not None:
        yield "score multiplier"
    if mixer.rope is not None and (mixer.rope.dim < mixer.head_dim or mixer.rope.num_turned is not None):
        yield "rotation of a part of heads"
    if mixer.rope is not None and mixer.rope.is_interleaved:
        yield "interleaved rotation"
    if mixer.has_qkv_bias:
        yield "attention biases" if mixer.has_output_bias else "qkv biases"


def _of_feed_forward(layer: Layer) -> Iterator[str]:
    part = layer.feed_forward
    if isinstance(part, DenseAndExperts):
        yield "experts beside a dense network"
    elif isinstance(part, MoE):
        yield "experts"
        if part.shared is not None:
            yield "gated shared expert" if part.has_shared_gate else "shared expert"
        if part.router.num_groups > 1:
            yield "groups of experts"
    elif part is None:
        return
    elif part.activation != "silu":
        yield part.activation
    elif part.has_bias:
        yield "MLP biases"
    elif (part.gate_scale, part.output_scale) != (1.0, 1.0):
        yield "MLP multipliers"
