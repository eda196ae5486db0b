"""Quantized weights against NumPy: how they are rounded, what products with them give, where they go on a mesh."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jaxinfer.model.components.layers import TensorSpec, linear, take_rows
from jaxinfer.model.config import uniform_decoder
from jaxinfer.model.params import abstract_params, shardings
from jaxinfer.model.quantized_params import quantize_params, quantize_weight, quantize_weights, quantized_shardings
from jaxinfer.quantization import QuantizedArray, quantize
from jaxinfer.quantization.planes import pack_planes
from tests.replay import SMALL_SIZES, lively_params, replay

GENERATOR = np.random.default_rng(0)
CONFIG = uniform_decoder(**SMALL_SIZES | {"vocab_size": 64, "num_layers": 2, "layer_groups": (2,)})


def normal(*shape) -> Any:
    return GENERATOR.standard_normal(shape).astype(np.float32)


def floats(w: QuantizedArray, bits: int = 8) -> np.ndarray:
    """The weights [F, D] that a quantized array of two dimensions stands for, float64."""
    values, scales = np.asarray(w.values), np.asarray(w.scales, np.float64)
    if (
        bits == 4 and values.dtype == np.int8
    ):  # the low halves of a group's bytes, then the high ones; 8 to 15 stand for -8 to -1
        groups = values.view(np.uint8).reshape(*scales.shape, -1)
        halves = np.concatenate([groups & 15, groups >> 4], axis=-1).astype(int)
        values = np.where(halves < 8, halves, halves - 16).reshape(scales.shape[0], -1)
    return values * np.repeat(scales, values.shape[1] // scales.shape[1], axis=1)


@pytest.mark.parametrize(("bits", "largest"), [(8, 127), (4, 7)])
@pytest.mark.parametrize(("group_size", "num_groups"), [(None, 1), (16, 4)])
def test_each_weight_is_rounded_to_the_nearest_of_its_groups_grid(group_size, num_groups, bits, largest):
    w = normal(6, 64)

    quantized = quantize(w, group_size=group_size, bits=bits)

    steps = np.abs(w.reshape(6, num_groups, -1)).max(-1) / largest
    np.testing.assert_allclose(quantized.scales, steps, rtol=1e-6)
    assert quantized.values.nbytes == w.size * bits / 8
    # Half a step, and one rounding of the scale.
    assert (np.abs(floats(quantized, bits) - w) <= 0.5001 * np.repeat(steps, 64 // num_groups, axis=1)).all()


def test_weights_of_zero_stay_zero():
    assert (floats(quantize(jnp.zeros((2, 8)), group_size=4)) == 0).all()


def in_planes(integers: np.ndarray, planes: tuple[int, ...], size: int) -> np.ndarray:
    """Returns the bytes of rows of integers, of which each plane of a group has some bits."""
    octets = []
    for group in integers.reshape(-1, size).astype(int):
        shift = 0
        for plane in planes:
            stride, own = size * plane // 8, (group >> shift) % 2**plane
            octets += [(own[i::stride] << (plane * np.arange(8 // plane))).sum() for i in range(stride)]
            shift += plane
    return np.array(octets, np.uint8).reshape(len(integers), -1)


@pytest.mark.parametrize("is_on_cpu", [True, False])
@pytest.mark.parametrize(("bits", "planes"), [(2, (2,)), (3, (2, 1)), (5, (4, 1)), (6, (4, 2)), (7, (4, 2, 1))])
def test_integers_in_planes_multiply_as_the_numbers_that_they_stand_for(bits, planes, is_on_cpu, monkeypatch):
    if not is_on_cpu:  # what a GPU computes, by the reference of its kernels
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    integers, zeros = (GENERATOR.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), shape) for shape in ((6, 128), (6, 8)))
    scales = GENERATOR.random((6, 8)).astype(np.float32)
    exact = (integers - np.repeat(zeros, 16, axis=1)) * np.repeat(scales, 16, axis=1)
    packed = in_planes(integers, planes, 16)
    assert packed.nbytes == integers.size * bits / 8
    np.testing.assert_array_equal(pack_planes(integers, bits, 8), packed)
    x = normal(3, 128)

    for own in (zeros.astype(np.int8), in_planes(zeros, planes, 8)):
        w = QuantizedArray(packed, scales, own, bits=bits)
        np.testing.assert_allclose(linear(x, w), x @ exact.T, rtol=0, atol=1e-3)
        rows = take_rows(w, jnp.array([4, 1]), jnp.zeros(128, jnp.float32))
        np.testing.assert_array_equal(rows, exact[[4, 1]].astype(np.float32))


@pytest.mark.parametrize("group_size", [0, 5, 128])
def test_a_group_size_that_does_not_divide_the_inputs_is_refused(group_size):
    with pytest.raises(ValueError, match=rf"group_size={group_size} does not divide the 64 inputs"):
        quantize(normal(6, 64), group_size=group_size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, r"bits=3 is not supported; use one of \[4, 8\]"),
        ({"bits": 4, "group_size": 3}, r"group_size=3 of weights \(2, 6\): integers of 4 bits go in pairs"),
    ],
)
def test_bits_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        quantize(normal(2, 6), **options)


@pytest.mark.parametrize(
    ("bits", "group_size", "is_packed"),
    [(8, None, True), (8, 32, True), (4, None, True), (4, 32, True), (4, None, False), (4, 32, False)],
)
@pytest.mark.parametrize("T", [2, 17])
def test_a_product_with_quantized_weights_is_that_of_the_weights_they_stand_for(T, bits, group_size, is_packed):
    x, w = normal(T, 128), normal(24, 128)

    y = jax.jit(linear)(x, quantize(w, group_size=group_size, bits=bits, is_packed=is_packed))

    stand_for = floats(quantize(w, group_size=group_size, bits=bits), bits)
    # float32 has 24 bits of mantissa; 128 products of numbers around 1.
    np.testing.assert_allclose(y, x.astype(float) @ stand_for.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (8, 32), (4, 32)])
def test_rows_of_a_quantized_table_are_those_of_the_numbers_it_stands_for(bits, group_size):
    table = quantize(normal(7, 64), bits=bits, group_size=group_size)
    numbers = floats_like(np.zeros((7, 64)), table, bits)
    order = GENERATOR.permutation(64)
    ids = np.array([6, 0, 6, 3])

    for own, inputs in ((table, np.arange(64)), (replace(table, order=jnp.asarray(order)), np.argsort(order))):
        rows = jax.jit(take_rows)(own, ids, np.zeros(64, np.float32))
        np.testing.assert_array_equal(rows, numbers[ids][:, inputs])


@pytest.mark.parametrize("group_size", [None, 32])
def test_a_row_of_a_quantized_product_is_the_same_bits_in_any_batch(group_size):
    x, w = normal(17, 128), quantize(normal(24, 128), group_size=group_size)

    together = jax.jit(linear)(x, w)

    for row in (0, 16):
        np.testing.assert_array_equal(jax.jit(linear)(x[row : row + 2][:1], w)[0], together[row])


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, 16)])
def test_a_quantized_model_gives_the_logits_of_the_weights_it_stands_for(bits, group_size):
    params = lively_params(CONFIG)
    quantize_all = jax.jit(quantize_params, static_argnames=("config", "group_size", "bits"))
    quantized = quantize_all(params, CONFIG, group_size=group_size, bits=bits)
    stand_for = jax.tree.map(
        lambda w, q: floats_like(w, q, bits) if isinstance(q, QuantizedArray) else w,
        params,
        quantized,
        is_leaf=lambda node: isinstance(node, QuantizedArray),
    )
    steps = [[(0, 10), (1, 7)]]
    sequences = list(GENERATOR.integers(0, CONFIG.vocab_size, (2, 12), dtype=np.int32))

    run = functools.partial(replay, config=CONFIG, shape=(17, 2))
    actual, expected = (run(p, sequences, steps) for p in (quantized, stand_for))

    assert sum(isinstance(w, QuantizedArray) for w in quantized_leaves(quantized)) == 8  # seven of a layer, unembedding
    for logits, reference in zip(actual, expected, strict=True):
        np.testing.assert_allclose(logits, reference, rtol=1e-4, atol=1e-5)


def quantized_leaves(params):
    return jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, QuantizedArray))


def floats_like(w, quantized, bits):
    """The weights that a quantized tensor of any shape stands for, in float32."""
    groups = quantized.scales.shape[-1]
    rows = np.asarray(quantized.scales).reshape(-1, groups)
    flat = QuantizedArray(np.asarray(quantized.values).reshape(rows.shape[0], -1), rows)
    return floats(flat, bits).reshape(w.shape).astype(np.float32)


@pytest.mark.parametrize(
    ("axis", "quantization", "values", "scales"),
    [
        ("heads", "int8", (2, 4, 16, 48), (2, 4, 16, 1)),
        ("heads", "int4", (2, 4, 16, 24), (2, 4, 16, 3)),  # groups of 16, the greatest divisor of 48 and of 128
        ("vocab", "int4", (2, 4, 16, 48), (2, 4, 16, 1)),
    ],
)
def test_a_weight_has_a_scale_per_channel_in_8_bits_and_one_per_group_in_4(axis, quantization, values, scales):
    weight: Any = quantize_weight(jnp.ones((2, 4, 16, 48)), product_spec(axis), quantization)

    assert (weight.values.shape, weight.scales.shape) == (values, scales)


def test_weights_of_4_bits_that_are_not_packed_have_a_type_of_their_own():
    weight: Any = quantize_weight(jnp.ones((2, 4, 16, 48)), product_spec("heads"), "int4", is_packed=False)

    assert (weight.values.shape, weight.values.dtype) == ((2, 4, 16, 48), jnp.int4)


def product_spec(axis):
    return TensorSpec((2, 4, 16, 48), (axis, "experts", "mlp", "embed"), None, num_inputs=1)


def test_a_tensor_of_no_product_stays_in_floating_point():
    params = abstract_params(CONFIG, "float32")

    quantized = jax.eval_shape(functools.partial(quantize_weights, config=CONFIG, quantization="int4"), params)

    layer = quantized.layers[0]
    assert [quantized.embedding, quantized.final_norm, layer.mixer_norm] == [
        params.embedding,
        params.final_norm,
        params.layers[0].mixer_norm,
    ]
    assert isinstance(layer.mixer.q, QuantizedArray)


# Inputs: 64 of `o`, 48 of `down`, in one group, or in groups of 16.
@pytest.mark.parametrize(
    ("group_size", "is_packed", "of_o", "of_down"),
    [(None, False, None, None), (16, False, "model", None), (16, True, None, None)],
)
def test_scales_of_unpacked_integers_are_split_where_devices_divide_the_groups(group_size, is_packed, of_o, of_down):
    mesh: Any = AbstractMesh((2,), ("model",))
    quantize_all = functools.partial(quantize_params, config=CONFIG, group_size=group_size, bits=4, is_packed=is_packed)
    params = jax.eval_shape(quantize_all, abstract_params(CONFIG, "float32"))
    placement: Any = quantized_shardings(params, CONFIG, shardings(CONFIG, mesh))

    layer: Any = placement.layers[0]
    assert layer.mixer.q.scales.spec == PartitionSpec(None, "model", None, None)  # [n, N, H, groups]
    assert layer.mixer.o.values.spec == PartitionSpec(None, None, "model")  # [n, D, N H]
    assert layer.mixer.o.scales.spec == PartitionSpec(None, None, of_o)  # [n, D, groups]
    assert layer.feed_forward.down.scales.spec == PartitionSpec(None, None, of_down)
    assert placement.unembedding.scales.spec == PartitionSpec("model", None)
    assert layer.mixer_norm.spec == PartitionSpec(None, None)


def test_numpy_and_jax_round_the_smallest_weights_alike():
    w = np.array([[0, 0], [1e-39, -1e-39], [1e-37, 5e-38], [1e-36, -3e-37], [1, -0.3]], np.float32)

    of_numpy, of_jax = quantize(w), quantize(jnp.asarray(w))

    np.testing.assert_array_equal(of_numpy.values, of_jax.values)
    np.testing.assert_array_equal(of_numpy.scales, of_jax.scales)
    np.testing.assert_array_equal(of_numpy.scales[:3, 0], 1)
