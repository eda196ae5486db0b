"""On CPU a query's result is the same bits in any chunk, beside any rows, as a draft and in a tree of drafts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from kernels_pallas import row_products
from kernels_pallas.paged_attention import init_pages, paged_attention, write_kv
from scripts.kernels.named_calls import by_name
from tests.kernels.paged_attention.heads_and_pages import (
    ALL_HEADS_AND_PAGES,
    GROUPS,
    HEAD_DIMS,
    PAGE_SIZES,
    SOME_HEADS_AND_PAGES,
)
from tests.kernels.paged_attention.oracle import rows_of_chunks

pytestmark = [
    pytest.mark.bits,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="bit-equality is promised on CPU"),
]

LENGTH = 150  # more than a page of any size
NUM_TEXTS = 41  # the judged one, which is the first, and 40 neighbours
CHUNKS = (1, 2, 7, 31, 32, 33, 64, 100)
NUM_NEIGHBOURS = (0, 1, 2, 7, 40)
NUM_DRAFTS = (1, 2, 3, 4, 5, 6, 7, 8)
# Which token each follows in a tree; the path 0, 2, 3, 5 is that of the judged text.
PARENTS, PATH = (-1, 0, 0, 2, 2, 3, 1), (0, 2, 3, 5)
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "window, soft cap, sinks": {"window": 21, "softcap": 3.0}}
Chunk = tuple[int, int, int]  # text, first token, number of tokens


class Texts:
    """Random texts whose keys and values are in a pool, and the attention of any chunks of them."""

    def __init__(self, head_dim: int, group: int, page_size: int, options: dict[str, Any]) -> None:
        generator, K = np.random.default_rng(0), 2
        size = NUM_TEXTS, LENGTH
        self.qkv = [generator.standard_normal((*size, n, head_dim), np.float32) for n in (K * group, K, K)]
        width = -(-LENGTH // page_size)
        self.tables = generator.permutation(NUM_TEXTS * width).reshape(NUM_TEXTS, width).astype(np.int32)
        places = np.arange(LENGTH)
        slots = self.tables[:, places // page_size] * page_size + places % page_size
        pages = init_pages(self.tables.size, page_size, K, head_dim, np.float32, "cpu")
        k, v = (x.reshape(-1, K, head_dim) for x in self.qkv[1:])
        self.pages = jax.jit(write_kv)(pages, k, v, slots.reshape(-1))
        if options:
            options = {**options, "sinks": generator.standard_normal(K * group, np.float32)}
        attend = functools.partial(
            by_name(paged_attention), scale=head_dim**-0.5, implementation="reference", **options
        )
        self._attend = jax.jit(attend, static_argnames="q_len")

    def attend(
        self, chunks: list[Chunk], num_tokens: int, num_rows: int, q_len: int | None = None, **options: Any
    ) -> list[np.ndarray]:
        """Returns the results of each chunk in a step of this shape, padding being NaN."""
        q = np.concatenate([self.qkv[0][i, first : first + n] for i, first, n in chunks])
        return self.attend_to((q, None, None), chunks, num_tokens, num_rows, q_len, **options)

    def attend_to(self, qkv, chunks, num_tokens, num_rows, q_len=None, **options) -> list[np.ndarray]:
        """As `attend`, for queries, keys and values of the caller's."""
        lens, rows = rows_of_chunks(chunks, self.tables, num_rows)
        padding = ((0, num_tokens - sum(lens)), (0, 0), (0, 0))
        out, _ = self._attend(
            *(None if x is None else np.pad(x, padding, constant_values=np.nan) for x in qkv),
            self.pages,
            **rows,
            q_len=q_len,
            **options,
        )
        return np.split(np.asarray(out), np.cumsum(lens))[: len(chunks)]


def check_bits(head_dim, group, page_size, options, *, num_drafts: Sequence[int] = NUM_DRAFTS):
    texts = Texts(head_dim, group, page_size, options)
    attend = texts.attend
    (expected,) = attend([(0, 0, LENGTH)], 256, 8)
    assert np.isfinite(expected).all()

    def check(result, first, what):
        assert np.array_equal(result, expected[first : first + len(result)]), what

    neighbours = [(i, 3 * i, 1 + i % 20) for i in range(1, NUM_TEXTS)]
    for size in CHUNKS:
        for first in range(0, LENGTH, size):
            chunk = (0, first, min(size, LENGTH - first))
            check(attend([chunk], 128, 8)[0], first, f"a chunk of {size}")
            if size == 1:
                check(attend([chunk], 1, 1, 1)[0], first, "decoding alone")
    for count in NUM_NEIGHBOURS:
        for first in (0, 17, LENGTH - 1):
            rows = [*neighbours[: count // 2], (0, first, 1), *neighbours[count // 2 : count]]
            decoding = [(i, start, 1) for i, start, _ in rows]
            check(attend(decoding, NUM_TEXTS, NUM_TEXTS, 1)[count // 2], first, f"decoding beside {count}")
            beside = rows[max(count // 2 - 3, 0) : count // 2 + 4]
            place = beside.index((0, first, 1))
            beside[place] = (0, first, min(30, LENGTH - first))
            check(attend(beside, 256, 8)[place], first, f"a chunk beside {len(beside) - 1}")
    for count in num_drafts:
        for first in (0, 60, LENGTH - count - 1):
            rows = [(1, 40, count), (0, first, count + 1)]
            check(attend(rows, 2 * count + 2, 2, count + 1)[1], first, f"verifying {count} drafts")
    check_tree(texts, expected)


def check_tree(texts, expected):
    """The tokens of PATH are those of the judged text, all others are another one's."""
    num_tokens, mask = len(PARENTS), np.zeros((2 * len(PARENTS), 1), np.uint32)
    for i, parent in enumerate(PARENTS):
        mask[i] = (mask[parent] if i else 0) | np.uint32(1 << i)
    mask[num_tokens:] = mask[:num_tokens]
    for first in (0, 15, 60, LENGTH - num_tokens):
        q, k, v = (np.concatenate([x[2, :num_tokens]] * 2) for x in texts.qkv)
        for ours, theirs in zip((q, k, v), texts.qkv, strict=True):
            for depth, node in enumerate(PATH):
                ours[node] = theirs[0, first + depth]
        rows = [(0, first, num_tokens), (1, 30, num_tokens)]
        result = texts.attend_to((q, k, v), rows, 2 * num_tokens, 2, num_tokens, tree_mask=mask)[0]
        assert np.array_equal(result[list(PATH)], expected[first : first + len(PATH)]), f"a tree after {first}"


@pytest.mark.parametrize(("case", "options"), list(zip(SOME_HEADS_AND_PAGES[:-1:4], itertools.cycle(OPTIONS))))
def test_no_chunk_neighbour_or_draft_changes_a_bit(case, options):
    head_dim, group, page_size = case

    check_bits(head_dim, group, page_size, OPTIONS[options], num_drafts=(1, 4))


@pytest.mark.parametrize("case", [(80, 7, 16), pytest.param((16, 3, 32), marks=pytest.mark.exhaustive)])
def test_no_bit_changes_where_only_blocks_of_rows_are_multiplied(case, monkeypatch):
    head_dim, group, page_size = case
    monkeypatch.setattr(row_products, "equal_row_counts", lambda *_: frozenset())

    check_bits(head_dim, group, page_size, {}, num_drafts=(1, 4))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("head_dim", "group", "page_size"), ALL_HEADS_AND_PAGES)
def test_no_chunk_neighbour_or_draft_changes_a_bit_for_all_heads_and_pages(head_dim, group, page_size):
    # The options act between the products, so that each size need not meet them with every other one.
    is_plain = sum(map(list.index, (list(HEAD_DIMS), list(GROUPS), list(PAGE_SIZES)), (head_dim, group, page_size))) % 2
    check_bits(head_dim, group, page_size, OPTIONS["plain" if is_plain else "window, soft cap, sinks"])
