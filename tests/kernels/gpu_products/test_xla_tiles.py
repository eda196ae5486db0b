"""XLA's products on GPUs: options of a compilation by which nothing is measured, and a tile for which there is room."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from kernels_pallas.device import Device
from kernels_pallas.gpu_compiler import GPUS
from kernels_pallas.gpu_products import PASSES, compiler_options, weight_itemsize, xla_options
from kernels_pallas.gpu_products.xla_options import UNTUNED, xla_tile
from scripts.kernels.figures import products

AMPERE_ON = {name: gpu for name, gpu in GPUS.items() if name != "T4"}
CAPABILITY = {"A100": 8.0, "L4": 8.9, "H100": 9.0, "H200": 9.0}


def compile_on(monkeypatch, kind, capability, platform="gpu"):
    device = Device(kind, platform, 132, capability)
    monkeypatch.setattr(xla_options, "device_at_hand", lambda: device)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 256])
@pytest.mark.parametrize("name", AMPERE_ON)
def test_three_products_of_the_same_rows_in_one_program_have_room_in_shared_memory(name, num_rows, itemsize):
    gpu = GPUS[name]

    tile = xla_tile(CAPABILITY[name], num_rows, itemsize)

    held = tile.num_stages - (0 if CAPABILITY[name] >= 9 else 1)
    needed = 3 * held * (tile.block_m + tile.block_n) * tile.block_k * itemsize
    assert needed <= gpu.shared_per_block
    assert held >= 2
    assert tile.block_k >= 16
    # Wide enough for 64 rows and not for more than there are, in blocks of the tensor cores' 16.
    assert tile.block_n == (16 if num_rows <= 16 else 64)


@pytest.mark.parametrize("num_rows", [1, 256, 257, 2048])
def test_on_a_gpu_nothing_is_measured_at_any_number_of_rows(monkeypatch, num_rows):
    compile_on(monkeypatch, "NVIDIA H200", 9.0)

    options = compiler_options(num_rows, 2)

    assert options["xla_gpu_autotune_level"] == 0
    assert options["xla_gpu_experimental_enable_fusion_autotuner"] is False
    is_tiled = num_rows <= 256
    assert ("xla_gpu_override_gemm_autotuner" in options) == is_tiled
    assert options.get("xla_gpu_enable_triton_gemm", True) == is_tiled
    # Joined products would make cuBLASLt's weights copies.
    assert options[PASSES].split(",") == ["rematerialization", *([] if is_tiled else ["dot-merger"])]


def test_packed_weights_stay_with_triton_at_any_number_of_rows(monkeypatch):
    compile_on(monkeypatch, "NVIDIA H200", 9.0)

    assert compiler_options(2048, 1) == compiler_options(256, 1) == compiler_options(256, 2)


def test_the_type_of_weights_is_that_of_most_bytes():
    matrix, vector = jnp.zeros((64, 8), jnp.int8), jnp.zeros(64, jnp.float32)

    assert weight_itemsize({"packed": matrix, "scales": vector}) == 1
    assert weight_itemsize({"packed": matrix, "scales": vector, "embedding": jnp.zeros((64, 8), jnp.bfloat16)}) == 2
    assert weight_itemsize(()) == 4


@pytest.mark.parametrize(("kind", "capability"), [("Tesla T4", 7.5), ("AMD Instinct MI300X", None)])
def test_a_gpu_without_tritons_products_leaves_them_to_xla_and_measures_nothing(monkeypatch, kind, capability):
    compile_on(monkeypatch, kind, capability)

    assert compiler_options(8, 2) == UNTUNED == compiler_options(2048, 2)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_other_devices_have_no_such_options(monkeypatch, platform):
    compile_on(monkeypatch, "some device", None, platform)

    assert compiler_options(8, 2) == {}


TRITON = (
    "%gemm_fusion_dot.1_computation (p: bf16[8,64]) -> f32[8,32] {\n"
    '  %dot = dot(), backend_config={"sizes":["128"]}\n}\n'
    "  %gemm_fusion_dot.1 = f32[8,32]{1,0} fusion(%p), kind=kCustom, calls=%gemm_fusion_dot.1_computation,"
    ' backend_config={"kind":"__triton_nested_gemm_fusion","output_tiles":[{"sizes":["1","16","64"]}],"num_stages":3}\n'
)
CUBLAS = '  %custom-call.1 = custom-call(%a), custom_call_target="__cublas$lt$matmul"\n'


def test_products_are_counted_by_the_way_they_are_computed():
    assert products(TRITON + CUBLAS + CUBLAS) == {"16x64x128x3": 1, "cuBLASLt": 2}
    assert products("ENTRY %main () -> f32[] {\n}") == {}
