"""Packs the weights of small checkpoints as published formats do, each with the floating-point weights that it means.

GPTQ and AWQ are written here from their definitions; compressed-tensors by the library of that name.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

from tests.checkpoint.renamed import Tensors, edit_json, rewrite

LINEAR = re.compile(r"layers\.\d+\..*(_proj|_proj_\w+|experts\.\d+\.w\d)\.weight$")
GENERATOR = np.random.default_rng(5)
# (name, weight f32[out, in]) -> stored parts by the last piece of their names, and the weight that they mean
Pack = Callable[[str, np.ndarray], tuple[dict[str, np.ndarray | torch.Tensor], np.ndarray]]


@dataclass(frozen=True)
class Packed:
    """A packed checkpoint, and the same in floating point."""

    path: Path
    reference: Path
    weights: Mapping[str, np.ndarray]  # that the packed ones mean, by name


def pack_checkpoint(
    source: Path,
    folder: Path,
    pack: Pack,
    settings: Mapping[str, Any],
    skip: str = "never",
    linear: re.Pattern[str] = LINEAR,
) -> Packed:
    """Writes both checkpoints into a folder: packs weights of `linear` names, but for those that fit `skip`."""
    weights: dict[str, np.ndarray] = {}
    parts: Tensors = {}

    def packed(tensors: Tensors) -> Tensors:
        for name in [name for name in tensors if linear.search(name) and not re.search(skip, name)]:
            own, weights[name] = pack(name, tensors.pop(name).float().numpy())
            module = name.removesuffix("weight")
            for part, array in own.items():
                is_tensor = isinstance(array, torch.Tensor)
                parts[module + part] = array if is_tensor else torch.from_numpy(np.ascontiguousarray(array))
        return tensors | parts

    for name in ("packed", "reference"):
        shutil.copytree(source, folder / name)
    rewrite(folder / "packed", packed)
    edit_json(folder / "packed", quantization_config=dict(settings))
    rewrite(folder / "reference", lambda tensors: tensors | {n: torch.from_numpy(w) for n, w in weights.items()})
    return Packed(folder / "packed", folder / "reference", weights)


def rounded(w: np.ndarray, bits: int, size: int, *, is_symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns unsigned integers [out, in], scales f16[out, groups] and zero points [out, groups]."""
    groups = w.reshape(len(w), -1, size)
    most = 2**bits - 1
    if is_symmetric:
        scales = (np.abs(groups).max(-1) * 2 / most).astype(np.float16)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = ((high - low) / most).astype(np.float16)
        zeros = np.clip(np.round(-low / scales.astype(np.float32)), 0, most).astype(int)
        zeros[0] = 0, *zeros[0, 1:]  # which the first version of GPTQ stores as -1
    q = np.round(groups / scales.astype(np.float32)[..., None] + zeros[..., None])
    return np.clip(q, 0, most).reshape(w.shape).astype(int), scales, zeros


def meaning(q: np.ndarray, scales: np.ndarray, zeros: np.ndarray, of_inputs: np.ndarray) -> np.ndarray:
    """Returns (q - zero) * scale in float32, for the group of each input."""
    return (q - zeros[:, of_inputs]).astype(np.float32) * scales.astype(np.float32)[:, of_inputs]


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Returns i32[n bits / 32, ...] of unsigned integers [n, ...], the first in the lowest bits of a stream."""
    n, *rest = numbers.shape
    stream = (numbers[:, None] >> np.arange(bits).reshape(-1, *[1] * len(rest))) & 1
    packed = np.packbits(stream.reshape(n * bits, -1).astype(np.uint8), axis=0, bitorder="little")
    return np.ascontiguousarray(packed.T).view(np.int32).T.reshape(-1, *rest)


def gptq(
    source: Path,
    folder: Path,
    *,
    bits: int = 4,
    size: int = 32,
    is_symmetric: bool = True,
    has_order: bool = False,
    version: str = "gptq",
    **settings: Any,
) -> Packed:
    def pack(_: str, w: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        inputs = w.shape[1]
        own_size = inputs if size == -1 else size
        order = GENERATOR.permutation(inputs) if has_order else np.arange(inputs)
        of_inputs = np.empty(inputs, int)
        of_inputs[order] = np.arange(inputs) // own_size
        q, scales, zeros = rounded(w[:, order], bits, own_size, is_symmetric=is_symmetric)
        q = q[:, np.argsort(order)]
        stored = (zeros - (version == "gptq")) % 2**bits
        parts = {
            "qweight": words(q.T, bits),
            "qzeros": words(stored, bits).T,
            "scales": scales.T,
            "g_idx": of_inputs.astype(np.int32),
        }
        return parts, meaning(q, scales, zeros, of_inputs)

    stated = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": has_order, "sym": is_symmetric}
    return pack_checkpoint(source, folder, pack, stated | {"checkpoint_format": version} | settings)


def awq(source: Path, folder: Path, *, size: int = 32, skip: str = "never", **settings: Any) -> Packed:
    def in_words(q: np.ndarray) -> np.ndarray:
        outputs = q.reshape(len(q), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(outputs.reshape(len(q), -1).T, 4).T

    def pack(_: str, w: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        q, scales, zeros = rounded(w, 4, size, is_symmetric=False)
        parts = {"qweight": in_words(q.T), "qzeros": in_words(zeros.T), "scales": scales.T}
        return parts, meaning(q, scales, zeros, np.arange(w.shape[1]) // size)

    stated = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    return pack_checkpoint(source, folder, pack, stated | settings, skip)


def compressed(
    source: Path,
    folder: Path,
    *,
    bits: int = 4,
    size: int | None = 32,
    is_symmetric: bool = True,
    is_packed: bool = True,
    skip: str = "never",
    scale_type: torch.dtype = torch.float32,
    activations: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Packed:
    """Integers; `activations` are the arguments of those that a scheme rounds to 8 bits."""
    has_range = activations is not None and not activations["dynamic"]

    def pack(_: str, w: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        own_size, middle = size or w.shape[1], 2 ** (bits - 1)
        q, scales, zeros = rounded(w, bits, own_size, is_symmetric=is_symmetric)
        stored = torch.from_numpy(scales).to(scale_type)
        values, points = (torch.from_numpy((a - middle).astype(np.int8)) for a in (q, zeros))
        parts: dict[str, Any] = {"weight_scale": stored}
        if is_packed:
            parts |= {"weight_packed": pack_to_int32(values, bits), "weight_shape": torch.tensor(w.shape)}
        else:
            parts["weight"] = values
        if not is_symmetric:
            parts["weight_zero_point"] = pack_to_int32(points, bits, packed_dim=0) if is_packed else points
        if has_range:
            parts |= {"input_scale": torch.tensor([0.03]), "input_zero_point": torch.tensor([-9], dtype=torch.int8)}
        return parts, meaning(q, stored.float().numpy(), zeros, np.arange(w.shape[1]) // own_size)

    weights = {"num_bits": bits, "type": "int", "symmetric": is_symmetric, "dynamic": False}
    weights |= {"strategy": "channel"} if size is None else {"strategy": "group", "group_size": size}
    stated = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if is_packed else "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
        "ignore": ["lm_head"],
    }
    return pack_checkpoint(source, folder, pack, stated | settings, skip)


def compressed_w8a8(source: Path, folder: Path, *, is_dynamic: bool = True, is_symmetric: bool = True) -> Packed:
    activations = {"num_bits": 8, "type": "int", "symmetric": is_symmetric, "dynamic": is_dynamic}
    activations["strategy"] = "token" if is_dynamic else "tensor"
    return compressed(source, folder, bits=8, size=None, is_packed=False, activations=activations)


def rounded_float8(w: np.ndarray, rows: int, size: int, scale_type: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Returns f8_e4m3[out, in], scales of blocks of `rows` outputs and `size` inputs, and what they mean."""
    outputs, inputs = w.shape
    whole = torch.from_numpy(w)
    padded = torch.nn.functional.pad(whole, (0, -inputs % size, 0, -outputs % rows))
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // size, size)
    scales = (blocks.abs().amax((1, 3)) / 448).to(scale_type)
    each = scales.float().repeat_interleave(rows, 0).repeat_interleave(size, 1)[:outputs, :inputs]
    values = (whole / each).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, scales, values.float() * each


def fp8(source: Path, folder: Path, *, block: int | None = 32, scale_type=torch.float32, **settings: Any) -> Packed:
    def pack(_: str, w: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        rows, size = (block, block) if block else w.shape
        values, scales, meant = rounded_float8(w, rows, size, scale_type)
        return {"weight": values, "weight_scale_inv": scales if block else scales.reshape(())}, meant.numpy()

    stated = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    stated |= {"weight_block_size": [block, block]} if block else {}
    return pack_checkpoint(source, folder, pack, stated | settings)


def compressed_fp8(source: Path, folder: Path, *, strategy: str, **settings: Any) -> Packed:
    def pack(_: str, w: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        rows, size = {"tensor": w.shape, "channel": (1, w.shape[1]), "block": (32, 32)}[strategy]
        values, scales, meant = rounded_float8(w, rows, size, torch.bfloat16)
        parts = {"weight": values, "weight_scale": scales.reshape(1) if strategy == "tensor" else scales}
        if strategy == "tensor":
            parts["input_scale"] = torch.tensor([0.05])
        return parts, meant.numpy()

    weights: dict[str, Any] = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
    }
    weights |= {"block_structure": [32, 32]} if strategy == "block" else {}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "type": "float"}}
    stated = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": scheme}}
    return pack_checkpoint(source, folder, pack, stated | settings)


def compressed_floats(source: Path, folder: Path, *, kind: str, **settings: Any) -> Packed:
    """NVFP4, MXFP4 or MXFP8, by the compressors of the library."""
    scheme = QuantizationScheme(targets=["Linear"], **copy.deepcopy(PRESET_SCHEMES[kind]))
    assert scheme.weights is not None
    arguments: Any = scheme.weights
    form = infer_module_format(torch.nn.Linear, scheme).value
    compressor = BaseCompressor.get_value_from_registry(form)

    def pack(_: str, w: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        state: dict[str, Any] = {"weight": torch.from_numpy(w)}
        groups = state["weight"].reshape(len(w), -1, arguments.group_size)
        if kind.startswith("NVFP4"):
            ends: Any = [end.reshape(1) for end in state["weight"].aminmax()]
            state["weight_global_scale"] = generate_gparam(*ends)
        scale = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments, state.get("weight_global_scale"))[0]
        state["weight_scale"] = scale
        parts: dict[str, Any] = dict(compressor.compress(state, scheme))
        stored = parts["weight_scale"]
        wide = torch.exp2(stored.float() - 127) if stored.dtype == torch.uint8 else stored.float()
        if "weight_global_scale" in parts:
            wide = wide / parts["weight_global_scale"]
        if "weight_packed" in parts:
            numbers = unpack_fp4_from_uint8(parts["weight_packed"], *w.shape, dtype=torch.float32)
        else:
            numbers = parts["weight"].float()
        meant = numbers * wide.repeat_interleave(arguments.group_size, 1)
        assert np.abs(meant.numpy() - w).max() <= np.abs(w).max() / 4
        return parts, meant.numpy()

    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=form,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head"],
    )
    return pack_checkpoint(source, folder, pack, json.loads(config.model_dump_json()) | settings)


def mxfp4(source: Path, folder: Path, **settings: Any) -> Packed:
    """The experts of GPT-OSS, which are [E, in, out] in floating point, and [E, out, in] packed."""

    def pack(_: str, w: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        blocks = np.swapaxes(w, 1, 2).reshape(*np.swapaxes(w, 1, 2).shape[:2], -1, 32)
        exponents = np.floor(np.log2(np.abs(blocks).max(-1))).astype(int) - 2
        exponents[0, 0, 0] = -127  # the least there is
        numbers = (
            (blocks / np.exp2(exponents)[..., None].astype(np.float32)).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
        )
        codes = numbers.view(np.uint8)
        meant = numbers.astype(np.float32) * np.exp2(exponents.astype(np.float32))[..., None]
        parts = {"_blocks": codes[..., 0::2] | (codes[..., 1::2] << 4), "_scales": (exponents + 127).astype(np.uint8)}
        return parts, np.swapaxes(meant.reshape(*meant.shape[:2], -1), 1, 2)

    stated = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return pack_checkpoint(source, folder, pack, stated | settings, linear=re.compile(r"experts\.\w+_proj$"))


WRITERS: Mapping[str, Callable[..., Packed]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed": compressed,
    "fp8": fp8,
    "compressed fp8": compressed_fp8,
    "compressed w8a8": compressed_w8a8,
    "compressed floats": compressed_floats,
    "mxfp4": mxfp4,
}


def settings_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())["quantization_config"]
