"""Products with a low-rank change of each token's own, against NumPy, and their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.adapted import AdaptedArray, _add_by_products, padded_size
from jaxinfer.model.components.layers import product
from jaxinfer.quantization.quantized_array import quantize

GENERATOR = np.random.default_rng(0)
A = 5


def normal(*shape):
    return GENERATOR.standard_normal(shape).astype(np.float32)


def changes(D, r, outputs):
    """The halves and gains of A slots, the first of them zeros; slot 1 has no gains."""
    F = int(np.prod(outputs))
    down, up, gain = normal(A, D, r) / np.sqrt(D).astype(np.float32), normal(A, r, F), normal(A, F) / 4
    down[0], up[0], gain[:2] = 0, 0, 0
    return down, up, gain


def adapted(base, down, up, gain):
    down, up = (np.pad(a, ((0, 0), (0, padded_size(a.shape[1]) - a.shape[1]), (0, 0))) for a in (down, up))
    return AdaptedArray(base, down, up, gain)


@jax.jit
def multiply(x, w, slots):
    return product(x, w, StepTokens(jnp.asarray(x.shape[0]), slots))


@pytest.mark.parametrize("r", [1, 8, 16, 40])
@pytest.mark.parametrize(("D", "outputs"), [(7, (5,)), (48, (3, 4)), (144, (33,)), (300, (2, 5))], ids=str)
def test_each_token_takes_the_change_in_its_slot(D, outputs, r):
    x, w, (down, up, gain) = normal(9, D), normal(*outputs, D), changes(D, r, outputs)
    slots = np.array([0, 4, 1, 1, 3, 0, 2, 4, 4], np.int32)

    y = multiply(x, adapted(w, down, up, gain), slots)

    flat = w.reshape(-1, D).astype(float)
    rows = [
        (1 + gain[a]) * (row @ flat.T) + row @ down[a] @ up[a] for row, a in zip(x.astype(float), slots, strict=True)
    ]
    np.testing.assert_allclose(y, np.reshape(rows, (9, *outputs)), rtol=1e-5, atol=1e-5)


@pytest.mark.bits
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="bit-equality is promised on CPU")
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize(("D", "r"), [(144, 8), (300, 40), (704, 16)])
def test_the_bits_of_a_token_depend_on_no_other_token_and_on_no_slot(D, r, is_quantized):
    w, parts, x = normal(65, D), changes(D, r, (65,)), normal(70, D)
    base = quantize(jnp.asarray(w)) if is_quantized else w
    slots = (np.arange(70) % A).astype(np.int32)
    together = np.asarray(multiply(x, adapted(base, *parts), slots))

    moved = tuple(part[[0, 4, 3, 2, 1]] for part in parts)  # the adapter of slot a in slot 5 - a
    for rows in (slice(3, 4), slice(11, 13), slice(20, 37)):
        alone = multiply(x[rows], adapted(base, *moved), np.where(slots[rows] == 0, 0, A - slots[rows]))
        np.testing.assert_array_equal(alone, together[rows])
    without = slots == 0
    expected = np.asarray(jax.jit(product)(x, base, StepTokens(jnp.asarray(70))))
    np.testing.assert_array_equal(together[without], expected[without])


def test_products_of_all_slots_at_once_are_the_same_sums():
    D, r, F = 96, 8, 20
    x, y, (down, up, gain) = normal(9, D), normal(9, F), changes(D, r, (F,))
    slots = np.array([0, 4, 1, 1, 3, 0, 2, 4, 4], np.int32)

    added = jax.jit(_add_by_products)(y, x, down, up, gain, slots)

    expected = [(1 + gain[a]) * y[t] + x[t].astype(float) @ down[a] @ up[a] for t, a in enumerate(slots)]
    np.testing.assert_allclose(added, expected, rtol=1e-5, atol=1e-5)


def test_numbers_of_other_slots_do_not_matter():
    x, w, (down, up, gain) = normal(4, 48), normal(6, 48), changes(48, 8, (6,))
    slots = np.array([1, 2, 1, 0], np.int32)
    expected = multiply(x, adapted(w, down, up, gain), slots)
    down[3:], up[3:], gain[3:] = np.nan, np.inf, np.nan

    np.testing.assert_array_equal(multiply(x, adapted(w, down, up, gain), slots), expected)
