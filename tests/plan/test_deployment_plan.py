"""Plans of models on devices that are not there, against formulas and the devices' own arrays."""

from __future__ import annotations

import json
import pickle
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer import plan as plans
from jaxinfer.cli.main import main
from jaxinfer.config import EngineConfig
from jaxinfer.plan import compiler
from jaxinfer.plan.devices import CHIPS, Devices, HostLink, parse_devices
from jaxinfer.plan.memory import num_bytes
from jaxinfer.xla_options import MEMORY_FRACTION
from kernels_pallas.device import data_sheet

plan_deployment: Any = plans.plan_deployment  # whose layouts may lack a plan
LLAMA = "Llama-3-8B"
# Of Llama 3 8B: layers, hidden size, KV heads and their width, vocabulary, and all parameters.
L, D, K, H, V, P = 32, 4096, 8, 128, 128256, 8_030_261_248


def of(name: str, count: int | None) -> Devices:
    return Devices(CHIPS[name], count)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v6e-8", of("v6e", 8)),
        ("H200x4", of("H200", 4)),
        ("h200 x 4", of("H200", 4)),
        ("A100-80GB", of("A100-80GB", None)),
        ("a100-80gb-2", of("A100-80GB", 2)),
        ("L4", of("L4", None)),  # as few as hold the model
        ("A100-80GB x 1", of("A100-80GB", 1)),
        ("v5p-64", of("v5p", 32)),  # of two cores each
        ("4xv5p", of("v5p", 4)),
        ("v5p", of("v5p", None)),
        ("v4-8", of("v4", 4)),
        ("4xH100", of("H100", 4)),
        ("H100x4", of("H100", 4)),
        ("v5litepod-8", of("v5e", 8)),
        ("v5e-8", of("v5e", 8)),
        ("tpu v6e-4", of("v6e", 4)),
        ("Ironwood-8", of("tpu7x", 8)),
        ("A100-40", of("A100", None)),
        ("A100-80", of("A100-80GB", None)),
        ("A10Gx4", of("A10G", 4)),
        ("RTX 3090", of("RTX3090", None)),
        ("NVIDIA GeForce RTX 4090", of("RTX4090", None)),
        ("2 x RTX 5090", of("RTX5090", 2)),
        ("rtx-pro-6000", of("RTXPRO6000", None)),
        ("L40S-2", of("L40S", 2)),
        ("H100-80", of("H100", None)),
        ("H100-80GB", of("H100", None)),
        ("H100-80GB-2", of("H100", 2)),
        ("4xH100-80", of("H100", 4)),
        ("H200-141", of("H200", None)),
        ("L40S-48", of("L40S", None)),
        ("L4-24", of("L4", None)),
        ("H100-8", of("H100", 8)),
        ("H100x80", of("H100", 80)),
        ("v6e-32", of("v6e", 32)),
        ("1xv5e-8", of("v5e", 8)),
        ("2xA100-80", of("A100-80GB", 2)),
    ],
)
def test_names_of_devices_are_those_of_clouds(name, expected):
    assert parse_devices(name) == expected


LINK = HostLink(bytes_per_second=25e9, latency_seconds=50e-6)


@pytest.mark.parametrize(
    ("name", "chip", "count"),
    [("2xv5e-8", "v5e", 16), ("2 x H100x1", "H100", 2), ("2x4xH100", "H100", 8), ("2xv5p-64", "v5p", 64)],
)
def test_a_number_before_a_name_with_a_number_counts_hosts(name, chip, count):
    assert parse_devices(name, host_link=LINK) == Devices(CHIPS[chip], count, 2, LINK)


@pytest.mark.parametrize(
    ("name", "link", "message"),
    [
        ("2xv5e-8", None, r"'2xv5e-8' has 2 hosts, and no link between them .* --host-link RATE,LATENCY"),
        ("v5e-8", LINK, r"host_link=25 GB/s, 50 us does not go with device='v5e-8'.* such as 2xv5e-8"),
        ("0xv5e-8", None, "has 0 hosts; give 1 to 512"),
        ("513xv5e-8", LINK, "has 513 hosts; give 1 to 512"),
    ],
)
def test_hosts_need_a_link_and_a_link_hosts(name, link, message):
    with pytest.raises(ValueError, match=message):
        parse_devices(name, host_link=link)


@pytest.mark.parametrize(("rate", "latency"), [(0.0, 0.0), (-1.0, 0.0), (1e9, -1e-6), (float("inf"), 0.0)])
def test_a_link_that_is_none_is_refused(rate, latency):
    with pytest.raises(ValueError, match=r"bytes_per_second=|latency_seconds="):
        HostLink(bytes_per_second=rate, latency_seconds=latency)


@pytest.mark.parametrize(("num_replicas", "count", "num_hosts"), [(1, 16, 2), (2, 8, 1), (4, 4, 1)])
def test_a_replica_has_whole_hosts_or_a_part_of_one(num_replicas, count, num_hosts):
    each = parse_devices("2xv5e-8", host_link=LINK).of_each(num_replicas)

    assert (each.count, each.num_hosts, each.host_link is None) == (count, num_hosts, num_hosts == 1)


def test_replicas_do_not_cut_a_host_in_uneven_parts():
    with pytest.raises(ValueError, match="replicas=2 cannot share 12 devices of 3 hosts .* are 1, 3, 6, 12"):
        parse_devices("3x4xH100", host_link=LINK).of_each(2)


@pytest.mark.parametrize("name", ["v9-8", "v6e-0", "v6e-99999", "v5p-3", "", "H200x", "x4", "v6e-²"])
def test_an_unknown_device_is_refused_with_those_that_are_known(name):
    with pytest.raises(ValueError, match="device="):
        parse_devices(name)


def test_a_large_number_behind_a_hyphen_is_none_of_gpus():
    with pytest.raises(ValueError, match="'H100-94' has 94 behind a hyphen.* give H100x94 for 94 devices, or H100 for"):
        parse_devices("H100-94")


def test_chips_have_the_data_sheets_by_which_kernels_are_planned():
    assert all(data_sheet(chip.kind) in (None, chip.sheet) for chip in CHIPS.values())


OWN: dict[str, Any] = {"memory_bytes": 192e9, "bandwidth": 5.3e12, "flops": 1.3e15}


def test_any_other_device_is_planned_by_its_own_figures():
    config = EngineConfig(max_num_seqs=32, memory_bytes=192_000_000_000)

    plan = plan_deployment(LLAMA, parse_devices("MI300X", **OWN), config)

    assert (plan.devices.count, plan.usable_bytes) == (1, 192_000_000_000)
    assert plan.best.decode.seconds == pytest.approx(plan.best.decode.bytes_read / 5.3e12)
    assert parse_devices("MI300Xx8", **OWN, link_bytes=4.5e11).count == 8


@pytest.mark.parametrize(
    ("name", "rates", "message"),
    [
        ("MI300X", {"memory_bytes": 192e9}, "--memory-bytes, --bandwidth and --flops"),
        ("MI300X-8", OWN, "--link-bandwidth"),
        ("H100", {"bandwidth": 0.0}, "bandwidth=0.0 is not a positive number"),
        ("H100", {"flops": float("nan")}, "flops=nan is not a positive number"),
    ],
)
def test_figures_that_are_missing_or_none_are_refused(name, rates, message):
    with pytest.raises(ValueError, match=message):
        parse_devices(name, **rates)


def test_other_rates_of_a_known_device_are_honoured_and_not_measured():
    pcie = parse_devices("H200x2", bandwidth=2.0e12, link_bytes=3.2e10).chip

    assert (pcie.sheet.bandwidth, pcie.sheet.flops, pcie.link_bytes) == (2.0e12, 989e12, 3.2e10)
    assert pcie.measured is None


def test_devices_without_a_number_are_the_fewest_that_hold_the_model():
    plans = [plan_deployment("Qwen3-30B-A3B", parse_devices(name)) for name in ("v6e", "v6e-1", "RTX 4090")]

    found, one, small = plans
    assert (found.devices.count, one.best) == (4, None)  # slices have 1, 4, 8, … chips
    assert small.devices.count == 4
    assert plan_deployment("Llama-3.1-405B", parse_devices("T4")).best is None


@pytest.mark.parametrize(
    ("model", "device", "gigabytes"),
    [("GPT-OSS-120B", "H100x1", 65.2), ("GPT-OSS-120B", "H200x1", 65.2), ("DeepSeek-V3", "H200x8", 85.2)],
)
def test_models_that_are_published_packed_fit_where_they_are_known_to_run(model, device, gigabytes):
    plan = plan_deployment(model, parse_devices(device))

    assert plan.best.num_devices == plan.devices.count
    assert plan.best.memory.resident_bytes / 1e9 == pytest.approx(gigabytes, abs=0.1)
    assert plan.best.memory.total_bytes <= MEMORY_FRACTION * plan.devices.chip.memory_bytes


def test_packed_weights_are_not_rounded_again():
    with pytest.raises(
        ValueError, match=r"quantization='int4' does not go with GPT-OSS-20B, .* by mxfp4; leave it out"
    ):
        plan_deployment("GPT-OSS-20B", parse_devices("L4"), EngineConfig(quantization="int4"))


def test_a_long_prompt_takes_the_steps_of_its_parts():
    config = EngineConfig(max_num_batched_tokens=512)
    whole = plan_deployment(LLAMA, of("H200", 1), EngineConfig(max_num_batched_tokens=2048), prompt=2048).best
    parts = plan_deployment(LLAMA, of("H200", 1), config, prompt=2048).best

    assert whole.first_token_seconds == pytest.approx(whole.prefill.seconds)
    # Each of four steps also draws a token.
    assert parts.first_token_seconds == pytest.approx(whole.first_token_seconds, rel=0.01)
    with pytest.raises(ValueError, match="prompt=9000 is not between 1 and the 8192 tokens"):
        plan_deployment(LLAMA, of("H200", 1), prompt=9000)


def test_the_answer_is_a_bound_and_its_measured_part():
    plan = plan_deployment(LLAMA, of("H200", 2), EngineConfig(max_num_seqs=32), context=2048)

    found = plans.answer(plan, num_replicas=3, price=4.0, load_bytes_per_second=2e9)

    assert found is not None
    assert found.expected is not None
    rows, seconds = 32, plan.best.decode.seconds
    assert found.num_users == 3 * rows
    assert found.bound.tokens_per_second_all == pytest.approx(3 * rows / seconds)
    assert found.bound.tokens_per_second_each == pytest.approx(1 / seconds)
    assert found.bound.tokens_per_second_alone == pytest.approx(1 / plan.best.decode_alone.seconds)
    assert found.expected.tokens_per_second_all == pytest.approx(0.6 * 3 * rows / seconds)
    assert found.expected.first_token_seconds == pytest.approx(plan.best.first_token_seconds / 0.53)
    assert found.dollars_per_hour == 4.0 * 6
    assert found.bound.dollars_per_million_tokens == pytest.approx(24 / (3600 * 3 * rows / seconds) * 1e6)
    assert found.load_seconds == pytest.approx(2 * P / 2e9)
    refused: list[dict[str, Any]] = [{"price": -1.0}, {"load_bytes_per_second": 0.0}]
    for options in refused:
        with pytest.raises(ValueError, match="is not allowed"):
            plans.answer(plan, **options)


def test_nothing_is_expected_of_devices_that_were_not_measured():
    found = plans.answer(plan_deployment(LLAMA, of("H100", 1)))

    assert found is not None
    assert (found.expected, found.dollars_per_hour, found.compile_seconds) == (None, None, None)


def test_a_step_of_a_dense_model_takes_what_the_formula_says():
    plan = plan_deployment(LLAMA, of("H200", 1), EngineConfig(max_num_seqs=32), context=2048)

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
    (layout,) = plan_deployment(LLAMA, of("H200", 1), EngineConfig(max_num_batched_tokens=2048)).layouts

    prefill = layout.prefill

    # The last token alone is multiplied by the unembedding; a token sees half of the prompt on average.
    flops = 2048 * (2 * (P - 2 * V * D) + 4 * D * (2049 / 2) * L) + 2 * V * D
    assert not prefill.is_memory_bound
    assert prefill.flops == pytest.approx(flops, rel=1e-3)
    assert prefill.seconds == pytest.approx(flops / 989e12, rel=1e-3)


def test_a_split_model_sends_two_sums_a_layer():
    plan = plan_deployment(LLAMA, of("v6e", 4), EngineConfig(max_num_seqs=64))

    layout = next(layout for layout in plan.layouts if layout.tensor == 4)

    assert layout.decode.num_collectives == 2 * L + 1  # and one after the embedding
    width = 64 * D * 2
    assert layout.decode.link_bytes == pytest.approx((2 * L + 1) * 2 * 3 / 4 * width)


# Of Llama 3 70B: the weights of its 80 layers, and of one embedding.
LAYERS_70B, ENDS_70B = 80 * (2 * 8192 * 64 * 128 + 2 * 8192 * 8 * 128 + 3 * 8192 * 28672), 128256 * 8192


def of_hosts(model: str = "Llama-3-70B", **options: Any) -> dict[tuple[int, int], Any]:
    plan = plan_deployment(model, parse_devices("2xv5e-8", host_link=LINK), **options)
    return {(layout.stages, layout.tensor): layout for layout in plan.layouts}


def test_a_step_in_stages_takes_what_the_formula_says():
    layout = of_hosts(config=EngineConfig(max_num_seqs=32), context=4096)[2, 8]
    decode, prefill = layout.decode, layout.prefill
    keys_and_values = 32 * 4096 * 2 * 8 * 128 * 80 * 2 / 16

    # 32 rows are one part: two ticks, in each of which a stage reads its layers and the pages of the rows.
    read = 2 * (2 * LAYERS_70B / 16 + keys_and_values) + 2 * ENDS_70B / 8
    assert decode.bytes_read == pytest.approx(read, rel=1e-3)
    assert (decode.num_parts, decode.num_ticks, decode.idle_part) == (1, 2, 0.5)
    assert decode.num_collectives == 2 * 2 * 40 + 1
    # Two parts handed over, and the last states, by each of 8 devices.
    width = 32 * 8192 * 2
    assert (decode.num_messages, decode.host_bytes) == (3, 8 * 3 * width)
    assert decode.host_seconds == pytest.approx(3 * 50e-6 + 24 * width / 25e9)
    sums = decode.link_bytes / 2e11
    assert decode.link_bytes == pytest.approx(161 * 2 * 7 / 8 * width)
    assert decode.seconds == pytest.approx(read / 819e9 + sums + decode.host_seconds, rel=1e-3)

    # 2,048 tokens are eight parts: nine ticks, each of which multiplies a part by half of the layers.
    attention = 4 * 64 * 128 * (2049 / 2) * 80
    flops = 9 / 8 * 2048 * (2 * LAYERS_70B + attention) / 16 + 2 * ENDS_70B / 8
    assert (prefill.num_tokens, prefill.num_parts, prefill.num_ticks) == (2048, 8, 9)
    assert prefill.flops == pytest.approx(flops, rel=1e-3)
    assert (prefill.num_collectives, prefill.num_messages) == (9 * 2 * 40 + 1, 9 + 1)


def test_sums_over_hosts_wait_for_their_link():
    one, both = (of_hosts("Llama-3-8B", config=EngineConfig(max_num_seqs=32))[key] for key in ((1, 8), (1, 16)))

    assert (one.num_hosts, one.decode.num_messages, one.decode.host_seconds) == (1, 0, 0.0)
    # Within a host 8 devices add up, and then the two hosts.
    width = 32 * D * 2
    assert both.decode.link_bytes == pytest.approx((2 * L + 1) * 2 * 7 / 8 * width)
    assert (both.decode.num_messages, both.decode.host_bytes) == (2 * L + 1, (2 * L + 1) * width)
    assert both.decode.host_seconds == pytest.approx((2 * L + 1) * (50e-6 + width / 25e9))


def test_stages_have_whole_hosts_and_a_part_of_the_layers_in_memory():
    layouts = of_hosts()

    assert {*layouts} == {(1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (2, 8)}
    staged = layouts[2, 8]
    assert staged.memory.resident_bytes == pytest.approx(2 * LAYERS_70B / 16 + 2 * 2 * ENDS_70B / 8, rel=1e-3)
    assert staged.axes == {"stages": 2, "experts": 1, "model": 8}


def test_layers_that_stages_do_not_share_are_passed_once():
    devices = parse_devices("3xH200x1", host_link=LINK)
    plan = plan_deployment(LLAMA, devices, EngineConfig(max_num_seqs=32), context=2048)
    decode = next(layout for layout in plan.layouts if layout.stages == 3).decode

    # Ten layers of each stage are read in three ticks, with the pages of the rows, and two layers once by all.
    weights = (P - 2 * V * D) / L
    passes = 3 * 10 + 2
    read = 2 * (passes * (weights + 32 * 2048 * 2 * K * H) + V * D)
    assert decode.bytes_read == pytest.approx(read, rel=1e-3)
    flops = 32 * (passes * (2 * weights + 4 * D * 2048) + 2 * V * D)
    assert decode.flops == pytest.approx(flops, rel=1e-3)


def test_the_command_compares_stages_with_sums_over_hosts(capsys):
    arguments = ["plan", "Llama-3-70B", "--device", "2xv5e-8", "--host-link", "12.5GB,0.1ms", "--max-num-seqs", "32"]
    assert main(arguments) == 0
    out = capsys.readouterr().out

    assert "on 2 hosts of 8 x v5e with" in out
    assert "\nBetween hosts (12.5 GB/s, 100 us):\n  16x1: a decode step of 32 rows sends 161 sums, " in out
    assert "\n  8x1 in 2 stages: a decode step of 32 rows takes 2 ticks for 1 part (50% idle), 12.6 MB a host" in out
    assert "tokens takes 9 ticks for 8 parts (11% idle)" in out
    assert "Take --stages 2 --tensor-parallel 8 --expert-parallel 1.\n" in out
    assert "no latency but that of hosts" in out
    assert "Llama-3-70B fits on 16 v5e with" in out

    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["answer"]["stages"], plan["layouts"][0]["stages"], plan["layouts"][0]["num_hosts"]) == (2, 2, 2)
    assert plan["devices"]["host_link"] == {"bytes_per_second": 12.5e9, "latency_seconds": 1e-4}


@pytest.mark.parametrize("link", ["25GB", "25GB,", "25GB,x", ",1us", "25GB,1us,2us", "25GB,1hs", "25GB,us"])
def test_a_link_of_another_form_is_refused(link, capsys):
    assert main(["plan", LLAMA, "--device", "2xv5e-8", "--host-link", link]) == 2
    assert "is not of the form RATE,LATENCY" in capsys.readouterr().err


@pytest.mark.parametrize("latency", ["50us", "0.05ms", "5e-5", "5e-5s", "50\u00b5s"])
def test_latencies_are_read_in_any_unit(latency, capsys):
    assert main(["plan", LLAMA, "--device", "2xv5e-8", "--host-link", f"25GB,{latency}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"]["host_link"]["latency_seconds"] == pytest.approx(5e-5)


def test_random_routing_reaches_the_experts_that_a_step_is_said_to_read():
    rows = 16
    plan = plan_deployment("Qwen3-30B-A3B", of("H200", 1), EngineConfig(max_num_seqs=rows), context=1)
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
    (full,) = plan_deployment("Qwen3-0.6B", of("L4", 1), config).layouts

    narrow = EngineConfig(max_num_seqs=32, max_model_len=4096, quantization="int8", cache_dtype="fp8")
    (half,) = plan_deployment("Qwen3-0.6B", of("L4", 1), narrow).layouts

    assert half.memory.page_bytes == pytest.approx(full.memory.page_bytes / 2, rel=0.01)  # token ids stay
    embedding = 2 * 151936 * 1024
    products = full.memory.resident_bytes - embedding
    assert half.memory.resident_bytes - embedding == pytest.approx(products / 2, rel=0.01)


def test_what_a_mesh_cannot_divide_is_refused_with_its_size():
    plan = plan_deployment("Qwen2.5-7B", of("v6e", 8))

    refused = next(layout for layout in plan.layouts if layout.tensor == 8)

    assert refused.refusal == "tensor=8 cannot split heads of size 28 evenly; the numbers that can are 1, 2, 4"
    assert refused.memory is None


def test_each_device_has_a_whole_kv_head_if_there_are_fewer_heads_than_devices():
    plan = plan_deployment("Qwen3-30B-A3B", of("v6e", 8))

    four, eight = (next(layout for layout in plan.layouts if layout.tensor == tensor) for tensor in (4, 8))

    assert eight.refusal is None
    # Of 48 layers, each with keys and values of one head of 128 numbers in 2 bytes, and a token id.
    assert four.memory.page_bytes == eight.memory.page_bytes == EngineConfig().page_size * (48 * 2 * 128 * 2 + 4)


def test_devices_of_different_experts_share_heads_and_pages():
    plan = plan_deployment("GPT-OSS-120B", of("v6e", 16), EngineConfig(max_num_seqs=32))

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

    (layout,) = plan_deployment(LLAMA, of("H200", 1), tight, context=8000).layouts

    assert layout.refusal.endswith("fewer than the 8,000 of a row")


def test_rows_of_shorter_requests_have_all_their_tokens():
    plan = plan_deployment(LLAMA, of("T4", 1), EngineConfig(max_model_len=512, quantization="int4"))

    assert (plan.context, plan.dtype) == (512, "float16")  # which a T4 multiplies natively


def test_what_is_not_planned_is_refused():
    with pytest.raises(ValueError, match="max_adapters=4 is not planned"):
        plan_deployment(LLAMA, of("H200", 1), EngineConfig(max_adapters=4))


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(ValueError, match="context=9000 is not between 1 and the 8192 tokens"):
        plan_deployment(LLAMA, of("H200", 1), context=9000)


def test_the_command_prints_a_table_and_json(capsys):
    assert main(["plan", "Qwen3-30B-A3B", "--device", "v6e-4"]) == 0
    out = capsys.readouterr().out
    assert "30.53 billion parameters in bfloat16, on 4 x v6e with 33.6 GB each\n" in out
    assert "\n4x1 2x2 1x4 " in out
    assert "Take --tensor-parallel 4 --expert-parallel 1: as fast as 2x2 1x4, and with the fewest groups" in out
    assert re.search(
        r"\nQwen3-30B-A3B fits on 4 v6e with room for [\d,]+ tokens; 256 users at [\d.]+ tokens/s each at", out
    )

    assert main(["plan", "Qwen3-30B-A3B", "--device", "v6e-4", "--price", "2.7", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["layouts"][0]["tensor"], plan["layouts"][0]["experts"]) == (4, 1)
    assert plan["answer"]["dollars_per_hour"] == pytest.approx(4 * 2.7)
    assert (plan["answer"]["tensor"], plan["answer"]["expected"]) == (4, None)
    assert plan["devices"]["count"] == 4
    assert plan["devices"]["chip"]["sheet"] == {"bandwidth": 1.64e12, "flops": 918e12}


def test_the_page_shows_what_the_command_prints(capsys):
    page = (Path(__file__).parents[2] / "docs/capacity.md").read_text(encoding="utf-8")
    whole, hosts, part = re.findall(r"(?s)```text\n(.*?)```", page)

    assert main(["plan", "GPT-OSS-120B", "--device", "H100"]) == 0
    assert capsys.readouterr().out == whole
    of_hosts = ["--device", "2xv5e-8", "--host-link", "25GB,50us", "--context", "4096", "--max-num-seqs", "32"]
    assert main(["plan", "Llama-3-70B", *of_hosts]) == 0
    assert hosts in capsys.readouterr().out
    assert main(["plan", "Qwen3-8B", "--device", "H200x1", "--price", "4"]) == 0
    assert part in capsys.readouterr().out


def test_a_plan_of_many_devices_fits_a_screen(capsys):
    assert main(["plan", "GPT-OSS-120B", "--device", "v5e-256"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert [line.split(":")[0] for line in lines if line.startswith(("Too small", "Not divided so"))]


def test_prices_and_expected_figures_stand_beside_the_bound(capsys):
    assert main(["plan", LLAMA, "--device", "H200x1", "--price", "4", "--load-bytes-per-second", "4GB"]) == 0
    out = capsys.readouterr().out

    title, first, *_, dollars = re.findall(r"(?m)^(?: {20}|first token|tokens/s of|dollars per).*$", out)
    assert title.split() == ["bound", "expected"]
    bound, expected = (float(cell) for cell in re.findall(r"([\d.]+) ms", first))
    assert bound / expected == pytest.approx(0.53, rel=0.02)
    assert float(dollars.split()[-2]) < float(dollars.split()[-1])
    assert "16.1 GB at 4 GB/s take 4.02 s; compile: not measured. $4.00 an hour." in out
    assert out.splitlines()[-1].endswith(" expected.")


def test_replicas_share_the_devices_of_a_plan(capsys):
    assert main(["plan", "Qwen3-30B-A3B", "--device", "v6e-8", "--replicas", "2"]) == 0
    out = capsys.readouterr().out
    assert "each of 2 replicas on 4 x v6e" in out
    assert "Take --tensor-parallel 4 --expert-parallel 1 --replicas 2: as fast as 2x2 1x4" in out

    with pytest.raises(ValueError, match="replicas=3 cannot share 8 devices evenly; the numbers that can are 1, 2, 4"):
        of("v6e", 8).of_each(3)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (of("v6e", 1), r"libtpu\) is not installed: pip install \"jaxinfer\[aot\]\""),
        (of("H200", 1), r"CUDA compiler for JAX is not installed: pip install \"jaxinfer\[aot\]\""),
    ],
)
def test_a_missing_compiler_is_named_with_the_way_to_install_it(devices, message, monkeypatch):
    monkeypatch.setattr(compiler, "find_spec", lambda _: None)
    monkeypatch.setattr(compiler.gpu_compiler, "is_available", lambda: False)

    with pytest.raises(ValueError, match=message):
        plans.compile_plan(plan_deployment("Qwen3-0.6B", devices))


def test_devices_that_no_compiler_describes_are_refused(monkeypatch):
    monkeypatch.setattr(compiler, "find_spec", lambda _: object())
    monkeypatch.setattr(compiler.gpu_compiler, "is_available", lambda: True)

    with pytest.raises(ValueError, match="512 chips are more than the largest slice of v6e here, 256"):
        compiler.require_compiler("v6e", "tpu", 512)
    with pytest.raises(ValueError, match="steps for B200 cannot be compiled .* the GPUs that can are T4"):
        compiler.require_compiler("B200", "gpu", 1)
    with pytest.raises(ValueError, match="steps for a v4 cannot be compiled .* the TPUs that can are v5e"):
        plans.compile_plan(plan_deployment("Qwen3-0.6B", of("v4", 4)))
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


def test_a_plan_does_not_depend_on_the_machine_that_makes_it(monkeypatch):
    plan = plan_deployment("Gemma-3-12B", of("v5e", 8))

    monkeypatch.setattr("jaxinfer.device.CPU_BATCHED_TOKENS", 32)

    assert plan_deployment("Gemma-3-12B", of("v5e", 8)) == plan


def test_steps_are_compiled_for_the_packed_weights_of_the_plan(monkeypatch):
    tasks: list[compiler.CompileTask] = []
    monkeypatch.setattr("jaxinfer.plan.deployment.require_compiler", lambda *_: None)
    monkeypatch.setattr(
        "jaxinfer.plan.deployment.compile_steps", lambda task: tasks.append(pickle.loads(pickle.dumps(task)))
    )
    config = EngineConfig(max_num_seqs=8, max_model_len=1024)
    plan = plan_deployment("GPT-OSS-20B", of("H200", 1), config)

    plans.compile_plan(plan, config)

    (task,) = tasks
    assert [num_bytes(step["params"]) for step in task.steps.values()] == 2 * [plan.best.memory.resident_bytes]


@pytest.mark.aot
@pytest.mark.skipif(find_spec("libtpu") is None, reason='libtpu is not installed; pip install "jaxinfer[aot]"')
def test_compiled_steps_need_the_memory_of_the_plan_within_two_percent():
    config = EngineConfig(max_num_seqs=32, max_model_len=4096, max_num_batched_tokens=256)
    plan = plan_deployment("Qwen3-0.6B", of("v6e", 4), config)

    compiled = plans.compile_plan(plan, config)

    memory, needs = plan.best.memory, [step.argument_bytes + step.temporary_bytes for step in compiled.values()]
    assert list(compiled) == ["decode", "prefill"]
    assert memory.total_bytes == pytest.approx(max(needs), rel=0.02)
    assert min(step.seconds for step in compiled.values()) > 1


def test_the_command_says_what_does_not_fit(capsys):
    assert main(["plan", "Llama-3-70B", "--device", "H200x1"]) == 1

    out = capsys.readouterr().out
    assert re.search(r"Too small: 1x1: 1[45]\.\d GB more than a device has\.\n", out)  # 141.1 GB less 0.98 of 129.7
    assert out.endswith("does not fit on 1 x H200: take more or larger devices, or --quantization int8 or int4.\n")


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        (["--device", "L4x1", "--quantization", "int8"], "L4: take more or larger devices, or --quantization int4."),
        (["--device", "L4x1", "--quantization", "int4"], "L4: take more or larger devices."),
        (
            ["--device", "H100x8", "--replicas", "8", "--quantization", "int4", "--memory-bytes", "20GB"],
            "H100: take fewer replicas (1, 2, 4), more or larger devices.",
        ),
        (
            ["--device", "T4", "--replicas", "2", "--quantization", "int4", "--memory-bytes", "1GB"],
            "take more or larger devices.",
        ),
    ],
)
def test_the_way_out_is_none_that_was_taken(options, way_out, capsys):
    assert main(["plan", "Llama-3-70B", *options]) == 1
    assert capsys.readouterr().out.endswith(f"{way_out}\n")


@pytest.mark.parametrize(
    ("device", "num_replicas", "count"), [("H100x8", 4, 2), ("L4x2", 1, 2)], ids=["that fit", "none fits"]
)
def test_replicas_may_be_the_most_that_the_devices_hold(device, num_replicas, count, capsys):
    main(["plan", "Llama-3-70B", "--device", device, "--replicas", "auto", "--json"])

    plan = json.loads(capsys.readouterr().out)
    assert (plan["replicas"], plan["devices"]["count"]) == (num_replicas, count)


def test_replicas_of_a_free_number_of_devices_are_refused(capsys):
    assert main(["plan", LLAMA, "--device", "H100", "--replicas", "auto"]) == 2
    assert "their number is not given; give H100x8 or another" in capsys.readouterr().err
