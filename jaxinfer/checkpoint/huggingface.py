"""Checkpoints in the Hugging Face layout, config.json beside safetensors, or in one GGUF file; here or on the Hub."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.checkpoint.assembly import Assembly, abstract, assemble, grid_of, plan_assembly
from jaxinfer.checkpoint.config_json.family import WeightTable, embedding_name, fields_of, is_backbone
from jaxinfer.checkpoint.families import family_of
from jaxinfer.checkpoint.formats import logical_tensors, settings_of, without_settings
from jaxinfer.checkpoint.formats.cache_scales import has_cache_scales, with_cache_scales
from jaxinfer.checkpoint.formats.gguf import describe_widened, gguf_tensors, settings_of_gguf
from jaxinfer.checkpoint.safetensors_file import DTYPES, StoredTensor, read_header
from jaxinfer.checkpoint.stored import Stored, StoredQuantized
from jaxinfer.device import packs_integers
from jaxinfer.gguf.file import SUFFIX, is_gguf, read_gguf
from jaxinfer.gguf.names import config_of
from jaxinfer.model.config import Layer, ModelConfig
from jaxinfer.model.mixers import source_of
from jaxinfer.model.params import Params
from jaxinfer.validation import MAX_INT, is_int, require, shown

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
UNEMBEDDING = "lm_head.weight"  # the name, or its end
SENTENCE_MODULES = "modules.json"  # of embedding models, by sentence-transformers

# Subfolders and Mistral's consolidated files hold the same weights once more, in other formats.
DOWNLOADED = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.tiktoken", "*.txt", "*.jinja"]
NOT_DOWNLOADED = ["[!a]*/*", "a[!d]*/*", "consolidated*"]  # all subfolders but additional_chat_templates
ROWS_COMPARED_AT_ONCE = 4096
MAX_JSON_BYTES = 2**26  # of a configuration or an index; the largest models' have some megabytes


def resolve_checkpoint(path_or_id: str | Path, patterns: Sequence[str] = DOWNLOADED) -> Path:
    """Returns the place of a checkpoint: a local directory or GGUF file, or else what a Hub id names, downloaded.

    A Hub id is that of a repository, or of a GGUF file in one, such as "owner/name/model.gguf". A ValueError if it is
    neither; of a repository only files of these patterns are fetched: safetensors, JSON and tokenizer files unless told
    otherwise.
    """
    is_path = isinstance(path_or_id, str | Path) and str(path_or_id).isprintable() and bool(str(path_or_id))
    require(is_path, "checkpoint", path_or_id, "a folder, a GGUF file or a Hub id, as text or Path")
    place = Path(path_or_id).expanduser()
    if place.is_dir() or (place.is_file() and is_gguf(place)):
        return place
    if place.exists():
        raise ValueError(
            f"checkpoint {str(path_or_id)!r} is a file; give the directory that it is in, or a file {SUFFIX}"
        )
    owner, name, file = [*str(path_or_id).split("/", 2), "", ""][:3]
    if is_gguf(place) and not (owner and name and file):
        raise ValueError(
            f"checkpoint {shown(str(path_or_id))} does not exist; give the path of a GGUF file, or its place on the"
            f" Hugging Face Hub, such as 'owner/name/model{SUFFIX}'"
        )
    # Imported here: reading a local checkpoint needs neither the package nor the time to import it.
    import huggingface_hub

    try:
        if is_gguf(place):
            return Path(huggingface_hub.hf_hub_download(f"{owner}/{name}", file))
        snapshot = huggingface_hub.snapshot_download(
            str(path_or_id), allow_patterns=list(patterns), ignore_patterns=NOT_DOWNLOADED
        )
    # The Hub's own errors derive from these two; what is wrong (name, access, network) is in their message.
    except (OSError, ValueError) as error:
        raise ValueError(
            f"checkpoint {shown(str(path_or_id))} is neither a local directory nor reachable on the Hugging"
            f" Face Hub ({type(error).__name__}: {error}); give the path of an existing directory or GGUF file, or an"
            " id such as 'Qwen/Qwen3-0.6B' with network access or after downloading it once"
        ) from error
    return Path(snapshot)


def read_config(path: str | Path) -> ModelConfig:
    """Returns the model that config.json or a GGUF describes; what cannot be honoured in it is a ValueError.

    If the tensors are there too, they decide if it has an unembedding of its own, that of the embedding, or none.
    """
    hf, settings = read_settings(Path(path))
    try:
        config = family_of(hf).config_from_hf(hf)
        config = with_cache_scales(config) if has_cache_scales(settings) else config
    except ValueError as error:
        raise ValueError(f"{_config_file(Path(path))}: {error}") from None
    if is_backbone(hf):
        return replace(config, has_logits=False)
    try:
        stored = read_stored(Path(path))
    except ValueError:  # none are there, or `require_fitting_tensors` says what is wrong with them
        return config
    return _with_stored_unembedding(Path(path), config, hf, stored)


def read_settings(path: Path) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Returns config.json as that of a model in floating point, and its settings of a packed format, if any.

    A GGUF has them in its metadata. Raises ValueError for a format that is not read.
    """
    try:
        if is_gguf(path):
            file = read_gguf(path)
            return config_of(file), settings_of_gguf(file)
        hf = read_json(path / "config.json")
        return without_settings(hf), settings_of(hf)
    except ValueError as error:
        raise _from_file(_config_file(path), error) from None


def read_stored(path: Path) -> dict[str, Stored]:
    """Returns the model's tensors by name, packed weights as integers; ValueError for a damaged or unknown format."""
    try:
        if is_gguf(path):
            return gguf_tensors(read_gguf(path))
        _, settings = read_settings(path)
        return logical_tensors(read_headers(path), settings)
    except ValueError as error:
        raise _from_file(path, error) from None


def _config_file(path: Path) -> Path:
    return path if is_gguf(path) else path / "config.json"


def _from_file(file: Path, error: ValueError) -> ValueError:
    """Returns the error with the file's name before its message, if it is not there yet."""
    return error if str(error).startswith((str(file), f"{file.parent} ")) else ValueError(f"{file}: {error}")


def refuse_both(path: Path, quantization: str | None) -> None:
    """Raises ValueError for a `quantization` of a checkpoint that is packed already."""
    _, settings = read_settings(path)
    if quantization is not None and settings is not None:
        raise ValueError(
            f"quantization={quantization!r} does not go with {path}, whose weights are packed already by"
            f" {settings['quant_method']}; leave it out"
        )


def _with_stored_unembedding(
    path: Path, config: ModelConfig, hf: Mapping[str, Any], stored: Mapping[str, Stored]
) -> ModelConfig:
    family = family_of(hf)
    own = _without(stored, (*family.skipped, *family.draft_prefixes(hf)))
    name = embedding_name(family.weights_among(own))
    embedding, unprefixed = own.get(name), own.get(name.removeprefix(family.prefix))
    unembeddings = [tensor for name, tensor in own.items() if name.endswith(UNEMBEDDING)]
    if config.has_tied_embeddings:
        # transformers ties them only if they are equal.
        stated = embedding or unprefixed
        are_tied = stated is None or all(have_equal_values(stated, tensor) for tensor in unembeddings)
        return config if are_tied else replace(config, has_tied_embeddings=False)
    # Embedding models may state the architecture of the language model that they come from.
    is_backbone_alone = (embedding is None and unprefixed is not None) or (path / SENTENCE_MODULES).is_file()
    return replace(config, has_logits=bool(unembeddings) or not is_backbone_alone)


def _without(stored: Mapping[str, Stored], prefixes: tuple[str, ...]) -> dict[str, Stored]:
    return {name: tensor for name, tensor in stored.items() if not name.startswith(prefixes)}


def read_eos_token_ids(path: str | Path) -> tuple[int, ...]:
    """Returns the tokens that end a text: generation_config.json's, else config.json's or the GGUF's, else none.

    In a checkpoint of several models those of the text model count as config.json's too.
    """
    files = [Path(path) / name for name in ("generation_config.json", "config.json")]
    for file in [Path(path)] if is_gguf(Path(path)) else files:
        stated = read_settings(file)[0] if is_gguf(file) else read_json(file) if file.is_file() else {}
        text_model = stated.get("text_config")
        places = (stated, text_model) if isinstance(text_model, dict) else (stated,)
        value = next((place["eos_token_id"] for place in places if place.get("eos_token_id") is not None), None)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(is_int(i) and 0 <= i <= MAX_INT for i in ids):
            raise ValueError(f"eos_token_id={value!r} in {file} is not a token id or a list of them; correct the file")
        return tuple(ids)
    return ()


def load_params(
    path: str | Path,
    config: ModelConfig,
    dtype: Any,
    *,
    placement: Params | None = None,
    quantization: str | None = None,
    show_progress: bool = False,
) -> Params:
    """Reads the parameters of a checkpoint as `dtype`, one tensor of `Params` at a time.

    Each is on its devices before the next is read, so the host holds one stacked group of one weight at most. If
    `placement` (see `jaxinfer.model.params.shardings`) splits a weight, the host holds only the slices of its own
    devices. Every missing, unexpected or mis-shaped tensor is listed in one ValueError before any
    is read. Those of other models in the checkpoint, such as a tower for images, are skipped, and logged once as a
    warning. `config` is that of `read_config`, with any `layer_groups`. With `quantization` ("int8", "int4") weights
    are rounded on the host, some rows at a time.
    """
    path = Path(path)
    refuse_both(path, quantization)
    plan, stored = require_fitting_tensors(path, config)
    hf, _ = read_settings(path)
    skipped = [name for name in stored if name.startswith(family_of(hf).skipped)]
    if config.has_logits and not config.has_tied_embeddings and family_of(hf).config_from_hf(hf).has_tied_embeddings:
        logger.warning(
            "%s: %s differs from %s, so both are used, as transformers does; set tie_word_embeddings to false in"
            " config.json",
            *(path, plan.unembedding.names[0], plan.embedding.names[0]),
        )
    if skipped:
        towers = ", ".join(sorted({name.removeprefix("model.").partition(".")[0] for name in skipped}))
        logger.warning("%s: loads the text model alone, without %d tensors of %s", path, len(skipped), towers)
    if is_gguf(path):
        floats = [a for a in jax.tree.leaves(plan, is_leaf=_is_assembly) if grid_of(a, stored) is None]
        names = (name for assembly in floats for name in assembly.names)
        if line := describe_widened(read_gguf(path), names, jnp.dtype(dtype)):
            logger.warning("%s: %s", path, line)
    if placement is not None and jax.tree.structure(placement) != jax.tree.structure(plan, is_leaf=_is_assembly):
        raise ValueError(
            f"placement does not have the tensors of a model with layer_groups={config.layer_groups};"
            " build it from the config that is given here"
        )
    options = {"placement": placement, "quantization": quantization, "show_progress": show_progress}
    try:
        return read_tensors(plan, stored, dtype, **options)
    except ValueError as error:
        raise _from_file(path, error) from None


def read_tensors(
    plan: Any,
    stored: Mapping[str, Stored],
    dtype: Any,
    *,
    placement: Any = None,
    quantization: str | None = None,
    show_progress: bool = False,
) -> Any:
    """Returns a tree with a tensor in the place of each `Assembly` of the plan; options are those of `load_params`."""
    assemblies, structure = jax.tree.flatten(plan, is_leaf=_is_assembly)
    shardings = [None] * len(assemblies) if placement is None else jax.tree.leaves(placement)
    dtype, options = jnp.dtype(dtype), {"quantization": quantization, "packs_integers": packs_integers()}
    with _progress_bar(sum(len(assembly.names) for assembly in assemblies), show_progress) as bar:
        leaves = []
        for assembly, sharding in zip(assemblies, shardings, strict=True):
            leaves.append(assemble(assembly, stored, dtype, sharding, **options))
            bar.update(len(assembly.names))
    return jax.tree.unflatten(structure, leaves)


def require_fitting_tensors(path: Path, config: ModelConfig) -> tuple[Params, dict[str, Stored]]:
    """Returns how `Params` are made, an `Assembly` in the place of each tensor, and the stored tensors by name.

    Raises one ValueError that lists every missing, unexpected or mis-shaped tensor of the checkpoint directory.
    """
    hf, _ = read_settings(path)
    family = family_of(hf)
    stored = read_stored(path)
    weights = family.weights_among(stored)
    plan, unread = plan_assembly(config, weights), _unread_keys_and_values(config, weights)
    stored = _with_prefix(stored, {*_expected_shapes(plan), *unread}, family.prefix)
    own = _without(stored, (*family.skipped, *family.draft_prefixes(hf), *unread))
    if config.has_tied_embeddings and plan.embedding.names[0] not in own:
        # The one tensor may have either name.
        names = [name for name in own if name.endswith(UNEMBEDDING)] or plan.embedding.names
        plan = replace(plan, embedding=replace(plan.embedding, names=tuple(names[:1])))
    needs_unembedding = config.has_logits and not config.has_tied_embeddings
    refuse_misfits(path, plan, own, needs_unembedding=needs_unembedding)
    return plan, stored


def abstract_packed(path: Path, config: ModelConfig, dtype: Any) -> Params:
    """Returns the shapes and dtypes of what `load_params` returns for a packed checkpoint, from headers alone."""
    plan, stored = require_fitting_tensors(path, config)
    options = {"packs_integers": packs_integers()}
    return jax.tree.map(lambda a: abstract(a, stored, jnp.dtype(dtype), **options), plan, is_leaf=_is_assembly)


def layers_packed_anew(path: Path, config: ModelConfig) -> list[int]:
    """Returns the layers packed in another way than the last equal one, with which a new stack must begin."""
    _, settings = read_settings(path)
    if settings is None:
        return []
    plan, stored = require_fitting_tensors(path, config.regrouped((1,) * config.num_layers))

    def grids(layer: Any) -> list[Any]:
        return [grid_of(assembly, stored) for assembly in jax.tree.leaves(layer, is_leaf=_is_assembly)]

    known: dict[Layer, list[Any]] = {}
    anew = []
    for i, layer in enumerate(config.layers):
        own = grids(plan.layers[i])
        anew += [i] if known.setdefault(layer, own) != own else []
        known[layer] = own
    return anew


def _unread_keys_and_values(config: ModelConfig, weights: WeightTable) -> set[str]:
    """Returns the names of keys and values of layers that read those of an earlier layer.

    Published checkpoints have them, and `transformers` leaves them out.
    """
    readers = [
        i for i, layer in enumerate(config.layers) if any(source_of(mixer) is not None for mixer in layer.mixers)
    ]
    fields = {f"layers.mixer.{name}" for name in ("k", "k_bias", "k_norm", "v", "v_bias")}
    names = [name for name, targets in weights.items() if fields & {*fields_of(targets)}]
    return {name.format(layer=layer) for name in names for layer in readers}


def _with_prefix(stored: Mapping[str, Stored], expected: Collection[str], prefix: str) -> dict[str, Stored]:
    """Returns the tensors under their expected names: each name may lack the prefix, as in transformers."""

    def expected_name(name: str) -> str:
        whole = prefix + name
        return whole if name not in expected and whole in expected and whole not in stored else name

    return {expected_name(name): tensor for name, tensor in stored.items()}


def _is_assembly(node: Any) -> bool:
    return isinstance(node, Assembly)


def _progress_bar(total: int, show_progress: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="loading", unit="tensor", disable=not show_progress)


def read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file.parent} has no {file.name}; give the directory of a complete Hugging Face checkpoint")
    if file.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{file} has more than {MAX_JSON_BYTES:,} bytes; give the checkpoint's own")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not an object; download it again")
    return content


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Returns every tensor of the checkpoint's file or files by name."""
    if (path / SINGLE_FILE).is_file():
        return read_header(path / SINGLE_FILE)
    if not (path / INDEX_FILE).is_file():
        others = sorted(file.name for file in path.glob("*.bin"))
        if others:
            convert = f"m = AutoModelForCausalLM.from_pretrained({str(path)!r}, dtype='auto')"
            raise ValueError(
                f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}, only {', '.join(others)}: pickles, which may run"
                " any code when they are read; use a checkpoint in safetensors, or where you trust this one, write them"
                f' beside it: python -c "from transformers import AutoModelForCausalLM; {convert};'
                f' m.save_pretrained({str(path)!r})"'
            )
        raise ValueError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}; use a checkpoint in safetensors")
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path / INDEX_FILE} has no weight_map of file names but {weight_map!r}; download it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard:
            raise ValueError(
                f"{path / INDEX_FILE} names no file for {name}: its weight_map says {shard!r}; download it again"
            )
    shards = sorted(set(weight_map.values()))
    absent = [name for name in shards if not (path / name).is_file()]
    if absent:
        raise ValueError(f"{path} lacks {', '.join(absent)}, named in {INDEX_FILE}; download the checkpoint again")
    headers = {shard: read_header(path / shard) for shard in shards}
    found = {name: tensor for header in headers.values() for name, tensor in header.items()}
    # A tensor that two files hold is taken from the one that the index names.
    return found | {name: headers[shard][name] for name, shard in weight_map.items() if name in headers[shard]}


def _expected_shapes(plan: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each stored tensor that a tree of `Assembly` needs, by its name."""
    expected: dict[str, tuple[int, ...]] = {}
    for assembly in jax.tree.leaves(plan, is_leaf=_is_assembly):
        expected |= dict.fromkeys(assembly.names, assembly.stored_shape)
    return expected


def refuse_misfits(path: Path, plan: Any, stored: Mapping[str, Stored], *, needs_unembedding: bool = True) -> None:
    """Raises one ValueError that lists every missing, unexpected or mis-shaped tensor; `plan` is a tree of `Assembly`.

    A model that needs no unembedding may have one: one equal to the embedding, or that of a backbone.
    """
    expected = _expected_shapes(plan)
    problems = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in stored]
    for name, tensor in stored.items():
        if name not in expected:
            # The frequencies follow from the config.
            is_known = name.endswith("rotary_emb.inv_freq") or (not needs_unembedding and name.endswith(UNEMBEDDING))
            is_known |= _is_zero_bias(name, stored)
            problems += [] if is_known else [f"unexpected: {name} {tensor.shape}"]
        elif tensor.shape != expected[name]:
            problems.append(f"mis-shaped: {name} expected {expected[name]}, found {tensor.shape}")
        elif isinstance(tensor, StoredTensor) and tensor.dtype not in DTYPES:
            problems.append(f"unsupported dtype: {name} is {tensor.dtype}, not one of {', '.join(DTYPES)}")
    if problems:
        raise ValueError(
            f"{len(problems)} tensors in {path} do not fit its config.json; use the config.json and the"
            " safetensors of one and the same checkpoint, or correct the table of a family that you are adding:\n  "
            + "\n  ".join(problems)
        )


def _is_zero_bias(name: str, stored: Mapping[str, Stored]) -> bool:
    """True for a bias of zeros beside a packed weight, as AutoGPTQ writes for layers without a bias."""
    module, _, last = name.rpartition(".")
    bias = stored[name]
    is_of_packed = last == "bias" and isinstance(stored.get(f"{module}.weight"), StoredQuantized)
    return is_of_packed and isinstance(bias, StoredTensor) and bias.dtype in DTYPES and not bias.map().any()


def have_equal_values(one: Stored, other: Stored) -> bool:
    """True if two stored tensors [rows, columns] are equal; reads a few rows at a time. Packed ones are not."""
    if isinstance(one, StoredQuantized) or isinstance(other, StoredQuantized):
        return False
    if one.shape != other.shape or not {one.dtype, other.dtype} <= DTYPES.keys():
        return False
    ours, theirs = one.map(), other.map()
    starts = range(0, len(ours), ROWS_COMPARED_AT_ONCE)
    pieces = [slice(start, start + ROWS_COMPARED_AT_ONCE) for start in starts]
    return not any((ours[piece] != theirs[piece]).any() for piece in pieces)
