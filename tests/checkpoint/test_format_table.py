"""The table of formats in docs/formats.md, made from what a decode step does with small checkpoints of each.

    python -m tests.checkpoint.test_format_table

writes the table anew. That weights are exact on CPU is what `test_packed.py` checks, case by case.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.checkpoint import abstract_checkpoint
from jaxinfer.config import CacheConfig
from jaxinfer.plan.compiler import step_call
from jaxinfer.plan.memory import num_bytes
from jaxinfer.quantization import PACKED
from tests.checkpoint.packing import WRITERS
from tests.checkpoint.test_packed import CASES
from tests.oracles import save_random_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
BEGIN, END = "<!-- formats: begin -->\n", "<!-- formats: end -->\n"
# Sizes that every kernel takes: all groups of 32, and several of them.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 256, "head_dim": 32},
    "gpt_oss": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
}
# A format's name, the case of `test_packed.py` that shows its exact weights, and changes to it.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPTQ, 4 bits": ("gptq", {}),
    "GPTQ, 4 bits, zero points, act-order": ("gptq with zero points", {"has_order": True}),
    "GPTQ, 2 bits": ("gptq of 2 bits", {}),
    "GPTQ, 3 bits": ("gptq of 3 bits", {}),
    "GPTQ, 8 bits": ("gptq of 8 bits", {}),
    "AWQ": ("awq", {}),
    "compressed-tensors, integers of 2 bits": ("compressed of 2 bits", {}),
    "compressed-tensors, integers of 3 bits": ("compressed of 3 bits", {}),
    "compressed-tensors, integers of 4 bits": ("compressed", {}),
    "compressed-tensors, integers of 8 bits per channel": ("compressed by channels", {}),
    "compressed-tensors, FP8 per tensor": ("compressed fp8", {}),
    "compressed-tensors, FP8 per channel": ("compressed fp8 by channels", {}),
    "compressed-tensors, FP8 in blocks": ("compressed fp8 in blocks", {}),
    "compressed-tensors, MXFP8": ("compressed mxfp8 of experts", {}),
    "compressed-tensors, MXFP4": ("compressed mxfp4", {}),
    "compressed-tensors, NVFP4": ("nvfp4", {}),
    "FP8 of DeepSeek and Qwen": ("fp8", {}),
    "MXFP4 of GPT-OSS": ("mxfp4", {}),
}
DEVICES = {"A100": ("NVIDIA A100-SXM4-80GB", "gpu"), "H200": ("NVIDIA H200", "gpu"), "TPU": ("TPU v6 lite", "tpu")}
KERNELS = {"dense": {"packed_product", "quantized_matmul"}, "experts": {"grouped_matmul"}}


def kernels_of(jaxpr: Any) -> Iterator[str]:
    """Yields the names of the Pallas kernels of a traced program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield str(equation.params["name"])
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda node: hasattr(node, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from kernels_of(inner)


def traced_kernels(path: Path, kind: str, platform: str) -> set[str]:
    """Returns the kernels of a decode step by a checkpoint, on a device that need not be here."""
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, 100, platform))
    with mock.patch("jax.default_backend", return_value=platform), jax.sharding.use_abstract_mesh(mesh):
        params, config = abstract_checkpoint(path, "bfloat16")
        pages = CacheConfig(num_pages=4, page_size=128, dtype="bfloat16")
        sizes = {"num_tokens": 4, "num_rows": 4, "max_context": 128, "cache": pages}
        step, arguments = step_call(None, config, step="decode_step", layout=platform, params=params, **sizes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # plain JAX takes the place of a kernel: the table says so
            return {*kernels_of(step.trace(**arguments).jaxpr.jaxpr)}


def bits_of_weights(path: Path) -> float:
    """Returns the bits that a packed weight takes on a CPU, scales and zero points included, in the mean."""
    params, _ = abstract_checkpoint(path, "float32")
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, PACKED))
    packed = [leaf for leaf in leaves if isinstance(leaf, PACKED)]
    floats, _ = abstract_checkpoint(path.parent / "reference", "float32")
    whole = jax.tree.leaves(floats)
    count = sum(f.size for leaf, f in zip(leaves, whole, strict=True) if isinstance(leaf, PACKED))
    return 8 * num_bytes(packed) / count


def row_of(name: str, sources: Mapping[str, Path], folder: Path) -> str:
    case, changes = ROWS[name]
    writer, family, options = CASES[case]
    families = ["gpt_oss"] if family == "gpt_oss" else ["llama", "qwen3_moe"]
    cells: dict[str, dict[str, str]] = {"dense": {}, "experts": {}}
    for own in families:
        packed = WRITERS[writer](sources[own], folder / own, **options, **changes)
        part = "dense" if own == "llama" else "experts"
        for device, description in DEVICES.items():
            is_read = KERNELS[part] & traced_kernels(packed.path, *description)
            cells[part][device] = "kernel" if is_read else "XLA"
    bits = bits_of_weights(packed.path)
    columns = [cells[part].get(device, "") for part in cells for device in DEVICES]
    return f"| {name} | {bits:.1f} | {' | '.join(columns)} |\n"


def save_sources(folder: Path) -> dict[str, Path]:
    return {
        family: save_random_checkpoint(folder / family, family, **own, num_hidden_layers=1)
        for family, own in SIZES.items()
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return save_sources(tmp_path_factory.mktemp("sources"))


@pytest.mark.parametrize("name", ROWS)
def test_the_table_says_what_a_decode_step_does(name, sources, tmp_path):
    assert row_of(name, sources, tmp_path) in PAGE.read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sources_here = save_sources(Path(scratch) / "sources")
        rows = [row_of(name, sources_here, Path(scratch) / str(i)) for i, name in enumerate(ROWS)]
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    columns = [f"{part}, {device}" for part in KERNELS for device in DEVICES]
    header = f"| format | bits | {' | '.join(columns)} |\n|---|--:|{'---|' * len(columns)}\n"
    PAGE.write_text(head + BEGIN + header + "".join(rows) + END + rest.split(END)[1])
