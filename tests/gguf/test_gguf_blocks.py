"""Blocks as float32, against the dequantization of the `gguf` package, which is that of ggml's C to the bit."""

import functools
import itertools

import gguf
import jax
import numpy as np
import pytest

from jaxinfer.checkpoint.formats.gguf import INTEGERS
from jaxinfer.gguf.blocks import (
    BLOCK_TYPES,
    dequantize,
    mxfp4_codes,
    q4_0_integers,
    q8_0_integers,
    require_finite_scales,
)
from jaxinfer.model.components.layers import linear, take_rows
from jaxinfer.quantization import PackedBlocks

TYPES = {block.name: block for block in BLOCK_TYPES.values()}
NUM_ROWS = 24


def random_blocks(block, num_blocks, seed=0):
    """Returns rows of random bytes, whose half-precision numbers are finite and whose E8M0 scales are numbers."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (NUM_ROWS, num_blocks, block.num_bytes), np.uint8)
    scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "F32": (), "BF16": (), "F16": (0,), "MXFP4": ()}
    pair = (0, 2) if block.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)
    for at in scales.get(block.name, pair):
        numbers = rng.standard_normal((NUM_ROWS, num_blocks)) * np.exp2(rng.integers(-16, 8, (NUM_ROWS, num_blocks)))
        blocks[..., at : at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    if block.name in ("F32", "BF16"):
        blocks[..., -1] &= 0xBF  # a smaller exponent
    if block.name == "MXFP4":
        blocks[..., 0] %= 253  # beyond, float32 overflows
    return blocks.reshape(NUM_ROWS, -1)


def bits_of(numbers):
    return np.ascontiguousarray(numbers, np.float32).view(np.uint32)


@pytest.mark.parametrize("name", TYPES)
def test_blocks_give_the_numbers_of_ggml_to_the_bit(name):
    blocks = random_blocks(TYPES[name], 300 if TYPES[name].length < 256 else 40)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])

    found = dequantize(blocks, TYPES[name])

    assert found.shape == (NUM_ROWS, expected.shape[-1])
    np.testing.assert_array_equal(bits_of(found), bits_of(expected))


PACKED = [name for name, block in TYPES.items() if not block.is_float and name not in INTEGERS]


@functools.cache
def packed_weights(name):
    """Returns weights in blocks of a type on the device, and their numbers."""
    blocks = random_blocks(TYPES[name], 8 * 256 // TYPES[name].length)
    return PackedBlocks(jax.numpy.asarray(blocks), name), dequantize(blocks, TYPES[name])


@pytest.mark.parametrize("name", PACKED)
def test_a_device_makes_the_same_numbers_of_blocks_to_the_bit(name):
    w, expected = packed_weights(name)
    ids = np.array([3, 0, 3, 23])

    np.testing.assert_array_equal(bits_of(jax.jit(PackedBlocks.widened)(w)), bits_of(expected))
    rows = jax.jit(take_rows)(w, ids, np.zeros(expected.shape[1], np.float32))
    np.testing.assert_array_equal(bits_of(rows), bits_of(expected[ids]))


def test_a_row_of_a_product_by_blocks_is_the_same_bits_in_any_batch():
    w, numbers = packed_weights("Q4_K")
    x = np.random.default_rng(3).standard_normal((19, numbers.shape[1])).astype(np.float32)

    together = jax.jit(linear)(x, w)

    for row in (0, 8, 18):
        np.testing.assert_array_equal(jax.jit(linear)(x[row : row + 1], w)[0], together[row])
    expected = x.astype(np.float64) @ numbers.T
    np.testing.assert_allclose(together, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_a_product_by_blocks_has_the_derivative_of_its_numbers():
    w, numbers = packed_weights("Q6_K")
    x = np.ones((2, numbers.shape[1]), np.float32)

    gradient = jax.grad(lambda x: linear(x, w).sum())(x)

    np.testing.assert_allclose(gradient[0], numbers.sum(0, dtype=np.float64), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "integers"), [("Q8_0", q8_0_integers), ("Q4_0", q4_0_integers)])
def test_integers_times_their_scales_are_the_numbers(name, integers):
    blocks = random_blocks(TYPES[name], 3)

    values, scales = integers(blocks)

    assert (values.dtype, scales.dtype) == (np.int8, np.float16)
    assert (values.shape, scales.shape) == ((NUM_ROWS, 96), (NUM_ROWS, 3))
    product = values.astype(np.float32) * scales.astype(np.float32).repeat(32, -1)
    np.testing.assert_array_equal(product, dequantize(blocks, TYPES[name]))


def test_codes_of_e2m1_times_their_powers_of_two_are_the_numbers():
    blocks = random_blocks(TYPES["MXFP4"], 3)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)

    codes, exponents = mxfp4_codes(blocks)

    product = np.concatenate([numbers, -numbers])[codes] * np.exp2(exponents.astype(np.float32) - 127).repeat(32, -1)
    np.testing.assert_array_equal(product, dequantize(blocks, TYPES["MXFP4"]))


def test_lengths_and_bytes_are_those_of_ggml():
    assert {name: (block.length, block.num_bytes) for name, block in TYPES.items()} == {
        name: tuple(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]) for name in TYPES
    }


@pytest.mark.parametrize("name", PACKED)
def test_each_scale_of_packed_blocks_is_checked(name):
    block = TYPES[name]
    blocks = random_blocks(block, 2)
    require_finite_scales(blocks, block)

    for at, number in itertools.product(block.halves, ("-inf", "nan")):
        damaged = blocks.copy()
        damaged[1, block.num_bytes + at : block.num_bytes + at + 2] = np.array([number], np.float16).view(np.uint8)
        for read in (require_finite_scales, dequantize):
            with pytest.raises(ValueError, match="is infinite or no number"):
                read(damaged, block)


@pytest.mark.parametrize(("name", "scale"), [("MXFP4", [255]), ("Q4_K", [0, 0x7C]), ("Q8_0", [1, 0x7E])])
def test_a_scale_that_is_infinite_or_no_number_is_refused(name, scale):
    blocks = random_blocks(TYPES[name], 2)
    blocks[1, : len(scale)] = scale

    with pytest.raises(ValueError, match="is infinite or no number"):
        dequantize(blocks, TYPES[name])
