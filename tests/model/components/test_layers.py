"""Each layer against its formula in NumPy float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.layers import ACTIVATIONS, UNGATED_ACTIVATIONS, Norm, linear, product, rms_norm, swiglu
from jaxinfer.model.components.mlp import CurveParams, xielu
from jaxinfer.quantization.quantized_array import quantize
from kernels_pallas.row_products import row_sum
from tests.checkpoint.test_format_table import kernels_of

jit_linear = jax.jit(linear)
jit_product = jax.jit(product)
jit_rms_norm = jax.jit(rms_norm, static_argnames="norm")
GENERATOR = np.random.default_rng(0)
# float32 has 24 bits of mantissa; some tens of roundings.
assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-6, atol=3e-6)


def normal(*shape):
    return GENERATOR.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("out_shape", [(5,), (3, 4)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("T", "num_rows"), [(2, 1), (8, 8), (17, 17), (40, 19), (40, 0)])
def test_linear_is_x_times_w_transposed_plus_bias(T, num_rows, out_shape, has_bias):
    x, w, bias = normal(T, 8), normal(*out_shape, 8), normal(*out_shape)
    expected = [[row @ column for column in w.reshape(-1, 8).astype(float)] for row in x.astype(float)]

    y = jit_linear(x, w, bias if has_bias else None, StepTokens(jnp.asarray(num_rows)))

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

    assert_close(jit_rms_norm(jnp.asarray(x), jnp.asarray(weight), Norm(epsilon=epsilon)), expected)


def test_rms_norm_of_half_precision_sums_in_float32():
    # 300² overflows float16, and bfloat16 would lose the small terms of a sum over 4096.
    x = jnp.full((2, 4096), 300, jnp.float16)

    y = jit_rms_norm(x, jnp.ones(4096, jnp.float16), Norm(epsilon=1e-5))

    assert y.dtype == jnp.float16
    assert (y == 1).all()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100, 1025])
def test_row_sum_adds_every_element_once(size):
    # Integers below 2**24 add without rounding, so the sum is exact in any order.
    x = GENERATOR.integers(-1000, 1000, (3, size)).astype(np.float32)

    np.testing.assert_array_equal(jax.jit(row_sum)(jnp.asarray(x)), x.astype(float).sum(-1))


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("gelu_tanh", lambda g, u: 0.5 * g * (1 + np.tanh((2 / np.pi) ** 0.5 * (g + 0.044715 * g**3))) * u),
        (
            "clamped_silu",
            lambda g, u: np.minimum(g, 7) / (1 + np.exp(-1.702 * np.minimum(g, 7))) * (np.clip(u, -7, 7) + 1),
        ),
    ],
)
def test_a_gated_activation_has_its_formula(name, formula):
    gate, up = normal(4, 9) * 5, normal(4, 9) * 5

    assert_close(jax.jit(ACTIVATIONS[name])(gate, up), formula(gate.astype(float), up.astype(float)), atol=1e-5)


def test_squared_relu_is_the_square_of_what_is_positive():
    up = normal(4, 9) * 5

    assert_close(jax.jit(UNGATED_ACTIVATIONS["relu2"])(up), np.maximum(up.astype(float), 0) ** 2)


def test_xielu_is_a_parabola_above_zero_and_an_exponential_below():
    up, numbers = normal(4, 9) * 3, {"alpha_p": -0.4, "alpha_n": 0.7, "beta": 0.5, "eps": -1e-6}
    curve = CurveParams(
        **{name: jnp.full((1,) if name.startswith("alpha") else (), a, jnp.float32) for name, a in numbers.items()}
    )
    rise, fall = (np.log1p(np.exp(numbers[name])) for name in ("alpha_p", "alpha_n"))

    x = up.astype(float)
    below = (fall + 0.5) * (np.expm1(np.minimum(x, -1e-6)) - x) + 0.5 * x
    assert_close(jax.jit(xielu)(up, curve), np.where(x > 0, rise * x**2 + 0.5 * x, below))


def test_swiglu_gates_with_x_times_sigmoid():
    gate, up = normal(4, 9) * 5, normal(4, 9)

    expected = gate / (1 + np.exp(-gate.astype(float))) * up

    assert_close(swiglu(jnp.asarray(gate), jnp.asarray(up)), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_gpus_split_a_packed_weight_without_a_kernel_that_takes_it_whole(bits):
    w = quantize(jnp.asarray(normal(128, 128)), group_size=32, bits=bits)
    mesh = AbstractMesh((2,), ("model",), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))

    def kernels(*, is_split):
        tokens = StepTokens(jnp.int32(8), is_split=is_split)
        return {*kernels_of(jax.make_jaxpr(product)(jnp.ones((8, 128), jnp.bfloat16), w, tokens).jaxpr)}

    with jax.sharding.use_abstract_mesh(mesh):
        assert kernels(is_split=False) == {"packed_product"}
        assert kernels(is_split=True) == set()
