"""The quantized product of GPUs before Ampere, in plain JAX, against NumPy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.packed_numbers import dequantize
from kernels_pallas.quantized_matmul import before_ampere, quantized_matmul
from kernels_pallas.quantized_matmul.before_ampere import FEW_ROWS, multiply_by_channels
from tests.kernels.quantized_matmul.test_quantized_matmul import make_call

multiply = jax.jit(multiply_by_channels)


@pytest.mark.parametrize("T", [1, 3, 8, FEW_ROWS - 1, FEW_ROWS + 1])
@pytest.mark.parametrize(
    ("F", "group_size", "bits", "has_zeros"),
    [(70, 96, 8, False), (70, 32, 8, True), (7, 96, 4, False), (64, 32, 4, False), (64, 16, 4, True)],
)
def test_a_product_is_that_of_the_weights_the_integers_stand_for(T, F, group_size, bits, has_zeros):
    (x, *parts), expected = make_call(T, 96, F, group_size, bits=bits, has_zeros=has_zeros)

    # float32 sums of 96 terms of order 1/10.
    np.testing.assert_allclose(multiply(x, tuple(parts)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_in_float16_lose_nothing_to_scales(bits):
    (x, *parts), expected = make_call(8, 256, 32, 64, bits=bits, dtype=jnp.float16)

    # Weights are widened to float32, so only the sums are rounded.
    np.testing.assert_allclose(multiply(x, tuple(parts)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4"])
def test_weights_may_have_a_narrow_type(dtype):
    (x, weights, scales, _), _ = make_call(8, 96, 32, 32, bits=4, is_packed=False)
    weights = weights.astype("int8").astype(dtype)

    expected = np.asarray(x, np.float64) @ np.asarray(dequantize(weights, scales, None, 96), np.float64).T

    np.testing.assert_allclose(multiply(x, (weights, scales, None)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [2, 40])
def test_floats_of_4_bits_are_widened_in_turns_that_overlap(T, monkeypatch):
    monkeypatch.setattr(before_ampere, "MAX_WIDENED", 64 * 12)  # 34 channels: 0-11, 12-23, 22-33
    generator = np.random.default_rng(0)
    codes = jnp.asarray(generator.integers(0, 256, (34, 32), np.uint8))
    scales = jnp.asarray(generator.integers(120, 130, (34, 2), np.uint8))
    x = jnp.asarray(generator.standard_normal((T, 64)), jnp.float32)

    expected = np.asarray(x, np.float64) @ np.asarray(dequantize(codes, scales, None, 64), np.float64).T

    out = jax.jit(lambda *args: multiply_by_channels(*args))(x, (codes, scales, None))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("T", [1, 12])
def test_a_row_of_padding_leaves_others_as_they_are(T):
    (x, *parts), _ = make_call(T + 1, 96, 64, 32, bits=4)
    padded = jnp.asarray(x).at[T].set(jnp.nan)

    np.testing.assert_array_equal(multiply(padded, tuple(parts))[:T], multiply(x, tuple(parts))[:T])


def test_the_derivative_is_that_of_the_weights_the_integers_stand_for():
    (x, weights, scales, zeros), _ = make_call(4, 96, 64, 32)
    change = jnp.asarray(np.random.default_rng(1).standard_normal((4, 64)), jnp.float32)

    (of_x,) = jax.vjp(lambda x: multiply_by_channels(x, (weights, scales, zeros)), x)[1](change)

    assert weights is not None
    assert scales is not None
    w = dequantize(weights, scales, zeros, 96)
    np.testing.assert_allclose(of_x, np.asarray(change, np.float64) @ np.asarray(w, np.float64), rtol=1e-5, atol=1e-5)


def test_other_devices_have_their_own_product():
    call, _ = make_call(2, 96, 8, 32)

    with pytest.raises(NotImplementedError, match="compute capability 8.0 and up have a kernel"):
        quantized_matmul(*call, implementation="before_ampere")
