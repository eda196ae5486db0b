"""A body's JSON is that of the standard library, within bounds, and reading it holds up no other thread for long."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.openai import reading
from jaxinfer.openai.bodies import Body, ChatBody, CompletionBody, DetokenizeBody
from jaxinfer.openai.errors import RefusedError, refusal_of
from jaxinfer.openai.reading import MAX_FEW, MAX_VALUES, read_body, require_json
from tests.pauses import longest_pause

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=6),
)
LAYOUTS: list[dict[str, Any]] = [{}, {"separators": (",", ":")}, {"indent": 2}, {"ensure_ascii": False}]


class AnyBody(Body):
    """A body whose values are read and not looked at."""

    values: Any = None


def refusal(content: bytes, model: type[Body] = AnyBody) -> str:
    with pytest.raises(RefusedError) as found:
        read_body(content, model)
    assert found.value.status == 400
    return str(found.value)


@pytest.mark.parametrize("max_few", [0, MAX_FEW])
@settings(max_examples=200, deadline=None)
@given(value=VALUES, layout=st.sampled_from(LAYOUTS))
def test_values_are_those_of_the_standard_library(max_few, value, layout):
    text = json.dumps({"values": [value]}, **layout)
    before, reading.MAX_FEW = reading.MAX_FEW, max_few
    try:
        found = read_body(text.encode(errors="surrogatepass"), AnyBody)
    finally:
        reading.MAX_FEW = before

    assert repr(found.values) == repr(json.loads(text)["values"])


@pytest.mark.parametrize("max_few", [0, MAX_FEW])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b"[1]", "the body is a list; send a JSON object"),
        (b"null", "the body is null"),
        (b"1", "the body is a number"),
        (b'{"values": 1', "the body is no JSON: Expecting ',' delimiter at line 1, column 13"),
        (b'{"values": [1, 2 3]}', "Expecting ',' delimiter at line 1, column 18"),
        (b'{"values": [1, 2-3, 4]}', "Expecting ',' delimiter at line 1, column 17"),
        (b'{"values": [01, 2, 3]}', "Expecting ',' delimiter at line 1, column 14"),
        (b'{"values": [1, 2,]}', "Expecting value at line 1, column 18"),
        (b'{"values": nothing}', "Expecting value at line 1, column 12"),
        (b'{"values" 1}', "Expecting ':' delimiter at line 1, column 11"),
        (b"{values: 1}", "Expecting property name enclosed in double quotes at line 1, column 2"),
        (b'{"values": "a\nb"}', "Invalid control character at at line 1, column 14"),
        (b'{"values": 1} {}', "Extra data at line 1, column 15"),
        (b'{"values": "\xff"}', "it is no UTF-8"),
        (b'{"values": ' + b"9" * 5_000 + b"}", "an integer of more than"),
        (b'{"values": [1, ' + b"9" * 5_000 + b", 1]}", "an integer of more than"),
        (b'{"values": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"values": ' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b'{"values": 1, "values": 2}', "keys ['values'] are given more than once"),
        (b'{"values": [{"a": 1, "a": 1}]}', "keys ['a'] are given more than once"),
        (b'{"values": 1, "\\ud800": 2}', "\\ud800: this field is unknown"),
        (b'{"\\ud800\\ud800": 2}', "\\ud800\\ud800: this field is unknown"),
    ],
)
def test_any_other_body_is_refused_by_its_mistake(max_few, content, message, monkeypatch):
    monkeypatch.setattr(reading, "MAX_FEW", max_few)

    assert message in refusal(content)


@pytest.mark.parametrize(
    ("content_type", "is_json"),
    [
        ("application/json", True),
        ("application/json; charset=utf-8", True),
        ("Application/JSON", True),
        ("application/vnd.api+json", True),
        (None, False),
        ("", False),
        ("text/plain", False),
        ("text/json", False),
        ("application/x-www-form-urlencoded", False),
        ("multipart/form-data; boundary=a", False),
    ],
)
def test_a_body_needs_the_content_type_of_json(content_type, is_json):
    if is_json:
        require_json(content_type)
        return
    with pytest.raises(RefusedError, match=r"Content-Type .* send Content-Type: application/json"):
        require_json(content_type)


SIZE = 2**22
MANY = "more than 262,144 keys and values"
# Forms of 4 MiB, each with a part of its error, if it has one.
HEAVY: dict[str, tuple[type[Body], bytes, str | None]] = {
    "lists": (AnyBody, b'{"values":[' + b"[]," * (SIZE // 3) + b"1]}", MANY),
    "objects": (AnyBody, b'{"values":[' + b"{}," * (SIZE // 3) + b"1]}", MANY),
    "objects in objects": (AnyBody, b'{"values":[' + b'{"b":{}},' * (SIZE // 9) + b"1]}", MANY),
    "texts": (AnyBody, b'{"values":[' + b'"",' * (SIZE // 3) + b"1]}", MANY),
    "keys": (AnyBody, b"{" + b",".join(b'"%d":1' % i for i in range(SIZE // 10)) + b"}", MANY),
    "equal keys": (AnyBody, b"{" + b'"a":1,' * (MAX_VALUES // 3) + b'"a":1}', "['a'] are given more than once"),
    "digits": (AnyBody, b'{"values":[' + b"1," * (SIZE // 2) + b"1]}", None),
    "fractions": (AnyBody, b'{"values":[' + b"1.5," * (SIZE // 4) + b"1]}", None),
    "digits of one number": (AnyBody, b'{"values":' + b"9" * SIZE + b"}", "an integer of more than"),
    "words": (AnyBody, b'{"values":[' + b"true," * (SIZE // 5) + b"1]}", MANY),
    "a text": (AnyBody, b'{"values":"' + b"a" * SIZE + b'"}', None),
    "escapes": (AnyBody, b'{"values":"' + b"\\n" * (SIZE // 2) + b'"}', None),
    "surrogate pairs": (AnyBody, b'{"values":"' + b"\\ud83d\\ude00" * (SIZE // 12) + b'"}', None),
    "JSON in a text": (AnyBody, json.dumps({"values": '{"a": [1, {}]},' * (SIZE // 20)}).encode(), None),
    "spaces": (AnyBody, b'{"values":' + b" " * SIZE + b"1}", None),
    "token ids": (DetokenizeBody, b'{"tokens":[' + b"17," * (2**20 - 1) + b"17]}", None),
    "a wrong id": (DetokenizeBody, b'{"tokens":[' + b"17," * (2**20 - 1) + b"-1]}", "tokens: item 1048575: Input"),
    "prompts": (
        CompletionBody,
        b'{"model":"m","prompt":[' + b",".join([b"[" + b"5," * 500 + b"5]"] * 2_048) + b"]}",
        None,
    ),
    "short prompts": (CompletionBody, b'{"model":"m","prompt":[' + b"[1]," * (SIZE // 4) + b"[1]]}", MANY),
    "parts": (ChatBody, b'{"model":"m","messages":[{"content":[' + b"{}," * (SIZE // 3) + b"{}]}]}", MANY),
}


@pytest.mark.parametrize("name", HEAVY)
def test_no_other_thread_waits_long_while_a_heavy_body_is_read(name):
    model, content, message = HEAVY[name]
    alone = longest_pause(lambda: time.sleep(0.5))

    def read() -> None:
        if message is None:
            read_body(content, model)
        else:
            assert message in refusal(content, model)

    # One call for all that a text of this size may hold would take 0.1 to 1.2 s. Other processes may hold a try up.
    assert any(longest_pause(read) <= max(0.1, 3 * alone) for _ in range(8))


def test_a_body_of_as_many_values_as_are_allowed_is_read():
    content = json.dumps({"values": ["a"] * (MAX_VALUES - 3)}).encode()
    assert len(read_body(content, AnyBody).values) == MAX_VALUES - 3
    assert MANY in refusal(json.dumps({"values": ["a"] * (MAX_VALUES - 2)}).encode())


def test_at_least_four_hundred_levels_are_read():
    for width in (1, MAX_FEW + 1):
        content = b'{"values": [' + b"[" * 400 + b"]" * 400 + b",1" * width + b"]}"
        assert read_body(content, AnyBody).values[0]


def test_a_client_is_sent_to_the_operator_for_what_it_cannot_raise():
    message = "n=9 is more than max_samples=8; ask for fewer or raise EngineConfig.max_samples"

    refusal = refusal_of(ValueError(message), message, {"n"})

    assert "ask for fewer or ask the server's operator to raise max_samples" in str(refusal)
    assert refusal.param == "n"
