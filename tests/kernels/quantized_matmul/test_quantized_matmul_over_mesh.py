"""Products by integers that devices of a mesh split, against NumPy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kernels.quantized_matmul.mesh_program import CASES, PAIRS
from tests.on_devices import run_on_devices


@pytest.fixture(scope="module")
def found() -> Any:
    return json.loads(run_on_devices(4, "-m", "tests.kernels.quantized_matmul.mesh_program"))


@pytest.mark.parametrize(("case", "implementation"), PAIRS)
def test_devices_give_the_product_together(case, implementation, found):
    # bfloat16 rounds the result of each of four devices, of about 1, and their sum; float32 adds in another order.
    tolerance = 2**-6 if CASES[case].dtype == "bfloat16" else 1e-5

    assert found["errors"][f"{case}, {implementation}"] < tolerance


def test_packed_integers_of_a_group_on_several_devices_are_refused(found):
    assert "2 groups of packed integers cannot be split over 4 devices" in found["refusal"]
