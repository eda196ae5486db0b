"""Whole steps of large models under the real TPU compiler. `scripts/kernels/large_models.py` has v5p too."""

from __future__ import annotations

import pytest

from scripts.kernels.compile_matrix import can_compile
from tests.kernels.large_steps import check_step, compiled, steps_on

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not can_compile(), reason='libtpu is not installed; pip install "jaxinfer[aot]"'),
]


@pytest.mark.parametrize(("model", "device", "case"), steps_on("v6e"))
def test_a_step_of_a_large_model_fits_its_chips(model, device, case):
    check_step(model, device, case)


@pytest.mark.parametrize("step", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("model", "device"),
    [("Qwen3-30B-A3B", "v6e-4"), ("GPT-OSS-120B", "v6e-8x2"), ("Qwen3-Next-80B-A3B", "v6e-8x2")],
)
def test_a_step_copies_no_weight(model, device, step):
    assert compiled(model, device)[f"{model} {step} step"]["copied_weights"] == []


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_a_step_reads_experts_where_they_lie(step):
    figures = compiled("Qwen3-30B-A3B", "v6e-4")[f"Qwen3-30B-A3B {step} step"]

    # A layer's experts are three weights of 50 MB. Logits of 32 rows in float32 are 5 MB, and sampling has a few.
    assert figures["temporary_bytes"] < 30e6
