"""How rows become the arrays of a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.model.batch import PADDING_SLOT, Row, last_tokens, make_batch, next_batch, num_evicted_tokens

S = 16
SHAPE = {"page_size": S, "num_tokens": 8, "num_rows": 4, "table_width": 3}


def as_lists(batch):
    assert batch.bounded_tables == ()
    return {
        name: np.asarray(value).tolist()
        for name, value in vars(batch).items()
        if name not in ("bounded_tables", "adapters")
    }


def test_rows_lie_one_after_another_with_padding_last():
    rows = [Row([5, 6, 7], 15, [2, 9]), Row([8], 0, [4]), Row([9, 10], 31, [7, 1, 3])]

    batch = make_batch(rows, **SHAPE)

    assert as_lists(batch) == {
        "tokens": [5, 6, 7, 8, 9, 10, 0, 0],
        "positions": [15, 16, 17, 0, 31, 32, 0, 0],
        "slot_mapping": [2 * S + 15, 9 * S, 9 * S + 1, 4 * S, S + 15, 3 * S, PADDING_SLOT, PADDING_SLOT],
        "cu_q_lens": [0, 3, 4, 6, 6],
        "kv_lens": [18, 1, 33, 0],
        "block_tables": [[2, 9, 0], [4, 0, 0], [7, 1, 3], [0, 0, 0]],
    }


def test_in_a_decode_batch_padding_rows_own_their_padding_token():
    rows = [Row([5], 15, [2]), Row([6], 16, [3, 1])]

    batch = make_batch(rows, page_size=S, num_tokens=4, num_rows=4, table_width=2)

    assert as_lists(batch) == {
        "tokens": [5, 6, 0, 0],
        "positions": [15, 16, 0, 0],
        "slot_mapping": [2 * S + 15, S, PADDING_SLOT, PADDING_SLOT],
        "cu_q_lens": [0, 1, 2, 3, 4],
        "kv_lens": [16, 17, 0, 0],
        "block_tables": [[2, 0], [3, 1], [0, 0], [0, 0]],
    }


# A row at position 40 of its request that does not see 16 of its tokens, one that sees all, and two of padding.
HIDING = [Row([5, 6], 40, [2, 9], 16), Row([8], 3, [4])]


def test_a_row_that_does_not_see_all_of_its_request_keeps_its_positions_and_closes_up_its_pages():
    batch = as_lists(make_batch(HIDING, **SHAPE))

    assert batch["positions"] == [40, 41, 3, 0, 0, 0, 0, 0]
    assert batch["slot_mapping"][:3] == [9 * S + 8, 9 * S + 9, 4 * S + 3]
    assert batch["kv_lens"] == [26, 4, 0, 0]


@pytest.mark.parametrize("rows", [HIDING, [row._replace(token_ids=[7]) for row in HIDING]])
def test_what_a_row_does_not_see_follows_from_its_batch_and_stays_so_in_the_next(rows):
    num_tokens = 8 if len(rows[0].token_ids) > 1 else 4
    batch = make_batch(rows, **{**SHAPE, "num_tokens": num_tokens})

    @jax.jit
    def go_on(batch):
        more = jnp.array([1, 1, 0, 0])
        following = next_batch(batch, more, batch.kv_lens + more, S)
        return num_evicted_tokens(batch), following, num_evicted_tokens(following)

    hidden, following, still_hidden = go_on(batch)

    assert hidden.tolist() == still_hidden.tolist() == [16, 0, 0, 0]
    end = 40 + len(rows[0].token_ids)
    assert following.positions[:2].tolist() == [end, 4]
    assert following.slot_mapping[:2].tolist() == [9 * S + end - 32, 4 * S + 4]


def test_the_last_tokens_of_rows_keep_the_tables_of_every_kind_of_pages():
    rows = [Row([5, 6], 15, [2, 9], bounded_ids=((1, 3),)), Row([8], 0, [4], bounded_ids=((5,),))]
    batch = make_batch(rows, **SHAPE)

    last = last_tokens(batch)

    assert np.asarray(last.tokens)[:2].tolist() == [6, 8]
    assert [table.tolist() for table in last.bounded_tables] == [table.tolist() for table in batch.bounded_tables]


def test_chunks_in_a_batch_with_as_many_rows_as_tokens_keep_their_lengths():
    rows = [Row([5, 6, 7], 0, [2]), Row([8], 4, [3])]

    batch = make_batch(rows, page_size=S, num_tokens=4, num_rows=4, table_width=1)

    assert as_lists(batch)["cu_q_lens"] == [0, 3, 4, 4, 4]


@pytest.mark.parametrize("num_rows", [2, 8])
def test_a_batch_without_rows_is_all_padding(num_rows):
    batch = make_batch([], page_size=S, num_tokens=8, num_rows=num_rows, table_width=2)

    assert batch.slot_mapping.tolist() == [PADDING_SLOT] * 8
    assert batch.kv_lens.tolist() == [0] * num_rows


def test_token_and_page_ids_may_be_arrays():
    listed = make_batch([Row([5, 6], 15, [2, 9])], **SHAPE)

    tokens: Any = np.array([5, 6])
    pages: Any = np.array([2, 9])
    batch = make_batch([Row(tokens, 15, pages)], **SHAPE)

    assert as_lists(batch) == as_lists(listed)


def test_every_batch_of_one_shape_has_the_same_types():
    full = make_batch([Row([1] * 8, 0, [0])], **SHAPE)

    empty = make_batch([], **SHAPE)

    assert all(array.dtype == np.int32 for array in jax.tree.leaves((full, empty)))
    assert jax.tree.map(np.shape, full) == jax.tree.map(np.shape, empty)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([Row([1] * 9, 0, [0])], "9 tokens in 1 rows do not fit num_tokens=8, num_rows=4"),
        ([Row([1], 0, [0])] * 5, "5 tokens in 5 rows do not fit num_tokens=8, num_rows=4"),
        ([Row([1], 0, [0, 1, 2, 3])], "4 pages.*table_width=3"),
        ([Row([1, 2], 15, [3])], "17 tokens.*1 page"),
        ([Row([], 0, [0])], "no tokens|empty"),
        ([Row([1], -1, [0])], "start|position"),
    ],
    ids=["tokens", "rows", "table", "pages", "empty", "start"],
)
def test_rows_that_do_not_fit_are_refused_with_the_numbers(rows, message):
    with pytest.raises(ValueError, match=message):
        make_batch(rows, **SHAPE)
