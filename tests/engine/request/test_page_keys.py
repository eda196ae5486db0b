"""Two pages have one key exactly where their content is the same by construction."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.request.page_keys import DIGEST_BYTES, PageKeys, root_key

S = 4
PARTS: dict[str, Any] = {"model": "m", "params_version": "", "adapter": "", "cache_salt": ""}


def keys_of(token_ids: list[int], root: bytes = b"") -> list[bytes]:
    keys = PageKeys(root, S)
    return [keys.key(i, token_ids) for i in range(len(token_ids) // S)]


# Three tokens only, so that equal pages at different places and equal beginnings are common.
@given(st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=2, max_size=6))
def test_keys_are_equal_exactly_where_all_tokens_up_to_the_end_of_the_page_are(sequences):
    pages = [(tuple(tokens[: (i + 1) * S]), key) for tokens in sequences for i, key in enumerate(keys_of(tokens))]

    for (tokens, key), (other_tokens, other_key) in itertools.product(pages, pages):
        assert (key == other_key) == (tokens == other_tokens)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=8, max_size=20), st.data())
def test_a_key_does_not_depend_on_when_it_was_asked_for(tokens, data):
    keys = PageKeys(b"", S)
    for length in sorted(data.draw(st.lists(st.integers(S, len(tokens)), max_size=4))):
        keys.key(length // S - 1, tokens[:length])

    assert [keys.key(i, tokens) for i in range(len(tokens) // S)] == keys_of(tokens)


@pytest.mark.parametrize(
    "change",
    [("model", "n"), ("params_version", "1"), ("adapter", "a"), ("cache_salt", "s")],
    ids=lambda change: change[0],
)
def test_another_model_version_adapter_or_salt_gives_another_key(change):
    changed = dict(PARTS)
    changed[change[0]] = change[1]

    assert keys_of([1] * S, root_key(**PARTS)) != keys_of([1] * S, root_key(**changed))


def test_parts_of_the_root_do_not_run_into_each_other():
    one = root_key(model="", params_version="", adapter="a", cache_salt="bc")

    assert one != root_key(model="", params_version="", adapter="ab", cache_salt="c")


def test_a_page_that_is_not_full_has_no_key():
    with pytest.raises(RuntimeError, match="page 1 is not full: 7 tokens in pages of 4"):
        PageKeys(b"", S).key(1, [1] * 7)


def test_a_key_is_long_enough_to_have_no_collisions():
    assert DIGEST_BYTES * 8 >= 256
    assert len(keys_of([1] * S)[0]) == DIGEST_BYTES
