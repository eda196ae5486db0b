"""The kernel of dense products on GPUs, interpreted on CPU: against NumPy in float64, and XLA's derivative."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import triton
from kernels_pallas.device import Device
from kernels_pallas.gpu_products import can_multiply, multiply, product
from kernels_pallas.gpu_products.tiles import ProductTile

TILE = ProductTile(block_channels=16, block_rows=16, block_inputs=32, num_stages=3, num_warps=4)


def gated(up, gate):
    return jax.nn.silu(gate) * up


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def in_float64(x, weights, scales, combine):
    products = np.einsum("td,pfd->ptf", np.asarray(x, np.float64), np.asarray(weights, np.float64))
    products = products if scales is None else products * np.asarray(scales, np.float64).reshape(len(weights), 1, -1)
    if combine is None:
        return products[0]
    up, gate = products
    return up * gate / (1 + np.exp(-gate))


@pytest.mark.parametrize("combine", [None, gated])
@pytest.mark.parametrize(("rows", "channels", "inputs"), [(1, 16, 32), (8, 40, 96), (17, 33, 64), (40, 7, 128)])
def test_a_product_is_that_of_numpy(rows, channels, inputs, combine):
    parts = 1 if combine is None else 2
    x, weights = random(rows, inputs), random(parts, channels, inputs, seed=1)

    result = multiply(
        jnp.asarray(x), jnp.asarray(weights), dtype=jnp.float32, combine=combine, tile=TILE, interpret=True
    )

    expected = in_float64(x, weights, None, combine)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_weights_of_8_bits_are_worth_their_channels_scales(dtype):
    weights = jnp.asarray(np.round(random(2, 24, 64, seed=1) * 16)).astype(dtype)
    x, scales = jnp.asarray(random(5, 64)), jnp.abs(jnp.asarray(random(2, 24, 1, seed=2))) / 16

    result = multiply(x, weights, scales, combine=gated, tile=TILE, interpret=True)

    expected = in_float64(x, weights.astype(jnp.float32), scales, gated)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


def test_parts_are_combined_as_rounded_to_the_results_dtype():
    x, weights = random(4, 64), random(2, 16, 64, seed=1)

    def parts(up, gate):
        return up + 0.0 * gate

    result = multiply(
        jnp.asarray(x), jnp.asarray(weights), dtype=jnp.bfloat16, combine=parts, tile=TILE, interpret=True
    )

    expected = (x @ weights[0].T).astype(jnp.bfloat16)
    np.testing.assert_allclose(result.astype(jnp.float32), expected.astype(np.float32), rtol=2**-7)


def test_each_rows_sums_are_the_same_in_any_tile_of_rows(monkeypatch):
    """With products whose order is stated, for an interpreted one may depend on the size of its operands."""

    def in_order(a, b, transpose_b=False):
        assert transpose_b
        total = jnp.zeros((a.shape[0], b.shape[0]), jnp.float32)
        for i in range(a.shape[1]):
            total = total + a[:, i, None] * b[None, :, i]
        return total

    monkeypatch.setattr(triton, "dot", in_order)
    x, weights = jnp.asarray(random(40, 64)), jnp.asarray(random(1, 24, 64, seed=1))

    def run(x, block_rows, num_stages):
        tile = TILE._replace(block_rows=block_rows, num_stages=num_stages)
        return multiply(x, weights, dtype=jnp.float32, combine=None, tile=tile, interpret=True)

    alone, together = run(x[7:8], 16, 8), run(x, 64, 3)
    np.testing.assert_array_equal(alone[0], together[7])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_derivative_is_that_of_the_product_by_xla(dtype):
    x, weights = jnp.asarray(random(5, 32)), jnp.asarray(np.round(random(2, 16, 32, seed=1) * 4)).astype(dtype)
    scales = None if dtype == "float32" else jnp.asarray(random(2, 16, 1, seed=2))
    of = (0, 1) if scales is None else (0, 2)

    def total(x, weights, scales):
        return (multiply(x, weights, scales, combine=gated, tile=TILE, interpret=True) ** 2).sum()

    def expected(x, weights, scales):
        products = jnp.einsum("td,pfd->ptf", x, weights.astype(x.dtype))
        products = products if scales is None else products * scales[:, None, :, 0]
        return (gated(*products) ** 2).sum()

    found = jax.grad(total, of)(x, weights, scales)
    for one, other in zip(found, jax.grad(expected, of)(x, weights, scales), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def shape(*sizes, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    ("rows", "inputs", "dtype", "is_taken"),
    [
        (8, 4096, "bfloat16", True),
        (256, 2880, "bfloat16", True),
        (257, 4096, "bfloat16", False),
        (0, 4096, "bfloat16", False),
        (8, 4104, "bfloat16", False),
        (8, 4096, "float32", False),
    ],
)
def test_it_takes_few_rows_of_half_precision_whose_inputs_blocks_divide(monkeypatch, rows, inputs, dtype, is_taken):
    monkeypatch.setattr(product, "device_at_hand", lambda: Device("NVIDIA H200", "gpu", 132, 9.0))
    x, weights, scales = shape(rows, inputs, dtype=dtype), shape(64, inputs, dtype=dtype), shape(64, 1)

    assert can_multiply(x, weights) == is_taken
    assert can_multiply(x, shape(64, inputs, dtype="int8"), scales) == is_taken
    assert not can_multiply(x, shape(64, inputs, dtype="int4"), scales)
    # Packed, two to a byte.
    assert not can_multiply(x, shape(64, inputs // 2, dtype="int8"), scales)


@pytest.mark.parametrize(
    "device", [Device("Tesla T4", "gpu", 40, 7.5), Device("cpu", "cpu", None, None), Device("gfx942", "gpu", 304, None)]
)
def test_other_devices_leave_it_to_xla(monkeypatch, device):
    monkeypatch.setattr(product, "device_at_hand", lambda: device)

    assert not can_multiply(shape(8, 64), shape(64, 64))
