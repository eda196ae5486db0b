"""Every implementation of paged attention against the definition, over pools that are NaN where nothing was written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import copy_pages, page_size, paged_attention, pool_shapes, write_kv
from kernels_pallas.paged_attention.api import IMPLEMENTATIONS
from tests.kernels.paged_attention.oracle import expected_output, make_call

attend = jax.jit(paged_attention, static_argnames=("scale", "q_len", "implementation"))
SMALL = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
# float32 sums of at most 300 weighted values of order 1.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}

# (q_len, kv_len) of each row; pages of 16.
RAGGED = {
    "whole prompts": [(1, 1), (15, 15), (16, 16), (17, 17)],
    "prompts longer than a tile": [(40, 40), (33, 33), (2, 2)],
    "chunks inside a context": [(7, 23), (5, 48), (16, 32), (2, 64)],
    "single tokens between long rows": [(1, 33), (20, 37), (1, 16), (1, 17), (34, 34), (1, 1)],
    "long rows between single tokens": [(33, 64), (1, 1), (3, 3), (1, 64), (35, 35)],
    "a long row first and singles last": [(37, 60), (1, 12), (1, 31), (1, 15), (1, 64)],
    "padding rows": [(5, 21), (1, 16), (0, 0), (0, 0)],
    "nothing but padding": [(0, 0), (0, 0)],
    "empty rows between": [(3, 3), (0, 0), (2, 18), (0, 0), (1, 2)],
}
EDGE_LENS = [1, 15, 16, 17, 32, 33, 64]


def check(call, *, tolerance=TOLERANCE, q_len=None, implementation=None):
    scale = call.arguments["q"].shape[-1] ** -0.5
    out = attend(**call.arguments, scale=scale, q_len=q_len, implementation=implementation)
    expected = expected_output(call, scale)
    is_real = ~np.isnan(expected)
    np.testing.assert_allclose(np.asarray(out[: call.num_tokens])[is_real], expected[is_real], **tolerance)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.mark.parametrize("name", RAGGED)
def test_a_ragged_batch_is_the_attention_of_each_row_alone(name, implementation):
    lens = RAGGED[name]
    padded = [*lens, *[(0, 0)] * (6 - len(lens))]
    num_padding = 96 - sum(q_len for q_len, _ in lens)

    check(make_call(padded, **SMALL, num_padding=num_padding), implementation=implementation)


@pytest.mark.parametrize("q_len", [1, 5])
def test_a_uniform_batch_is_the_attention_of_each_row_alone(q_len, implementation):
    lens = [(q_len, max(kv_len, q_len)) for kv_len in EDGE_LENS] + [(q_len, 0)]

    check(make_call(lens, **SMALL), q_len=q_len, implementation=implementation)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(3, 3, 64), (8, 2, 80), (7, 1, 128)],
    ids=["G=1 H=64", "G=4 H=80", "G=7 H=128"],
)
def test_query_heads_share_the_key_value_head_of_their_group(num_heads, num_kv_heads, head_dim, implementation):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}

    check(make_call([(1, 33), (9, 30), (1, 1)], **sizes, num_padding=1), implementation=implementation)


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("q_len", [None, 1])
def test_lengths_around_the_page_size_are_exact(size, q_len, implementation):
    lens = [(1, kv_len) for kv_len in (1, size - 1, size, size + 1, 2 * size)]

    check(make_call(lens, **SMALL, page_size=size, table_width=2), q_len=q_len, implementation=implementation)


def test_a_uniform_batch_may_be_wider_than_a_tile(implementation):
    call = make_call([(40, 55), (40, 40), (40, 0)], **SMALL)

    check(call, q_len=40, implementation=implementation)


def test_a_batch_of_one_query_is_computed(implementation):
    check(make_call([(1, 20)], **SMALL), implementation=implementation)


def test_scores_far_apart_neither_overflow_nor_vanish(implementation):
    call = make_call([(20, 50)], **SMALL)
    q, k, v = call.rows[0]
    call.rows[0] = (q * 60, k, v)
    call.arguments["q"] = call.arguments["q"] * 60

    # Scores of some hundreds are rounded to 2**-16, so a weight errs by one part in ten thousand.
    check(call, tolerance={"rtol": 1e-3, "atol": 3e-4}, implementation=implementation)


def test_half_precision_pools_are_accumulated_in_float32(implementation):
    call = make_call([(4, 60), (1, 33)], **SMALL)
    half = {name: jnp.asarray(call.arguments[name], jnp.bfloat16) for name in ("q", "k_pages", "v_pages")}

    out = attend(**{**call.arguments, **half}, scale=0.25, implementation=implementation)

    assert out.dtype == jnp.bfloat16
    # bfloat16 has 8 bits of mantissa: inputs, weights and result are each rounded once.
    np.testing.assert_allclose(out.astype(jnp.float32), expected_output(call, 0.25), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("lens", [[(5, 21), (0, 0)], [(1, 9), (0, 0)]], ids=["chunk", "single token"])
def test_values_at_padding_positions_are_finite(lens, implementation):
    call = make_call(lens, **SMALL, num_padding=8)

    out = attend(**call.arguments, scale=0.25, implementation=implementation)

    assert np.isfinite(out).all()


@pytest.mark.parametrize("q_len", [None, 1])
def test_a_result_is_the_same_bits_whatever_the_neighbours(q_len, implementation):
    lens = [(1, 37), (1, 20), (1, 64), (1, 1)]
    arguments = make_call(lens, **SMALL).arguments
    full = attend(**arguments, scale=0.25, q_len=q_len, implementation=implementation)

    rows = [2, 0]
    picked = {name: arguments[name][rows] for name in ("q", "block_tables", "kv_lens")}
    pair = attend(
        **{**arguments, **picked, "cu_q_lens": np.arange(3)},
        scale=0.25,
        q_len=q_len,
        implementation=implementation,
    )

    np.testing.assert_array_equal(pair, full[np.array(rows)])


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("head_dim", [8, 20, 24, 40, 64])
def test_a_query_has_the_same_bits_in_a_long_row_a_short_one_and_alone(head_dim, group, implementation):
    arguments = make_call([(48, 48)], num_heads=2 * group, num_kv_heads=2, head_dim=head_dim).arguments
    whole = np.asarray(attend(**arguments, scale=0.25, implementation=implementation))

    tails = {}
    for q_len in (1, 4, 16):
        tail = {**arguments, "q": arguments["q"][-q_len:], "cu_q_lens": np.array([0, q_len], np.int32)}
        tails[q_len] = np.asarray(attend(**tail, scale=0.25, implementation=implementation))

    assert all(np.array_equal(tail, whole[-q_len:]) for q_len, tail in tails.items())


def test_an_unknown_implementation_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="implementation='cuda' is unknown; choose from .*'reference'"):
        paged_attention(**make_call([(1, 1)], **SMALL).arguments, scale=1.0, implementation="cuda")


def test_a_call_that_the_named_implementation_cannot_do_says_why(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("head_dim=16 is not a multiple of 128")

    monkeypatch.setitem(IMPLEMENTATIONS, "picky", refuse)
    with pytest.raises(NotImplementedError, match="head_dim=16"):
        paged_attention(**make_call([(1, 1)], **SMALL).arguments, scale=1.0, implementation="picky")


def test_an_unnamed_implementation_is_the_first_that_can(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("not here")

    order = {"picky": refuse, "able": lambda *args, **kwargs: "able was asked"}
    monkeypatch.setattr("kernels_pallas.paged_attention.api.IMPLEMENTATIONS", order)

    assert paged_attention(**make_call([(1, 1)], **SMALL).arguments, scale=1.0) == "able was asked"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("v_pages", (9, 2, 16, 8)),
        ("q", (2, 4, 24)),
        ("q", (2, 3, 16)),
        ("block_tables", (3, 4)),
        ("kv_lens", (3,)),
        ("cu_q_lens", (2,)),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_together_are_refused_with_all_of_them(name, shape):
    arguments = make_call([(1, 1), (1, 2)], **SMALL).arguments

    with pytest.raises(ValueError, match=f"shapes do not fit together: .*{name}"):
        paged_attention(**{**arguments, name: np.zeros(shape, arguments[name].dtype)}, scale=1.0)


def test_keys_and_values_written_to_slots_are_the_ones_attended_to():
    S = 16
    k_pool, v_pool = (jnp.full(shape, jnp.nan) for shape in pool_shapes(3, S, 2, 16))
    k, v = (jnp.asarray(x, jnp.float32) for x in np.random.default_rng(0).standard_normal((2, 3, 2, 16)))

    # The third token lies past the pool.
    written = write_kv(k_pool, v_pool, k, v, jnp.array([2 * S, 0, 3 * S]))

    assert page_size(written[1]) == S
    assert [int(np.isfinite(pool).sum()) for pool in written] == [2 * 2 * 16] * 2
    # Attention over a context of one token is that token's value, up to the rounding of w * v / w.
    one = {"kv_lens": jnp.ones(2, jnp.int32), "cu_q_lens": jnp.arange(3), "scale": 1.0}
    out = paged_attention(k[:2], *written, jnp.array([[2], [0]]), **one)
    np.testing.assert_allclose(out, v[:2], rtol=1e-6)


@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
def test_copied_pages_equal_their_sources_and_pages_past_the_pool_are_dropped(which):
    pages = jnp.arange(4.0)[:, None, None, None] * jnp.ones(pool_shapes(4, 16, 1, 2)[which])

    copied = copy_pages(pages, jnp.array([3, 1, 2]), jnp.array([0, 2, 4]))

    expected = np.array([3.0, 1.0, 1.0, 3.0])[:, None, None, None]
    np.testing.assert_array_equal(copied, np.broadcast_to(expected, pages.shape))
