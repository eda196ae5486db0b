"""Every implementation of the grouped product against NumPy in float64, expert by expert."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.grouped_matmul.gpu import (
    FEW_ROWS,
    MANY_ROWS,
    SOME_ROWS,
    GroupedBlockSizes,
    grouped_block_sizes,
    grouped_matmul_gpu,
    tiles_of,
)
from kernels_pallas.grouped_matmul.tpu import grouped_matmul_tpu, lies_turned, turns_of
from tests.kernels.grouped_matmul.oracle import make_call, product_by_expert

multiply = jax.jit(grouped_matmul, static_argnames="implementation")
EACH = pytest.mark.parametrize("implementation", ["reference", "gpu_interpret", "tpu_interpret"])
# Rows of each expert, and rows in all.
COUNTS = {
    "uneven": ([3, 0, 17, 1, 33], 54),
    "one expert has everything": ([0, 0, 40, 0, 0], 40),
    "rows past the end": ([5, 0, 20, 0, 1], 50),
    "rows past the end alone": ([0, 0, 0, 0, 0], 20),
    "one row": ([0, 1, 0, 0, 0], 1),
    "whole tiles": ([16, 32, 0, 64, 16], 128),
}


@EACH
@pytest.mark.parametrize("case", COUNTS)
def test_a_row_is_multiplied_by_the_weights_of_its_expert(case, implementation):
    counts, num_rows = COUNTS[case]
    call, expected = make_call(counts, num_rows)

    # float32 sums of 96 terms of order 1/10.
    np.testing.assert_allclose(multiply(**call, implementation=implementation), expected, rtol=1e-5, atol=1e-5)


@EACH
def test_rows_without_an_expert_are_not_read(implementation):
    counts, num_rows = COUNTS["rows past the end"]
    call, expected = make_call(counts, num_rows)
    call["rows"] = call["rows"].at[sum(counts) :].set(jnp.nan)

    np.testing.assert_allclose(multiply(**call, implementation=implementation), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["gpu_interpret", "tpu_interpret"])
def test_a_kernel_reads_no_weights_of_experts_without_rows(implementation):
    counts, num_rows = COUNTS["rows past the end"]
    call, expected = make_call(counts, num_rows)
    call["weights"] = call["weights"].at[1].set(jnp.nan).at[3].set(jnp.inf)

    np.testing.assert_allclose(multiply(**call, implementation=implementation), expected, rtol=1e-5, atol=1e-5)


@EACH
@pytest.mark.parametrize(("bits", "group_size"), [(None, None), (8, None), (4, 32)])
def test_the_experts_of_a_layer_are_read_from_the_stack_of_several(bits, group_size, implementation):
    is_packed = implementation != "tpu_interpret"
    call, expected = make_call([3, 0, 17, 1], 23, bits=bits, group_size=group_size, is_packed=is_packed)
    names = ("weights",) if bits is None else ("weights", "scales")
    stacked = {name: jnp.concatenate([jnp.zeros_like(call[name][:2]), call[name], call[name][:1]]) for name in names}

    out = multiply(**call | stacked, first_expert=jnp.int32(2), implementation=implementation)

    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-5)


@EACH
@pytest.mark.parametrize("D", [20, 64, 200, 288])
def test_inputs_need_not_fill_blocks(D, implementation):
    call, expected = make_call([7, 2, 0, 20], 31, D, 30)

    np.testing.assert_allclose(multiply(**call, implementation=implementation), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("bits", "group_size"), [(None, None), (8, None), (4, 40)])
def test_weights_that_lie_turned_on_a_tpu_are_read_as_they_lie(bits, group_size):
    assert lies_turned(384, 200)
    call, expected = make_call([3, 0, 40, 1], 60, 200, 384, bits=bits, group_size=group_size, is_packed=False)

    np.testing.assert_allclose(multiply(**call, implementation="tpu_interpret"), expected, rtol=1e-5, atol=2e-5)


@EACH
@pytest.mark.parametrize(
    ("bits", "D", "group_size"),
    [
        *((8, 96, None), (8, 96, 32), (8, 96, 96), (8, 256, 128), (8, 36, 12), (8, 768, 256)),
        *((4, 96, None), (4, 96, 32), (4, 256, 128), (4, 36, 12), (4, 320, 320)),
    ],
)
def test_integers_stand_for_weights(bits, D, group_size, implementation):
    is_packed = implementation != "tpu_interpret"
    call, expected = make_call([3, 0, 18, 1], 25, D, 34, bits=bits, group_size=group_size, is_packed=is_packed)

    # float32 sums of up to 768 terms, of which the largest are of order 1/10.
    np.testing.assert_allclose(multiply(**call, implementation=implementation), expected, rtol=1e-5, atol=2e-5)


@EACH
@pytest.mark.parametrize(("bits", "D", "group_size"), [(8, 96, None), (8, 256, 128), (4, 96, 32), (4, 36, 12)])
def test_integers_may_have_zero_points(bits, D, group_size, implementation):
    packing = {"is_packed": implementation != "tpu_interpret", "has_zeros": True}
    call, expected = make_call([3, 0, 18, 1], 25, D, 34, bits=bits, group_size=group_size, **packing)

    np.testing.assert_allclose(multiply(**call, implementation=implementation), expected, rtol=1e-5, atol=4e-5)


@EACH
@pytest.mark.parametrize(("bits", "group_size"), [(None, None), (8, None), (8, 32), (4, 32)])
@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_half_precision_is_added_up_in_float32(dtype, error, bits, group_size, implementation):
    if (implementation, dtype) == ("tpu_interpret", "float16"):
        pytest.skip("TPUs have no float16")
    is_packed = implementation != "tpu_interpret"
    call, expected = make_call([3, 0, 18, 1], 22, dtype=dtype, bits=bits, group_size=group_size, is_packed=is_packed)

    out = multiply(**call, implementation=implementation)

    assert out.dtype == dtype
    # The result is rounded; the reference also rounds weights that integers stand for, each by up to `error`.
    atol = 3 * error if implementation == "reference" and bits else 1e-4
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=error, atol=atol)


@pytest.mark.parametrize("block_sizes", [FEW_ROWS, SOME_ROWS, MANY_ROWS], ids=lambda sizes: f"{sizes.block_m} rows")
@pytest.mark.parametrize(("bits", "group_size"), [(None, None), (8, None), (4, 128)])
def test_every_size_of_blocks_gives_the_same(block_sizes, bits, group_size):
    call, expected = make_call([150, 0, 1, 70], 230, 256, 140, bits=bits, group_size=group_size)
    kernel = functools.partial(grouped_matmul_gpu, block_sizes=block_sizes, interpret=True)

    out = jax.jit(kernel)(**{"scales": None, **call})

    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-5)


def test_the_rows_of_each_expert_begin_a_tile():
    tiles = tiles_of(jnp.array([3, 0, 5], jnp.int32), num_rows=9, block_m=4)

    np.testing.assert_array_equal(tiles, [[0, 2, 2, 3, 3], [0, 3, 7, 8, 12], [3, 8, 8, 9, 9]])


@pytest.mark.parametrize("seed", range(12))
def test_tiles_hold_every_row_once_and_are_enough(seed):
    generator = np.random.default_rng(seed)
    E, block_m = generator.integers(1, 9), 2 ** generator.integers(0, 5)
    counts = generator.integers(0, 30, E) * generator.integers(0, 2, E)
    num_rows = int(counts.sum() + generator.integers(0, 2) * generator.integers(1, 20)) or 1

    lay_out = functools.partial(tiles_of, num_rows=num_rows, block_m=int(block_m))
    tiles = np.asarray(jax.jit(lay_out)(counts.astype(np.int32)))

    owner = np.repeat(np.arange(E + 1), [*counts, num_rows - counts.sum()])
    found = [(row, e) for e, first, end in tiles.T for row in range(first, min(first + block_m, end))]
    assert found == list(enumerate(owner))


def test_a_block_of_rows_has_a_turn_for_each_expert_in_it():
    turns = turns_of(jnp.array([3, 0, 2], jnp.int32), num_rows=7, block_rows=4)

    np.testing.assert_array_equal(
        turns, [[0, 2, 2, 2, 2], [0, 0, 1, 1, 1], [0, 3, 3, 5, 7], [3, 5, 5, 7, 7], [0, 2, 2, 3, 3]]
    )


@pytest.mark.parametrize("seed", range(12))
def test_turns_write_every_row_once_and_visit_blocks_in_order(seed):
    generator = np.random.default_rng(seed)
    E, block_rows = generator.integers(1, 9), 2 ** generator.integers(0, 5)
    counts = generator.integers(0, 30, E) * generator.integers(0, 2, E)
    num_rows = int(counts.sum() + generator.integers(0, 2) * generator.integers(1, 20)) or 1

    lay_out = functools.partial(turns_of, num_rows=num_rows, block_rows=int(block_rows))
    turns = np.asarray(jax.jit(lay_out)(counts.astype(np.int32)))

    owner = np.repeat(np.arange(E + 1), [*counts, num_rows - counts.sum()])
    ranges = [(e, range(max(first, b * block_rows), min(end, (b + 1) * block_rows))) for _, b, first, end, e in turns.T]
    assert [(row, e) for e, rows in ranges for row in rows] == list(enumerate(owner))
    assert (np.diff(turns[1]) >= 0).all()
    assert (turns[0][turns[4] < E] == turns[4][turns[4] < E]).all()


@pytest.mark.parametrize(("block_rows", "bits"), [(16, None), (128, None), (32, 8)])
def test_every_size_of_blocks_of_the_tpu_kernel_gives_the_same(block_rows, bits):
    call, expected = make_call([150, 0, 1, 70], 230, 256, 140, bits=bits)
    kernel = functools.partial(grouped_matmul_tpu, block_rows=block_rows, interpret=True)

    out = jax.jit(kernel)(**{"scales": None, "first_expert": None, **call})

    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-5)


def test_blocks_grow_with_the_rows_of_an_expert():
    sizes = functools.partial(grouped_block_sizes, num_experts=128, itemsize=2)

    assert [sizes(rows=8 * tokens) for tokens in (1, 64, 2048, 8192)] == [FEW_ROWS, FEW_ROWS, SOME_ROWS, MANY_ROWS]


@pytest.mark.parametrize("implementation", ["gpu_interpret", "tpu_interpret"])
@pytest.mark.parametrize(("bits", "group_size"), [(None, None), (8, None), (4, 32)])
def test_the_derivative_is_that_of_the_product_by_its_definition(bits, group_size, implementation):
    counts = [3, 0, 18, 1]
    call, _ = make_call(counts, 25, bits=bits, group_size=group_size, is_packed=implementation != "tpu_interpret")
    change = np.random.default_rng(1).standard_normal((25, 70)).astype(np.float32)
    names = ("rows", "weights") if bits is None else ("rows", "scales")

    def product(values: dict[str, Any]) -> jax.Array:
        return grouped_matmul(**call | values, implementation=implementation)

    def derivative_of(values: dict[str, Any]) -> dict[str, jax.Array]:
        return jax.vjp(product, values)[1](jnp.asarray(change))[0]

    actual = jax.jit(derivative_of)({name: call[name] for name in names})

    # A product is linear in each operand: its derivative along a direction is the product of the direction.
    for name in names:
        direction = jnp.asarray(np.random.default_rng(2).standard_normal(call[name].shape), jnp.float32)
        along = np.sum(np.asarray(jax.jit(product)({name: direction}), np.float64) * change)
        np.testing.assert_allclose(np.sum(actual[name] * direction), along, rtol=1e-4)


def test_integers_in_a_tree_of_parameters_have_no_derivative():
    call, _ = make_call([3, 0, 18, 1], 22, bits=8)

    _, derivative = jax.vjp(functools.partial(grouped_matmul, implementation="gpu_interpret"), *ordered(call))
    _, of_weights, of_counts, _ = derivative(jnp.ones((22, 70)))

    assert of_weights.dtype == of_counts.dtype == jax.dtypes.float0


def ordered(call):
    return [call[name] for name in ("rows", "weights", "counts", "scales")]


SHAPES = {"rows": (6, 64), "weights": (3, 8, 64), "counts": (3,), "scales": (3, 8, 2)}
DTYPES = {"rows": "float32", "weights": "int8", "counts": "int32", "scales": "float32"}


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("rows", (2, 3, 64), "float32"),
        ("rows", (6, 64), "int32"),
        ("weights", (3, 8, 16), "int8"),
        ("weights", (3, 8, 64), "int16"),
        ("weights", (3, 8, 64), "float32"),
        ("weights", (3, 8, 32), "int4"),
        ("weights", (8, 64), "int8"),
        ("counts", (4,), "int32"),
        ("counts", (3,), "float32"),
        ("scales", (3, 8, 3), "float32"),
        ("scales", (3, 4, 2), "float32"),
        ("scales", (3, 8, 2), "int8"),
        ("zeros", (3, 8, 1), "int8"),
        ("zeros", (3, 8, 2), "float32"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused_with_all_of_them(name, shape, dtype):
    arrays: dict[str, Any] = {n: jnp.zeros(s, DTYPES[n]) for n, s in SHAPES.items()}

    with pytest.raises(ValueError, match=f"arrays do not fit together: .*{name} "):
        grouped_matmul(**{**arrays, name: jnp.zeros(shape, dtype)})


@pytest.mark.parametrize(("shape", "dtype"), [((3, 8, 32), "float32"), ((3, 8, 64), "bfloat16"), ((3, 8, 64), "int8")])
def test_weights_without_scales_are_those_of_rows_in_their_dtype(shape, dtype):
    rows, counts = jnp.zeros((6, 64), jnp.float32), jnp.zeros(3, jnp.int32)

    with pytest.raises(ValueError, match="arrays do not fit together"):
        grouped_matmul(rows, jnp.zeros(shape, dtype), counts)


@pytest.mark.parametrize(
    ("implementation", "weights", "dtype", "reason"),
    [
        ("gpu_interpret", "int4", "float32", "weights.dtype=int4 is not supported.*pack_int4"),
        ("gpu", "int8", "float8_e4m3fn", "rows.dtype=float8_e4m3fn is not supported.*bfloat16"),
        ("gpu", "int8", "bfloat16", "device='cpu'"),
        ("tpu_interpret", "int8", "float16", "rows.dtype=float16 is not supported.*bfloat16"),
        ("tpu", "int8", "bfloat16", "device='cpu' is no TPU"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_by_name(implementation, weights, dtype, reason):
    call, _ = make_call([1, 2], 3, bits=8, dtype=dtype)
    call["weights"] = call["weights"].astype(weights)

    with pytest.raises(NotImplementedError, match=reason):
        grouped_matmul(**call, implementation=implementation)


@pytest.mark.parametrize("implementation", ["reference", "gpu_interpret"])
@pytest.mark.parametrize(("D", "group_size"), [(96, 32), (64, None), (36, 12)])
def test_weights_may_be_fp4_with_powers_of_two(D, group_size, implementation):
    call, expected = make_call([3, 0, 18, 1], 25, D, 34, bits=4, group_size=group_size, is_fp4=True)

    np.testing.assert_allclose(multiply(**call, implementation=implementation), expected, rtol=1e-5, atol=1e-5)


@EACH
@pytest.mark.parametrize(("D", "group_size"), [(96, 32), (256, 128), (96, None)])
def test_weights_may_be_fp8(D, group_size, implementation):
    call, _ = make_call([3, 0, 18, 1], 25, D, 34, bits=8, group_size=group_size)
    bits = np.asarray(call["weights"]).view(np.uint8)
    numbers = np.where(bits & 127 == 127, 0, bits).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    call["weights"] = jnp.asarray(numbers)
    wide = numbers.astype(np.float64) * np.repeat(np.asarray(call["scales"], np.float64), group_size or D, axis=2)

    out = multiply(**call, implementation=implementation)

    # float32 sums of up to 256 terms of up to 448 times the scale.
    expected = product_by_expert(np.asarray(call["rows"]), wide, [3, 0, 18, 1])
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=2e-5 * np.abs(wide).max())


def test_fp4_is_refused_by_the_tpu_kernel():
    call, _ = make_call([1, 2], 3, bits=8)
    call["weights"] = jnp.zeros((2, 70, 48), "uint8")

    with pytest.raises(NotImplementedError, match="weights.dtype=uint8 is not supported by the TPU kernel"):
        grouped_matmul(**call, implementation="tpu_interpret")


def test_what_the_kernel_cannot_do_the_reference_does():
    call, _ = make_call([1, 2], 3, bits=8)
    call["weights"] = jnp.clip(call["weights"], -8, 7)
    expected = grouped_matmul(**call, implementation="gpu_interpret")
    call["weights"] = call["weights"].astype("int4")

    np.testing.assert_allclose(grouped_matmul(**call), expected, rtol=1e-5, atol=1e-5)


def test_no_rows_have_no_results():
    call, _ = make_call([0, 0], 0)

    assert grouped_matmul(**call).shape == (0, 70)
    with pytest.raises(NotImplementedError, match="no rows at all"):
        grouped_matmul(**call, implementation="gpu_interpret")
    with pytest.raises(NotImplementedError, match="no rows at all"):
        grouped_matmul(**call, implementation="tpu_interpret")


def test_packed_integers_are_refused_by_the_tpu_kernel():
    call, _ = make_call([1, 2], 3, bits=4)

    with pytest.raises(NotImplementedError, match="packed integers .*int4"):
        grouped_matmul(**call, implementation="tpu_interpret")


def test_a_tensor_that_offsets_of_32_bits_do_not_reach_is_refused():
    kernel = functools.partial(grouped_matmul_gpu, interpret=True)
    E, F, D = 256, 2048, 7168
    shapes = (((8, D), "bfloat16"), ((E, F, D), "int8"), ((E,), "int32"), ((E, F, 1), "float32"))

    with pytest.raises(NotImplementedError, match=r"between 2\*\*31 and 2\*\*32"):
        jax.eval_shape(kernel, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))


def test_an_unknown_implementation_is_refused_with_the_known_ones():
    call, _ = make_call([1, 2], 3)

    with pytest.raises(ValueError, match="implementation='cuda' is unknown; choose from .*'reference'"):
        grouped_matmul(**call, implementation="cuda")


@pytest.mark.parametrize(("name", "value"), [("block_m", 8), ("block_n", 48), ("block_k", 0), ("num_stages", 0)])
def test_block_sizes_that_no_kernel_has_are_refused(name, value):
    blocks = GroupedBlockSizes(block_m=16, block_n=16, block_k=16, num_warps=4, num_stages=2)

    with pytest.raises(ValueError, match=f"{name}={value} must be"):
        dataclasses.replace(blocks, **{name: value})
