"""Calibrated rounding against the published method, written anew, and integers in words against compressed-tensors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from jaxinfer.quantization.gptq import DAMPING, plan_feedback, refined
from jaxinfer.quantization.schemes import SCHEMES, round_by_moments, words

NUM_OUTPUTS, NUM_INPUTS = 48, 256


@pytest.fixture(scope="module")
def layer():
    """Returns correlated inputs f32[T, in] of unequal sizes, and weights f32[out, in] of bfloat16 numbers."""
    generator = np.random.default_rng(0)
    mixing = generator.standard_normal((NUM_INPUTS, NUM_INPUTS)) * generator.uniform(0.1, 2.0, NUM_INPUTS)
    x = generator.standard_normal((600, NUM_INPUTS)) @ mixing / NUM_INPUTS**0.5
    w = generator.standard_normal((NUM_OUTPUTS, NUM_INPUTS)).astype(ml_dtypes.bfloat16)
    return x.astype(np.float32), w


def nearest(w, scales, zeros, bits):
    return (np.clip(np.rint(w / scales + zeros), 0, 2**bits - 1) - zeros) * scales


def published_grid(group, bits, *, is_symmetric):
    """Returns scales and zero points [out, 1] of weights [out, size], by their least and largest numbers."""
    low, high = np.minimum(group.min(1), 0), np.maximum(group.max(1), 0)
    if is_symmetric:
        high = np.maximum(-low, high)
        low = -high
    scales = (high - low) / (2**bits - 1)
    zeros = np.full_like(scales, 2 ** (bits - 1)) if is_symmetric else np.rint(-low / scales)
    return scales[:, None], zeros[:, None]


def published_method(w, x, bits, size, *, is_symmetric):
    """GPTQ of all outputs in float64, by the inverse for all inputs left: each group's grid when its turn comes."""
    H = x.T.astype(np.float64) @ x
    w, inverse = w.astype(np.float64), np.linalg.inv(H + DAMPING * np.diagonal(H).mean() * np.eye(len(H)))
    for j in range(len(H)):
        if j % size == 0:
            scales, zeros = published_grid(w[:, j : j + size], bits, is_symmetric=is_symmetric)
        rounded = nearest(w[:, [j]], scales, zeros, bits)
        errors = (w[:, [j]] - rounded) / inverse[j, j]
        w -= errors * inverse[j]
        w[:, [j]] = rounded
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j], inverse[:, j] = 0, 0
        inverse[j, j] = 1.0  # no rounded input changes again
    return w


def rounded_to_nearest(w, bits, size):
    groups = w.astype(np.float64).reshape(-1, size)
    return nearest(groups, *published_grid(groups, bits, is_symmetric=True), bits).reshape(w.shape)


def widened(numbers, scales):
    size = numbers.shape[1] // scales.shape[1]
    return numbers.astype(np.float32) * np.repeat(scales.astype(np.float32), size, axis=1)


def cost(x, w, other):
    return np.linalg.norm(x @ (w.astype(np.float64) - other).T) ** 2


@pytest.mark.parametrize("size", [128, 64, 32])
@pytest.mark.parametrize("scheme", ["int4", "int3", "int2"])
def test_a_product_costs_less_than_by_the_published_method(layer, scheme, size):
    x, w = layer
    bits = SCHEMES[scheme].bits

    ours = widened(*round_by_moments(w, size, SCHEMES[scheme], plan_feedback(x.T @ x)))

    others = [published_method(w, x, bits, size, is_symmetric=is_symmetric) for is_symmetric in (True, False)]
    assert cost(x, w, ours) < 0.8 * min(cost(x, w, other) for other in others)
    assert cost(x, w, ours) < 0.3 * cost(x, w, rounded_to_nearest(w, bits, size))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_refinement_costs_no_more_than_its_start(layer, scheme, dtype):
    x, w = layer
    grid, feedback = SCHEMES[scheme], plan_feedback(x.T @ x)
    generator = np.random.default_rng(1)
    numbers = grid.to_grid(generator.standard_normal(w.shape, np.float32) * 2 ** (grid.bits - 2))
    scales = generator.uniform(-1, 1, (NUM_OUTPUTS, 4)).astype(np.float32).astype(dtype)
    start = w - widened(numbers, scales)

    better = w - widened(*refined(w.astype(np.float32), numbers, scales, feedback, grid.to_grid))

    costs = [np.einsum("oi,ij,oj->o", e, feedback.moments.astype(np.float64), e) for e in (better, start)]
    assert (costs[0] <= costs[1]).all()
    assert costs[0].sum() < 0.5 * costs[1].sum()


def test_weights_of_zeros_stay_zeros(layer):
    x, w = layer
    for scheme in SCHEMES.values():
        numbers, scales = round_by_moments(np.zeros_like(w), 64, scheme, plan_feedback(x.T @ x))
        assert not widened(numbers, scales).any()
        assert np.isfinite(scales.astype(np.float32)).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("num_inputs", [16, 96, 112, 256])
def test_words_are_those_of_compressed_tensors(bits, num_inputs):
    numbers = np.random.default_rng(2).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, num_inputs), np.int8)

    np.testing.assert_array_equal(words(numbers, bits), pack_to_int32(torch.from_numpy(numbers), bits).numpy())
