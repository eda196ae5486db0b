"""Whole steps of large models under the real compilers: they fit the devices they need, with the cache in place."""

from __future__ import annotations

import pytest

from scripts.kernels import compile_gpu, compile_matrix
from scripts.kernels.compilers import axes_of
from scripts.kernels.large_models import MEMORY, MESHES, cases_of, compile_for, is_gpu
from tests.kernels.recorded import figures_of

pytestmark = pytest.mark.aot

CASES = [(model, device, name) for model, meshes in MESHES.items() for device in meshes for name in cases_of(model)]


@pytest.mark.parametrize(("model", "device", "name"), CASES)
def test_a_step_of_a_large_model_fits_its_devices(model, device, name):
    compiler = compile_gpu if is_gpu(device) else compile_matrix
    if not compiler.can_compile():
        pytest.skip('no compiler for this device; pip install "jaxinfer[aot]"')

    figures = figures_of(device, cases_of(model), compile_for)[name]

    assert "error" not in figures, figures["error"]
    assert figures["in_place"]
    assert figures["argument_bytes"] + figures["temporary_bytes"] < MEMORY[axes_of(device)[0]]
    # Of all threads, for other work on the machine lengthens the time by the clock.
    assert figures["processor_seconds"] < 180
    assert [kernel["name"] for kernel in figures.get("kernels", ()) if kernel["spill_bytes"]] == []


def test_grouped_products_on_a_gpu_take_little_memory_beside_the_weights():
    if not compile_gpu.can_compile():
        pytest.skip('no CUDA compiler; pip install "jaxinfer[aot]"')

    steps = figures_of("H200", cases_of("Qwen3-30B-A3B"), compile_for).values()

    # A grouped product of jax alone takes 9 GB in prefill.
    assert max(figures["temporary_bytes"] for figures in steps) < 250e6
    # Gate, up and down of each layer.
    names = [[kernel["name"] for kernel in figures["kernels"]] for figures in steps]
    assert [sum(name.startswith("grouped_matmul") for name in own) for own in names] == [48 * 3] * 2
