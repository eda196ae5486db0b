"""Products of rows against NumPy float64, on any machine with the bits of each row alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import row_products
from kernels_pallas.packed_numbers import dequantize, pack_int4
from kernels_pallas.row_products import (
    BY_MATRICES,
    BY_WEIGHTS,
    CHANNEL_BLOCK,
    MAX_TRIED,
    ROW_BLOCK,
    WEIGHT_ROWS,
    equal_row_counts,
    multiply,
    rows_by_integers,
    rows_by_matrices,
    rows_by_weights,
)

pytestmark = pytest.mark.bits

GENERATOR = np.random.default_rng(0)
# Weights large enough to be tried, and small ones.
WEIGHTS = {"tried": (200, 768), "not tried": (33, 50)}
# float32 sums of at most 768 products of order 1.
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


def normal(*shape):
    return GENERATOR.standard_normal(shape).astype(np.float32)


@pytest.fixture(params=["as tried", "nothing but blocks"])
def machine(request, monkeypatch):
    """This machine, and one on which no other number of rows has the bits of ROW_BLOCK rows."""
    if request.param == "nothing but blocks":
        monkeypatch.setattr(row_products, "equal_row_counts", lambda *_: frozenset())
    return request.param


@functools.cache
def jitted(product, machine):
    """The product, compiled once per shape; a trace of one machine is never found for the other."""
    return jax.jit(lambda *args: product(*args))


@pytest.mark.parametrize("num_rows", [1, 4, 5, 8, 9, 16, 17, 40, 130, 180, 400])
@pytest.mark.parametrize("size", WEIGHTS)
def test_rows_by_weights_are_the_same_bits_alone_and_together(size, num_rows, machine):
    (F, D), x = WEIGHTS[size], normal(num_rows, WEIGHTS[size][1])
    w = normal(F, D)

    product = jitted(rows_by_weights, machine)
    together = np.asarray(product(x, w))

    np.testing.assert_allclose(together, x.astype(float) @ w.T.astype(float), **TOLERANCE)
    for row in {0, num_rows // 2, num_rows - 1}:
        np.testing.assert_array_equal(together[row], product(x[row : row + 1], w)[0])


@pytest.mark.parametrize("num_real", [0, 1, 16, 17, 136, 137, 400])
def test_blocks_of_nothing_but_padding_are_not_multiplied(num_real, machine):
    x, w = normal(400, 768), normal(200, 768)
    x[num_real:] = np.nan

    y = jitted(rows_by_weights, machine)(x, w, num_real)

    np.testing.assert_allclose(y[:num_real], x[:num_real].astype(float) @ w.T.astype(float), **TOLERANCE)
    # A turn computes at most so many rows.
    assert not np.any(y[num_real + max(WEIGHT_ROWS) :])


@pytest.mark.parametrize("num_tokens", [100, 136, 300])
def test_what_large_blocks_leave_is_multiplied_in_small_ones(num_tokens, monkeypatch):
    monkeypatch.setattr(row_products, "equal_row_counts", lambda *_: frozenset({24, 136}))
    x, w = normal(num_tokens, 768), normal(200, 768)
    expected = x.astype(float) @ w.T.astype(float)
    product = jax.jit(lambda *args: rows_by_weights(*args))

    for num_real in {0, 1, 24, 25, 72, 73, 96, 97, 135, 136, 137, 160, 232, 233, 272, 273, 300} & {
        *range(num_tokens + 1)
    }:
        y = np.asarray(product(np.where(np.arange(num_tokens)[:, None] < num_real, x, np.nan), w, num_real))

        np.testing.assert_allclose(y[:num_real], expected[:num_real], **TOLERANCE)
        # Up to three small blocks take less time than a large one.
        if num_real % 136 <= 72:
            assert not np.any(y[num_real + 23 :])


INPUTS = 192


def integers(format_, num_channels) -> tuple[Any, Any, Any, Any]:
    """Random integers, scales and zero points [num_channels, groups] of INPUTS inputs, and the weights they mean."""
    kind, has_zeros = format_.removesuffix(" less zero points"), format_.endswith("zero points")
    bits, group_size = {"int8": (8, INPUTS), "int8 in groups": (8, 32), "int4": (4, 64), "int4, a type": (4, 64)}[kind]
    values = GENERATOR.integers(1 - 2 ** (bits - 1), 2 ** (bits - 1), (num_channels, INPUTS), np.int8)
    scales = GENERATOR.uniform(0.5, 1.5, (num_channels, INPUTS // group_size)).astype(np.float32)
    zeros = GENERATOR.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), scales.shape, np.int8) if has_zeros else None
    stored = pack_int4(jnp.asarray(values), group_size) if kind == "int4" else values
    stored = jnp.asarray(stored, "int4" if kind == "int4, a type" else "int8")
    centred = values.astype(int) - (np.repeat(zeros.astype(int), group_size, axis=1) if zeros is not None else 0)
    return stored, scales, zeros, centred * np.repeat(scales.astype(float), group_size, axis=1)


FORMATS = ("int8", "int4", "int8 less zero points", "int4 less zero points")


@pytest.mark.parametrize(
    ("format_", "num_channels"),
    [
        *(("int8", 50), ("int8", 256), ("int8", 300), ("int8 in groups", 300), ("int4", 200), ("int4, a type", 300)),
        *(("int8 less zero points", 300), ("int4 less zero points", 200)),
    ],
)
def test_rows_by_integers_are_the_same_bits_beside_any_others(format_, num_channels):
    values, scales, zeros, w = integers(format_, num_channels)
    x = normal(40, INPUTS)

    product = jax.jit(rows_by_integers)
    together = np.asarray(product(x, values, scales, zeros))

    np.testing.assert_allclose(together, x.astype(float) @ w.T, rtol=1e-4, atol=1e-2)
    for num_rows in (1, 8, 23):
        chosen = GENERATOR.permutation(40)[:num_rows]
        # Padding of a step holds what the step before left there.
        rows = np.concatenate([x[chosen], np.full((num_rows % 3, INPUTS), np.nan, np.float32)])
        np.testing.assert_array_equal(product(rows, values, scales, zeros, num_rows)[:num_rows], together[chosen])


@pytest.mark.parametrize("format_", FORMATS)
def test_integers_are_never_widened_whole(format_):
    values, scales, zeros, _ = integers(format_, 4096)

    for num_rows in (8, 64):
        compiled: Any = jax.jit(rows_by_integers).lower(normal(num_rows, INPUTS), values, scales, zeros).compile()
        # Two blocks in float32 and the results, twice; the weights take 3 MB.
        bound = 4 * (2 * CHANNEL_BLOCK * INPUTS + 2 * num_rows * 4096)
        assert compiled.memory_analysis().temp_size_in_bytes <= 1.2 * bound


@pytest.mark.parametrize("format_", FORMATS)
def test_the_derivative_of_rows_by_integers_is_that_of_the_weights_they_stand_for(format_):
    values, scales, zeros, w = integers(format_, 300)
    x, change = normal(9, INPUTS), normal(9, 300)

    _, derivative = jax.vjp(lambda x, scales: rows_by_integers(x, values, scales, zeros), x, scales)
    of_x, of_scales = derivative(change)

    np.testing.assert_allclose(of_x, change.astype(float) @ w, rtol=1e-4, atol=1e-2)
    of_weights = change.T.astype(float) @ x
    unscaled = np.asarray(dequantize(values, jnp.ones_like(scales), zeros, INPUTS))
    by_group = (of_weights * unscaled).reshape(*scales.shape, -1).sum(-1)
    np.testing.assert_allclose(of_scales, by_group, rtol=1e-3, atol=1e-1)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 9, 31, 64, 96])
@pytest.mark.parametrize(("A", "B"), [(64, 128), (80, 32)])
def test_rows_by_matrices_are_the_same_bits_alone_and_together(A, B, num_rows, machine):
    rows, matrices = normal(2, 3, num_rows, A), normal(2, 3, A, B)

    product = jitted(rows_by_matrices, machine)
    together = np.asarray(product(rows, matrices))

    np.testing.assert_allclose(together, rows.astype(float) @ matrices.astype(float), **TOLERANCE)
    for row in {0, num_rows // 2, num_rows - 1}:
        one = product(rows[1:, 2:, row : row + 1], matrices[1:, 2:])
        np.testing.assert_array_equal(together[1, 2, row], one[0, 0, 0])


def exact_product(rows, matrices):
    """No product, but as it is computed element by element its bits are the same for any number of rows."""
    return (rows[..., :, :, None] * matrices[..., None, :, :]).max(-2)


def product_that_differs(num_rows, place):
    """`exact_product`, but of `num_rows` rows one at some place differs by the least bit of one number."""

    def product(rows, matrices):
        y = exact_product(rows, matrices)
        if rows.shape[-2] != num_rows:
            return y
        return y.at[..., place, -1].set(jnp.nextafter(y[..., place, -1], jnp.inf))

    return product


@pytest.mark.parametrize(("num_rows", "place"), [(2, 0), (16, 15), (32, 20)])
def test_a_trial_says_no_if_a_single_bit_differs(num_rows, place, monkeypatch):
    form = f"differs at {num_rows}"
    monkeypatch.setitem(row_products.PRODUCTS, form, product_that_differs(num_rows, place))

    assert equal_row_counts(form, (2, 4, 16, 32), 48, 64, np.dtype("float32")) == {2, 4, 16, 32} - {num_rows}


def test_a_trial_says_no_if_products_side_by_side_differ(monkeypatch):
    def product(rows, matrices):
        y = exact_product(rows, matrices)
        return y if rows.shape[0] == 1 or rows.shape[-2] != 4 else jnp.nextafter(y, jnp.inf)

    monkeypatch.setitem(row_products.PRODUCTS, "differs together", product)

    assert equal_row_counts("differs together", (2, 4, 16), 48, 64, np.dtype("float32")) == {2, 16}


def test_a_trial_says_no_if_the_block_itself_is_another(monkeypatch):
    monkeypatch.setitem(row_products.PRODUCTS, "other blocks", product_that_differs(ROW_BLOCK, 1))

    assert equal_row_counts("other blocks", (2, 4, 16), 48, 64, np.dtype("float32")) == set()


def test_nothing_is_tried_that_would_take_too_much_memory_or_is_for_another_device(monkeypatch):
    monkeypatch.setattr(row_products, "trial_operands", None)  # would raise

    assert equal_row_counts(BY_WEIGHTS, (4,), 1024, MAX_TRIED // 1024 + 1, np.dtype("float32")) == set()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert equal_row_counts(BY_WEIGHTS, (4,), 999, 1000, np.dtype("float32")) == set()


@pytest.mark.parametrize(("A", "B"), [(64, 64), (4096, 256)])
@pytest.mark.parametrize("form", [BY_WEIGHTS, BY_MATRICES])
def test_no_two_rows_or_columns_of_a_trial_are_alike(form, A, B):
    rows, operand = row_products.trial_operands(form, 32, A, B, np.dtype("float32"))

    columns = operand if form == BY_WEIGHTS else operand[0, 0].T
    assert len(np.unique(rows.reshape(32, A), axis=0)) == 32
    assert len(np.unique(columns, axis=0)) == B
    assert multiply(rows, operand, form=form).shape[-2:] == (32, B)
