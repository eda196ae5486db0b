"""Each layer against its formula in NumPy float64, and rotary frequencies against `transformers`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxinfer.model.config import uniform_decoder
from jaxinfer.model.layers import (
    linear,
    product,
    rms_norm,
    rotary_angles,
    rotary_embedding,
    rotary_frequencies,
    swiglu,
    turning_angles,
)
from jaxinfer.model.rope import RopeScaling
from kernels_pallas.row_sum import row_sum

jit_linear = jax.jit(linear)
jit_product = jax.jit(product)
jit_rms_norm = jax.jit(rms_norm, static_argnames="epsilon")
GENERATOR = np.random.default_rng(0)
# float32 has 24 bits of mantissa; some tens of roundings.
assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-6, atol=3e-6)


def normal(*shape):
    return GENERATOR.standard_normal(shape).astype(np.float32)


def rope_config(head_dim=64, theta=10_000.0, scaling=None):
    return uniform_decoder(
        vocab_size=2,
        hidden_size=2,
        intermediate_size=2,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        max_position=131_072,
        rope_theta=theta,
        rope_scaling=scaling,
    )


@pytest.mark.parametrize("out_shape", [(5,), (3, 4)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("T", "num_rows"), [(2, 1), (8, 8), (17, 17), (40, 19), (40, 0)])
def test_linear_is_x_times_w_transposed_plus_bias(T, num_rows, out_shape, has_bias):
    x, w, bias = normal(T, 8), normal(*out_shape, 8), normal(*out_shape)
    expected = [[row @ column for column in w.reshape(-1, 8).astype(float)] for row in x.astype(float)]

    y = jit_linear(x, w, bias if has_bias else None, num_rows)

    expected = np.reshape(expected, (T, *out_shape)) + has_bias * bias
    assert_close(y[:num_rows], expected[:num_rows])
    assert np.isfinite(y).all()


@pytest.mark.parametrize(("F", "D"), [(300, 768), (33, 5000)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_of_a_product_do_not_depend_on_the_rows_beside(F, D, dtype):
    x, w = jnp.asarray(normal(16, D), dtype), jnp.asarray(normal(F, D), dtype)
    many = jit_product(x, w)

    for T in (1, 4, 5, 8):
        np.testing.assert_array_equal(jit_product(x[:T], w), many[:T])


@pytest.mark.parametrize("shape", [(3, 48), (2, 5, 12), (2, 7)], ids=str)
@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_rms_norm_divides_by_the_root_of_the_mean_square(shape, epsilon):
    x, weight = normal(*shape), normal(shape[-1])
    wide = x.astype(float)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + epsilon) * weight

    assert_close(jit_rms_norm(jnp.asarray(x), jnp.asarray(weight), epsilon=epsilon), expected)


def test_rms_norm_of_half_precision_sums_in_float32():
    # 300² overflows float16, and bfloat16 would lose the small terms of a sum over 4096.
    x = jnp.full((2, 4096), 300, jnp.float16)

    y = jit_rms_norm(x, jnp.ones(4096, jnp.float16), epsilon=1e-5)

    assert y.dtype == jnp.float16
    assert (y == 1).all()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100, 1025])
def test_row_sum_adds_every_element_once(size):
    # Integers below 2**24 add without rounding, so the sum is exact in any order.
    x = GENERATOR.integers(-1000, 1000, (3, size)).astype(np.float32)

    np.testing.assert_array_equal(jax.jit(row_sum)(jnp.asarray(x)), x.astype(float).sum(-1))


def test_swiglu_gates_with_x_times_sigmoid():
    gate, up = normal(4, 9) * 5, normal(4, 9)

    expected = gate / (1 + np.exp(-gate.astype(float))) * up

    assert_close(swiglu(jnp.asarray(gate), jnp.asarray(up)), expected)


def test_rotary_embedding_rotates_the_pairs_of_half_the_head_apart():
    T, N, H = 5, 3, 8
    x, positions = normal(T, N, H), np.array([0, 1, 2, 17, 100])
    expected = np.zeros((T, N, H))
    for t in range(T):
        for i in range(H // 2):
            angle = positions[t] * 10_000.0 ** (-2 * i / H)
            rotated = (x[t, :, i] + 1j * x[t, :, i + H // 2]) * np.exp(1j * angle)
            expected[t, :, i], expected[t, :, i + H // 2] = rotated.real, rotated.imag

    @jax.jit
    def rotate(x, positions):
        return rotary_embedding(x, *rotary_angles(positions, rope_config(H)))

    y = rotate(x, positions)

    # An angle of 100 is rounded to 2**-17.
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("first", [0, 131_000, 10**6 + 1, 2**31 - 5_000])
def test_the_angle_between_two_tokens_depends_on_their_distance_however_far_they_are(first):
    distances = np.array([0, 1, 17, 1_000, 4_000])
    expected = np.exp(1j * distances[:, None] * 10_000.0 ** (-np.arange(0, 64, 2) / 64))

    @jax.jit
    def angles(positions):
        return [x[:, 0] for x in turning_angles(positions, rope_config())]

    cos, sin = map(np.asarray, angles((first + distances).astype(np.int32)))

    turns = (cos + 1j * sin) / (cos + 1j * sin)[:1]
    # Frequencies have 24 bits, and so have angles below the model's length of 2**17: some 2**17 * 2**-24 together.
    np.testing.assert_allclose(turns, expected, rtol=0, atol=2e-2 if first == 131_000 else 5e-4)


def test_the_attention_factor_scales_cosine_and_sine():
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_position=64, attention_factor=1.25)

    cos, sin = jax.jit(lambda p: rotary_angles(p, rope_config(scaling=scaling)))(np.arange(9))

    assert_close(np.square(cos) + np.square(sin), np.full(cos.shape, 1.25**2))


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
    hf = LlamaConfig(head_dim=head_dim, max_position_embeddings=131_072, rope_parameters=parameters)
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](hf, device=None)
    scaling = RopeScaling(
        kind=parameters["rope_type"],
        factor=parameters["factor"],
        original_max_position=parameters.get("original_max_position_embeddings", 0),
        attention_factor=factor,
        **fields,
    )

    frequencies, our_factor = rotary_frequencies(rope_config(head_dim, parameters["rope_theta"], scaling))

    # Both sides compute a power in float32: 20 roundings of its exponent's logarithm.
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=2e-6)
    assert our_factor == factor


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10_000.0), (80, 500_000.0), (128, 1_000_000.0)])
def test_unscaled_rotary_frequencies_are_powers_of_theta(head_dim, theta):
    frequencies, factor = rotary_frequencies(rope_config(head_dim, theta))

    # A frequency that errs by one part in 10⁶ turns position 100,000 by 0.1 at most.
    np.testing.assert_allclose(frequencies, theta ** (-np.arange(0, head_dim, 2) / head_dim), rtol=1e-6)
    assert factor == 1.0
