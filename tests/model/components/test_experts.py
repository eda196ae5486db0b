"""The sum of each token's experts over meshes, against NumPy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.model.components.experts_program import CASES
from tests.on_devices import run_on_devices


@pytest.fixture(scope="module")
def found() -> Any:
    return json.loads(run_on_devices(4, "-m", "tests.model.components.experts_program"))


@pytest.mark.parametrize("case", CASES)
def test_experts_over_a_mesh_give_the_sum_of_the_formula(case, found):
    # float32 sums of 32 products in another order.
    assert found[case] < 1e-5
