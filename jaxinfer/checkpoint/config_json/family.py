"""What the families share: the sizes every config.json states, and the settings that are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.checkpoint.config_json.fields import (
    expert_counts,
    is_enabled,
    require_count,
    require_number,
    require_size,
)
from jaxinfer.checkpoint.config_json.rope import read_max_position, translate_rope
from jaxinfer.model.components.layers import Norm
from jaxinfer.model.components.moe import Router
from jaxinfer.model.config import Layer, LayerGroup, ModelConfig, scan_sizes

# (path in `Params`, einops pattern from the stored axes to ours)
Target = tuple[str, str]


@dataclass(frozen=True)
class Fused:
    """The targets of a stored tensor that holds several of ours along one of its axes."""

    targets: tuple[Target, ...]  # in the order in which they lie there
    axis: int = 0
    is_interleaved: bool = False  # entry i along the axis belongs to target i % len(targets)
    unfold: str | None = None  # einops pattern from the stored axes to those that `axis` counts, which targets name


@dataclass(frozen=True)
class Either:
    """The targets of a stored tensor that different layers, or different models of a family, have by the same name."""

    alternatives: tuple[Target | Fused, ...]


EMBEDDING: Target = ("embedding", "V D -> V D")
CACHE_SCALES = ("k_scale", "v_scale")
# Stored name -> its targets. `{layer}` and `{expert}` in a name stand for their numbers.
WeightTable = Mapping[str, Target | Fused | Either]


@dataclass(frozen=True, kw_only=True)
class DraftLayer:
    """The names of a stored layer for multi-token prediction; `{layer}` is its number, counted on from the model's.

    The layer's other tensors have the names of any layer, which begin with `LAYER`, with `prefix` in its place.
    """

    count: str  # key in config.json of the number of these layers
    default_count: int = 0  # where config.json does not state it
    own_embedding: str | None = None  # key of the switch that gives them an embedding other than the model's
    beginning: str  # of the names of all its tensors
    prefix: str
    # number of the model's layers -> settings of config.json for a model whose last layer this is
    as_last: Callable[[int], Mapping[str, Any]]
    input: str
    embedding_norm: str
    hidden_norm: str
    final_norm: str
    embedding: str  # a copy of the model's, or absent
    unembedding: str  # the same


LAYER = "model.layers.{layer}."
# As DeepSeek-V3 stores it.
NEXTN = DraftLayer(
    count="num_nextn_predict_layers",
    beginning=LAYER,
    prefix=LAYER,
    as_last=lambda num_layers: {"num_hidden_layers": num_layers + 1},
    input=f"{LAYER}eh_proj.weight",
    embedding_norm=f"{LAYER}enorm.weight",
    hidden_norm=f"{LAYER}hnorm.weight",
    final_norm=f"{LAYER}shared_head.norm.weight",
    embedding=f"{LAYER}embed_tokens.weight",
    unembedding=f"{LAYER}shared_head.head.weight",
)


@dataclass(frozen=True)
class Family:
    """A reader of the checkpoints of one `model_type`.

    `weights` may name more tensors than a model has: those that `ModelConfig` does not declare are skipped. It may
    name a tensor twice, for two ways to store it. Stored names may lack the prefix of the embedding's name, as in
    checkpoints of the backbone alone.
    """

    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    weights: WeightTable
    # Prefixes that the names of `weights` have in a checkpoint instead of their own, one mapping per way to store it.
    spellings: tuple[Mapping[str, str], ...] = ({},)
    skipped: tuple[str, ...] = ()  # prefixes of the tensors of other models in the checkpoint
    # Ends of the names of tensors of three axes that a checkpoint may store with the last two in the other order.
    turned: tuple[str, ...] = ()
    draft_layer: DraftLayer | None = None
    text_key: str | None = None  # key in config.json of the text model's settings; None: they are all of config.json

    def text_settings(self, hf: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the text model's settings in a config.json that the family has read."""
        return hf if self.text_key is None else hf[self.text_key]

    def with_text_settings(self, hf: Mapping[str, Any], changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns config.json with other settings of the text model."""
        changed = {**self.text_settings(hf), **changes}
        return changed if self.text_key is None else {**hf, self.text_key: changed}

    @property
    def prefix(self) -> str:
        """The first part of the embedding's name, such as "model."."""
        return embedding_name(self.weights).partition(".")[0] + "."

    def num_draft_layers(self, hf: Mapping[str, Any]) -> int:
        """Returns the number of layers for multi-token prediction that config.json states or implies."""
        if self.draft_layer is None:
            return 0
        key, default, text = self.draft_layer.count, self.draft_layer.default_count, self.text_settings(hf)
        return default if text.get(key) is None else require_count(text, key, default)

    def draft_prefixes(self, hf: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the beginnings of the names of the tensors of these layers."""
        if self.draft_layer is None or (count := self.num_draft_layers(hf)) == 0:
            return ()
        first, name = read_num_layers(self.text_settings(hf)), self.draft_layer.beginning
        return tuple(name.replace("{layer}", str(layer)) for layer in range(first, first + min(count, MAX_LAYERS)))

    def weights_among(self, stored: Collection[str]) -> WeightTable:
        """Returns `weights` under the names of the spelling in which most of the stored names begin.

        Of two names of a tensor it keeps the one that is stored. It adds the names of the scales of keys and values.
        """

        def count(spelling: Mapping[str, str]) -> int:
            return sum(name.startswith(tuple(spelling.values())) for name in stored)

        spelling = max(self.spellings, key=count)
        names = {*stored, *(self.prefix + name for name in stored)}
        table = as_stored({_spelled(name, spelling): targets for name, targets in self.weights.items()}, names)
        return {**table, **_cache_scales(table)}


def _cache_scales(weights: WeightTable) -> WeightTable:
    """Returns the scales of keys and values beside the products that make keys, whatever the family calls these."""
    modules = [name.rsplit(".", 2)[0] for name, targets in weights.items() if "layers.mixer.k" in fields_of(targets)]
    return {f"{module}.{name}": (f"layers.mixer.{name}", "s -> s") for module in modules for name in CACHE_SCALES}


def embedding_name(weights: WeightTable) -> str:
    """Returns the stored name of the embedding; RuntimeError if the table has none."""
    name = next((name for name, target in weights.items() if target == EMBEDDING), None)
    if name is None:
        raise RuntimeError(f"`Family.weights` has no name for {EMBEDDING}, the embedding of every model; add one")
    return name


def as_stored(weights: WeightTable, stored: Collection[str]) -> WeightTable:
    """Returns the table with one name of each tensor that it names twice: the one that is stored, if any is."""

    def numberless(name: str) -> str:
        return re.sub(r"\d+|{\w+}", "0", name)

    names = {numberless(name) for name in stored}
    present = {name for name in weights if numberless(name) in names}
    found = {field for name in present for field in fields_of(weights[name])}
    return {
        name: targets for name, targets in weights.items() if name in present or found.isdisjoint(fields_of(targets))
    }


def fields_of(targets: Target | Fused | Either) -> Iterator[str]:
    """Yields the paths in `Params` that a line of a table leads to."""
    if isinstance(targets, Either):
        for alternative in targets.alternatives:
            yield from fields_of(alternative)
    elif isinstance(targets, Fused):
        yield from (field for field, _ in targets.targets)
    else:
        yield targets[0]


def _spelled(name: str, spelling: Mapping[str, str]) -> str:
    for own, theirs in spelling.items():
        if name.startswith(own):
            return theirs + name.removeprefix(own)
    return name


def backbones_of(architecture: str) -> tuple[str, ...]:
    """Returns the names that the model without its task head may have in transformers."""
    name = architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    return f"{name}Model", f"{name}TextModel"


CLASSIFIER = "ForSequenceClassification"  # ends the name of a model whose head tells labels of a text apart


def classifiers_of(architecture: str) -> tuple[str, ...]:
    """Returns the names that the model with a classifier as task head may have in transformers."""
    return tuple(name.removesuffix("Model") + CLASSIFIER for name in backbones_of(architecture))


def is_classifier(hf: Mapping[str, Any]) -> bool:
    """True if config.json names a model with a classifier as task head."""
    return _ends(hf, CLASSIFIER)


def is_backbone(hf: Mapping[str, Any]) -> bool:
    """True if config.json names a model without logits of tokens: one without a task head, or with a classifier."""
    return _ends(hf, "Model", CLASSIFIER)


def _ends(hf: Mapping[str, Any], *ends: str) -> bool:
    architectures = hf.get("architectures")
    return isinstance(architectures, list) and len(architectures) == 1 and str(architectures[0]).endswith(ends)


class ArchitectureError(ValueError):
    """Refuses a task head; `supported` is the one that the family runs."""

    def __init__(self, message: str, supported: str) -> None:
        super().__init__(message)
        self.supported = supported


# Every layer is a few entries in tables, which a damaged number would fill the memory with.
MAX_LAYERS = 10_000
# Key -> (values that change nothing, what to do about any other). An absent key is as good as the first.
Harmless = Mapping[str, tuple[tuple[Any, ...], str]]
_HONOURED: Harmless = {
    "hidden_act": (("silu", "swish"), "use a checkpoint whose MLP is gated by silu"),
    "partial_rotary_factor": ((1.0, None), "use a checkpoint that rotates whole heads"),
    "rope_interleaved": ((False, None), "use a checkpoint that rotates the two halves of a head"),
    "is_causal": ((True, None), "use a checkpoint of a causal language model"),
    "quantization_config": ((None, {}), "use the unquantized checkpoint"),
    "compression_config": ((None, {}), "use the unquantized checkpoint"),
}


def translate_common(hf: Mapping[str, Any], *, architecture: str, max_position: int) -> dict[str, Any]:
    """Returns the arguments of `uniform_decoder` that all families take from the same keys.

    `architecture` is the one task head that is run; `max_position` the family's default. What is absent gets
    the default of transformers; a setting that would change the result and is not implemented is a
    ValueError.
    """
    refuse_unsupported(hf, architecture)
    rope = translate_rope(hf, max_position)
    return {
        "vocab_size": require_size(hf, "vocab_size"),
        "hidden_size": require_size(hf, "hidden_size"),
        "intermediate_size": require_size(hf, "intermediate_size"),
        "num_layers": read_num_layers(hf),
        "num_heads": require_size(hf, "num_attention_heads"),
        "max_position": read_max_position(hf, max_position, [rope["rope_scaling"]]),
        "norm_epsilon": require_number(hf, "rms_norm_eps", 1e-6),
        "has_tied_embeddings": is_enabled(hf, "tie_word_embeddings"),
        **rope,
    }


def decoder_of(
    hf: Mapping[str, Any], layers: Sequence[Layer], *, max_position: int, is_tied: bool = False, **options: Any
) -> ModelConfig:
    """Returns the model of these layers; `options` are those of `ModelConfig` that differ from its defaults.

    `max_position` is the family's default, and `is_tied` that of the unembedding, which may be the embedding.
    """
    ropes = [mixer.rope for layer in layers for mixer in layer.mixers if mixer.rope is not None]
    config = ModelConfig(
        vocab_size=require_size(hf, "vocab_size"),
        hidden_size=require_size(hf, "hidden_size"),
        max_position=read_max_position(hf, max_position, [rope.scaling for rope in ropes]),
        groups=(LayerGroup(tuple(layers)),),
        norm=layers[0].norm,
        has_tied_embeddings=is_enabled(hf, "tie_word_embeddings", default=is_tied),
        **options,
    )
    return config.regrouped(scan_sizes(layers))


def read_num_layers(hf: Mapping[str, Any]) -> int:
    return require_size(hf, "num_hidden_layers", most=MAX_LAYERS)


def read_norm(hf: Mapping[str, Any], *, default: float = 1e-6, adds_one: bool = False) -> Norm:
    return Norm(epsilon=require_number(hf, "rms_norm_eps", default), adds_one=adds_one)


def read_grouped_router(hf: Mapping[str, Any], default: int, default_chosen: int) -> tuple[int, Router]:
    """Returns the number of experts, and their router: biased sigmoids choose groups, and experts in these."""
    num_experts, num_chosen = expert_counts(hf, "n_routed_experts", default, default_chosen)
    num_groups, num_chosen_groups = require_size(hf, "n_group", 1), require_size(hf, "topk_group", 1)
    num_choices = num_experts * num_chosen_groups // num_groups
    if num_experts % num_groups or num_chosen_groups > num_groups or num_chosen > num_choices:
        raise ValueError(
            f"n_group={num_groups}, topk_group={num_chosen_groups} and num_experts_per_tok={num_chosen} do not fit"
            f" n_routed_experts={num_experts}; download the checkpoint's config.json again"
        )
    router = Router(
        num_chosen=num_chosen,
        scoring="sigmoid",
        normalizes=is_enabled(hf, "norm_topk_prob", default=True),
        scale=require_number(hf, "routed_scaling_factor", 1.0, least=1e-9),
        has_choice_bias=True,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
    )
    return num_experts, router


def refuse_unsupported(hf: Mapping[str, Any], architecture: str, honours: Collection[str] = ()) -> None:
    """Raises ValueError for settings that would change the result; the family `honours` some of them itself.

    `architecture` is that of the language model.
    """
    require_harmless(hf, {key: values for key, values in _HONOURED.items() if key not in honours})
    architectures = hf.get("architectures")
    known = (architecture, *backbones_of(architecture), *classifiers_of(architecture))
    if architectures and architectures not in [[name] for name in known]:
        raise ArchitectureError(
            f"architectures={architectures!r} is not supported: only {architecture}, its backbone and its classifier"
            " are; use a checkpoint of the language model itself",
            architecture,
        )


def require_harmless(hf: Mapping[str, Any], settings: Harmless) -> None:
    """Raises ValueError for a setting that has another value than those that change nothing."""
    for key, (harmless, way_out) in settings.items():
        if key in hf and hf[key] not in harmless:
            raise ValueError(f"{key}={hf[key]!r} is not supported; {way_out}")


def expert_weights(
    prefix: str,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    router: str = "gate",
    shared: str | None = None,
) -> WeightTable:
    """Returns the table of a mixture whose experts are stored one by one under `prefix`.

    `names` are those of gate, up and down, and `router` is that of the router. `shared` is the name of the shared
    expert, if there may be one.
    """
    moe = "layers.feed_forward"
    gate, up, down = names
    weights: dict[str, Target] = {
        f"{prefix}.{router}.weight": (f"{moe}.router", "E D -> E D"),
        f"{prefix}.experts.{{expert}}.{gate}.weight": (f"{moe}.experts.gate", "F D -> F D"),
        f"{prefix}.experts.{{expert}}.{up}.weight": (f"{moe}.experts.up", "F D -> F D"),
        f"{prefix}.experts.{{expert}}.{down}.weight": (f"{moe}.experts.down", "D F -> D F"),
    }
    if shared is not None:
        weights |= {
            f"{prefix}.{shared}.gate_proj.weight": (f"{moe}.shared.gate", "F D -> F D"),
            f"{prefix}.{shared}.up_proj.weight": (f"{moe}.shared.up", "F D -> F D"),
            f"{prefix}.{shared}.down_proj.weight": (f"{moe}.shared.down", "D F -> D F"),
        }
    return weights
