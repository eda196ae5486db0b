"""The verbs of a page pool do the same in every layout."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas.paged_attention import abstract_pages, gather_tokens, init_pages, map_keys, move_slots, write_kv
from kernels_pallas.paged_attention.layout import FNUZ_FACTOR, LAYOUTS, as_operand, default_layout, to_stored
from tests.kernels.paged_attention.oracle import gather, poisoned, worth_by_token, write

S = 16


@jax.jit
def read_back(pages, k, v, slots):
    return gather_tokens(write_kv(pages, k, v, slots), slots)


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


def draw(n, num_kv_heads, head_dim):
    k, v = np.random.default_rng(0).standard_normal((2, n, num_kv_heads, head_dim), dtype=np.float32)
    return k, v


@pytest.mark.parametrize(("num_kv_heads", "dtype"), [(1, "float32"), (2, "bfloat16"), (3, "float32")])
@pytest.mark.parametrize("head_dim", [16, 20, 64, 80, 128, 256])
def test_what_is_written_to_slots_is_read_from_them(layout, num_kv_heads, head_dim, dtype):
    pages = poisoned(abstract_pages(4, S, num_kv_heads, head_dim, dtype, layout))
    k, v = draw(3, num_kv_heads, head_dim)

    read = read_back(pages, k, v, np.array([2 * S, 5, 3 * S + 15]))

    assert (pages.num_pages, pages.page_size, pages.num_kv_heads) == (4, S, num_kv_heads)
    for x, expected in zip(read, (k, v), strict=True):
        np.testing.assert_array_equal(x, expected.astype(dtype))


def test_a_slot_past_the_pool_is_dropped(layout):
    pages = poisoned(abstract_pages(2, S, 2, 16, "float32", layout))

    written = write(pages, *draw(2, 2, 16), np.array([2 * S, 2**31 - 1]))

    assert all(np.isnan(pool).all() for pool in written.arrays)


def test_a_write_leaves_every_other_slot(layout):
    pages = poisoned(abstract_pages(2, S, 2, 16, "float32", layout))

    k, v = gather(write(pages, *draw(1, 2, 16), np.array([S + 3])), np.arange(2 * S))

    for x in (k, v):
        assert set(np.flatnonzero(~np.isnan(x).any((1, 2))).tolist()) == {S + 3}


def test_slots_are_moved_as_they_were_before_and_none_past_the_pool(layout):
    pages = write(poisoned(abstract_pages(2, S, 2, 16, "float32", layout)), *draw(3, 2, 16), np.array([4, 5, S + 1]))
    before = gather(pages, np.arange(2 * S))

    sources, targets = jnp.array([5, 4, S + 1, 5]), jnp.array([4, 6, 2 * S, S])
    moved = gather(move_slots(pages, sources, targets), np.arange(2 * S))

    expected = np.arange(2 * S)
    expected[[4, 6, S]] = 5, 4, 5
    for x, old in zip(moved, before, strict=True):
        np.testing.assert_array_equal(x, np.asarray(old)[expected])


def test_every_8_bit_float_is_stored_and_worth_what_it_is(layout):
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(16, 1, 16)
    pages = poisoned(abstract_pages(1, S, 1, 16, "float8_e4m3fn", layout))

    read = read_back(pages, numbers, numbers[::-1], np.arange(16))

    assert pages.dtype == numbers.dtype
    for x, expected in zip(read, (numbers, numbers[::-1]), strict=True):
        # NaN equals NaN, and -0 equals 0.
        np.testing.assert_array_equal(np.asarray(x).astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_8_bit_float_widens_to_what_it_is(dtype):
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)

    wide = jax.jit(functools.partial(as_operand, dtype=dtype))(numbers)

    assert wide.dtype == dtype
    wide, expected = np.asarray(wide).astype(np.float32), numbers.astype(np.float32)
    np.testing.assert_array_equal(wide, expected)
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(wide)[is_number], np.signbit(expected)[is_number])


def test_the_tpu_pool_holds_8_bit_floats_that_are_worth_a_sixteenth():
    numbers = np.array([-448, -1.125, 2**-9, 0, 1, 7, 448], np.float32)[:, None, None]
    pages = write(init_pages(1, 32, 1, 1, "float8_e4m3fn", "tpu"), numbers, -numbers, np.arange(7))

    held = np.asarray(pages.arrays[0]).astype(np.float32).reshape(32, 128)

    np.testing.assert_array_equal(FNUZ_FACTOR * held[:7, [0, 64]], np.hstack([numbers[:, 0], -numbers[:, 0]]))


@pytest.mark.parametrize(("dtype", "largest"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344), ("int8", 127)])
@pytest.mark.parametrize("scale", [None, np.ones(1, np.float32)], ids=["no scale", "scale 1"])
def test_what_a_narrow_page_cannot_hold_is_stored_as_the_largest_it_can(dtype, largest, scale):
    x = jnp.array([1, 1e5, -1e5, np.inf], jnp.bfloat16)[:, None, None]

    stored = to_stored(x, None if scale is None else jnp.asarray(scale), jnp.dtype(dtype))

    np.testing.assert_array_equal(stored.astype(jnp.float32).ravel(), [1, largest, -largest, largest])


def by_token(num_pages, num_kv_heads, head_dim, layout, dtype="int8"):
    return poisoned(abstract_pages(num_pages, 32, num_kv_heads, head_dim, dtype, layout, has_scales=True))


# In 4 bits heads of 21, 64 and 256 fill no vector of a CPU, two to a byte, and two planes of a TPU.
@pytest.mark.parametrize(
    ("dtype", "most", "head_dim"),
    [("int8", 127, 16), ("int8", 127, 80), ("int4", 7, 21), ("int4", 7, 64), ("int4", 7, 256)],
)
def test_each_vector_is_stored_as_integers_of_its_own_scale(layout, dtype, most, head_dim):
    k, v = draw(4, 2, head_dim)
    k[1], v[2, 1] = 1e-30 * k[1], 0

    pages = by_token(2, 2, head_dim, layout, dtype)
    read = read_back(pages, k, v, np.array([3, 0, 33, 31]))

    assert (pages.dtype, pages.num_kv_heads, pages.page_size) == (dtype, 2, 32)
    for x, given in zip(read, (k, v), strict=True):
        np.testing.assert_array_equal(x, worth_by_token(given, most))
        # Half a step of the grid, and the rounding of its scale.
        assert (np.abs(x - given).max(-1) <= 0.5001 * np.abs(given).max(-1) / most).all()


def test_integers_of_4_bits_take_half_a_byte(layout):
    pages = abstract_pages(3, 32, 2, 128, "int4", layout)

    assert sum(array.size * array.dtype.itemsize for array in pages.arrays) == 3 * 32 * 2 * 128


def test_the_bits_of_a_token_do_not_depend_on_the_tokens_written_with_it(layout):
    k, v = draw(4, 2, 16)
    together = read_back(by_token(2, 2, 16, layout), k, v, np.arange(4) + 9)

    for i in range(4):
        alone = read_back(by_token(2, 2, 16, layout), k[i : i + 1], 7 * v[i : i + 1], np.array([50]))
        np.testing.assert_array_equal(alone[0][0], together[0][i])


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_no_rounding_hides_a_number_that_is_not_finite(layout, dtype, number):
    k, v = draw(2, 1, 16)
    k[1, 0, 3] = number

    read, _ = read_back(by_token(1, 1, 16, layout, dtype), k, v, np.arange(2))

    assert np.isfinite(read[0]).all()
    assert not np.isfinite(read[1]).any()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_scales_are_moved_with_their_slots_and_none_past_the_pool(layout, dtype):
    pages = write(by_token(2, 2, 16, layout, dtype), *draw(3, 2, 16), np.array([4, 5, 33]))
    before = gather(pages, np.arange(64))

    moved = gather(move_slots(pages, jnp.array([5, 4, 33, 5]), jnp.array([4, 6, 64, 32])), np.arange(64))

    expected = np.arange(64)
    expected[[4, 6, 32]] = 5, 4, 5
    for x, old in zip(moved, before, strict=True):
        np.testing.assert_array_equal(x, np.asarray(old)[expected])


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "int4"])
def test_keys_of_few_bits_are_not_changed_in_place(dtype, layout):
    with pytest.raises(NotImplementedError, match=f"keys of {dtype} would be rounded at each change"):
        map_keys(init_pages(1, 32, 1, 16, dtype, layout), lambda keys: keys)


def test_an_unknown_layout_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"layout='rows' is unknown; choose from \('cpu', 'gpu', 'tpu'\)"):
        abstract_pages(1, 16, 1, 16, "float32", "rows")


def test_the_layout_is_the_platforms_own():
    assert default_layout() == jax.default_backend()
