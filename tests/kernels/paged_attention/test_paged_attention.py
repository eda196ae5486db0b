"""Every implementation of paged attention against the definition, over pools that are NaN where nothing was written."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.paged_attention.api import IMPLEMENTATIONS
from kernels_pallas.paged_attention.reference import paged_attention_reference
from scripts.kernels.named_calls import by_name
from tests.kernels.paged_attention.blocks import IN_BLOCKS
from tests.kernels.paged_attention.oracle import check_pages, expected_output, make_call, tree_of, tree_words

STATIC = ("scale", "q_len", "window", "softcap", "implementation")
attend = jax.jit(by_name(paged_attention), static_argnames=STATIC)
attend_within_rounding = jax.jit(by_name(paged_attention), static_argnames=STATIC)
SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
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


# An implementation, and the layout of pages that it is tested on. test_gpu.py runs some of these tests on its kernel.
TARGETS = {"reference": ("reference", "cpu"), **{name: (name, "gpu") for name in IN_BLOCKS}}


@pytest.fixture(params=TARGETS)
def target(request, monkeypatch):
    """The name of an implementation, and a `make_call` for its pages."""
    implementation, layout = TARGETS[request.param]
    if implementation in IN_BLOCKS:
        attend = functools.partial(paged_attention_reference, attend=IN_BLOCKS[implementation])
        monkeypatch.setitem(IMPLEMENTATIONS, implementation, attend)
    return implementation, functools.partial(make_call, layout=layout)


def check(call, implementation, *, tolerance=TOLERANCE, q_len=None, trees=None, **options):
    scale = call.arguments["q"].shape[-1] ** -0.5
    out, pages = attend_within_rounding(
        **call.arguments, **options, scale=scale, q_len=q_len, implementation=implementation
    )
    expected = expected_output(call, scale, trees=trees, **options)
    is_real = ~np.isnan(expected)
    actual = np.asarray(out)[: call.num_tokens].astype(np.float32)
    np.testing.assert_allclose(actual[is_real], expected[is_real], **tolerance)
    check_pages(call, call.arguments["pages"], pages)


@pytest.mark.parametrize("name", RAGGED)
def test_a_ragged_batch_is_the_attention_of_each_row_alone(name, target):
    implementation, make = target
    lens = RAGGED[name]
    padded = [*lens, *[(0, 0)] * (6 - len(lens))]
    num_padding = 96 - sum(q_len for q_len, _ in lens)

    check(make(padded, **SMALL, num_padding=num_padding), implementation)


@pytest.mark.parametrize("layout", ["gpu", "tpu"])
def test_the_reference_reads_pages_of_every_layout(layout):
    check(make_call([(7, 23), (1, 40), (0, 0)], **SMALL, layout=layout), "reference")


@pytest.mark.parametrize("q_len", [1, 5])
def test_a_uniform_batch_is_the_attention_of_each_row_alone(q_len, target):
    implementation, make = target
    lens = [(q_len, max(kv_len, q_len)) for kv_len in EDGE_LENS] + [(q_len, 0)]

    check(make(lens, **SMALL), implementation, q_len=q_len)


def test_a_uniform_batch_may_have_more_rows_than_a_tile(target):
    implementation, make = target
    lens = [(1, kv_len) for kv_len in (*EDGE_LENS, 0, 50, 2)]

    check(make(lens, **SMALL), implementation, q_len=1)


def test_rows_may_have_fewer_tokens_than_the_bound(target):
    implementation, make = target
    lens = [(4, 23), (1, 40), (3, 3), (4, 64), (2, 17), (1, 1), (0, 0)]

    check(make(lens, **SMALL, num_padding=13), implementation, q_len=4)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(3, 3, 64), (8, 2, 80), (7, 1, 128)],
    ids=["G=1 H=64", "G=4 H=80", "G=7 H=128"],
)
def test_query_heads_share_the_key_value_head_of_their_group(num_heads, num_kv_heads, head_dim, target):
    implementation, make = target
    sizes: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}

    check(make([(1, 33), (9, 30), (1, 1)], **sizes, num_padding=1), implementation)


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("q_len", [None, 1])
def test_lengths_around_the_page_size_are_exact(size, q_len, target):
    implementation, make = target
    lens = [(1, kv_len) for kv_len in (1, size - 1, size, size + 1, 2 * size)]

    check(make(lens, **SMALL, page_size=size, table_width=2), implementation, q_len=q_len)


def test_a_uniform_batch_may_be_wider_than_a_tile(target):
    implementation, make = target

    check(make([(40, 55), (40, 40), (40, 0)], **SMALL), implementation, q_len=40)


def test_a_batch_of_one_query_is_computed(target):
    implementation, make = target

    check(make([(1, 20)], **SMALL), implementation)


def test_scores_far_apart_neither_overflow_nor_vanish(target):
    implementation, make = target
    call = make([(20, 50)], **SMALL)
    q, k, v = call.rows[0]
    call.rows[0] = (q * 60, k, v)
    call.arguments["q"] = call.arguments["q"] * 60

    # Scores of some hundreds are rounded to 2**-16, so a weight errs by one part in ten thousand.
    check(call, implementation, tolerance={"rtol": 1e-3, "atol": 3e-4})


RAGGED_OPTIONS = [(7, 23), (1, 40), (5, 5), (1, 1), (33, 64), (0, 0)]


@pytest.mark.parametrize("window", [1, 16, 17, 1000])
@pytest.mark.parametrize("q_len", [None, 1])
def test_a_window_hides_what_lies_behind_it(window, q_len, target):
    implementation, make = target
    lens = [(q_len or length, kv_len) for length, kv_len in RAGGED_OPTIONS if kv_len]

    check(make(lens, **SMALL).with_freed_pages(window), implementation, q_len=q_len, window=window)


@pytest.mark.parametrize("q_len", [None, 1])
def test_a_soft_cap_bounds_the_scores(q_len, target):
    implementation, make = target
    lens = [(q_len or length, kv_len) for length, kv_len in RAGGED_OPTIONS if kv_len]

    check(make(lens, **SMALL), implementation, q_len=q_len, softcap=0.5)


@pytest.mark.parametrize("q_len", [None, 1])
@pytest.mark.parametrize("level", [-20.0, 20.0])
def test_sinks_take_their_share_of_the_weights(level, q_len, target):
    implementation, make = target
    lens = [(q_len or length, kv_len) for length, kv_len in RAGGED_OPTIONS if kv_len]
    sinks = np.array([level, level + 1, 0.0, -3.0], np.float32)

    check(make(lens, **SMALL), implementation, q_len=q_len, sinks=sinks, window=20)


# The parent of each draft; token 0 is the one that was accepted last. Two rows, words of 32 bits.
TREES = {"chain": [[-1, 0, 1, 2, 3]], "fan": [[-1, 0, 0, 0, 0, 0, 0]], "two rows": [[-1, 0, 0, 1, 1, 2], [-1, 0, 1]]}
TREES["more drafts than a word has bits"] = [[-1, *(i // 2 for i in range(39))]]


@pytest.mark.parametrize("window", [None, 14])
@pytest.mark.parametrize("name", TREES)
def test_a_draft_sees_the_context_and_its_own_ancestors(name, window, target):
    implementation, make = target
    trees = [tree_of(parents) for parents in TREES[name]]
    lens = [(len(tree), len(tree) + context) for tree, context in zip(trees, (13, 0), strict=False)]
    call = make(lens, **SMALL, num_padding=2)
    masked = call.with_options(tree_mask=tree_words(trees, call.num_tokens + 2))

    check(masked, implementation, trees=trees, window=window)


# q, pages; the tolerance is that of weights and values rounded to q's type: 8 bits of mantissa in bfloat16.
DTYPES = {
    "bfloat16": (jnp.bfloat16, jnp.bfloat16, 0.03),
    "int8 under bfloat16": (jnp.bfloat16, jnp.int8, 0.03),
    "int8 under float32": (jnp.float32, jnp.int8, 2e-5),
    "float8 under bfloat16": (jnp.bfloat16, jnp.float8_e4m3fn, 0.03),
}


@pytest.mark.parametrize("q_len", [None, 1])
@pytest.mark.parametrize("name", DTYPES)
def test_narrow_pages_are_accumulated_in_float32(name, q_len, target):
    implementation, make = target
    dtype, page_dtype, tolerance = DTYPES[name]
    scales = (np.array([0.02, 0.03], np.float32), np.array([0.03, 0.02], np.float32))
    lens = [(q_len or 4, 60), (1, 33), (q_len or 20, 20), (1, 1)]
    call = make(
        lens,
        **SMALL,
        page_size=32,
        dtype=dtype,
        page_dtype=page_dtype,
        scales=None if page_dtype == jnp.bfloat16 else scales,
    )

    check(call, implementation, q_len=q_len, tolerance={"rtol": tolerance, "atol": tolerance})


BY_TOKEN: dict[str, Any] = {"page_dtype": jnp.int8, "has_scales": True}
OF_4_BITS: dict[str, Any] = {"page_dtype": jnp.int4, "has_scales": True}
SINKS = np.array([2.0, -20.0, 0.5, 1.0], np.float32)


@pytest.mark.parametrize("options", [{}, {"window": 17, "softcap": 2.0, "sinks": SINKS}], ids=["", "with all options"])
@pytest.mark.parametrize("q_len", [None, 1])
def test_each_token_of_integer_pages_has_its_own_scale(q_len, options, target):
    implementation, make = target
    lens = [(q_len or 4, 60), (1, 33), (q_len or 20, 20), (1, 1)]
    call = make(lens, **SMALL, page_size=32, **BY_TOKEN)

    check(call, implementation, q_len=q_len, **options)


@pytest.mark.parametrize("layout", ["cpu", "gpu", "tpu"])
def test_integers_of_4_bits_are_read_from_pages_of_every_layout(layout):
    lens = [(4, 60), (1, 33), (20, 20), (1, 1)]
    call = make_call(lens, **SMALL, page_size=32, layout=layout, **OF_4_BITS)

    check(call, "reference")


def test_drafts_of_a_tree_read_their_ancestors_by_their_own_scales(target):
    implementation, make = target
    trees = [tree_of(parents) for parents in TREES["two rows"]]
    lens = [(len(tree), len(tree) + context) for tree, context in zip(trees, (13, 0), strict=False)]
    call = make(lens, **SMALL, num_padding=2, **BY_TOKEN)

    check(call.with_options(tree_mask=tree_words(trees, call.num_tokens + 2)), implementation, trees=trees)


@pytest.mark.parametrize("q_len", [None, 1])
def test_layers_that_share_keys_and_values_write_nothing(q_len, target):
    implementation, make = target
    call = make([(q_len or 5, 40), (1, 17)], **SMALL)
    _, written = attend_within_rounding(**call.arguments, scale=0.25, implementation="reference")
    shared = call.with_options(k=None, v=None, pages=written)

    check(shared, implementation, q_len=q_len)
    _, after = attend_within_rounding(**shared.arguments, scale=0.25, q_len=q_len, implementation=implementation)
    for old, new in zip(written.arrays, after.arrays, strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("q_len", [None, 1])
def test_a_page_offset_selects_the_layer(q_len, target):
    implementation, make = target
    call = make([(q_len or 5, 40), (1, 17)], **SMALL)
    P = call.arguments["pages"].num_pages
    call.slots = [slots + P * 16 for slots in call.slots]
    both = jax.tree.map(lambda a: jnp.concatenate([jnp.full_like(a, jnp.nan), a]), call.arguments["pages"])

    check(call.with_options(pages=both, page_offset=jnp.int32(P)), implementation, q_len=q_len)


@pytest.mark.parametrize("lens", [[(5, 21), (0, 0)], [(1, 9), (0, 0)]], ids=["chunk", "single token"])
def test_values_at_padding_positions_are_finite(lens, target):
    implementation, make = target
    call = make(lens, **SMALL, num_padding=8)

    out, _ = attend_within_rounding(**call.arguments, scale=0.25, implementation=implementation)

    assert np.isfinite(out).all()


@pytest.mark.parametrize("target", ["reference"], indirect=True)
@pytest.mark.parametrize("q_len", [None, 1])
def test_a_result_is_the_same_bits_whatever_the_neighbours(q_len, target):
    implementation, make = target
    arguments = make([(1, 37), (1, 20), (1, 64), (1, 1)], **SMALL).arguments
    full, _ = attend(**arguments, scale=0.25, q_len=q_len, implementation=implementation)

    rows = np.array([2, 0])
    picked = {name: arguments[name][rows] for name in ("q", "k", "v", "block_tables", "kv_lens")}
    pair, _ = attend(
        **{**arguments, **picked, "cu_q_lens": np.arange(3)},
        scale=0.25,
        q_len=q_len,
        implementation=implementation,
    )

    np.testing.assert_array_equal(pair, full[rows])


# Stored as 16, 32 and 64 numbers a head.
@pytest.mark.parametrize(("head_dim", "group"), [(8, 3), (20, 1), (64, 3)])
def test_a_query_has_the_same_bits_in_a_long_row_a_short_one_and_alone(head_dim, group):
    arguments = make_call([(48, 48)], num_heads=2 * group, num_kv_heads=2, head_dim=head_dim).arguments
    whole, pages = attend(**arguments, scale=0.25, implementation="reference")
    whole = np.asarray(whole)

    tails = {}
    for q_len, is_known in ((1, True), (1, False), (4, False)):
        last = {name: arguments[name][-q_len:] for name in ("q", "k", "v")}
        tail = {**arguments, **last, "pages": pages, "cu_q_lens": np.array([0, q_len], np.int32)}
        known = q_len if is_known else None
        tails[q_len, known] = np.asarray(attend(**tail, scale=0.25, q_len=known, implementation="reference")[0])

    assert all(np.array_equal(tail, whole[-q_len:]) for (q_len, _), tail in tails.items())
