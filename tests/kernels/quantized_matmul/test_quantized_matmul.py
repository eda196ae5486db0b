"""Every implementation of the quantized product against NumPy in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from kernels_pallas.device import lies_turned
from kernels_pallas.packed_numbers import dequantize, doubled_fp4, pack_int4, unpack_int4, wide_scales
from kernels_pallas.quantized_matmul import quantized_matmul
from kernels_pallas.quantized_matmul.tpu import quantized_matmul_tpu
from kernels_pallas.triton import floats_of_fp8
from tests.kernels.grouped_matmul.oracle import pack_pairs

GENERATOR = np.random.default_rng(3)
multiply = jax.jit(quantized_matmul, static_argnames="implementation")


def make_call(T, D, F, group_size, *, bits=8, has_zeros=False, dtype=jnp.float32, seed=0, is_packed=True):
    """Returns the arguments of a call and the product in float64.

    `is_packed` lays 4 bits two to a byte, zero points too; else they have a type of their own.
    """
    generator = np.random.default_rng(seed)
    low, high = (-8, 7) if bits == 4 else (-128, 127)
    integers = generator.integers(low, high, (F, D), np.int8, endpoint=True)
    scales = generator.uniform(0.5, 2.0, (F, D // group_size)).astype(np.float32) / (high * D**0.5)
    zeros = generator.integers(low, high, scales.shape, np.int8, endpoint=True) if has_zeros else None
    x = np.asarray(jnp.asarray(generator.standard_normal((T, D)), dtype).astype(jnp.float32))
    centres = 0 if zeros is None else np.repeat(zeros, group_size, axis=1).astype(np.float64)
    w = (integers - centres) * np.repeat(scales, group_size, axis=1)
    stored = pack_int4(jnp.asarray(integers), group_size) if bits == 4 and is_packed else jnp.asarray(integers)
    stored = stored.astype("int4") if bits == 4 and not is_packed else stored
    if zeros is not None and bits == 4:
        zeros = pack_pairs(zeros) if is_packed else zeros.astype("int4")
    call = (jnp.asarray(x, dtype), stored, jnp.asarray(scales), None if zeros is None else jnp.asarray(zeros))
    return call, x.astype(np.float64) @ w.T


@pytest.mark.parametrize("implementation", ["reference", "gpu_interpret"])
@pytest.mark.parametrize(
    ("T", "F", "group_size", "bits", "has_zeros"),
    [(3, 70, 32, 8, False), (3, 70, 128, 4, True), (1, 64, 64, 8, True), (40, 24, 32, 4, False), (70, 24, 32, 4, True)],
)
def test_a_product_is_that_of_the_weights_the_integers_stand_for(T, F, group_size, bits, has_zeros, implementation):
    call, expected = make_call(T, 384, F, group_size, bits=bits, has_zeros=has_zeros)

    # float32 sums of 384 terms of order 1/16.
    np.testing.assert_allclose(multiply(*call, implementation=implementation), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_one_group_is_a_scale_per_channel(bits, has_zeros):
    call, expected = make_call(5, 96, 10, 96, bits=bits, has_zeros=has_zeros)

    np.testing.assert_allclose(multiply(*call), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "gpu_interpret"])
def test_half_precision_rows_lose_nothing_to_integers_and_zero_points(implementation):
    call, expected = make_call(4, 256, 32, 64, has_zeros=True, dtype=jnp.bfloat16)

    out = multiply(*call, implementation=implementation)

    assert out.dtype == jnp.bfloat16
    # Differences up to 255 are exact in bfloat16, so only the result is rounded, to 8 bits.
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=2**-8, atol=1e-4)


def put_in_stack(call, layer, num_layers, channels=None):
    """Returns a call by weights in a stack of layers, of which the others have scales of NaN.

    `channels` are the sizes of the axes of channels, None for one axis.
    """
    x, weights, scales, zeros = call
    channels = weights.shape[:1] if channels is None else channels
    is_layer = (jnp.arange(num_layers) == layer)[:, None, None]
    weights = jnp.where(is_layer, weights[None].astype("int8"), 1).astype(weights.dtype)
    scales = jnp.where(is_layer, scales[None], jnp.nan)
    zeros = None if zeros is None else jnp.where(is_layer, zeros[None].astype("int8"), 1).astype(zeros.dtype)
    stacks = {"weights": weights, "scales": scales, "zeros": zeros}
    stacks = jax.tree.map(lambda a: a.reshape(num_layers, *channels, a.shape[-1]), stacks)
    return {"x": x, **stacks, "layer": jnp.int32(layer)}


@pytest.mark.parametrize("implementation", ["reference", "gpu_interpret", "tpu_interpret"])
@pytest.mark.parametrize(("bits", "group_size"), [(8, 128), (8, 32), (4, 32)])
@pytest.mark.parametrize(("layer", "num_layers"), [(0, 1), (2, 3)])
def test_a_layer_is_read_from_the_stack_of_several(layer, num_layers, bits, group_size, implementation):
    is_packed = implementation == "gpu_interpret"
    call, expected = make_call(5, 256, 24, group_size, bits=bits, has_zeros=True, is_packed=is_packed)
    stacked = put_in_stack(call, layer, num_layers, channels=(3, 8))

    out = multiply(**stacked, implementation=implementation)
    own = {name: stacked[name][layer : layer + 1] for name in ("scales", "zeros")}
    by_own_scales = multiply(**(stacked | own), implementation=implementation)

    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(by_own_scales, out)


@pytest.mark.parametrize("T", [1, 32, 200, 512])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("D", "F", "bits", "group_size"),
    [
        *((96, 70, 8, 96), (200, 384, 8, 40), (4096, 640, 8, 4096)),
        *((256, 640, 4, 128), (320, 34, 4, 64), (200, 384, 4, 40), (4096, 640, 4, 1024)),
    ],
)
def test_the_tpu_kernel_takes_any_rows_channels_and_groups(T, D, F, bits, group_size, has_zeros):
    call, expected = make_call(T, D, F, group_size, bits=bits, has_zeros=has_zeros, is_packed=False)

    out = multiply(**put_in_stack(call, 1, 2), implementation="tpu_interpret")

    # float32 sums of up to 4,096 terms of order 1/64.
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("bits", "group_size"), [(8, 256), (4, 64)])
def test_the_tpu_kernel_adds_up_half_precision_in_float32(bits, group_size):
    call, expected = make_call(40, 256, 70, group_size, bits=bits, dtype=jnp.bfloat16, is_packed=False)

    out = multiply(**put_in_stack(call, 1, 2), implementation="tpu_interpret")

    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("block_rows", [16, 128])
def test_blocks_of_rows_of_the_tpu_kernel_give_the_same(block_rows):
    call, expected = make_call(230, 256, 140, 64, bits=4, is_packed=False)
    kernel = functools.partial(quantized_matmul_tpu, zeros=None, block_rows=block_rows, interpret=True)

    out = jax.jit(kernel)(**put_in_stack(call, 1, 3))

    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer": None}, "layer=None is not supported by the TPU kernel.*implementation='reference'"),
        ({"x": np.zeros((3, 200), "float16")}, "rows.dtype=float16 is not supported.*bfloat16"),
        ({"x": np.zeros((0, 200), "float32")}, "no rows at all"),
        ({"weights": np.zeros((2, 384, 100), "int8")}, "packed integers .*int4"),
    ],
)
def test_what_the_tpu_kernel_cannot_do_is_refused_by_name(change, reason):
    arrays = put_in_stack(make_call(3, 200, 384, 40, is_packed=False)[0], 1, 2) | change
    if arrays["layer"] is None:
        arrays |= {name: arrays[name][0] for name in ("weights", "scales")}

    with pytest.raises(NotImplementedError, match=reason):
        quantized_matmul(**arrays, implementation="tpu_interpret")


def test_channels_of_several_axes_that_lie_turned_are_refused_and_computed_by_the_reference():
    assert lies_turned(128, 200)
    call, expected = make_call(3, 200, 384, 40, is_packed=False)
    stacked = put_in_stack(call, 1, 2, channels=(3, 128))

    with pytest.raises(NotImplementedError, match="the last axis of channels lies along lanes"):
        quantized_matmul(**stacked, implementation="tpu_interpret")
    np.testing.assert_allclose(multiply(**stacked), expected, rtol=1e-5, atol=1e-5)


def test_packed_integers_are_the_ones_unpacked():
    integers = jnp.asarray(np.random.default_rng(0).integers(-8, 8, (3, 64)), jnp.int8)

    packed = pack_int4(integers, 32)

    assert packed.shape == (3, 32)
    np.testing.assert_array_equal(unpack_int4(packed, 32), integers)


def test_dequantized_weights_are_those_the_integers_stand_for():
    weights, scales = jnp.array([[1, -2, 3, 4]], jnp.int8), jnp.array([[0.5, 2.0]], jnp.bfloat16)

    np.testing.assert_array_equal(dequantize(weights, scales, jnp.array([[1, 2]], jnp.int8), 4), [[0.0, -1.5, 2, 4]])


@pytest.mark.parametrize(("num_rows", "is_widened"), [(64, False), (65, True)])
def test_of_more_rows_than_a_tile_the_weights_are_widened_once(num_rows, is_widened):
    call, _ = make_call(num_rows, 128, 32, 64, bits=4, dtype=jnp.bfloat16)
    device = AbstractDevice("NVIDIA H200", 132, "gpu")

    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        trace = jax.make_jaxpr(functools.partial(quantized_matmul, implementation="gpu"))(*call)

    assert ("pallas_call" not in str(trace)) == is_widened


def test_arrays_of_a_stack_need_a_layer_and_a_layer_needs_a_stack():
    x, weights, scales, _ = make_call(2, 64, 8, 32)[0]

    with pytest.raises(ValueError, match="arrays do not fit together"):
        quantized_matmul(x, weights[None], scales[None])
    with pytest.raises(ValueError, match="arrays do not fit together"):
        quantized_matmul(x, weights, scales, layer=jnp.int32(0))


SHAPES = {"x": (2, 64), "weights": (8, 64), "scales": (8, 2), "zeros": (8, 2)}


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("weights", (8, 16), "int8"),
        ("weights", (8, 64), "int16"),
        ("weights", (8, 32), "int4"),
        ("scales", (8, 3), "float32"),
        ("scales", (4, 2), "float32"),
        ("zeros", (8, 1), "int8"),
        ("zeros", (8, 2), "int4"),
        ("zeros", (8, 2), "float32"),
        ("x", (2, 3, 64), "float32"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused_with_all_of_them(name, shape, dtype):
    arrays = {n: np.zeros(s, "int8" if n in ("weights", "zeros") else "float32") for n, s in SHAPES.items()}

    with pytest.raises(ValueError, match=f"arrays do not fit together: .*{name} "):
        quantized_matmul(**{**arrays, name: jnp.zeros(shape, dtype)})


@pytest.mark.parametrize(
    ("group_size", "dtype", "reason"),
    [
        (16, jnp.bfloat16, "group size=16 is not supported.*32"),
        (64, jnp.float32, "x.dtype=float32 is not supported.*bfloat16"),
        (64, jnp.bfloat16, "device='cpu'"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_by_name(group_size, dtype, reason):
    call, _ = make_call(2, 256, 8, group_size, dtype=dtype)

    with pytest.raises(NotImplementedError, match=reason):
        quantized_matmul(*call, implementation="gpu")


def test_an_unknown_implementation_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="implementation='cuda' is unknown; choose from .*'reference'"):
        quantized_matmul(*make_call(2, 64, 8, 32)[0], implementation="cuda")


def test_exponents_and_codes_of_fp4_mean_what_their_types_say():
    codes = np.arange(16, dtype=np.uint8)
    exponents = np.arange(255, dtype=np.uint8)
    scales = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)

    for dtype in ("int8", "uint8"):
        wide = np.asarray(wide_scales(jnp.zeros(1, dtype), jnp.asarray(exponents)), np.float64)
        np.testing.assert_array_equal(wide, scales / (2 if dtype == "uint8" else 1))
    np.testing.assert_array_equal(
        doubled_fp4(jnp.asarray(codes)), 2 * codes.view(ml_dtypes.float4_e2m1fn).astype(float)
    )


@pytest.mark.parametrize("implementation", ["reference", "gpu_interpret", "tpu_interpret"])
@pytest.mark.parametrize("num_rows", [1, 40, 70])
@pytest.mark.parametrize("kind", ["float8", "float8 per channel", "float8, scaled by powers of 2", "fp4"])
def test_weights_may_be_floats_of_8_and_4_bits(kind, num_rows, implementation):
    x, groups = GENERATOR.standard_normal((num_rows, 256)).astype(np.float32), 8
    if kind == "fp4":
        codes = GENERATOR.integers(0, 16, (34, 256), np.uint8)
        weights, scales = pack_int4(jnp.asarray(codes), 32), jnp.full((34, groups), 125, "uint8")
        wide = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) / 4
    else:
        # Every number of the type but NaN, subnormal ones too.
        bits = GENERATOR.permuted(np.tile(np.arange(256, dtype=np.uint8), (34, 1)), axis=1)
        numbers = np.where(bits & 127 == 127, 0, bits).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
        groups = 1 if "channel" in kind else groups
        weights, scales = jnp.asarray(numbers), jnp.full((34, groups), 0.25, "bfloat16")
        scales = jnp.full(scales.shape, 125, "uint8") if "powers" in kind else scales
        wide = numbers.astype(np.float64) / 4

    call = {"x": jnp.asarray(x), "weights": weights, "scales": scales}
    if implementation == "tpu_interpret":
        if kind == "fp4":
            pytest.skip("a TPU has integers in place of FP4")
        call |= {"weights": weights[None], "scales": scales[None], "layer": jnp.int32(0)}

    y = multiply(**call, implementation=implementation)

    expected = x.astype(np.float64) @ wide.T
    # float32 sums of 256 terms of up to 112.
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=2e-5 * np.abs(wide).max())


def test_fp8_by_its_bits_is_exact():
    bits = np.arange(256, dtype=np.uint8)
    finite = bits[bits & 127 != 127]

    numbers = np.asarray(floats_of_fp8(jnp.asarray(finite.view(np.int8))), np.float64)

    np.testing.assert_array_equal(numbers * 256, finite.view(ml_dtypes.float8_e4m3fn).astype(np.float64))
