"""Layers that draft for a target, as published: for multi-token prediction in its own checkpoint, or an EAGLE-3 folder.

Both become an `EagleHead`. It uses the target's embedding and unembedding if its own are copies of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint.checkpoint import Checkpoint, read_tensors
from jaxinfer.checkpoint.config_json.family import LAYER, as_stored
from jaxinfer.checkpoint.config_json.fields import is_enabled, require_size
from jaxinfer.checkpoint.families import FAMILIES, llama
from jaxinfer.checkpoint.huggingface import read_json
from jaxinfer.checkpoint.making.assemblies import Assembly, plan_assembly
from jaxinfer.checkpoint.making.misfits import have_equal_values, refuse_misfits
from jaxinfer.checkpoint.safetensors_file import INTEGERS, StoredTensor
from jaxinfer.checkpoint.stored import Stored
from jaxinfer.model.components.attention import AttentionParams
from jaxinfer.model.components.layers import TensorSpec
from jaxinfer.model.config import LayerGroup, ModelConfig
from jaxinfer.model.params import Params
from jaxinfer.steps.eagle import EagleHead
from jaxinfer.validation import is_int

# States that a layer attends to. The layers were trained on whole contexts; more states cost memory and products. The
# number is not tuned: no published layer has been measured.
WINDOW = 64
MTP = "mtp"
STATE_LAYERS = "eagle_aux_hidden_state_layer_ids"
OFFSETS, IS_DRAFTED = "d2t", "t2d"  # of target ids from draft ids; true for the target ids that have a draft id


def load_mtp(target: Checkpoint, dtype: Any, quantization: str | None = None) -> EagleHead:
    """Loads the first layer for multi-token prediction of a checkpoint.

    Raises ValueError if the checkpoint has none, or one that does not fit its config.json.
    """
    hf, family, config, stored = target.settings, target.family, target.config, target.stored
    path, wanted = target.path, f"speculation={MTP!r} needs a checkpoint with a layer for multi-token prediction"
    text = family.text_settings(hf)
    if (names := family.draft_layer) is None:
        known = ", ".join(name for name, family in FAMILIES.items() if family.draft_layer is not None)
        raise ValueError(f"{wanted}, and {path} is of model_type={hf['model_type']!r}; these may have one: {known}")
    stated = text.get(names.count)
    if family.num_draft_layers(hf) == 0:
        raise ValueError(f"{wanted}, and {path / 'config.json'} says {names.count}={stated!r}; leave out speculation")
    n = config.num_layers
    own = {name: tensor for name, tensor in stored.items() if name.startswith(family.draft_prefixes(hf)[0])}
    if not own:
        why = (
            "leave out speculation"
            if stated is None
            else f"its config.json says {names.count}={stated}, so download it again"
        )
        raise ValueError(f"{wanted}, and {path} has no tensors {family.draft_prefixes(hf)[0]}*; {why}")
    (*_, layer) = family.config_from_hf(family.with_text_settings(hf, names.as_last(n))).layers
    config = replace(config, groups=(LayerGroup((layer,)),), has_tied_embeddings=False)

    def own_name(name: str) -> str:
        return name.replace("{layer}", str(n))

    tables = {"embedding": own_name(names.embedding), "unembedding": own_name(names.unembedding)}
    weights = {
        **{own_name(name.replace(LAYER, names.prefix)): place for name, place in family.weights.items()},
        **{name: (field, "V D -> V D") for field, name in tables.items()},
        own_name(names.final_norm): ("final_norm", "D -> D"),
    }
    D = config.hidden_size
    plan: dict[str, Any] = {
        "params": plan_assembly(config, as_stored(weights, own)),
        "input": _as_stored(own_name(names.input), D, 2 * D),
        "embedding_norm": _as_stored(own_name(names.embedding_norm), D),
        "hidden_norm": _as_stored(own_name(names.hidden_norm), D),
    }
    has_own_embedding = names.own_embedding is not None and is_enabled(text, names.own_embedding)
    for field, name in tables.items():
        if name not in own and not (field == "embedding" and has_own_embedding):
            plan["params"] = replace(plan["params"], **{field: None})
    refuse_misfits(path, plan, own)
    plan["params"] = _without_copies(plan["params"], own, target)
    tensors = read_tensors(plan, own, dtype, quantization=quantization)
    return _head(config, **tensors)


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """True if a folder holds an EAGLE-3 head."""
    hf = checkpoint.settings
    names = hf.get("architectures")
    is_named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    return is_named or "draft_vocab_size" in hf


def load_eagle3(head: Checkpoint, dtype: Any, target: Checkpoint) -> EagleHead:
    """Loads an EAGLE-3 head for the target, in the format of SafeAILab, SpecForge or vLLM's speculators.

    Raises ValueError for a head of another target, or tensors that do not fit its config.json.
    """
    aimed, path, file = target.config, head.path, head.config_file
    try:
        hf = _read_eagle3(read_json(file))
        config = llama.config_from_hf(hf)
        kept_layers = _kept_layers(hf, aimed.num_layers)
        adds_normed = is_enabled(hf, "norm_before_residual")
        num_drafted = require_size(hf, "draft_vocab_size", config.vocab_size)
        _require_same(hf, "target_hidden_size", config.hidden_size, aimed.hidden_size, target.path)
        _require_same(hf, "vocab_size", None, aimed.vocab_size, target.path)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    stored = head.headers
    token_ids = _token_ids(path, stored, num_drafted, aimed.vocab_size)
    own = {name: tensor for name, tensor in stored.items() if name not in (OFFSETS, IS_DRAFTED)}
    prefix = "model." if any(name.startswith("model.") for name in own) else ""
    layer = "midlayer." if any(name.startswith(f"{prefix}midlayer.") for name in own) else "layers.0."
    weights = {
        name.replace(LAYER, f"model.{layer}").replace("model.", prefix): place for name, place in llama.WEIGHTS.items()
    }
    D = config.hidden_size
    params = plan_assembly(config, weights)
    assert isinstance(params.layers[0].mixer, AttentionParams)
    mixer = replace(
        params.layers[0].mixer, **{name: _doubled(getattr(params.layers[0].mixer, name)) for name in ("q", "k", "v")}
    )
    params = replace(
        params,
        layers=(replace(params.layers[0], mixer=mixer),),
        unembedding=params.unembedding.of_shape((num_drafted, D)),
    )
    if params.embedding.names[0] not in own and aimed.hidden_size == D:
        params = replace(params, embedding=None)
    num_states = len(kept_layers) * aimed.hidden_size
    plan: dict[str, Any] = {
        "params": params,
        "reduction": _as_stored(f"{prefix}fc.weight", D, num_states),
        "hidden_norm": _as_stored(f"{prefix}{layer}hidden_norm.weight", D),
    }
    refuse_misfits(path, plan, own)
    plan["params"] = _without_copies(params, own, target, fields=("embedding",))
    tensors = read_tensors(plan, own, dtype)
    (stack,) = tensors["params"].layers
    embedding_norm, stack = stack.mixer_norm[0], replace(stack, mixer_norm=None)
    tensors["params"] = replace(tensors["params"], layers=(stack,))
    return _head(
        config,
        **tensors,
        embedding_norm=embedding_norm,
        token_ids=token_ids,
        kept_layers=kept_layers,
        adds_normed=adds_normed,
        continues_normed=False,
    )


def _head(config: ModelConfig, *, params: Params, **fields: Any) -> EagleHead:
    return EagleHead(
        layer=jax.tree.map(lambda tensor: tensor[0], params.layers[0]),
        final_norm=params.final_norm,
        embedding=params.embedding,
        unembedding=params.unembedding,
        config=config,
        window=WINDOW,
        **fields,
    )


def _without_copies(
    params: Params,
    stored: Mapping[str, Stored],
    target: Checkpoint,
    fields: tuple[str, ...] = ("embedding", "unembedding"),
) -> Params:
    """Returns a plan with None in the place of the tables that are equal to the target's."""
    plan, others = target.plan(target.config)
    for field in fields:
        own, theirs = getattr(params, field), getattr(plan, field) or plan.embedding
        if own is not None and have_equal_values(stored[own.names[0]], others[theirs.names[0]]):
            params = replace(params, **{field: None})
    return params


def _as_stored(name: str, *sizes: int) -> Assembly:
    """Returns the assembly of a tensor in floating point from the stored one of the same axes."""
    axes = ("embed", "states")[: len(sizes)]
    return Assembly(TensorSpec(sizes, axes, None), (name,), f"{' '.join(axes)} -> {' '.join(axes)}")


def _doubled(assembly: Assembly) -> Assembly:
    """Returns the assembly of a weight [..., D] as [..., 2 D]."""
    return assembly.of_shape((*assembly.shape[:-1], 2 * assembly.shape[-1]))


def _read_eagle3(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json as that of a Llama of one layer; ValueError for a setting that changes the function."""
    nested = hf.get("transformer_layer_config")  # of vLLM's speculators
    if isinstance(nested, dict):
        hf = {**nested, "norm_before_residual": True, **hf}
    eagle = hf.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    layers = hf.get("num_hidden_layers", 1)
    if layers != 1:
        raise ValueError(f"num_hidden_layers={layers!r} is not supported; use an EAGLE-3 head of one layer")
    harmless: dict[str, tuple[Any, ...]] = {"use_aux_hidden_state": (True, None), "norm_before_fc": (False, None)}
    for key, values in harmless.items():
        value = eagle.get(key, hf.get(key))
        if value not in values:
            raise ValueError(f"{key}={value!r} is not supported; use an EAGLE-3 head with {key}={values[0]!r}")
    ids = hf.get(STATE_LAYERS, eagle.get(STATE_LAYERS))
    drafted = hf.get("draft_vocab_size") or hf.get("vocab_size")
    fixed = {"architectures": None, "num_hidden_layers": 1, "tie_word_embeddings": False}
    return {**hf, **fixed, STATE_LAYERS: ids, "draft_vocab_size": drafted}


def _kept_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns the numbers of target layers after which the head takes states.

    By default they are those of SafeAILab and vLLM. Stated ids that begin with 1 count layers from 0, as SGLang reads
    them: the first is the output of layer 1. All others are numbers of layers, as vLLM reads them.
    """
    ids = hf[STATE_LAYERS]
    if ids is None:
        ids = [2, num_layers // 2, num_layers - 3]
    are_ids = isinstance(ids, list) and len(ids) > 0 and all(is_int(i) for i in ids)
    layers = sorted(i + 1 for i in ids) if are_ids and ids[0] == 1 else ids
    if not are_ids or not 0 <= min(layers) <= max(layers) <= num_layers:
        raise ValueError(
            f"{STATE_LAYERS}={ids!r} are no layers of a target of {num_layers} layers; use an EAGLE-3 head of this"
            " target"
        )
    return tuple(sorted(layers))


def _require_same(hf: Mapping[str, Any], key: str, default: int | None, size: int, target: Path) -> None:
    if require_size(hf, key, default) != size:
        raise ValueError(
            f"the head is for a target of {key}={hf.get(key, default)}, and {target} has {size}; use an EAGLE-3 head of"
            " this target"
        )


def _token_ids(path: Path, stored: Mapping[str, StoredTensor], num_drafted: int, vocab_size: int) -> jax.Array | None:
    """Returns the target's ids i32[W] of the head's tokens; None if both are the same."""
    if OFFSETS not in stored:
        if num_drafted == vocab_size:
            return None
        raise ValueError(
            f"{path} has no tensor {OFFSETS}, though its draft_vocab_size={num_drafted} is not the target's"
            f" {vocab_size}; download the head again"
        )
    offsets = stored[OFFSETS]
    if offsets.shape != (num_drafted,) or offsets.dtype not in INTEGERS:
        raise ValueError(
            f"{OFFSETS} in {offsets.path} is {offsets.dtype} {offsets.shape}, and draft_vocab_size={num_drafted} in"
            f" config.json needs integers ({num_drafted},); use the files of one and the same head"
        )
    ids = np.arange(num_drafted) + offsets.map()
    if not 0 <= ids.min() <= ids.max() < vocab_size or len(np.unique(ids)) < num_drafted:
        raise ValueError(
            f"{OFFSETS} in {offsets.path} leads to ids from {ids.min()} to {ids.max()}, {len(np.unique(ids))} different"
            f" ones; {num_drafted} different ids below the target's vocabulary of {vocab_size} are needed: use an"
            " EAGLE-3 head of this target"
        )
    return jax.numpy.asarray(ids, "int32")
