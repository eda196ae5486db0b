"""Quantized copies of checkpoints, in the format of compressed-tensors, which vLLM and transformers read too.

Weights are rounded to the nearest number of their grid, file by file and tensor by tensor. Those of products in layers
are packed; embeddings, norms, routers and the unembedding stay as they are, and so do experts stored in one tensor.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import jax
import ml_dtypes
import numpy as np
from tqdm import tqdm

from jaxinfer.checkpoint.assembly import Assembly
from jaxinfer.checkpoint.huggingface import (
    INDEX_FILE,
    read_config,
    read_headers,
    read_json,
    read_settings,
    require_fitting_tensors,
    resolve_checkpoint,
)
from jaxinfer.checkpoint.safetensors_file import DTYPES, FLOAT8, INTEGERS, LENGTH_BYTES, StoredTensor, read_header
from jaxinfer.quantization.quantized_array import INT4_GROUP_SIZE, LARGEST
from jaxinfer.validation import require

MIN_GROUP = 16
COPIED = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "tokenizer*")
FLOAT8_MAX = 448.0
TYPE_NAMES = {dtype: name for name, dtype in (DTYPES | INTEGERS | FLOAT8).items()}


class Scheme(NamedTuple):
    """How weights are rounded: integers of `bits`, or FP8, with a scale per group of inputs or per channel."""

    bits: int
    is_float: bool = False
    group_size: int | None = None  # None: a scale per channel


SCHEMES: Mapping[str, Scheme] = {
    "int4": Scheme(4, group_size=INT4_GROUP_SIZE),
    "int8": Scheme(8),
    "fp8": Scheme(8, is_float=True),
}


class _Entry(NamedTuple):
    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def write_quantized(source: str | Path, target: str | Path, scheme: str, *, show_progress: bool = False) -> Path:
    """Writes a copy of a checkpoint in floating point, a folder or Hub id, whose weights are quantized.

    `scheme` is a name of SCHEMES. Each file appears when it is complete; a call that was interrupted goes on with the
    next file if it is made again. Raises ValueError for a checkpoint that cannot be read or is packed already, and if
    `target` has other files.
    """
    require(isinstance(scheme, str) and scheme in SCHEMES, "scheme", scheme, f"one of {', '.join(SCHEMES)}")
    path, target = resolve_checkpoint(source), Path(target)
    _, settings = read_settings(path)
    if settings is not None:
        method = settings["quant_method"]
        raise ValueError(f"{path} is packed already, by {method}; give a checkpoint in floating point")
    if path.is_file():
        raise ValueError(f"{path} is one file; give a folder or Hub id with safetensors")
    if target.resolve() == path.resolve():
        raise ValueError(f"{target} is the checkpoint itself; give another folder for its copy")
    groups = _groups(path, SCHEMES[scheme])
    target.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    headers = read_headers(path)
    with tqdm(total=len(headers), desc="quantizing", unit="tensor", disable=not show_progress) as bar:
        for file in sorted({tensor.path for tensor in headers.values()}):
            own = {name: tensor for name, tensor in headers.items() if tensor.path == file}
            entries = _entries(own, groups, SCHEMES[scheme])
            if not _is_written(target / file.name, entries):
                _write(target / file.name, entries)
            names |= dict.fromkeys(entries, file.name)
            bar.update(len(own))
    if (path / INDEX_FILE).is_file():
        (target / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": names}, indent=1))
    for file in {file for pattern in COPIED for file in path.glob(pattern)} - {path / INDEX_FILE, path / "config.json"}:
        if file.is_file():
            shutil.copyfile(file, target / file.name)
    modules = [name.removesuffix(".weight") for name, tensor in headers.items() if len(tensor.shape) == 2]
    ignored = [module for module in modules if f"{module}.weight" not in groups]
    stated = read_json(path / "config.json") | {"quantization_config": _settings(groups, ignored, SCHEMES[scheme])}
    # Last, for without it the folder is no checkpoint.
    (target / "config.json").write_text(json.dumps(stated, indent=1))
    return target


def _groups(path: Path, scheme: Scheme) -> dict[str, int]:
    """Returns the inputs per scale of each weight that is packed, by its stored name."""
    config = read_config(path)
    plan, stored = require_fitting_tensors(path, config.regrouped((1,) * config.num_layers))
    uses: dict[str, list[Assembly]] = {}
    for assembly in jax.tree.leaves(plan, is_leaf=lambda node: isinstance(node, Assembly)):
        for name in assembly.names:
            uses.setdefault(name, []).append(assembly)

    def is_packed(name: str) -> bool:  # not the unembedding, for no layer makes up for its errors
        are_products = all(use.is_packable and not use.spec.is_of_vocabulary for use in uses[name])
        return are_products and len(stored[name].shape) == 2

    places = {_place(stored[name]) for name in uses if is_packed(name)}
    groups = {}
    for name, tensor in read_headers(path).items():
        inputs = tensor.shape[-1] if tensor.shape else 0
        size = inputs if scheme.group_size is None else math.gcd(inputs, scheme.group_size)
        if _place(tensor) in places and name.endswith(".weight") and size >= MIN_GROUP:
            groups[name] = size
    return groups


def _place(tensor: Any) -> tuple[Path, int]:
    # Names may lack a prefix in the file.
    return tensor.path, tensor.offset


def _entries(tensors: Mapping[str, StoredTensor], groups: Mapping[str, int], scheme: Scheme) -> dict[str, _Entry]:
    """Returns what a file of the copy has, by name, and how to read it."""

    # A weight and its scales are written one after the other.
    @functools.lru_cache(maxsize=1)
    def rounded(name: str) -> tuple[np.ndarray, np.ndarray]:
        return _round(tensors[name].map(), groups[name], scheme)

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
            words = -(-inputs * scheme.bits // 32)
            read = functools.partial(lambda name: _words(rounded(name)[0], scheme.bits), name)
            entries[f"{module}weight_packed"] = _Entry(np.dtype(np.int32), (outputs, words), read)
            shape = np.array(tensor.shape, np.int64)
            entries[f"{module}weight_shape"] = _Entry(shape.dtype, (2,), lambda shape=shape: shape)
        entries[f"{module}weight_scale"] = _Entry(dtype, of_scales, lambda name=name: rounded(name)[1])
    return entries


def _round(w: np.ndarray, size: int, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers i8 or f8[out, in] nearest to weights [out, in], and scales [out, groups] in their type."""
    groups = w.astype(np.float32).reshape(len(w), -1, size)
    largest = FLOAT8_MAX if scheme.is_float else LARGEST[scheme.bits]
    scales = (np.abs(groups).max(-1) / np.float32(largest)).astype(w.dtype)
    # A group of zeros has any scale, as has one whose scale is too small for the type.
    scales = np.where(scales.astype(np.float32) > 0, scales, np.ones((), w.dtype))
    numbers = np.clip(groups / scales.astype(np.float32)[..., None], -largest, largest)
    numbers = numbers.astype(ml_dtypes.float8_e4m3fn) if scheme.is_float else np.rint(numbers).astype(np.int8)
    return numbers.reshape(w.shape), scales


def _words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Returns i32[out, in bits / 32] of integers i8[out, in], shifted to begin at 0, the first in the lowest bits."""
    per_word = 32 // bits
    padded = np.pad(numbers.astype(np.int16) + 2 ** (bits - 1), ((0, 0), (0, -numbers.shape[1] % per_word)))
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    parts = padded.astype(np.uint32).reshape(len(numbers), -1, per_word) << shifts
    return np.bitwise_or.reduce(parts, axis=-1).view(np.int32)


def _settings(groups: Mapping[str, int], ignored: Iterable[str], scheme: Scheme) -> dict[str, Any]:
    """Returns the quantization_config: one group, or by the names of modules if they differ in the size of groups."""
    by_size: dict[int, list[str]] = {}
    for name, size in groups.items():
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


def _is_written(path: Path, entries: Mapping[str, _Entry]) -> bool:
    """True if an earlier call has written this file; raises ValueError if it is another one."""
    if not path.exists():
        return False
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in read_header(path).items()}
    if found != {name: (TYPE_NAMES[entry.dtype], entry.shape) for name, entry in entries.items()}:
        raise ValueError(f"{path} exists and is no part of this copy; remove it, or give another folder")
    return True


def _write(path: Path, entries: Mapping[str, _Entry]) -> None:
    """Writes a safetensors file tensor by tensor, under another name until it is complete."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.dtype.itemsize * math.prod(entry.shape)
        header[name] = {"dtype": TYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    aside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with aside.open("wb") as file:
            file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
            for entry in entries.values():
                file.write(np.ascontiguousarray(entry.read()).view(np.uint8).data)
        aside.replace(path)
    except BaseException:  # also on an interrupt
        aside.unlink(missing_ok=True)
        raise
