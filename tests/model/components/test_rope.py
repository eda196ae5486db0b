"""Rotary embedding against its formula in NumPy float64, and scaled frequencies against `transformers`."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxinfer.model.components.rope import (
    Rope,
    RopeScaling,
    rotary_angles,
    rotary_embedding,
    rotary_frequencies,
    turning_angles,
)

GENERATOR = np.random.default_rng(0)
MAX_POSITION = 131_072


def test_rotary_embedding_rotates_the_pairs_of_half_the_head_apart():
    T, N, H = 5, 3, 8
    x, positions = GENERATOR.standard_normal((T, N, H)).astype(np.float32), np.array([0, 1, 2, 17, 100])
    expected = np.zeros((T, N, H))
    for t in range(T):
        for i in range(H // 2):
            angle = positions[t] * 10_000.0 ** (-2 * i / H)
            rotated = (x[t, :, i] + 1j * x[t, :, i + H // 2]) * np.exp(1j * angle)
            expected[t, :, i], expected[t, :, i + H // 2] = rotated.real, rotated.imag

    @jax.jit
    def rotate(x, positions):
        return rotary_embedding(x, *rotary_angles(positions, Rope(dim=H, max_position=MAX_POSITION)))

    y = rotate(x, positions)

    # An angle of 100 is rounded to 2**-17.
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-5)


def test_the_first_pairs_may_turn_alone_as_fast_as_among_all_of_them():
    rope = Rope(dim=16, num_turned=3, max_position=MAX_POSITION, theta=100.0)

    frequencies, factor = rotary_frequencies(rope)

    np.testing.assert_allclose(frequencies, [100.0 ** (-2 * i / 16) if i < 3 else 0.0 for i in range(8)], rtol=1e-6)
    assert factor == 1.0
    with pytest.raises(ValueError, match="num_turned=9"):
        Rope(dim=16, num_turned=9, max_position=MAX_POSITION)


@pytest.mark.parametrize("first", [0, 131_000, 10**6 + 1, 2**31 - 5_000])
def test_the_angle_between_two_tokens_depends_on_their_distance_however_far_they_are(first):
    distances = np.array([0, 1, 17, 1_000, 4_000])
    expected = np.exp(1j * distances[:, None] * 10_000.0 ** (-np.arange(0, 64, 2) / 64))

    @jax.jit
    def angles(positions):
        return [x[:, 0] for x in turning_angles(positions, Rope(dim=64, max_position=MAX_POSITION))]

    cos, sin = map(np.asarray, angles((first + distances).astype(np.int32)))

    turns = (cos + 1j * sin) / (cos + 1j * sin)[:1]
    # Frequencies have 24 bits, and so have angles below the model's length of 2**17: some 2**17 * 2**-24 together.
    np.testing.assert_allclose(turns, expected, rtol=0, atol=2e-2 if first == 131_000 else 5e-4)


def test_the_attention_factor_scales_cosine_and_sine():
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_position=64, attention_factor=1.25)
    rope = Rope(dim=64, max_position=MAX_POSITION, scaling=scaling)

    cos, sin = jax.jit(lambda p: rotary_angles(p, rope))(np.arange(9))

    # float32 has 24 bits of mantissa; some tens of roundings.
    np.testing.assert_allclose(np.square(cos) + np.square(sin), np.full(cos.shape, 1.25**2), rtol=3e-6, atol=3e-6)


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn"}
ROPES = {
    "linear": ({"rope_type": "linear", "factor": 3.5}, {}),
    "llama 3.1": ({**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192}, {}),
    "llama 3.2": ({**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}, {}),
    "qwen yarn": ({**YARN, "factor": 4.0, "original_max_position_embeddings": 32_768}, {}),
    "yarn betas": (
        {**YARN, "factor": 16.0, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2},
        {"beta_fast": 16, "beta_slow": 2},
    ),
    "yarn of Kimi-K2": (
        {**YARN, "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0},
        {"beta_fast": 1.0},
    ),
    "yarn exact": (
        {**YARN, "factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False},
        {"truncate": False},
    ),
    "yarn past the last pair": (
        {**YARN, "factor": 2.0, "original_max_position_embeddings": 1000, "rope_theta": 10.0},
        {},
    ),
    "yarn without a ramp": (
        {**YARN, "factor": 2.0, "original_max_position_embeddings": 4, "attention_factor": 0.7},
        {},
    ),
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10_000.0), (128, 1_000_000.0)])
def test_scaled_rotary_frequencies_are_those_of_transformers(name, head_dim, theta):
    parameters, fields = ROPES[name]
    parameters = {"rope_theta": theta, **parameters}
    hf = LlamaConfig(head_dim=head_dim, max_position_embeddings=MAX_POSITION, rope_parameters=parameters)
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](hf, device=None)
    scaling = RopeScaling(
        kind=parameters["rope_type"],
        factor=parameters["factor"],
        original_max_position=parameters.get("original_max_position_embeddings", 0),
        attention_factor=factor,
        **fields,
    )

    rope = Rope(dim=head_dim, max_position=MAX_POSITION, theta=parameters["rope_theta"], scaling=scaling)
    frequencies, our_factor = rotary_frequencies(rope)

    # Both sides compute a power in float32: 20 roundings of its exponent's logarithm.
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=2e-6)
    assert our_factor == factor


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10_000.0), (80, 500_000.0), (128, 1_000_000.0)])
def test_unscaled_rotary_frequencies_are_powers_of_theta(head_dim, theta):
    frequencies, factor = rotary_frequencies(Rope(dim=head_dim, max_position=MAX_POSITION, theta=theta))

    # A frequency that errs by one part in 10⁶ turns position 100,000 by 0.1 at most.
    np.testing.assert_allclose(frequencies, theta ** (-np.arange(0, head_dim, 2) / head_dim), rtol=1e-6)
    assert factor == 1.0
