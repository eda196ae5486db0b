"""GPTQ against the published method step by step: an inverse for all inputs left, from which each rounded one goes."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.quantization.gptq import BLOCK, DAMPING, plan_feedback, round_with_feedback

NUM_OUTPUTS, NUM_INPUTS, STEP = 5, BLOCK + 40, 0.25


@pytest.fixture(scope="module")
def layer():
    """Returns correlated inputs f32[T, in] of unequal sizes, and weights f32[out, in]."""
    generator = np.random.default_rng(0)
    mixing = generator.standard_normal((NUM_INPUTS, NUM_INPUTS)) * generator.uniform(0.1, 2.0, NUM_INPUTS)
    x = generator.standard_normal((400, NUM_INPUTS)) @ mixing / NUM_INPUTS**0.5
    return x.astype(np.float32), generator.standard_normal((NUM_OUTPUTS, NUM_INPUTS)).astype(np.float32)


def nearest(w, _):
    return np.clip(np.rint(w / STEP), -7, 7) * STEP


def published_method(w, x):
    """Optimal Brain Quantization (Frantar & Alistarh 2022) of all outputs, in float64, the largest inputs first."""
    H = x.T.astype(np.float64) @ x
    order = np.argsort(-np.diagonal(H), kind="stable")
    w, inverse = w.astype(np.float64), np.linalg.inv(H + DAMPING * np.diagonal(H).mean() * np.eye(len(H)))
    for j in order:
        rounded = nearest(w[:, j], j)
        w -= np.outer(w[:, j] - rounded, inverse[j]) / inverse[j, j]
        w[:, j] = rounded
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j], inverse[:, j] = 0, 0
        inverse[j, j] = 1.0  # no rounded input changes again
    return w


def test_weights_are_those_of_the_published_method(layer):
    x, w = layer

    ours = round_with_feedback(w, plan_feedback(x.T @ x), nearest)

    np.testing.assert_array_equal(ours, published_method(w, x))


def test_outputs_are_nearer_than_those_of_rounded_weights(layer):
    x, w = layer

    ours = round_with_feedback(w, plan_feedback(x.T @ x), nearest)

    error, of_rounding = (np.linalg.norm(x @ (w - other).T) for other in (ours, nearest(w, None)))
    assert error < 0.7 * of_rounding


def test_an_input_without_texts_is_rounded_to_the_nearest_number(layer):
    x, w = layer
    x = x * (np.arange(NUM_INPUTS) != 3)

    ours = round_with_feedback(w, plan_feedback(x.T @ x), nearest)

    np.testing.assert_array_equal(ours[:, 3], nearest(w[:, 3], 3))


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_moments_that_say_nothing_are_refused(value):
    with pytest.raises(ValueError, match="give other calibration texts"):
        plan_feedback(np.full((4, 4), value, np.float32))
