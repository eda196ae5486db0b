"""Whole steps of large models under the real TPU compiler. `scripts/kernels/large_models.py` has v5p too."""

from __future__ import annotations

import pytest

from scripts.kernels.compile_matrix import can_compile
from tests.kernels.large_steps import check_step, steps_on

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not can_compile(), reason='libtpu is not installed; pip install "jaxinfer[aot]"'),
]


@pytest.mark.parametrize(("model", "device", "case"), steps_on("v6e"))
def test_a_step_of_a_large_model_fits_its_chips(model, device, case):
    check_step(model, device, case)
