"""Adapters in the layout of PEFT: adapter_config.json beside adapter_model.safetensors."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.config_json.text_model import SPELLINGS
from jaxinfer.checkpoint.families import FAMILIES
from jaxinfer.checkpoint.huggingface import read_json, resolve_checkpoint
from jaxinfer.checkpoint.making.assemblies import Assembly, assemblies_of, is_assembly, plan_assembly
from jaxinfer.checkpoint.making.reading import floats_of
from jaxinfer.checkpoint.safetensors_file import DTYPES, StoredTensor, read_header
from jaxinfer.checkpoint.stored import Stored
from jaxinfer.model.adapted_params import Adapter, Slots, adapted_weights, slots_of
from jaxinfer.model.components.layers import TensorSpec
from jaxinfer.model.config import ModelConfig
from jaxinfer.validation import is_int, is_real, shown

logger = logging.getLogger(__name__)

CONFIG_FILE, TENSOR_FILE, PICKLE_FILE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # of every name that PEFT writes
# By the end of a tensor's name, behind "lora_".
KINDS = {"A.weight": "A", "B.weight": "B", "magnitude_vector": "lengths"}
DIGEST_BYTES = 32
MAX_ALPHA = 1e30
MAX_PATTERNS = 10_000  # entries of rank_pattern or alpha_pattern
# Keys that say how the adapter was made or where it came from. All others must be absent, or have a value that says no.
DESCRIPTIONS = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
    *("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"),
    *("megatron_core", "qalora_group_size", "eva_config", "lora_ga_config", "runtime_config", "ensure_weight_tying"),
}
# Other ways to begin change the base weights too, unless PEFT has converted the adapter, and then it says True.
HARMLESS_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
# Beginnings of the names of modules for images and sound, in the models that have such parts.
TOWERS = tuple(
    sorted({beginning for family in FAMILIES.values() if family.text_key is not None for beginning in family.skipped})
)
WAYS_OUT = {
    "modules_to_save": "an adapter changes products alone; merge these modules into the model by merge_and_unload",
    "target_parameters": "weights of experts have no slots; merge the adapter into the model by merge_and_unload",
    "trainable_token_indices": "the embedding has no slots; merge the adapter into the model by merge_and_unload",
}
MERGE = "merge the adapter into the model by merge_and_unload"


def read_adapter(
    path_or_id: str | Path, checkpoint: Checkpoint, config: ModelConfig, *, max_rank: int, dtype: Any
) -> Adapter:
    """Reads an adapter of PEFT, from a folder or the Hub, for the model `config` of a checkpoint.

    Returns it in `dtype`, padded to `max_rank`. Raises ValueError that names the setting or tensor that cannot be
    honoured: another method than LoRA and DoRA, a rank above `max_rank`, and a target that is no product of the
    model's layers.
    """
    folder = resolve_checkpoint(path_or_id, [CONFIG_FILE, TENSOR_FILE])
    file, settings = folder / TENSOR_FILE, folder / CONFIG_FILE
    if not file.is_file() and (folder / PICKLE_FILE).is_file():
        raise ValueError(
            f"{folder / PICKLE_FILE} is a pickle, which may run any code when it is read; where you trust it, write"
            f" {TENSOR_FILE} in its place: safetensors.torch.save_file(torch.load({PICKLE_FILE!r}, weights_only=True),"
            f" {TENSOR_FILE!r})"
        )
    for needed in (settings, file):
        if not needed.is_file():
            raise ValueError(f"{folder} has no {needed.name}; give the folder that PEFT's save_pretrained has written")
    try:
        scaling = read_scaling(read_json(settings))
        stored, left_out = _of_text(read_header(file))
        pairs = _pairs(stored)
        places = _places(checkpoint, config, pairs)
        prefix = checkpoint.family.prefix  # which an adapter of the backbone alone leaves out
        whole = {name: prefix + name if prefix + name in places else name for name in pairs}
        if len({*whole.values()}) < len(whole):
            raise ValueError(f"it has modules under two names, with {prefix!r} and without; save the adapter again")
        for name, pair in pairs.items():
            _check(whole[name], pair, places, scaling, max_rank)
        scales = {whole[name]: scaling.of(name, pair["A"].shape[0]) for name, pair in pairs.items()}
        pairs = {whole[name]: pair for name, pair in pairs.items()}
        weights = _read_weights(checkpoint, config, places) if scaling.sets_lengths else {}
        tensors, digest = _place(pairs, places, scales, weights, config, max_rank=max_rank, dtype=np.dtype(dtype))
        if left_out:
            logger.warning("%s: leaves out what the adapter changes in %s, which no text passes", folder, left_out)
        # Another process that lacks a relative folder would take its name for an id of the Hub.
        is_folder = Path(path_or_id).expanduser().is_dir()
        return Adapter(tensors, digest, str(folder.absolute() if is_folder else path_or_id))
    except ValueError as error:
        raise error if str(error).startswith(str(folder)) else ValueError(f"{folder}: {error}") from None


@dataclass(frozen=True)
class Scaling:
    """The factor of each module's change: alpha / rank, or alpha / sqrt(rank) with rsLoRA (Kalajdzievski 2023)."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    sets_lengths: bool  # of the rows of changed weights, each to a number of the adapter (DoRA)
    ranks: Mapping[str, int]  # of modules whose names end in the key
    alphas: Mapping[str, float]

    def of(self, module: str, rank: int) -> float:
        """Returns the factor of a module, by its name in the adapter; ValueError if its tensors have another rank."""
        stated = _matching(self.ranks, module, self.rank)
        if rank != stated:
            raise ValueError(
                f"the tensors of {module} have rank {rank}, but {CONFIG_FILE} states {stated}; save the adapter again"
            )
        alpha = _matching(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank


def read_scaling(settings: Mapping[str, Any]) -> Scaling:
    """Returns the scaling that adapter_config.json states; ValueError for settings that cannot be honoured."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"peft_type={shown(kind)} is not supported; give an adapter of LoRA, or {MERGE}")
    for name, value in settings.items():
        # 0 == False, and an empty list of modules changes nothing.
        if name not in DESCRIPTIONS and value not in (None, False, [], {}, ""):
            raise ValueError(f"{name}={shown(value)} is not supported; {WAYS_OUT.get(name, MERGE)}")
    if (bias := settings.get("bias", "none")) != "none":
        raise ValueError(f"bias={shown(bias)} is not supported, for only weights have slots; {MERGE}")
    beginning = settings.get("init_lora_weights")
    if not isinstance(beginning, bool | str | None) or beginning not in HARMLESS_BEGINNINGS:
        raise ValueError(
            f"init_lora_weights={shown(beginning)} changes the base weights too; convert the adapter with"
            " path_initial_model_for_weight_conversion of PEFT's save_pretrained"
        )
    for name in ("use_rslora", "use_dora"):
        if not isinstance(settings.get(name, False), bool):
            raise ValueError(f"{name}={shown(settings[name])} is neither true nor false; correct {CONFIG_FILE}")
    rank = _checked_rank("r", settings.get("r", 8))
    return Scaling(
        rank=rank,
        alpha=_checked_alpha("lora_alpha", settings.get("lora_alpha", 8)),
        is_rank_stabilized=settings.get("use_rslora", False),
        sets_lengths=settings.get("use_dora", False),
        ranks={name: _checked_rank("rank_pattern", r) for name, r in _patterns(settings, "rank_pattern").items()},
        alphas={name: _checked_alpha("alpha_pattern", a) for name, a in _patterns(settings, "alpha_pattern").items()},
    )


def _checked_rank(name: str, value: Any) -> int:
    if not is_int(value) or value < 1:
        raise ValueError(f"{name} has {shown(value)}, which is no rank from 1 on; correct {CONFIG_FILE}")
    return int(value)


def _checked_alpha(name: str, value: Any) -> float:
    if not is_real(value) or not -MAX_ALPHA < value < MAX_ALPHA:
        raise ValueError(f"{name} has {shown(value)}, which is no finite number; correct {CONFIG_FILE}")
    return float(value)


def _patterns(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a pattern's entries by module; ValueError for regular expressions, which may take for ever to match."""
    patterns = settings.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise ValueError(f"{name}={shown(patterns)} is no object of up to {MAX_PATTERNS:,} entries; correct the file")
    for key in patterns:
        if not re.fullmatch(r"\^?[\w.]+", key):
            raise ValueError(f"{name} has the key {shown(key)}; name each module instead of a regular expression")
    return patterns


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Returns the value of the first pattern that is a module's name or the end of it, as PEFT finds it."""
    if not patterns:
        return default

    def matches(key: str) -> bool:
        return module == key[1:] if key.startswith("^") else module == key or module.endswith(f".{key}")

    return next((value for key, value in patterns.items() if matches(key)), default)


def _of_text(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], str]:
    """Returns the tensors but for those of a model's parts for images and sound, and the names of these parts."""
    places = {name: name.removeprefix(PREFIX) for name in stored}
    text = {name: tensor for name, tensor in stored.items() if not places[name].startswith(TOWERS)}
    parts = {places[name].removeprefix("model.").partition(".")[0] for name in stored if name not in text}
    if parts and not text:
        raise ValueError(
            f"it changes {', '.join(sorted(parts))} alone, and of a model that reads images only the text model is"
            " loaded; give an adapter that changes this"
        )
    return text, ", ".join(sorted(parts))


def _pairs(stored: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Returns the tensors of each module by its name in the model: A [r, in], B [out, r], and lengths [out] of DoRA."""
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, _, stated = name.removeprefix(PREFIX).rpartition(".lora_")
        kind = KINDS.get(stated)
        if kind is None or not module:
            raise ValueError(f"{name} is no A or B of LoRA for the weight of a product; {MERGE}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype}; save the adapter in one of {', '.join(DTYPES)}")
        if len(tensor.shape) != (1 if kind == "lengths" else 2) or 0 in tensor.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, but A and B are matrices, and magnitudes a vector; save the"
                " adapter again"
            )
        pair = pairs.setdefault(module, {})
        if kind in pair:
            raise ValueError(f"{module} has lora_{stated} under two names; save the adapter again")
        pair[kind] = tensor
    for module, pair in pairs.items():
        for half in "AB":
            if half not in pair:
                raise ValueError(f"{module} has no lora_{half}; save the adapter again")
    if not pairs:
        raise ValueError("it has no tensors; save the adapter again")
    return pairs


@dataclass(frozen=True)
class _Place:
    """A layer's weight that a stored module is, or is a part of."""

    index: int  # of the weight among the leaves of `adapted_weights`
    layer: int  # in its stack
    assembly: Assembly


def _places(checkpoint: Checkpoint, config: ModelConfig, modules: Collection[str]) -> dict[str, list[_Place]]:
    """Returns the places of each module that adapters may change, by its name in the spelling of these `modules`.

    The adapter may be of the whole model and the checkpoint of its text model, or the other way about.
    """
    family = replace(checkpoint.family, spellings=({}, *checkpoint.family.spellings, *SPELLINGS))
    plan = plan_assembly(config, family.weights_among([f"{module}.weight" for module in modules]))
    places: dict[str, list[_Place]] = {}
    for index, assembly in enumerate(_assemblies(plan, config)):
        if assembly.is_packable and assembly.unfold is None and assembly.num_stacked == 1:
            for layer, name in enumerate(assembly.names):
                places.setdefault(name.removesuffix(".weight"), []).append(_Place(index, layer, assembly))
    return places


def _assemblies(plan: Any, config: ModelConfig) -> list[Assembly]:
    """Returns those of the leaves of `adapted_weights`, in their order."""
    adapted = jax.tree.map(
        lambda assembly, spec: None if spec is None else assembly,
        plan,
        adapted_weights(config),
        is_leaf=is_assembly,
    )
    return assemblies_of(adapted)


def _read_weights(
    checkpoint: Checkpoint, config: ModelConfig, places: Mapping[str, Sequence[_Place]]
) -> dict[str, Stored]:
    """Returns the stored weight of each module. The checkpoint may spell its name in another way than an adapter."""
    plan, stored = checkpoint.plan(config)
    assemblies = _assemblies(plan, config)
    return {module: stored[assemblies[place.index].names[place.layer]] for module, (place, *_) in places.items()}


def _place(
    pairs: Mapping[str, Mapping[str, StoredTensor]],
    places: Mapping[str, list[_Place]],
    scales: Mapping[str, float],
    weights: Mapping[str, Stored],
    config: ModelConfig,
    *,
    max_rank: int,
    dtype: np.dtype,
) -> tuple[Slots, str]:
    specs, structure = jax.tree.flatten(adapted_weights(config), is_leaf=lambda node: isinstance(node, TensorSpec))
    # Slots of another rank add up a change in another order, so that a token's last bits differ.
    digest = blake2b(f"slots of rank {max_rank}".encode(), digest_size=DIGEST_BYTES)
    tensors = [
        [np.zeros((a.shape[0], *a.shape[2:]), a.dtype) for a in slots_of(spec, 1, max_rank, dtype)] for spec in specs
    ]
    for module, pair in sorted(pairs.items()):
        rank = pair["A"].shape[0]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            down, up = (pair[kind].map().astype(np.float32) for kind in "AB")
            up, gain = up * np.float32(scales[module]), np.zeros(len(up), np.float32)
            if "lengths" in pair:
                w = floats_of(weights[module]).astype(np.float32)
                ratio = pair["lengths"].map().astype(np.float32) / np.linalg.norm(w + up @ down, axis=1)
                up, gain = up * ratio[:, None], ratio - 1
            down, up = down.astype(dtype), up.astype(dtype)
        if not all(np.isfinite(numbers).all() for numbers in (down, up, gain)):
            raise ValueError(f"{module} has numbers that are not finite in {dtype}; train the adapter again")
        for content in (module.encode(), repr(down.shape).encode(), down.tobytes(), up.tobytes(), gain.tobytes()):
            digest.update(len(content).to_bytes(8, "little") + content)
        for place in places[module]:
            own = place.assembly.of_groups(rank).view(up).reshape(-1, rank)
            tensors[place.index][0][place.layer, : down.shape[1], :rank] = down.T
            tensors[place.index][1][place.layer, :rank] = own.T
            tensors[place.index][2][place.layer] = place.assembly.of_groups(1).view(gain[:, None]).reshape(-1)
    leaves = [tuple(own) for own in tensors]
    return jax.tree.unflatten(structure, leaves), digest.hexdigest()


def _check(
    module: str,
    pair: Mapping[str, StoredTensor],
    places: Mapping[str, list[_Place]],
    scaling: Scaling,
    max_rank: int,
) -> None:
    if module not in places:
        known = sorted({re.sub(r"\d+", "*", name) for name in places})
        raise ValueError(f"{module} is no weight that an adapter may change; those are {', '.join(known)}; {MERGE}")
    (rank, inputs), (outputs, other) = pair["A"].shape, pair["B"].shape
    wanted = places[module][0].assembly.stored_shape
    if (outputs, inputs) != wanted or other != rank:
        raise ValueError(
            f"{module} has A {[rank, inputs]} and B {[outputs, other]}, but its weight has the shape {list(wanted)};"
            " give an adapter of this model"
        )
    if ("lengths" in pair) != scaling.sets_lengths:
        has = "has a magnitude vector" if "lengths" in pair else "has no magnitude vector"
        raise ValueError(
            f"{module} {has}, but {CONFIG_FILE} states use_dora={scaling.sets_lengths}; save the adapter again"
        )
    if scaling.sets_lengths and pair["lengths"].shape != (outputs,):
        raise ValueError(
            f"{module} has {pair['lengths'].shape[0]} magnitudes for {outputs} rows; save the adapter again"
        )
    if rank > max_rank:
        raise ValueError(
            f"{module} has rank {rank}, more than max_adapter_rank={max_rank}; raise EngineConfig.max_adapter_rank"
        )
