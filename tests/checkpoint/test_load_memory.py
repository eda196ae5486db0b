"""The memory that loading takes beside the parameters: a few rows of one tensor, for weights of any format."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxinfer.checkpoint import load_params, read_config
from jaxinfer.plan.memory import num_bytes
from jaxinfer.quantization import PACKED
from tests.checkpoint.packing import WRITERS
from tests.gguf.gguf_files import save_gguf
from tests.on_devices import run_on_devices
from tests.oracles import save_random_checkpoint

NUMBERS_AT_ONCE = 2**12  # as small beside these tensors as it is beside those of published models
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 97},
    "gpt_oss": {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("gptq", {"is_symmetric": False, "has_order": True}),
    "gptq of 3 bits": ("gptq", {"bits": 3}),
    "awq": ("awq", {}),
    "compressed": ("compressed", {}),
    "fp8": ("fp8", {}),
    "nvfp4": ("compressed floats", {"kind": "NVFP4"}),
    "mxfp4": ("mxfp4", {}),
    **{name: ("gguf", {"kind": name}) for name in ("F16", "Q8_0", "Q4_K")},
    **{name: ("float", {"quantization": name}) for name in ("int8", "int4")},
    "F16 to int4": ("gguf", {"kind": "F16", "quantization": "int4"}),
}


def save_packed(folder: Path, writer: str, options: dict[str, Any]) -> Path:
    if writer == "gguf":
        return save_gguf(folder, "llama", options["kind"], **SIZES["llama"])[0]
    family = "gpt_oss" if writer == "mxfp4" else "llama"
    source = save_random_checkpoint(folder / "source", family, **SIZES[family])
    if writer == "float":
        return source
    return WRITERS[writer](source, folder / "both", **options).path


@pytest.mark.parametrize(("writer", "options"), CASES.values(), ids=CASES)
def test_loading_takes_less_than_the_largest_tensor_beside_the_parameters(tmp_path, monkeypatch, writer, options):
    quantization = options.get("quantization")
    path = save_packed(tmp_path, writer, {name: value for name, value in options.items() if name != "quantization"})
    for module in ("stored", "making.reading"):
        monkeypatch.setattr(f"jaxinfer.checkpoint.{module}.NUMBERS_AT_ONCE", NUMBERS_AT_ONCE)
    config = read_config(path)
    load_params(path, config, "bfloat16", quantization=quantization)  # fills caches

    tracemalloc.start()
    try:
        params = load_params(path, config, "bfloat16", quantization=quantization)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    tensors = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, PACKED))
    largest = max(map(num_bytes, tensors))
    assert held < num_bytes(params) + largest
    # NumPy's memory, which is also that of the parameters on a CPU if no computation has made them.
    assert peak - min(held, num_bytes(params)) < largest


def test_loading_on_a_mesh_takes_one_tensor_beside_the_slices_of_the_devices(tmp_path):
    # One KV head, which all devices copy, and a vocabulary that they share with padding.
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 2048, "vocab_size": 97}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 1}
    source = save_random_checkpoint(tmp_path / "source", "llama", **sizes)
    gptq = WRITERS["gptq"](source, tmp_path / "both", is_symmetric=False, has_order=True).path
    gguf = save_gguf(tmp_path / "gguf", "llama", "Q4_0", **sizes)[0]
    cases = [(source, None), (source, "int8"), (source, "int4"), (gptq, None), (gguf, None)]

    program = ("-m", "tests.checkpoint.load_memory_program", str(NUMBERS_AT_ONCE))
    output = run_on_devices(8, *program, *(str(word) for case in cases for word in case))

    loads = json.loads(output.splitlines()[-1])
    assert len(loads) == 2 * len(cases)
    for seen in loads:
        assert seen["same"]
        assert seen["beside"] < seen["largest"] + 64 * NUMBERS_AT_ONCE  # arrays on the way to a few rows
