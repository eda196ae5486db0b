"""Plans of models on devices that are not there, against formulas and the devices' own arrays."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from jaxinfer import capacity
from jaxinfer.capacity import compiler
from jaxinfer.capacity.devices import CHIPS, Devices, parse_devices
from jaxinfer.cli.main import main
from jaxinfer.config import EngineConfig
from kernels_pallas.device import data_sheet

plan_deployment: Any = capacity.plan_deployment  # whose layouts may lack a plan
LLAMA = "Llama-3-8B"
# Of Llama 3 8B: layers, hidden size, KV heads and their width, vocabulary, and all parameters.
L, D, K, H, V, P = 32, 4096, 8, 128, 128256, 8_030_261_248


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v6e-8", Devices("v6e", 8)),
        ("H200x4", Devices("H200", 4)),
        ("h200 x 4", Devices("H200", 4)),
        ("A100-80GB", Devices("A100-80GB", 1)),
        ("a100-80gb-2", Devices("A100-80GB", 2)),
        ("L4", Devices("L4", 1)),
        ("v5p-64", Devices("v5p", 32)),  # of two cores each
        ("v5p", Devices("v5p", 1)),
    ],
)
def test_names_of_devices_are_those_of_clouds(name, expected):
    assert parse_devices(name) == expected


@pytest.mark.parametrize("name", ["v9-8", "v6e-0", "v6e-99999", "v5p-3", "", "H200x", "x4", "v6e-²"])
def test_an_unknown_device_is_refused_with_those_that_are_known(name):
    with pytest.raises(ValueError, match="device="):
        parse_devices(name)


def test_every_chip_has_a_data_sheet():
    assert all(data_sheet(chip.kind) is not None for chip in CHIPS.values())


def test_a_step_of_a_dense_model_takes_what_the_formula_says():
    plan = plan_deployment(LLAMA, Devices("H200", 1), EngineConfig(max_num_seqs=32), context=2048)

    (layout,) = plan.layouts
    decode = layout.decode

    weights, keys_and_values = P - V * D, 2 * K * H * L  # of the embedding a step reads 32 rows only
    read = 2 * (weights + 32 * 2048 * keys_and_values)
    flops = 32 * (2 * weights + 4 * D * 2048 * L)
    assert decode.bytes_read == pytest.approx(read, rel=1e-3)
    assert decode.flops == pytest.approx(flops, rel=1e-3)
    assert decode.is_memory_bound
    assert decode.seconds == pytest.approx(read / 4.8e12, rel=1e-3)
    assert decode.num_collectives == 0


def test_a_prompt_multiplies_longer_than_it_reads():
    (layout,) = plan_deployment(LLAMA, Devices("H200", 1), EngineConfig(max_num_batched_tokens=2048)).layouts

    prefill = layout.prefill

    # The last token alone is multiplied by the unembedding; a token sees half of the prompt on average.
    flops = 2048 * (2 * (P - 2 * V * D) + 4 * D * (2049 / 2) * L) + 2 * V * D
    assert not prefill.is_memory_bound
    assert prefill.flops == pytest.approx(flops, rel=1e-3)
    assert prefill.seconds == pytest.approx(flops / 989e12, rel=1e-3)


def test_a_split_model_sends_two_sums_a_layer():
    plan = plan_deployment(LLAMA, Devices("v6e", 4), EngineConfig(max_num_seqs=64))

    layout = next(layout for layout in plan.layouts if layout.tensor == 4)

    assert layout.decode.num_collectives == 2 * L + 1  # and one after the embedding
    width = 64 * D * 2
    assert layout.decode.link_bytes == pytest.approx((2 * L + 1) * 2 * 3 / 4 * width)


def test_random_routing_reaches_the_experts_that_a_step_is_said_to_read():
    rows = 16
    plan = plan_deployment("Qwen3-30B-A3B", Devices("H200", 1), EngineConfig(max_num_seqs=rows), context=1)
    (layout,) = plan.layouts
    # 48 layers of 128 experts of 3 * 2048 * 768 weights, of which a token takes 8.
    experts, whole = 48 * 128 * 3 * 2048 * 768, 30_532_122_624
    generator = np.random.default_rng(0)
    reached = np.mean(
        [
            len({*np.concatenate([generator.choice(128, 8, replace=False) for _ in range(rows)])}) / 128
            for _ in range(300)
        ]
    )

    others = whole - experts - 151936 * 2048

    assert layout.decode.bytes_read == pytest.approx(2 * (others + reached * experts), rel=0.01)


@pytest.mark.parametrize(("model", "device"), [("Llama-3-70B", "H200x4"), ("DeepSeek-V3", "v5p-64")])
def test_what_fits_stays_within_the_memory_of_a_device(model, device):
    plan = plan_deployment(model, parse_devices(device))

    for layout in plan.layouts:
        assert (layout.refusal is None) == (layout.num_tokens > 0)
        if layout.refusal is None:
            assert layout.memory.total_bytes <= plan.devices.chip.usable_bytes
    assert plan.best.num_devices == plan.devices.count  # fewer have no room for the weights, or read longer


def test_weights_and_keys_in_8_bits_take_half():
    config = EngineConfig(max_num_seqs=32, max_model_len=4096)
    (full,) = plan_deployment("Qwen3-0.6B", Devices("L4", 1), config).layouts

    narrow = EngineConfig(max_num_seqs=32, max_model_len=4096, quantization="int8", cache_dtype="fp8")
    (half,) = plan_deployment("Qwen3-0.6B", Devices("L4", 1), narrow).layouts

    assert half.memory.page_bytes == pytest.approx(full.memory.page_bytes / 2, rel=0.01)  # token ids stay
    embedding = 2 * 151936 * 1024
    products = full.memory.resident_bytes - embedding
    assert half.memory.resident_bytes - embedding == pytest.approx(products / 2, rel=0.01)


def test_what_a_mesh_cannot_divide_is_refused_with_its_size():
    plan = plan_deployment("Qwen2.5-7B", Devices("v6e", 8))

    refused = next(layout for layout in plan.layouts if layout.tensor == 8)

    assert refused.refusal == "tensor=8 cannot split heads of size 28 evenly; the numbers that can are 1, 2, 4"
    assert refused.memory is None


def test_each_device_has_a_whole_kv_head_if_there_are_fewer_heads_than_devices():
    plan = plan_deployment("Qwen3-30B-A3B", Devices("v6e", 8))

    four, eight = (next(layout for layout in plan.layouts if layout.tensor == tensor) for tensor in (4, 8))

    assert eight.refusal is None
    # Of 48 layers, each with keys and values of one head of 128 numbers in 2 bytes, and a token id.
    assert four.memory.page_bytes == eight.memory.page_bytes == EngineConfig().page_size * (48 * 2 * 128 * 2 + 4)


def test_devices_of_different_experts_share_heads_and_pages():
    plan = plan_deployment("GPT-OSS-120B", Devices("v6e", 16), EngineConfig(max_num_seqs=32))

    layouts = {(layout.tensor, layout.experts): layout for layout in plan.layouts}
    eight, both = layouts[8, 1], layouts[2, 8]

    # One of 8 KV heads, or a copy of one.
    assert both.memory.page_bytes == eight.memory.page_bytes
    # Two sums in each of 36 layers and one after the embedding, all over 16 devices.
    assert both.decode.num_collectives == 2 * 36 + 1
    width = 32 * 2880 * 2
    assert both.decode.link_bytes == pytest.approx((2 * 36 + 1) * 2 * 15 / 16 * width)


def test_a_split_whose_pages_do_not_hold_a_row_is_refused():
    tight = EngineConfig(max_num_seqs=1, memory_bytes=17_400_000_000)

    (layout,) = plan_deployment(LLAMA, Devices("H200", 1), tight, context=8000).layouts

    assert layout.refusal.endswith("fewer than the 8,000 of a row")


def test_rows_of_shorter_requests_have_all_their_tokens():
    plan = plan_deployment(LLAMA, Devices("T4", 1), EngineConfig(max_model_len=512, quantization="int4"))

    assert (plan.context, plan.dtype) == (512, "float16")  # which a T4 multiplies natively


def test_what_is_not_planned_is_refused():
    with pytest.raises(ValueError, match="max_adapters=4 is not planned"):
        plan_deployment(LLAMA, Devices("H200", 1), EngineConfig(max_adapters=4))


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(ValueError, match="context=9000 is not between 1 and the 8192 tokens"):
        plan_deployment(LLAMA, Devices("H200", 1), context=9000)


def test_the_command_prints_a_table_and_json(capsys):
    assert main(["plan", "Qwen3-30B-A3B", "--device", "v6e-4"]) == 0
    out = capsys.readouterr().out
    assert "30.53 billion parameters in bfloat16, on 4 x v6e with 33.6 GB each\n" in out
    assert "Take --tensor-parallel 4 --expert-parallel 1." in out

    assert main(["plan", "Qwen3-30B-A3B", "--device", "v6e-4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["layouts"][0]["tensor"], plan["layouts"][0]["experts"]) == (4, 1)


def test_replicas_share_the_devices_of_a_plan(capsys):
    assert main(["plan", "Qwen3-30B-A3B", "--device", "v6e-8", "--replicas", "2"]) == 0
    out = capsys.readouterr().out
    assert "each of 2 replicas on 4 x v6e" in out
    assert "Take --tensor-parallel 4 --expert-parallel 1 --replicas 2." in out

    with pytest.raises(ValueError, match="replicas=3 cannot share 8 devices evenly; the numbers that can are 1, 2, 4"):
        Devices("v6e", 8).of_each(3)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (Devices("v6e", 1), r"libtpu\) is not installed: pip install \"jaxinfer\[aot\]\""),
        (Devices("H200", 1), r"CUDA compiler for JAX is not installed: pip install \"jaxinfer\[aot\]\""),
    ],
)
def test_a_missing_compiler_is_named_with_the_way_to_install_it(devices, message, monkeypatch):
    monkeypatch.setattr(compiler, "find_spec", lambda _: None)
    monkeypatch.setattr(compiler.gpu_compiler, "is_available", lambda: False)

    with pytest.raises(ValueError, match=message):
        capacity.compile_plan(plan_deployment("Qwen3-0.6B", devices))


def test_devices_that_no_compiler_describes_are_refused(monkeypatch):
    monkeypatch.setattr(compiler, "find_spec", lambda _: object())
    monkeypatch.setattr(compiler.gpu_compiler, "is_available", lambda: True)

    with pytest.raises(ValueError, match="512 chips are more than the largest slice of v6e here, 256"):
        compiler.require_compiler("v6e", "tpu", 512)
    with pytest.raises(ValueError, match="steps for B200 cannot be compiled .* the GPUs that can are T4"):
        compiler.require_compiler("B200", "gpu", 1)
    for name in ("A100", "A100-80GB"):
        compiler.require_compiler(name, "gpu", 1)


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_a_compiler_that_fails_leaves_the_plan_and_its_last_words(options, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "find_spec", lambda _: object())
    monkeypatch.setattr(compiler, "WORKER", "raise SystemExit('no such\\nregister')")

    assert main(["plan", "Qwen3-0.6B", "--device", "v6e-1", "--compile", *options]) == 1

    out = capsys.readouterr().out
    if options:
        written = json.loads(out)
        assert written["compiler_failure"] == "the compiler failed with 1: no such register"
        assert written["compiled"] == {}
        assert written["layouts"]
    else:
        assert "Take --tensor-parallel 1" in out
        assert out.endswith("\nIts steps are not compiled: the compiler failed with 1: no such register\n")


@pytest.mark.aot
@pytest.mark.skipif(find_spec("libtpu") is None, reason='libtpu is not installed; pip install "jaxinfer[aot]"')
def test_compiled_steps_need_the_memory_of_the_plan_within_two_percent():
    config = EngineConfig(max_num_seqs=32, max_model_len=4096, max_num_batched_tokens=256)
    plan = plan_deployment("Qwen3-0.6B", Devices("v6e", 4), config)

    compiled = capacity.compile_plan(plan, config)

    memory, needs = plan.best.memory, [step.argument_bytes + step.temporary_bytes for step in compiled.values()]
    assert list(compiled) == ["decode", "prefill"]
    assert memory.total_bytes == pytest.approx(max(needs), rel=0.02)
    assert min(step.seconds for step in compiled.values()) > 1


def test_the_command_says_what_does_not_fit(capsys):
    assert main(["plan", "Llama-3-70B", "--device", "H200"]) == 1

    assert "GB more than a device has" in capsys.readouterr().out
