"""On CPU the logits of a token are the same bits whatever else is computed, and in whatever pieces.

See `kernels_pallas.row_products` for the rules that make it so.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.config import uniform_decoder
from jaxinfer.model.quantized_params import quantize_params
from tests.kernels.paged_attention.heads_and_pages import ALL_HEADS_AND_PAGES, SOME_HEADS_AND_PAGES
from tests.replay import lively_params, replay

pytestmark = [
    pytest.mark.bits,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="bit-equality is promised on CPU"),
]

LENGTH = 128
SIZES = ("num_heads", "num_kv_heads", "head_dim", "hidden_size", "intermediate_size", "vocab_size")
MAIN = (8, 2, 16, 64, 96, 128)
EXPERTS = "two of four large experts"
# Bits of quantized weights and their group size, of which 264 and 512 inputs are multiples.
QUANTIZED = {"int8": (8, None), "int4": (4, 8), "int8, two of four experts": (8, None)}
# Sizes, page size, and switches: heads in odd groups, head dims and widths that fill no vector, norms, biases, window.
LAYOUTS = {
    "G=4": (MAIN, 16, {}),
    "G=1 H=20, window of 21": ((3, 3, 20, 72, 100, 101), 16, {"sliding_window": 21}),
    "G=3 H=24 S=64": ((6, 2, 24, 96, 150, 97), 64, {"has_qkv_bias": True, "has_mlp_bias": True}),
    # Weights that are large enough for trials of other numbers of rows.
    "G=2, large weights": ((4, 2, 64, 264, 512, 520), 32, {}),
    EXPERTS: ((4, 2, 64, 264, 512, 520), 32, {}),
    # Channels that fill several turns, the last of which begins earlier.
    **dict.fromkeys(QUANTIZED, ((4, 2, 64, 264, 512, 520), 32, {})),
    "G=7 H=64 S=128": ((7, 1, 64, 100, 77, 130), 128, {"has_qk_norm": True}),
}


@functools.cache
def model(layout):
    """A random model with 16 sequences, and the logits of the first computed alone, all at once."""
    sizes, page_size, switches = LAYOUTS[layout]
    # A second layer would be compiled as the first; the main sizes show that layers after one another keep the bits.
    num_layers = 2 if sizes == MAIN else 1
    sizes_by_name = dict(zip(SIZES, sizes, strict=True))
    config = uniform_decoder(**sizes_by_name, num_layers=num_layers, max_position=LENGTH, **switches)
    if layout.endswith("experts"):
        experts = MoE(num_experts=4, expert=MLP(intermediate_size=sizes[4]), router=Router(num_chosen=2))
        layers = tuple(dataclasses.replace(layer, feed_forward=experts) for layer in config.groups[0].layers)
        config = dataclasses.replace(config, groups=(dataclasses.replace(config.groups[0], layers=layers),))
    sequences = np.random.default_rng(1).integers(0, config.vocab_size, (16, LENGTH), dtype=np.int32)
    params = lively_params(config)
    if layout in QUANTIZED:
        bits, group_size = QUANTIZED[layout]
        params = jax.jit(functools.partial(quantize_params, config=config, bits=bits, group_size=group_size))(params)
    run = functools.partial(replay, params, list(sequences), config=config, page_size=page_size)
    expected = run([[(0, LENGTH)]], shape=(LENGTH, 2))[0]
    assert np.isfinite(expected).all()
    assert expected.std() > 0.1
    return run, expected


def check(layout, steps, shape, q_len=None):
    run, expected = model(layout)
    logits = run(steps, shape=shape, q_len=q_len)[0]
    np.testing.assert_array_equal(logits, expected[: len(logits)])


ALONE = {
    "chunks of 64": ([[(0, 64)]] * 2, (LENGTH, 2)),
    "chunks of 100 and 28": ([[(0, 100)], [(0, 28)]], (LENGTH, 2)),
    "chunks of 32": ([[(0, 32)]] * 4, (32, 2)),
    "chunks of 16": ([[(0, 16)]] * 8, (32, 2)),
    "more padding": ([[(0, LENGTH)]], (256, 2)),
}
BESIDE_OTHERS = {
    "after a neighbour": ([[(1, LENGTH), (0, LENGTH)]], (256, 2)),
    "before a neighbour": ([[(0, LENGTH), (1, LENGTH)]], (256, 2)),
    "uneven chunks, some of one token": ([[(0, 33), (1, 1)], [(2, 1), (0, 1), (1, 50)], [(0, 94)]], (100, 5)),
    "single tokens beside a long chunk": (
        [[(0, 1), (1, 31)], [(2, 31), (0, 1)], [(0, 1), (3, 17)]] * 2,
        (32, 2),
    ),
}


@pytest.mark.parametrize("split", ALONE)
def test_logits_are_the_same_bits_in_any_chunks(split):
    check("G=4", *ALONE[split])


@pytest.mark.parametrize("split", BESIDE_OTHERS)
def test_logits_are_the_same_bits_beside_any_neighbours(split):
    check("G=4", *BESIDE_OTHERS[split])


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("order", ["first", "last"])
def test_logits_are_the_same_bits_decoding_in_a_batch_of_any_size(num_rows, order):
    rows = [(i, 1) for i in range(num_rows)]
    check("G=4", [rows if order == "first" else rows[::-1]] * LENGTH, (num_rows, num_rows), q_len=1)


def test_logits_are_the_same_bits_decoding_without_neighbours():
    check("G=4", [[(0, 1)]] * LENGTH, (4, 4), q_len=1)


def test_logits_are_the_same_bits_verifying_five_tokens_a_row():
    check("G=4", [[(1, 5), (0, 5)]] * 25, (10, 2), q_len=5)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "G=4"])
def test_logits_are_the_same_bits_for_any_heads_widths_and_page_size(layout):
    check(layout, [[(1, 7), (0, 29), (2, 1)]] * 2 + [[(0, 1), (2, 1)]] * 20 + [[(0, 40)]], (40, 5))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_logits_are_the_same_bits_decoding_with_one_query_per_key_head(num_rows):
    check("G=1 H=20, window of 21", [[(i, 1) for i in range(num_rows)]] * 60, (num_rows, num_rows), q_len=1)


MANY_PAGES = 150  # tokens: more than one page of any size
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 101, "num_layers": 1}


def check_model(head_dim, group, page_size, num_drafts):
    """Judges a random model of one layer, its first sequence in any chunks, beside 40 others and verified."""
    heads = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": head_dim}
    config = uniform_decoder(**SMALL, **heads, max_position=MANY_PAGES)
    sequences = np.random.default_rng(1).integers(0, config.vocab_size, (41, MANY_PAGES), dtype=np.int32)
    run = functools.partial(replay, lively_params(config), list(sequences), config=config, page_size=page_size)
    expected = run([[(0, MANY_PAGES)]], shape=(MANY_PAGES, 8))[0]

    def check(steps, shape, q_len=None):
        logits = run(steps, shape=shape, q_len=q_len)[0]
        np.testing.assert_array_equal(logits, expected[: len(logits)], err_msg=f"{steps[:2]} {shape} {q_len}")

    for size in (2, 7, 31, 32, 33, 64, 100):
        sizes = [min(size, MANY_PAGES - first) for first in range(0, MANY_PAGES, size)]
        check([[(0, n)] for n in sizes], (MANY_PAGES, 8))
        check([[(1, 1), (0, n), (2, min(n, 13))] for n in sizes[:3]], (MANY_PAGES, 8))
    check([[(0, 1)], *[[(1, 1), (0, 1)]] * 20, [(0, 1), (1, 60)]], (MANY_PAGES, 8))
    check([[(0, 1)]] * MANY_PAGES, (1, 1), 1)
    check([[(i, 1) for i in reversed(range(41))]] * 40, (41, 41), 1)
    for count in num_drafts:
        check([[(1, count), (0, count + 1)]] * (MANY_PAGES // (count + 1)), (2 * count + 2, 2), count + 1)


@pytest.mark.parametrize(("head_dim", "group", "page_size"), SOME_HEADS_AND_PAGES[1:2])
def test_logits_are_the_same_bits_for_heads_and_pages_of_many_sizes(head_dim, group, page_size):
    check_model(head_dim, group, page_size, num_drafts=(4,))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("head_dim", "group", "page_size"), ALL_HEADS_AND_PAGES)
def test_logits_are_the_same_bits_for_heads_and_pages_of_all_sizes(head_dim, group, page_size):
    check_model(head_dim, group, page_size, num_drafts=(8,))
