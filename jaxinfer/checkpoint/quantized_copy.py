"""Quantized copies of checkpoints, in the format of compressed-tensors, which vLLM and transformers read too.

Weights are rounded to the nearest number of their grid, file by file and tensor by tensor. With calibration texts they
are rounded by GPTQ instead, layer by layer, and then written file by file. Integers of 2 and 3 bits need these texts.
vLLM from June 2026 reads compressed-tensors at all these sizes, if integers have no zero points, and no longer reads
the format of GPTQ with fewer than 4 bits (pull requests 46389 and 38288). Weights of products in layers are packed;
embeddings, norms, routers and the unembedding stay as they are, and so do experts stored in one tensor.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxinfer.atomic_file import replacing
from jaxinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint, read_tensors
from jaxinfer.checkpoint.huggingface import INDEX_FILE, read_json
from jaxinfer.checkpoint.making.assemblies import Assembly, assemblies_of
from jaxinfer.checkpoint.safetensors_file import (
    DTYPES,
    FLOAT8,
    INTEGERS,
    LENGTH_BYTES,
    StoredTensor,
    read_header,
    read_metadata,
)
from jaxinfer.checkpoint.stored import Grid, StoredQuantized
from jaxinfer.display.progress import Bar, is_shown
from jaxinfer.model.calibration import embed_texts, input_moments, run_layer
from jaxinfer.model.components.observed import Moments
from jaxinfer.model.config import ModelConfig
from jaxinfer.quantization.gptq import Feedback, plan_feedback
from jaxinfer.quantization.schemes import SCHEMES, Rounded, Scheme, round_by_moments, round_to_nearest, words
from jaxinfer.validation import require

logger = logging.getLogger(__name__)

MIN_GROUP = 16
MAX_CALIBRATION_TOKENS = 2**20  # in all: their states take 16 GB in float32 if one has 4096 numbers
TOKENS_AT_ONCE = 4096  # of calibration texts in a layer
CALIBRATED = ".calibrated"  # the folder of rounded layers in an unfinished copy, and of the model's own texts
COPIED = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "tokenizer*")
EXPERT = re.compile(r"\.experts\.\d+\.")  # in the name of a weight
TYPE_NAMES = {dtype: name for name, dtype in (DTYPES | INTEGERS | FLOAT8).items()}


class _Entry(NamedTuple):
    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def require_copyable(source: str | Path | Checkpoint, target: str | Path, scheme: str) -> tuple[Checkpoint, Path]:
    """Returns a checkpoint, and the folder of its copy; raises ValueError for a checkpoint that cannot be copied."""
    require(isinstance(scheme, str) and scheme in SCHEMES, "scheme", scheme, f"one of {', '.join(SCHEMES)}")
    checkpoint, target = open_checkpoint(source), Path(target)
    path = checkpoint.path
    if checkpoint.packing is not None:
        method = checkpoint.packing["quant_method"]
        raise ValueError(f"{path} is packed already, by {method}; give a checkpoint in floating point")
    if path.is_file():
        raise ValueError(f"{path} is one file; give a folder or Hub id with safetensors")
    if target.resolve() == path.resolve():
        raise ValueError(f"{target} is the checkpoint itself; give another folder for its copy")
    return checkpoint, target


def write_quantized(
    source: str | Path | Checkpoint,
    target: str | Path,
    scheme: str,
    *,
    calibration: np.ndarray | None = None,
    show_progress: bool | None = None,
) -> Path:
    """Writes a copy of a checkpoint in floating point, open or a folder or Hub id, whose weights are quantized.

    `scheme` is a name of `jaxinfer.quantization.schemes.SCHEMES`. With `calibration`, token ids i32[B, T] of texts,
    weights are rounded by GPTQ (see `jaxinfer.quantization.gptq`) for the inputs that they get from these texts in the
    layers rounded so far. "int3" and "int2" need it.

    Each file and each calibrated layer appears when it is complete; a call that was interrupted goes on with the next
    one if it is made again. Raises ValueError for a checkpoint that cannot be read or is packed already, and for a
    scheme without the texts that it needs. So it does if `target` has other files, or a finished part with another
    calibration.
    """
    show_progress = is_shown(show_progress)
    checkpoint, target = require_copyable(source, target, scheme)
    path, own_scheme = checkpoint.path, SCHEMES[scheme]
    if own_scheme.needs_texts and calibration is None:
        raise ValueError(
            f"scheme={scheme!r} needs calibration texts, for a model whose numbers of {own_scheme.bits} bits are only"
            " rounded is of no use; give calibration (--method gptq), or another scheme"
        )
    groups = _groups(checkpoint, own_scheme)
    metadata = {"format": "pt", "source": checkpoint.digest()}
    if calibration is not None:
        _check_calibration(calibration, checkpoint.config)
        metadata["calibration"] = hashlib.sha256(
            calibration.astype("<i4").tobytes() + f"{calibration.shape} {scheme}".encode()
        ).hexdigest()
    target.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    headers = checkpoint.headers
    calibrated: dict[str, StoredTensor] = {}

    def rounded(name: str) -> Rounded:
        if f"{name}.numbers" in calibrated:
            return _read_rounded(calibrated, name)
        return round_to_nearest(headers[name].map(), groups[name], own_scheme)

    files = sorted({tensor.path for tensor in headers.values()})
    by_file = {file: {name: tensor for name, tensor in headers.items() if tensor.path == file} for file in files}
    entries = {file: _entries(own, groups, own_scheme, rounded) for file, own in by_file.items()}
    unwritten = [file for file in files if not _is_written(target / file.name, entries[file], metadata)]
    if calibration is not None and unwritten:
        calibrated |= _calibrate(
            checkpoint, target / CALIBRATED, groups, own_scheme, calibration, metadata, show_progress
        )
    with Bar(len(headers), unit="tensor", description="quantizing", show=show_progress) as bar:
        for file in files:
            if file in unwritten:
                _write(target / file.name, entries[file], metadata)
            names |= dict.fromkeys(entries[file], file.name)
            bar.update(len(by_file[file]))
    if (path / INDEX_FILE).is_file():
        _write_json(target / INDEX_FILE, {"metadata": {}, "weight_map": names})
    for file in {file for pattern in COPIED for file in path.glob(pattern)} - {path / INDEX_FILE, path / "config.json"}:
        if file.is_file():
            shutil.copyfile(file, target / file.name)
    modules = [name.removesuffix(".weight") for name, tensor in headers.items() if len(tensor.shape) == 2]
    # Of tied weights no file has an lm_head, which transformers would take for a packed one.
    ignored = {"lm_head", *(module for module in modules if f"{module}.weight" not in groups)}
    stated = read_json(path / "config.json") | {"quantization_config": _settings(groups, ignored, own_scheme)}
    # Last, for without it the folder is no checkpoint.
    _write_json(target / "config.json", stated)
    # The texts that a model has written itself stay, so that they need not be written again to compare them.
    for file in (target / CALIBRATED).glob("*.safetensors"):
        file.unlink()
    with contextlib.suppress(OSError):
        (target / CALIBRATED).rmdir()
    return target


def _check_calibration(texts: Any, config: ModelConfig) -> None:
    are_ids = isinstance(texts, np.ndarray) and texts.ndim == 2 and np.issubdtype(texts.dtype, np.integer)
    require(are_ids, "calibration", texts, "an array of token ids i32[B, T]")
    fits = 0 < texts.size <= MAX_CALIBRATION_TOKENS and texts.shape[1] <= config.max_position
    limit = f"at most {MAX_CALIBRATION_TOKENS:,} tokens, at least one, in texts of up to {config.max_position}"
    require(fits, "calibration", f"i32{list(texts.shape)}", limit)
    bounds = int(texts.min()), int(texts.max())
    are_known = bounds[0] >= 0 and bounds[1] < config.vocab_size
    require(are_known, "calibration", bounds, f"ids of the {config.vocab_size} tokens of the vocabulary")


def _calibrate(
    checkpoint: Checkpoint,
    folder: Path,
    groups: Mapping[str, int],
    scheme: Scheme,
    texts: np.ndarray,
    metadata: Mapping[str, str],
    show_progress: bool,
) -> dict[str, StoredTensor]:
    """Rounds the layers one after another, each into a file of the folder, and returns what these files have.

    The inputs of a layer are those of texts i32[B, T] in the model whose earlier layers are rounded.
    """
    config, headers = checkpoint.config, checkpoint.headers
    config = config.regrouped((1,) * config.num_layers)
    plan, stored = checkpoint.plan(config)
    by_place = {_place(tensor): name for name, tensor in headers.items()}
    num_rows = max(1, TOKENS_AT_ONCE // texts.shape[1])
    parts = [jnp.asarray(texts[i : i + num_rows], jnp.int32) for i in range(0, len(texts), num_rows)]
    outside = read_tensors(replace(plan, layers=(), unembedding=None), stored, np.float32)
    activations = [embed_texts(outside, part, config=config) for part in parts]
    del outside  # as large as some layers
    folder.mkdir(exist_ok=True)
    found: dict[str, StoredTensor] = {}
    bar = Bar(config.num_layers, unit="layer", description="calibrating", show=show_progress)
    for index in bar.along(range(config.num_layers)):
        layer = plan.layers[index]
        assemblies = assemblies_of(layer)
        names = {i: [by_place[_place(stored[name])] for name in making.names] for i, making in enumerate(assemblies)}
        observed = {i: own for i, own in names.items() if groups.keys() >= {*own}}
        rounding = _LayerRounding(headers, groups, scheme)
        entries = rounding.entries(dict.fromkeys(name for own in observed.values() for name in own))
        file = folder / f"layer-{index}.safetensors"
        if not _is_written(file, entries, metadata):
            leading = tuple((i, assemblies[i].num_stacked) for i in observed)
            params = read_tensors(layer, stored, np.float32)
            sums: Any = None
            for states in activations:
                moments = input_moments(params, states, leading, config=config, index=index)
                sums = moments if sums is None else jax.tree.map(jnp.add, sums, moments)
            del params
            for i, own in observed.items():
                rounding.add(own, jax.tree.map(np.asarray, sums[i]))
            _write(file, entries, metadata)
            rounding.log_unseen(index)
        found |= read_header(file)
        if index + 1 < config.num_layers:
            packed = {
                name: _as_stored(found, by_place[_place(stored[name])])
                for i in observed
                for name in assemblies[i].names
            }
            params = read_tensors(layer, stored | packed, np.float32)
            activations = [run_layer(params, states, config=config, index=index) for states in activations]
    return found


class _LayerRounding:
    """The rounding of one layer's weights, when its file is written."""

    def __init__(self, tensors: Mapping[str, StoredTensor], groups: Mapping[str, int], scheme: Scheme) -> None:
        self._tensors, self._groups, self._scheme = tensors, groups, scheme
        self._moments: dict[str, Moments] = {}
        self._feedbacks: dict[bytes, Feedback] = {}  # weights with the same inputs share one
        self._unseen: list[str] = []
        self._rounded = functools.lru_cache(maxsize=1)(self._round)

    def entries(self, names: Iterable[str]) -> dict[str, _Entry]:
        """Returns the numbers and the scales of weights, by which `_read_rounded` finds them."""
        entries = {}
        for name in names:
            tensor, size = self._tensors[name], self._groups[name]
            read = functools.partial(lambda name, part: self._rounded(name)[part], name)
            dtype = ml_dtypes.float8_e4m3fn if self._scheme.is_float else np.int8
            entries[f"{name}.numbers"] = _Entry(np.dtype(dtype), tensor.shape, functools.partial(read, 0))
            of_scales = (tensor.shape[0], tensor.shape[1] // size)
            entries[f"{name}.scales"] = _Entry(DTYPES[tensor.dtype], of_scales, functools.partial(read, 1))
        return entries

    def add(self, names: list[str], moments: Moments) -> None:
        """Takes the moments of the inputs of these weights, one after another on the leading axes."""
        size = moments.products.shape[-1]
        for name, products, count in zip(
            names, moments.products.reshape(-1, size, size), moments.num_inputs.reshape(-1), strict=True
        ):
            self._moments[name] = Moments(products, count)

    def log_unseen(self, index: int) -> None:
        """Logs the weights whose inputs were too few to calibrate by."""
        if self._unseen:
            logger.warning(
                "layer %d: %d weights got fewer tokens than a scale has inputs, so they are rounded without"
                " calibration; give more text: %s",
                *(index, len(self._unseen), ", ".join(self._unseen)),
            )

    def _round(self, name: str) -> Rounded:
        w, size, moments = self._tensors[name].map(), self._groups[name], self._moments[name]
        products = moments.products
        if moments.num_inputs < size or not np.trace(products):
            self._unseen.append(name)
            products = np.eye(w.shape[1], dtype=np.float32)  # all inputs count as much, each alone
        key = hashlib.sha256(products.tobytes()).digest()
        if key not in self._feedbacks:
            self._feedbacks[key] = plan_feedback(products)
        return round_by_moments(w, size, self._scheme, self._feedbacks[key])


def _read_rounded(found: Mapping[str, StoredTensor], name: str) -> Rounded:
    return found[f"{name}.numbers"].map(), found[f"{name}.scales"].map()


def _as_stored(found: Mapping[str, StoredTensor], name: str) -> StoredQuantized:
    """Returns a rounded weight as one of a packed checkpoint."""
    numbers, scales = found[f"{name}.numbers"], found[f"{name}.scales"]
    grid = Grid("int8" if numbers.dtype == "I8" else "float8_e4m3fn", scales.shape[1], scales.dtype, False, False)
    return StoredQuantized(numbers.shape, grid, lambda rows: numbers.map()[rows], scales.map)


def _groups(checkpoint: Checkpoint, scheme: Scheme) -> dict[str, int]:
    """Returns the inputs per scale of each weight that is packed, by its stored name."""
    config = checkpoint.config
    plan, stored = checkpoint.plan(config.regrouped((1,) * config.num_layers))
    uses: dict[str, list[Assembly]] = {}
    for assembly in assemblies_of(plan):
        for name in assembly.names:
            uses.setdefault(name, []).append(assembly)

    def is_packed(name: str) -> bool:  # not the unembedding, for no layer makes up for its errors
        are_products = all(use.is_packable and use.spec.num_inputs and use.unfold is None for use in uses[name])
        are_products = are_products and not any(use.spec.is_of_vocabulary for use in uses[name])
        return are_products and len(stored[name].shape) == 2

    places = {_place(stored[name]) for name in uses if is_packed(name)}
    groups = {}
    for name, tensor in checkpoint.headers.items():
        inputs = tensor.shape[-1] if tensor.shape else 0
        size = inputs if scheme.group_size is None else math.gcd(inputs, scheme.group_size)
        if _place(tensor) in places and name.endswith(".weight") and size >= MIN_GROUP:
            groups[name] = size
    if scheme.group_size is None:
        return groups
    # Programs that stack the experts of a layer read one size for all of them.
    of_experts = [name for name in groups if EXPERT.search(name)]
    return groups | dict.fromkeys(of_experts, math.gcd(*(groups[name] for name in of_experts)))


def _place(tensor: Any) -> tuple[Path, int]:
    # Names may lack a prefix in the file.
    return tensor.path, tensor.offset


def _entries(
    tensors: Mapping[str, StoredTensor],
    groups: Mapping[str, int],
    scheme: Scheme,
    round_tensor: Callable[[str], Rounded],
) -> dict[str, _Entry]:
    """Returns what a file of the copy has, by name, and how to read it."""
    # A weight and its scales are written one after the other.
    rounded = functools.lru_cache(maxsize=1)(round_tensor)
    entries: dict[str, _Entry] = {}
    for name, tensor in tensors.items():
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            types = ", ".join(DTYPES)
            raise ValueError(f"{name} in {tensor.path} is {tensor.dtype}, not one of {types}; use another checkpoint")
        if name not in groups:
            entries[name] = _Entry(dtype, tensor.shape, tensor.map)
            continue
        outputs, inputs = tensor.shape
        of_scales, module = (outputs, inputs // groups[name]), name.removesuffix("weight")
        if scheme.is_float:
            float8 = np.dtype(ml_dtypes.float8_e4m3fn)
            entries[name] = _Entry(float8, tensor.shape, lambda name=name: rounded(name)[0])
        else:
            num_words = -(-inputs * scheme.bits // 32)
            read = functools.partial(lambda name: words(rounded(name)[0], scheme.bits), name)
            entries[f"{module}weight_packed"] = _Entry(np.dtype(np.int32), (outputs, num_words), read)
            shape = np.array(tensor.shape, np.int64)
            entries[f"{module}weight_shape"] = _Entry(shape.dtype, (2,), lambda shape=shape: shape)
        entries[f"{module}weight_scale"] = _Entry(dtype, of_scales, lambda name=name: rounded(name)[1])
    return entries


def _settings(groups: Mapping[str, int], ignored: Iterable[str], scheme: Scheme) -> dict[str, Any]:
    """Returns the quantization_config: one group, or by the names of modules if they differ in the size of groups.

    transformers gives all experts the scheme of the first group that has names, so theirs comes first.
    """
    by_size: dict[int, list[str]] = {}
    for name, size in sorted(groups.items(), key=lambda pair: not EXPERT.search(pair[0])):
        by_size.setdefault(size if scheme.group_size else 0, []).append(name.removesuffix(".weight"))

    def group(size: int, modules: list[str]) -> dict[str, Any]:
        sizes = {"strategy": "group", "group_size": size} if scheme.group_size else {"strategy": "channel"}
        weights = {"num_bits": scheme.bits, "type": "float" if scheme.is_float else "int", "symmetric": True, **sizes}
        targets = ["Linear"] if len(by_size) == 1 else modules
        return {"targets": targets, "weights": weights | {"dynamic": False}, "input_activations": None}

    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if scheme.is_float else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group(*each) for i, each in enumerate(by_size.items())},
        "ignore": sorted(ignored),
    }


def _is_written(path: Path, entries: Mapping[str, _Entry], metadata: Mapping[str, str]) -> bool:
    """True if an earlier call has written this file; raises ValueError if it is another one."""
    if not path.exists():
        return False
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in read_header(path).items()}
    if found != {name: (TYPE_NAMES[entry.dtype], entry.shape) for name, entry in entries.items()}:
        raise ValueError(f"{path} exists and is no part of this copy; remove it, or give another folder")
    if read_metadata(path) != metadata:
        raise ValueError(
            f"{path} exists, and was rounded for other calibration texts, for none, or from another checkpoint; give"
            " the same, or another folder"
        )
    return True


def _write(path: Path, entries: Mapping[str, _Entry], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file tensor by tensor, under another name until it is complete."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.dtype.itemsize * math.prod(entry.shape)
        header[name] = {"dtype": TYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for entry in entries.values():
            file.write(np.ascontiguousarray(entry.read()).view(np.uint8).data)


def _write_json(path: Path, value: Any) -> None:
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1).encode())
