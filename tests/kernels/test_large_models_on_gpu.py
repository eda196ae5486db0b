"""Whole steps of large models under the real CUDA compiler."""

from __future__ import annotations

import pytest

from scripts.kernels.compile_gpu import can_compile
from tests.kernels.large_steps import check_step, compiled, steps_on

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not can_compile(), reason='no CUDA compiler; pip install "jaxinfer[aot]"'),
]


@pytest.mark.parametrize(("model", "device", "case"), steps_on("H200", ["Qwen3-30B-A3B"]))
def test_a_step_of_a_large_model_fits_its_gpus_and_keeps_to_registers(model, device, case):
    check_step(model, device, case)

    kernels = compiled(model, device)[case]["kernels"]
    assert kernels
    assert [kernel["name"] for kernel in kernels if kernel["spill_bytes"]] == []


@pytest.mark.parametrize(("model", "device", "case"), steps_on("H200", ["Llama-3-8B"]))
def test_a_step_in_stages_fits_its_gpus_and_keeps_to_registers(model, device, case):
    check_step(model, device, case)

    assert [kernel["name"] for kernel in compiled(model, device)[case]["kernels"] if kernel["spill_bytes"]] == []


def test_grouped_products_take_little_memory_beside_the_weights():
    steps = compiled("Qwen3-30B-A3B", "H200").values()

    # A grouped product of jax alone takes 9 GB in prefill.
    assert max(figures["temporary_bytes"] for figures in steps) < 250e6
    # Gate, up and down of each layer.
    names = [[kernel["name"] for kernel in figures["kernels"]] for figures in steps]
    assert [sum(name.startswith("grouped_matmul") for name in own) for own in names] == [48 * 3] * 2
