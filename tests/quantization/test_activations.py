"""Activations in 8 bits: the integers, their product and its scales, against NumPy and compressed-tensors."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams

from jaxinfer.quantization.activations import Activations, round_rows, rounded_product
from kernels_pallas.row_products import integers_by_integers

SCALE, ZERO = np.float32(0.05), 7
EVERY = [Activations(is_dynamic, is_symmetric) for is_dynamic in (True, False) for is_symmetric in (True, False)]


def stated_range(activations: Activations) -> Any:
    zero = 0 if activations.is_symmetric else ZERO
    return None if activations.is_dynamic else np.array([[SCALE, 1 / SCALE, zero]], np.float32)


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((20, 96)).astype(np.float32) * 3
    x[3] = 0
    return x


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 40])
def test_products_of_integers_are_those_of_numpy(num_rows):
    generator = np.random.default_rng(num_rows)
    pair: Any = (generator.integers(-128, 128, (n, 700), np.int8) for n in (num_rows, 33))
    x, w = pair
    x[0], w[0] = -128, -128

    np.testing.assert_array_equal(integers_by_integers(x, w), x.astype(np.int32) @ w.astype(np.int32).T)


@pytest.mark.parametrize("activations", EVERY, ids=str)
def test_rows_are_rounded_as_by_compressed_tensors(rows, activations):
    arguments = QuantizationArgs(
        num_bits=8,
        symmetric=activations.is_symmetric,
        dynamic=activations.is_dynamic,
        strategy=QuantizationStrategy.TOKEN if activations.is_dynamic else QuantizationStrategy.TENSOR,
    )
    x, stated = torch.from_numpy(rows), stated_range(activations)
    if activations.is_dynamic:
        scale, zero = calculate_qparams(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), arguments)
        if activations.is_symmetric:  # where the largest number is 127.5 steps, between two integers; here it is 127
            scale = x.abs().amax(-1, keepdim=True).clamp(1e-30) / 127
    else:
        scale, zero = torch.tensor([SCALE]), torch.tensor([0 if activations.is_symmetric else ZERO])
    expected = quantize(x, scale, zero, arguments).numpy()

    rounded = round_rows(jnp.asarray(rows), activations, stated)

    # The third row has zeros alone, for which any zero point will do.
    assert not rounded.floats()[3].any()
    difference = np.delete(np.asarray(rounded.values) - expected, 3, axis=0)
    steps = np.delete((x / scale).numpy(), 3, axis=0)
    is_between = np.abs(steps - np.floor(steps) - 0.5) < 1e-4
    np.testing.assert_array_equal(difference[~is_between], 0)
    assert np.abs(difference).max() <= 1
    assert is_between.mean() < 0.02
    if activations.is_dynamic:
        np.testing.assert_allclose(np.delete(rounded.scales, 3, axis=0), np.delete(scale.numpy(), 3, axis=0), rtol=1e-6)
        assert np.abs(rounded.floats() - rows).max() <= np.abs(rows).max() / 127


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("activations", EVERY, ids=str)
def test_products_are_exact_integers_times_scales_whatever_is_beside_a_row(rows, activations, has_zeros):
    generator = np.random.default_rng(1)
    w, zeros = generator.integers(-128, 128, (40, 96), np.int8), generator.integers(-128, 128, (40, 1), np.int8)
    scales, stated = generator.random((40, 1), np.float32), stated_range(activations)
    parts: Any = (w, scales, zeros if has_zeros else None, activations, stated)
    rounded = round_rows(jnp.asarray(rows), activations, stated)
    numbers = np.asarray(rounded.values, np.int64) - (0 if rounded.zeros is None else np.asarray(rounded.zeros))
    sums = numbers @ (w.astype(np.int64) - (zeros if has_zeros else 0)).T

    whole = rounded_product(jnp.asarray(rows), *parts)

    assert np.abs(sums).max() < 2**31
    np.testing.assert_array_equal(whole, sums.astype(np.float32) * (np.asarray(rounded.scales) * scales.T))
    for i in (0, 3, 19):
        np.testing.assert_array_equal(rounded_product(jnp.asarray(rows[i : i + 1]), *parts)[0], whole[i])
