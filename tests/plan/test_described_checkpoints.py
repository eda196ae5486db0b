"""The bytes of packed checkpoints of which only config.json is there, against those of the loaded parameters."""

from __future__ import annotations

import json
from typing import Any

import jax
import pytest
import torch
from safetensors.torch import load_file

from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.checkpoint.formats.described import DescribedCheckpoint
from jaxinfer.plan import parse_devices, plan_deployment
from jaxinfer.plan.memory import num_bytes
from tests.checkpoint.packing import WRITERS
from tests.checkpoint.renamed import edit_json
from tests.checkpoint.test_packed import CASES, SIZES
from tests.gguf.gguf_files import save_gguf
from tests.oracles import save_random_checkpoint

HEAD_IS_WHOLE = {"ignore": ["lm_head"]}
# What settings must say of these, as those of published checkpoints do; and scales in the type that FP8 mostly has.
STATED: dict[str, dict[str, Any]] = {
    "awq in part": {"modules_to_not_convert": ["v_proj"]},
    "compressed in part": {"ignore": ["lm_head", r"re:.*layers\.1\..*"]},
    "compressed as of Kimi-K2-Thinking": {
        "ignore": ["lm_head", r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"]
    },
    "compressed fp8": HEAD_IS_WHOLE,
    "compressed fp8 by channels": HEAD_IS_WHOLE,
    "compressed fp8 in blocks": HEAD_IS_WHOLE,
    "fp8 of experts": {"scale_type": torch.float32},
}
# compressed-tensors has scales in the model's type.
IN_BFLOAT16 = (
    "compressed as of Kimi",
    "compressed of 2 bits",
    "compressed of 3 bits",
    "compressed of experts",
    "compressed fp8",
)
DTYPES = {name: "bfloat16" for name in CASES if name.startswith(IN_BFLOAT16)}


def shapes_of(params: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), params)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return {
        family: save_random_checkpoint(tmp_path_factory.mktemp(family), family, **sizes)
        for family, sizes in SIZES.items()
    }


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_settings_alone_have_the_shapes_of_the_loaded_parameters(name, is_packed, sources, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxinfer.checkpoint.checkpoint.packs_integers", lambda: is_packed)
    writer, family, options = CASES[name]
    path = WRITERS[writer](sources[family], tmp_path / "both", **options | STATED.get(name, {})).path
    params, config = load_checkpoint(path, "bfloat16")
    settings = json.loads((path / "config.json").read_text())
    described = DescribedCheckpoint(path, settings | {"dtype": DTYPES.get(name, "float32")})

    planned = described.abstract_params(config, "bfloat16", is_packed=is_packed)

    assert shapes_of(planned) == shapes_of(params)
    assert num_bytes(planned) == num_bytes(params)


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed", "fp8", "compressed fp8", "mxfp4"])
@pytest.mark.parametrize("has_weights", [True, False])
def test_a_plan_of_a_packed_checkpoint_has_the_bytes_of_its_loaded_parameters(name, has_weights, sources, tmp_path):
    writer, family, options = CASES[name]
    path = WRITERS[writer](sources[family], tmp_path / "both", **options | STATED.get(name, {})).path
    edit_json(path, dtype=DTYPES.get(name, "float32"))
    params, _ = load_checkpoint(path, "bfloat16")
    # The writers leave float32 in the file, whatever config.json says.
    as_stored, _ = load_checkpoint(path, "float32" if has_weights else DTYPES.get(name, "float32"))
    if not has_weights:
        (path / "model.safetensors").unlink()

    plan = plan_deployment(path, parse_devices("H200x1"))

    assert plan.best is not None
    assert plan.best.memory is not None
    assert plan.best.memory.resident_bytes == num_bytes(params)
    assert plan.checkpoint_bytes == num_bytes(as_stored)


@pytest.mark.parametrize("family", ["llama", "phi3"])  # phi3 has several products in one stored tensor
def test_a_load_reads_the_bytes_of_the_file_in_any_dtype(family, tmp_path):
    path = save_random_checkpoint(tmp_path, family)
    tensors = load_file(path / "model.safetensors")

    plan = plan_deployment(path, parse_devices("H200x1"), dtype="bfloat16")

    assert plan.checkpoint_bytes == sum(4 * tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("stated", "itemsize"), [({"dtype": "float32"}, 4), ({"torch_dtype": "float16"}, 2), ({"dtype": None}, 2)], ids=str
)
def test_without_the_file_a_load_reads_the_dtype_of_the_configuration(stated, itemsize, tmp_path):
    path = save_random_checkpoint(tmp_path, "llama")
    (path / "model.safetensors").unlink()
    edit_json(path, dtype=None, torch_dtype=None)
    edit_json(path, **stated)

    plan = plan_deployment(path, parse_devices("H200x1"), dtype="float32")

    assert plan.checkpoint_bytes == itemsize * plan.num_parameters


def test_a_published_model_is_loaded_in_bfloat16_whatever_it_computes_in():
    wide, own = (plan_deployment("Qwen3-0.6B", parse_devices("H100x1"), dtype=dtype) for dtype in ("float32", None))

    assert wide.checkpoint_bytes == own.checkpoint_bytes == 2 * own.num_parameters


def test_a_gguf_is_planned_in_its_blocks(tmp_path):
    path, _ = save_gguf(tmp_path, "llama", lambda _: "Q4_K")
    params, _ = load_checkpoint(path, "float32")  # as the file has its norms

    plan = plan_deployment(path, parse_devices("H200x1"))

    assert plan.packing == "gguf"
    assert plan.checkpoint_bytes == num_bytes(params)
