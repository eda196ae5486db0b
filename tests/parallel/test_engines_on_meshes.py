"""Engines whose model is split over several CPU devices, against the engine on one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.checkpoint.packing import WRITERS
from tests.engine.exactness.test_families import OVERRIDES, STAGED
from tests.exhaustive import exhaustive_but
from tests.gguf.gguf_files import save_gguf
from tests.on_devices import ROOT, run_on_devices
from tests.oracles import save_random_checkpoint

NUM_DEVICES = 4  # of every process that needs no more: then processes share compiled steps on disk
ONE_LAYER, TWO_LAYERS = {"num_hidden_layers": 1}, {"num_hidden_layers": 2}
EXPERTS = {"num_local_experts": 4}
# One KV head and an odd vocabulary: devices share neither without copies and padding.
ODD = {"num_key_value_heads": 1, "vocab_size": 97}
WINDOW_AND_NONE = {"layer_types": ["sliding_attention", "full_attention"], **TWO_LAYERS}
STATES_AND_ATTENTION = {"layer_types": ["linear_attention", "full_attention"], **TWO_LAYERS}
# The family, changes to it, its devices by tensor and by experts, and settings of its engine.
CASES: dict[str, tuple[str, dict[str, Any], int, int, tuple[str, ...]]] = {
    "llama with n-grams": ("llama", TWO_LAYERS, 2, 1, ("speculation=ngram", "max_drafts=3")),
    "llama over four in loops": ("llama", {"vocab_size": 97, **ONE_LAYER}, 4, 1, ("decode_loop_steps=3",)),
    "qwen 2.5 over eight": ("qwen2", {"num_attention_heads": 8, **TWO_LAYERS, **ODD}, 8, 1, ()),
    "llama with adapters": ("llama", {**ONE_LAYER, **ODD}, 2, 1, ("max_adapters=1", "max_adapter_rank=4")),
    "llama joined with adapters": (
        *("llama", {**ONE_LAYER, **ODD}, 2, 1),
        ("joined=1", "max_adapters=1", "max_adapter_rank=4"),
    ),
    "qwen 2.5 joined in int8": ("qwen2", {**TWO_LAYERS, **ODD}, 2, 1, ("joined=1", "quantization=int8")),
    "gemma 3 in int8": ("gemma3_text", {**WINDOW_AND_NONE, **ODD}, 4, 1, ("quantization=int8",)),
    # All eight share the heads, with copies of both KV heads, and two of them each expert.
    "gpt-oss over eight": ("gpt_oss", {"num_attention_heads": 8, "vocab_size": 97, **TWO_LAYERS, **EXPERTS}, 2, 4, ()),
    "deepseek": ("deepseek_v3", TWO_LAYERS, 2, 2, ()),
    # Each device has one expert.
    "granite hybrid": ("granitemoehybrid", {**STATES_AND_ATTENTION, **EXPERTS}, 1, 4, ()),
    "qwen3-next": ("qwen3_next", STATES_AND_ATTENTION, 2, 2, ()),
    "gpt-oss in stages": ("gpt_oss", {"num_hidden_layers": 4, "vocab_size": 97, **EXPERTS}, 1, 2, ("stages=2",)),
    "gemma 3 joined in stages": (
        *("gemma3_text", {"num_hidden_layers": 4, "layer_types": WINDOW_AND_NONE["layer_types"] * 2, **ODD}, 2, 1),
        ("stages=2", "joined=1", "quantization=int8"),
    ),
}
# Stages alone: to the bit those of one device.
STAGES: dict[str, tuple[str, dict[str, Any], int, tuple[str, ...]]] = {
    "llama in four, in loops": ("llama", {"num_hidden_layers": 5, **ODD}, 4, ("decode_loop_steps=3",)),
    "llama with adapters, joined": (
        *("llama", {**TWO_LAYERS, **ODD}, 2),
        ("joined=1", "max_adapters=1", "max_adapter_rank=4", "speculation=ngram", "max_drafts=3"),
    ),
    "llama in int4 with int8 pages": ("llama", {**TWO_LAYERS, **ODD}, 2, ("quantization=int4", "cache_dtype=int8")),
    "deepseek": ("deepseek_v3", {"num_hidden_layers": 3}, 2, ()),
    "qwen3-next": (
        *("qwen3_next", {"num_hidden_layers": 4, "layer_types": STATES_AND_ATTENTION["layer_types"] * 2}, 2),
        ("speculation=ngram", "max_drafts=2"),
    ),
}
# Every run also has drafts of devices on a mesh below, eight devices with copies of heads in gpt-oss, and the logits of
# states and gated delta nets on a mesh in `tests/steps/test_mesh_steps.py`.
IN_EVERY_RUN = (
    "llama over four in loops",
    "llama joined with adapters",
    "gemma 3 in int8",
    "gpt-oss over eight",
    "deepseek",
    "gpt-oss in stages",
)
STAGES_IN_EVERY_RUN = ("llama in four, in loops", "llama with adapters, joined", "qwen3-next")


# One family for each kind of mixer, and its devices by tensor, by experts and in stages.
MESHES = [
    *((family, 1, 1, 2) for family in STAGED),
    *((family, tensor, 1, 1) for family in ("llama", "gemma3_text") for tensor in (2, 4, 8)),
    *(
        (family, 2, experts, 1)
        for family in ("gpt_oss", "deepseek_v3", "granitemoehybrid", "qwen3_next")
        for experts in (1, 2, 4)
    ),
]


def run_program(num_devices: int, *arguments: str) -> Any:
    output = run_on_devices(num_devices, "-m", "tests.parallel.engine_program", *arguments)
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("case", exhaustive_but(CASES, IN_EVERY_RUN))
def test_an_engine_on_a_mesh_gives_the_tokens_of_one_device_and_the_same_bits_in_any_batch(case, tmp_path):
    family, changes, tensor, experts, settings = CASES[case]
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", family, **changes)

    count = tensor * experts * (2 if "stages=2" in settings else 1)
    num_devices = max(NUM_DEVICES, count)
    results = run_program(num_devices, "same engine", str(checkpoint), str(tensor), str(experts), *settings)

    assert results["tokens"] == results["one"]
    assert results["bits"] == results["alone"]
    assert (results["drafts"] > 0) == ("speculation=ngram" in settings)
    # Parameters and pages of each device, to the byte.
    assert results["held"] == [results["planned"]] * count + [0] * (num_devices - count)
    assert results["planned"] < results["whole"]


@pytest.mark.parametrize("case", exhaustive_but(STAGES, STAGES_IN_EVERY_RUN))
def test_an_engine_in_stages_gives_the_bits_of_one_device(case, tmp_path):
    family, changes, count, settings = STAGES[case]
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", family, **changes)

    results = run_program(NUM_DEVICES, "same engine", str(checkpoint), "1", "1", f"stages={count}", *settings)

    assert results["bits"] == results["bits of one"]
    assert results["bits"] == results["alone"]
    assert (results["drafts"] > 0) == ("speculation=ngram" in settings)
    assert results["held"] == [results["planned"]] * count + [0] * (NUM_DEVICES - count)
    assert results["planned"] < results["whole"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "tensor", "experts", "stages"), MESHES)
def test_every_column_of_the_families_is_exact_on_a_mesh(family, tensor, experts, stages, tmp_path):
    changed = {**OVERRIDES[family], **(STAGED[family] if stages > 1 else {})}
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", family, **changed)
    sizes, count = (str(tensor), str(experts)), tensor * experts * stages

    results = run_program(count, "same engine", str(checkpoint), *sizes, f"stages={stages}")
    # Other than these, `jaxinfer.log_probs` computes on one device here.
    chosen = ("-m", "exhaustive or not exhaustive", "-k", f"{family} and not log_probabilities")
    program = ("-m", "pytest", "-p", "no:cacheprovider", "--mesh", f"{tensor}x{experts}x{stages}")
    report = run_on_devices(count, *program, *chosen, "tests/engine/exactness/test_families.py")

    assert results["tokens"] == results["one"]
    assert results["bits"] == results["alone"]
    assert re.search(r"^9 passed, \d+ deselected", report, re.MULTILINE)


def test_a_packed_checkpoint_is_split_in_whole_groups(tmp_path):
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128, **TWO_LAYERS, **ODD}
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", **sizes)
    packed = WRITERS["gptq"](checkpoint, tmp_path / "both", is_symmetric=False, has_order=True)

    results = run_program(NUM_DEVICES, "same engine", str(packed.path), "2", "1")

    assert results["tokens"] == results["one"]
    assert results["bits"] == results["alone"]
    assert results["held"] == [results["planned"]] * 2 + [0] * (NUM_DEVICES - 2)
    assert results["planned"] < results["whole"]


def test_tpus_share_the_integers_in_place_of_the_blocks_of_a_gguf(tmp_path):
    sizes: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_attention_heads": 4}
    path, _ = save_gguf(tmp_path, "llama", "Q4_K", **sizes, num_key_value_heads=2, num_hidden_layers=1, vocab_size=96)

    results = run_program(NUM_DEVICES, "same engine", str(path), "2", "1", "as_on_tpu=1")

    assert results["tokens"] == results["one"]
    assert results["bits"] == results["alone"]
    assert results["held"] == [results["planned"]] * 2 + [0] * (NUM_DEVICES - 2)


def test_drafts_of_devices_change_no_bit_on_a_mesh(tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", **TWO_LAYERS)

    results = run_program(NUM_DEVICES, "drafters", str(checkpoint))

    counts = results.pop("drafts")
    assert counts.pop("none") == 0
    assert min(counts.values()) > 0
    for kind in counts:
        assert results[kind] == results["none"]


def test_a_mesh_answers_requests_of_all_kinds_as_one_device_does(tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", num_hidden_layers=1, **ODD)
    changed = save_random_checkpoint(tmp_path / "changed", "llama", num_hidden_layers=1, seed=1, **ODD)

    results = run_program(NUM_DEVICES, "requests", str(checkpoint), str(changed))

    one, mesh = results["one device"], results["mesh"]
    assert mesh["beams"] == one["beams"]
    # All logits are equal, so that each token has the same chance, and padding would be drawn as well.
    assert mesh["flat"] == one["flat"]
    assert mesh["alternatives"] == [list(range(ODD["vocab_size"]))] * 2
    assert mesh["total"] == pytest.approx([1, 1], abs=1e-5)
    assert results["of one device"] == results["of the mesh"] == results["expected"]


def test_requests_are_forked_saved_and_restored_on_any_mesh(tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", **ONE_LAYER, **ODD)

    results = run_program(NUM_DEVICES, "branches", str(checkpoint), str(tmp_path))

    assert results["here"] == results["undisturbed"]
    assert results["forked"] == len(results["tokens"])
    for name in ("the same mesh", "another order", "one device"):
        assert results[name] == results["tokens"]
    # Pages of another mesh have other bits.
    assert results["computed"]["the same mesh"] == 0
    assert min(results["computed"]["another order"], results["computed"]["one device"]) > 37


@pytest.mark.parametrize("tensor", exhaustive_but([1, 2], [2]))
def test_two_replicas_give_the_bits_of_one_engine_together_and_apart(tensor, tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", **ONE_LAYER)

    results = run_program(NUM_DEVICES, "replicas", str(checkpoint), str(tensor))

    one = results.pop("one")
    assert (one["plans"], one["preemptions"] > 0) == (0, True)
    for two in results.values():
        assert two["bits"] == one["bits"]
        assert min(two["found"], two["preemptions"], *two["steps"]) > 0
        assert two["devices"] == [list(range(tensor)), list(range(tensor, 2 * tensor))]
        assert (two["plans"], two["owned"], two["damaged"]) == (2, 0, 0)
    assert (results["two"]["handed over"], results["apart"]["handed over"] > 100) == (0, True)


@pytest.mark.parametrize(("family", "settings"), [("granitemoehybrid", ()), ("gemma3_text", ("cache_dtype=int8",))])
def test_states_windows_and_rounded_caches_are_handed_over_and_damage_is_mended(family, settings, tmp_path):
    sizes: dict[str, Any] = STATES_AND_ATTENTION if family == "granitemoehybrid" else TWO_LAYERS
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", family, **sizes)

    results = run_program(NUM_DEVICES, "hand-over", str(checkpoint), *settings)

    assert results["apart"] == results["one"]
    assert results["damaged"] > 5
    assert results["owned"] == 0


def test_every_verb_acts_on_the_replica_of_its_request_or_on_all(tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", **ONE_LAYER)

    results = run_program(NUM_DEVICES, "replica verbs", str(checkpoint), str(tmp_path))

    assert [own.pop("tracks") for own in results.values()] == [[0], [0, 1], [0, 1]]
    assert results["two"] == results["apart"] == results["one"]


def test_a_replica_that_fails_ends_every_request_with_its_error(tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", **ONE_LAYER)

    errors = run_program(NUM_DEVICES, "failing replica", str(checkpoint))["errors"]

    assert len(errors) == 4 * 3 + 1
    assert all("has failed (RuntimeError: the device is lost); make a new one" in error for error in errors)


def test_steps_are_loaded_from_disk_for_the_same_order_of_devices_alone(tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", **ONE_LAYER)

    results = run_program(NUM_DEVICES, "warm start", str(checkpoint), str(tmp_path / "steps"))

    assert results["first"] > 0
    assert results["second"] == results["first"]
    assert results["other order"] == 2 * results["first"]
    assert results["tokens"] == results["tokens"][:1] * 3


def test_pages_on_disk_are_found_by_the_same_mesh_alone(tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", **TWO_LAYERS, **ODD)

    results = run_program(NUM_DEVICES, "disk tier", str(checkpoint), str(tmp_path / "pages"))

    assert results["the same mesh"] > 0
    assert results["first"] == results["another order"] == results["one device"] == 0
    assert results["tokens"] == results["tokens"][:1] * 4


def test_products_by_split_weights_have_one_number_of_rows(tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", **ONE_LAYER)

    results = run_program(NUM_DEVICES, "tried products", str(checkpoint))

    # A trial of the whole weights says nothing about their parts.
    assert results["one device"] > 3
    assert results["mesh"] == 0


def test_experts_and_a_shared_one_take_one_sum_over_devices():
    results = run_program(NUM_DEVICES, "shared expert")

    assert results["sums"] == 1
    assert results["error"] < 1e-4  # of numbers up to 100


def test_devices_find_the_greatest_logits_of_rows_that_they_share():
    assert run_program(NUM_DEVICES, "top k")


def test_an_engine_takes_the_fewest_devices_that_hold_the_model_and_names_the_others(tmp_path):
    # 14.2 MB of parameters, beside which the inputs of a second step in flight are little.
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 97}
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", **sizes)

    results = run_program(NUM_DEVICES, "fewest devices", str(checkpoint))

    two, one = results["12000000"], results["40000000"]
    assert two["parallelism"] == "Parallelism(tensor=2, experts=1, replicas=1, prefill=0, stages=1)"
    (line,) = two["lines"]
    assert "leaves cpu:2, cpu:3 idle" in line
    assert "Parallelism(tensor=4), or --tensor-parallel 4, splits it over 4" in line
    assert "Parallelism(tensor=2, replicas=2), or --tensor-parallel 2 --replicas 2, makes 2 copies of it" in line
    assert two["tokens"] == results["tokens"]
    assert one["parallelism"] == "None"
    assert "leaves cpu:1, cpu:2, cpu:3 idle" in one["lines"][0]
    for engine in (two, one):
        # What is guessed for steps to come stays reserved: 0.7 of 16.5 MB.
        assert 0.98 * engine["compiled"] <= engine["planned"] <= 1.06 * engine["compiled"]
    for name, split in {
        "all": "1, experts=1, replicas=4, prefill=0",
        "of two": "2, experts=1, replicas=2, prefill=1",
    }.items():
        parallelism = f"Parallelism(tensor={split}, stages=1)"
        assert results[name] == {"parallelism": parallelism, "lines": [], "tokens": results["tokens"]}
    assert results["left"] == {
        "parallelism": "Parallelism(tensor=3, experts=1, replicas=1, prefill=0, stages=1)",
        "lines": ["1 of the 4 devices stay idle: each replica has 3"],
    }
    (line,) = results["too few"]
    assert "no split over the devices of this process holds the model" in line
    assert "of 2.0 MB" in line


def test_what_devices_cannot_share_is_refused_by_name(tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", **TWO_LAYERS)
    sparse = save_random_checkpoint(tmp_path / "sparse", "gpt_oss", **EXPERTS)

    assert run_program(NUM_DEVICES, "refusals", str(checkpoint), str(sparse)) == {
        "tensor=3": "tensor=3 cannot split heads of size 4 evenly; the numbers that can are 1, 2, 4",
        "experts=2": "experts=2 has nothing to split: the model has no experts; use experts=1",
        "experts=3 of 4": "experts=3 cannot split experts of size 4 evenly; the numbers that can are 1, 2, 4",
        "tensor=8": (
            "Parallelism(tensor=8, experts=1, replicas=1, prefill=0, stages=1) needs 8 devices, and this process has 4;"
            " change EngineConfig.parallelism (--tensor-parallel, --expert-parallel, --stages, --replicas)"
        ),
        "groups": (
            "tensor=2 cannot split the 1 groups of inputs that share a scale in the 4-bit weight .layers[0].mixer.o;"
            " smaller numbers that can are 1"
        ),
        "devices": ("devices must be 2 different devices of this process, for EngineConfig.parallelism has 2"),
        "replicas=3": (
            "Parallelism(tensor=2, experts=1, replicas=3, prefill=0, stages=1) needs 6 devices, and this process has 4;"
            " change EngineConfig.parallelism (--tensor-parallel, --expert-parallel, --stages, --replicas)"
        ),
        "drafts": (
            "speculation='ngram' drafts for one replica, and EngineConfig.parallelism has replicas=2; leave out one of"
            " the two"
        ),
        "explicit axes": "use automatic ones: Mesh(devices, axis_names)",
        "unknown axis": (
            "mesh has the axis 'data', over which nothing is split; axes of a mesh are experts and model and stages"
        ),
    }


def test_host_devices_get_threads_of_their_own():
    flags = "--xla_force_host_platform_device_count=2"
    program = "import os, jaxinfer; print(os.environ['XLA_FLAGS'])"

    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=True,
    )

    assert {flags, "--xla_cpu_multi_thread_eigen=false"} <= set(run.stdout.split())
