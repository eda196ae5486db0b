"""A document is followed as far as its keys, in tokens of any cut: against `json`, which sees the whole document."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxinfer.text.json_schema import byte_tokenizer
from jaxinfer.text.unique_keys import KeyTokens, OpenKeys

pytest.importorskip("llguidance")


class Members(list):
    """The keys and values of an object, in which a key may come twice."""


KEYS = st.sampled_from(["", "a", "b", "ab", 'a"b', "\\", "a\\", "\n", "é", "😀", "{", '","'])
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), KEYS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(st.tuples(KEYS, inner), max_size=4).map(Members)),
)


def spelled_string(text, draw):
    """A string's spelling, with some characters as escapes."""
    parts = []
    for character in text:
        escapes = "".join(f"\\u{unit:04x}" for unit in utf16(character))
        parts.append(escapes if draw(st.booleans()) else json.dumps(character, ensure_ascii=False)[1:-1])
    return f'"{"".join(parts)}"'


def utf16(character):
    encoded = character.encode("utf-16-be")
    return [int.from_bytes(encoded[i : i + 2], "big") for i in range(0, len(encoded), 2)]


def spelled(value, draw):
    space = draw(st.sampled_from(["", " ", "\n"]))
    if isinstance(value, Members):
        members = (f"{spelled_string(key, draw)}{space}:{spelled(part, draw)}" for key, part in value)
        return "{" + f",{space}".join(members) + space + "}"
    if isinstance(value, list):
        return "[" + f"{space},".join(spelled(part, draw) for part in value) + "]"
    return spelled_string(value, draw) if isinstance(value, str) else json.dumps(value)


def has_key_twice(text):
    found = []
    json.loads(text, object_pairs_hook=lambda pairs: found.append(len(dict(pairs)) < len(pairs)))
    return any(found)


@given(st.data())
def test_a_document_has_a_key_twice_if_and_only_if_it_is_found(data):
    text = spelled(data.draw(VALUES), data.draw)
    encoded = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(encoded)))))

    state = OpenKeys()
    for start, end in zip([0, *cuts], [*cuts, len(encoded)], strict=True):
        state = state and state.after(encoded[start:end])

    assert (state is None) == has_key_twice(text)
    assert state is None or state == OpenKeys()


SPELLED = [
    *rb'''" a" "a "a" ": ":1," 1,"a":2 {"a": {"a":1,"a" b" ab": ab \" \"b" \u00 61" u0061 \u0061"'''.split(),
    *'},"a": ],"ab" "" "","" é é" \\ud83d \\ude00" 😀'.encode().split(),
    *(b'\xa9"', b'\x9f\x98\x80"'),
]
TOKENS = [*SPELLED, *(bytes([byte]) for byte in range(256))]
STARTS = [
    '{"a":1,"é":2,"😀":3,"":4,"ab":{"a":[',
    '[{"a":"',
    '{"a\\"b":1,"a":"x',
    '{"a":{"b":[1,{"a":2}]},',
    '[{"a":1},{"b":2',
]


@cache
def any_document():
    from llguidance import LLMatcher

    options = {"json_allow_general_unicode_escapes": True}
    return LLMatcher(byte_tokenizer(), LLMatcher.grammar_from_json_schema({"x-guidance": options}), log_level=0)


def opened(written):
    state = OpenKeys().after(written.encode())
    assert state is not None
    return state


def following(written, tokens):
    """The places of the tokens that can follow a text in a JSON document, and the mask that has them."""
    at = any_document().deep_copy()
    assert at.try_consume_tokens(list(written)) == len(written)
    places = [i for i, text in enumerate(tokens) if at.validate_tokens(list(text)) == len(text)]
    mask = np.zeros(-(-len(tokens) // 32), np.uint32)
    for i in places:
        mask[i >> 5] |= np.uint32(1 << (i & 31))
    return places, mask


@given(st.sampled_from(STARTS), st.lists(st.integers(0, 10**6), max_size=6))
@example(STARTS[0], [])
@example(STARTS[0], [SPELLED.index(b'"')])
@example(STARTS[0], [SPELLED.index(b'"'), SPELLED.index(b"\\ud83d")])
@example(STARTS[0], [SPELLED.index(b'"'), len(SPELLED) + 0xC3])
@example(STARTS[2], [SPELLED.index(b'"'), SPELLED.index(b"\\u00")])
def test_the_tokens_that_repeat_a_key_are_those_found_by_trying_all(start, chosen):
    """`chosen`: of the tokens that may follow, one after the other."""
    written, state = start.encode(), opened(start)
    for choice in chosen:
        places, _ = following(written, TOKENS)
        if not places:  # the document is complete
            return
        text = TOKENS[choice] if choice in places else TOKENS[places[choice % len(places)]]
        ahead = state.after(text)
        if ahead is not None:
            written, state = written + text, ahead

    places, mask = following(written, TOKENS)
    found = KeyTokens(TOKENS).repeating(state, mask)

    assert sorted(set(found)) == [i for i in places if state.after(TOKENS[i]) is None]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"ab":1,"', [b"ab"]),
        ('{"ab":1,"a', [b"b"]),
        ('{"a":1,', [b'"a']),
        ('{"a":1,"b":{"', []),
        ('{"a":1,"b":1', [b',"a']),
        ('{"a":1,"b":"1', [b'","a']),
        ('{"a":1,"\\u006', [b"1"]),
    ],
)
def test_the_tokens_that_spell_a_key_again_without_its_end_are_found(written, expected):
    texts = [b"a", b"b", b"ab", b"1", b'"a', b',"a', b'"', b'a"', b"x", b'","a']
    _, mask = following(written.encode(), texts)

    found = KeyTokens(texts).spelling(opened(written), mask)

    assert [texts[i] for i in found] == expected


def test_text_that_is_no_json_ends_nothing():
    # White space is a schema's own choice.
    state = OpenKeys().after(b'}]},"\\x":1,{"\xff":"\\q",]')

    assert state is not None
