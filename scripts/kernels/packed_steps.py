"""Compiles decode steps of Llama 3 8B from checkpoints as they are published in packed formats, and prints a table.

    python scripts/kernels/packed_steps.py [--devices H200 v6e] [--formats AWQ] [--rows 1 32]

Needs the extras `aot` and `test` (for the package gguf). A checkpoint's files have headers and no numbers, for a step's
shapes follow from headers alone. The table has for each step:

* the bytes of its parameters, of which it reads all but rows of the embedding for each token,
* the bytes of temporaries; a weight that is written in floating point takes a hundred megabytes of them,
* on TPU the operations that write a copy of a weight,
* the seconds of processor time to lower and compile.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.kernels import compile_gpu, compile_matrix
from scripts.kernels.compilers import Case, compile_in_process, print_figures, step_case
from scripts.kernels.figures import compile_on_gpu, compile_on_tpu

DEVICES = ("L4", "A100", "H200", "v5e", "v6e")
NUM_LAYERS = 32
# Weights of a layer by name, as [outputs, inputs].
LAYER = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}
TABLE = (128256, 4096)
Parts = dict[str, tuple[str, tuple[int, ...]]]  # by name, the type and the shape of a stored tensor


def awq_parts(outputs: int, inputs: int) -> Parts:
    groups = inputs // 128
    return {
        "qweight": ("I32", (inputs, outputs // 8)),
        "qzeros": ("I32", (groups, outputs // 8)),
        "scales": ("F16", (groups, outputs)),
    }


def fp8_parts(outputs: int, inputs: int) -> Parts:
    return {"weight": ("F8_E4M3", (outputs, inputs)), "weight_scale": ("BF16", (outputs, 1))}


def fp8_block_parts(outputs: int, inputs: int) -> Parts:
    return {"weight": ("F8_E4M3", (outputs, inputs)), "weight_scale_inv": ("F32", (outputs // 128, inputs // 128))}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**FP8_NUMBERS, "strategy": "channel", "dynamic": False},
            "input_activations": {**FP8_NUMBERS, "strategy": "token", "dynamic": True},
        }
    },
}
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
SAFETENSORS = {"AWQ": (AWQ, awq_parts), "FP8": (FP8, fp8_parts), "FP8-blocks": (FP8_BLOCKS, fp8_block_parts)}
FORMATS = (*SAFETENSORS, "Q4_K_M")


def write_safetensors(folder: Path, name: str) -> Path:
    """Writes a checkpoint's config.json, and a file whose numbers take no room on disk."""
    from jaxinfer.checkpoint.published.llama_qwen_gemma import LLAMA_8B

    settings, parts_of = SAFETENSORS[name]
    (folder / "config.json").write_text(json.dumps({**LLAMA_8B, "quantization_config": settings}))
    tensors: Parts = {
        "model.embed_tokens.weight": ("BF16", TABLE),
        "lm_head.weight": ("BF16", TABLE),
        "model.norm.weight": ("BF16", TABLE[1:]),
    }
    for i in range(NUM_LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = ("BF16", TABLE[1:])
        for module, shape in LAYER.items():
            tensors |= {f"model.layers.{i}.{module}.{part}": own for part, own in parts_of(*shape).items()}
    header, end = {}, 0
    for tensor, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * {"I32": 4, "F32": 4, "F8_E4M3": 1}.get(dtype, 2)
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    return folder


def is_finer(layer: int) -> bool:
    """True for the layers whose values and down projections llama.cpp stores in more bits.

    They are an eighth at each end, and every third of the others.
    """
    eighth = NUM_LAYERS // 8
    return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


def write_q4_k_m(folder: Path) -> Path:
    """Writes a GGUF of llama.cpp's mix Q4_K_M whose numbers take no room on disk."""
    import gguf
    import numpy as np

    from jaxinfer.checkpoint.published.llama_qwen_gemma import LLAMA_8B

    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(LLAMA_8B["max_position_embeddings"])
    writer.add_embedding_length(LLAMA_8B["hidden_size"])
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(LLAMA_8B["intermediate_size"])
    writer.add_head_count(LLAMA_8B["num_attention_heads"])
    writer.add_head_count_kv(LLAMA_8B["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(LLAMA_8B["rms_norm_eps"])
    writer.add_rope_freq_base(LLAMA_8B["rope_theta"])
    writer.add_vocab_size(LLAMA_8B["vocab_size"])
    types = gguf.GGMLQuantizationType
    own = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    own |= {"self_attn.o_proj": "attn_output"}
    own |= {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
    tensors = {"token_embd": (types.Q4_K, TABLE), "output": (types.Q6_K, TABLE), "output_norm": (types.F32, TABLE[1:])}
    for i in range(NUM_LAYERS):
        tensors |= {f"blk.{i}.{norm}": (types.F32, TABLE[1:]) for norm in ("attn_norm", "ffn_norm")}
        for module, shape in LAYER.items():
            finer = is_finer(i) and own[module] in ("attn_v", "ffn_down")
            tensors[f"blk.{i}.{own[module]}"] = (types.Q6_K if finer else types.Q4_K, shape)
    size = 0
    for name, (kind, shape) in tensors.items():
        length, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        own_bytes = math.prod(shape) // length * num_bytes
        stored = shape if kind == types.F32 else (*shape[:-1], shape[-1] // length * num_bytes)
        dtype = np.dtype(np.float32 if kind == types.F32 else np.uint8)
        writer.add_tensor_info(f"{name}.weight", stored, dtype, own_bytes, None if kind == types.F32 else kind)
        size += -(-own_bytes // writer.data_alignment) * writer.data_alignment
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size + writer.data_alignment)
    return path


@contextlib.contextmanager
def loading_for(layout: str) -> Iterator[None]:
    """Checkpoints that are read meanwhile are grouped and packed as on the devices of a layout, "gpu" or "tpu"."""
    with mock.patch("jax.default_backend", return_value=layout):
        yield


def make_case(name: str, num_rows: int, layout: str, mesh: Any) -> Case:
    """Returns a decode step of `num_rows` rows of up to 512 tokens each."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_q4_k_m(Path(folder)) if name == "Q4_K_M" else write_safetensors(Path(folder), name)
        with loading_for(layout):
            return step_case(
                mesh,
                model="Llama-3-8B",
                checkpoint=path,
                step="decode_step",
                layout=layout,
                num_tokens=num_rows,
                num_rows=num_rows,
                num_pages=4 * num_rows,
                page_size=128,
                max_context=512,
            )


def compile_named(device: str, dump: str, name: str) -> dict[str, Any]:
    """Returns what a case "format rows step" needs on a device, and its parameters' bytes."""
    from jaxinfer.plan.memory import num_bytes

    kind, num_rows, _ = name.split()
    layout = "gpu" if device in compile_gpu.DEVICES else "tpu"
    sizes: list[int] = []

    def make(mesh: Any) -> Case:
        case = make_case(kind, int(num_rows), layout, mesh)
        sizes.append(num_bytes(case.arguments["params"]))
        return case

    if layout == "gpu":
        figures = compile_on_gpu(device, make)
    else:
        mesh = compile_matrix.mesh_of(device)
        figures = compile_on_tpu(mesh, Path(dump), make)
    return {**figures, "parameter_bytes": sizes[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=DEVICES)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        device, dump = arguments.worker
        return print_figures(arguments.cases, functools.partial(compile_named, device, dump))
    cases = [f"{name} {rows} step" for name in arguments.formats for rows in arguments.rows]
    print("| device | format | rows | parameters, GB | temporaries, MB | copied weights | seconds |")
    for device in arguments.devices:
        compiled = (
            compile_in_process(__file__, [device, ""], cases, {})
            if device in compile_gpu.DEVICES
            else compile_matrix.compile_for(device, cases, __file__)
        )
        for case, figures in compiled.items():
            if "error" in figures:
                print(f"| {device} | {case} | {figures['error']} |", flush=True)
                continue
            kind, rows, _ = case.split()
            sizes = f"{figures['parameter_bytes'] / 1e9:.2f} | {figures['temporary_bytes'] / 1e6:.1f}"
            copied = ", ".join(figures.get("copied_weights", ())) or "none"
            print(
                f"| {device} | {kind} | {rows} | {sizes} | {copied} | {figures['processor_seconds']:.0f} |", flush=True
            )


if __name__ == "__main__":
    main()
