"""The GPU kernels and whole steps under the real CUDA compiler, which runs without a GPU: in place and in registers."""

from __future__ import annotations

import functools

import jax
import pytest

from kernels_pallas.packed_numbers import MAX_WIDENED
from kernels_pallas.paged_attention.gpu import prefill_choice
from kernels_pallas.paged_attention.gpu.parts import MAX_PARTIAL_BYTES
from kernels_pallas.paged_attention.in_blocks import DEFAULT_SIZES
from kernels_pallas.quantized_matmul.before_ampere import FEW_ROWS
from scripts.kernels import compile_gpu
from scripts.kernels.compile_gpu import (
    BUCKET_ROWS,
    DENSE_WEIGHTS,
    DEVICES,
    EXACT_ROWS,
    LOOP_STEPS,
    can_compile,
    cases_for,
)
from scripts.kernels.figures import CUBLAS, DENSE
from tests.kernels.recorded import figures_of

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not can_compile(), reason='no CUDA compiler; pip install "jaxinfer[aot]"'),
]

# What an L4 takes is what an A100 takes, but for 8-bit floating point.
ON_L4 = (
    *(
        "decode append",
        "prefill append",
        "decode H=128",
        "prefill H=128",
        "decode fp8",
        "prefill fp8",
        "product int4 x 16",
        "dense",
    ),
    *("experts decode", "experts int4 decode", "experts int4 prefill", "experts long prefill"),
)
ALL = ("decode", "verify", "prefill", "product", "dense", "latents", "experts")
# An H100 has the multiprocessors of an H200.
ON_H100 = ("decode H=128", "decode split", "prefill H=128")
KERNELS = {device: {"L4": ON_L4, "H100": ON_H100}.get(device, ALL) for device in DEVICES}
CASES = [(device, name) for device in DEVICES for name in cases_for(device, KERNELS[device])]


@functools.cache
def compiled(device):
    return figures_of(device, cases_for(device, KERNELS[device]), compile_gpu)


@functools.cache
def compiled_beginning_with(beginning, device="H200"):
    return figures_of(device, cases_for(device, [beginning]), compile_gpu)


@pytest.mark.parametrize(("device", "name"), CASES)
def test_a_kernel_compiles_in_place_and_keeps_to_registers(device, name):
    figures = compiled(device)[name]

    assert "error" not in figures, figures["error"]
    assert figures["in_place"]
    assert [kernel["name"] for kernel in figures["kernels"] if kernel["spill_bytes"]] == []
    assert all(kernel["programs_per_core"] >= 1 for kernel in figures["kernels"])
    # Partial results of long contexts, integers on their way to an int8 pool, and weights widened for many rows.
    has_parts = any(kernel["name"].startswith("combine_parts") for kernel in figures["kernels"])
    few_queries = name.startswith(("decode", "verify"))
    widened = {"product int4 x 512": 14336 * 4096 * 2}
    partial_bytes = has_parts * (1e7 if few_queries else MAX_PARTIAL_BYTES)
    assert figures["temporary_bytes"] < widened.get(name, partial_bytes) + 8e6


needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < prefill_choice.MIN_JAX, reason="the Mosaic kernel for prefill needs jax >= 0.11"
)


@needs_mosaic
@pytest.mark.parametrize("name", cases_for("H200", ["mosaic"]))
def test_the_hopper_kernel_for_prefill_copies_by_tma_multiplies_by_wgmma_and_keeps_to_registers(name):
    figures = compiled_beginning_with("mosaic")[name]

    assert "error" not in figures, figures["error"]
    assert figures["in_place"]
    assert figures["temporary_bytes"] < 1e6
    assert [kernel["name"] for kernel in figures["kernels"] if kernel["spill_bytes"]] == []
    (kernel,) = [kernel for kernel in figures["kernels"] if kernel["name"] == "hopper_prefill"]
    # Two warpgroups compute, and one fetches.
    assert kernel["threads"] == 3 * 128
    assert kernel["programs_per_core"] == 1
    # Queries; keys and values, first and later; results in runs of 64, 32 … 1 tokens.
    assert kernel["tensor_copies"] == 1 + 2 * 2 + 7
    # A product of 64 x 128 adds up 16 numbers: those of a head for scores, 128 keys for results. A loop masks, one does
    # not, and at the start of a window another masks.
    head_dim = 64 if "H=64" in name else 128
    assert kernel["warpgroup_products"] == (head_dim + 128) // 16 * (3 if "window" in name else 2)


def test_a_decode_step_of_contexts_that_are_never_split_is_two_launches_and_no_memory():
    figures = compiled("H200")["decode 2,048"]

    assert (figures["num_launches"], figures["temporary_bytes"]) == (2, 16)


def test_a_decode_step_of_attention_combines_parts_in_a_third_launch():
    figures = compiled("H200")["decode H=128"]

    # 4 parts of each of 64 rows, 32 heads of 128 + 2 numbers in float32.
    assert (figures["num_launches"], figures["temporary_bytes"]) == (3, pytest.approx(64 * 4 * 32 * 130 * 4, rel=0.01))


@pytest.mark.parametrize("device", DEVICES)
def test_the_decode_kernel_reads_blocks_while_it_computes_with_others(device):
    for name, figures in compiled(device).items():
        if "decode" not in name or "experts" in name or "append" in name:
            continue
        kernels = {kernel["name"]: kernel["loads_ahead"] for kernel in figures["kernels"]}
        assert kernels["paged_attention"] > 0, name


@pytest.mark.parametrize("bits", [4, 8])
def test_the_kernel_never_writes_the_weights_that_plain_xla_writes(bits):
    weight_bytes = 14336 * 4096 * 2
    plain = compiled_beginning_with("plain")[f"plain product int{bits} x 16"]
    kernel = compiled("H200")[f"product int{bits} x 16"]

    assert plain["temporary_bytes"] >= weight_bytes
    assert kernel["temporary_bytes"] < weight_bytes / 50


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_the_kernel_writes_nothing_but_the_result_of_a_grouped_product(step):
    plain = compiled_beginning_with("plain")[f"plain experts {step}"]

    assert plain["temporary_bytes"] > 100e6
    for dtype in ("", "float32 "):
        assert compiled("H200")[f"experts {dtype}{step}"]["temporary_bytes"] < 1e5


def test_a_scale_per_channel_needs_no_kernel():
    assert compiled("H200")["product int8 x 16 per channel"]["temporary_bytes"] < 4e6


STEPS = [(device, name) for device in ("H200", "H200-8") for name in ("step decode", "step prefill")]


# Of weights of 4 bits no product writes what they stand for: the largest would take 117 MB more.
@pytest.mark.parametrize(
    ("device", "name"),
    [*STEPS, ("H200", "step decode int4 weights"), ("H200", "step verify beside prefill")],
)
def test_a_whole_step_of_llama_8b_compiles_from_shapes_alone(device, name):
    figures = compiled_beginning_with("step", device)[name]

    assert "error" not in figures, figures["error"]
    assert figures["in_place"]
    # cuBLASLt gives the results of gate and up in float32, 117 MB each.
    assert figures["temporary_bytes"] < (200e6 if figures["products"].keys() != {CUBLAS} else 400e6)
    # Time of all threads, which what else the machine does cannot lengthen.
    assert max(figures["processor_seconds"], figures["lowering_seconds"]) < 60
    # Three launches per layer, and two more in a ragged batch.
    assert len(figures["kernels"]) == 32 * (3 if "decode" in name else 5)


@pytest.mark.parametrize("name", [name for name in cases_for("H200") if name.startswith("dense")])
@pytest.mark.parametrize("device", ["A100", "L4", "H200"])
def test_a_dense_product_has_blocks_under_way_while_it_multiplies_and_writes_its_result_alone(device, name):
    if name not in compiled(device):
        pytest.skip("refused there")
    figures = compiled(device)[name]

    assert figures["temporary_bytes"] == 0
    assert figures["kernels"][0]["loads_ahead"] >= 2


@pytest.mark.parametrize("sizes", DENSE_WEIGHTS)
@pytest.mark.parametrize("device", ["A100", "L4", "H200"])
def test_an_exact_product_has_one_instruction_at_any_number_of_rows(device, sizes):
    cases = [compiled(device)[f"dense exact {'x'.join(map(str, sizes))} x {rows}"] for rows in EXACT_ROWS]

    (instructions,) = {tuple(case["kernels"][0]["instructions"]) for case in cases}
    assert len(instructions) == 1


@pytest.mark.parametrize("name", cases_for("H200", ["exact"]))
def test_an_exact_step_leaves_no_sum_to_xla_and_attends_by_one_instruction(name):
    figures = compiled_beginning_with("exact")[name]

    assert "error" not in figures, figures["error"]
    assert figures["in_place"]
    # The full form scatters token counts, which are whole numbers, and biases, of which a token has one.
    assert figures["float_sums"] == (2 if name in ("exact decode 256", "exact verify") else 0)
    assert figures["spilling"] == []
    # 256 rows have as many tokens as a layer's output has weights.
    assert [copy for copy in figures["copied_weights"] if "bf16" in copy] == []
    assert figures["products"] == {DENSE: 4 * 28 + 1}
    attending = [kernel for kernel in figures["kernels"] if kernel["name"].startswith("paged_attention")]
    assert {tuple(kernel["instructions"]) for kernel in attending} == {("wgmma m64 k16 bf16",)}


def test_a_step_that_need_not_be_exact_leaves_sums_to_xla():
    assert compiled_beginning_with("bucket")["bucket decode 8"]["float_sums"] > 0


def test_few_rows_are_multiplied_by_our_kernel_and_many_by_cublaslt_and_neither_spills():
    steps = compiled_beginning_with("bucket") | compiled_beginning_with("step")

    # q, k and v; o; up and gate; and down of each layer, and the unembedding.
    for num_rows in BUCKET_ROWS:
        for name in ("decode", "plain loop", "filtered loop") if num_rows > 1 else ("decode",):
            assert steps[f"bucket {name} {num_rows}"]["products"] == {DENSE: 4 * 28 + 1}, (name, num_rows)
    assert steps["step prefill"]["products"] == {CUBLAS: 4 * 32, DENSE: 1}  # one row of each request has logits
    # The results of up and gate for 2,048 tokens, in bfloat16: they and what lies beside them.
    assert steps["step prefill"]["temporary_bytes"] < 1.6 * 2048 * 2 * 14336 * 2
    assert {name: figures["spilling"] for name, figures in steps.items() if figures["spilling"]} == {}


@pytest.mark.parametrize("num_rows", BUCKET_ROWS)
def test_the_host_waits_for_no_condition_and_no_loop_of_a_default_decode_step(num_rows):
    figures = compiled_beginning_with("bucket")

    loops = [("plain loop", [LOOP_STEPS], 295), ("filtered loop", [LOOP_STEPS], 370)]  # a turn counts once
    for name, turns, most_launches in [("decode", [], 285 if num_rows > 1 else 330), *(loops if num_rows > 1 else [])]:
        step = figures[f"bucket {name} {num_rows}"]
        assert "error" not in step, step["error"]
        assert step["in_place"]
        assert step["num_conditions"] == 0
        assert step["loop_turns"] == turns
        assert step["num_launches"] <= most_launches  # of 28 layers


def test_log_probabilities_of_draws_bring_no_condition_and_few_launches():
    figures = compiled_beginning_with("bucket")
    without, described = (figures[f"bucket filtered loop 8{tail}"] for tail in ("", " with sampling_log_probs"))

    assert "error" not in described, described["error"]
    assert described["in_place"]
    assert (described["num_conditions"], described["loop_turns"]) == (0, [LOOP_STEPS])
    assert described["num_launches"] <= without["num_launches"] + 10


@pytest.mark.parametrize("name", cases_for("T4"))
def test_the_host_of_a_gpu_before_ampere_follows_no_loop_if_tables_are_small(name):
    figures = compiled_beginning_with("old", "T4")[name]

    assert "error" not in figures, figures["error"]
    assert figures["in_place"]
    assert figures["num_conditions"] == 0
    assert (None in figures["loop_turns"]) == (name == "old step decode 8 x 8,192")


def test_the_host_of_a_gpu_before_ampere_follows_one_loop_a_layer_over_large_tables():
    figures = compiled_beginning_with("old", "T4")["old step decode 8 x 8,192"]

    assert figures["loop_turns"] == [None] * 28


@pytest.mark.parametrize(
    "name", ["step decode 1 x 8,192", "step decode 8 x 2,048", "step decode 8 x 8,192", "latents decode"]
)
def test_plain_jax_writes_no_more_than_a_block_of_pages_and_no_weights(name):
    assert compiled_beginning_with("old", "T4")[f"old {name}"]["temporary_bytes"] < DEFAULT_SIZES.block_bytes + 10e6


@pytest.mark.parametrize("name", cases_for("T4", ["old product"]))
def test_a_gpu_before_ampere_writes_no_packed_weights_but_those_of_a_turn(name):
    figures = compiled_beginning_with("old", "T4")[name]
    rows = int(name.split()[-1])
    results = 3 * rows * 14336 * 4

    # Of few rows the results alone, and zero points with a byte each.
    assert figures["temporary_bytes"] < (results + 1e6 if rows <= FEW_ROWS else results + 2 * MAX_WIDENED)


def test_a_decode_step_of_int4_experts_never_writes_them_in_floating_point():
    figures = compiled_beginning_with("sparse")["sparse step decode int4 weights"]

    assert "error" not in figures, figures["error"]
    assert figures["in_place"]
    # The experts of a layer are 1.2 GB in bfloat16.
    assert figures["temporary_bytes"] < 250e6
    # Gate, up and down of each layer, beside its attention.
    assert len(figures["kernels"]) == 48 * (3 + 3)
