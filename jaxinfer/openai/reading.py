"""Reads the body of a request: JSON with bounds, then the fields of its model.

No step of it holds the interpreter's lock for long, whatever the body has, so other threads go on meanwhile:

    bytes ──> text ──> values ──> Body
               │         └ few: one call of the C reader; many: one call for each text, and for a run of numbers
               └ the number of commas and brackets tells which
"""

from __future__ import annotations

import json
import re
import sys
from email.message import Message
from typing import Any, TypeVar

from pydantic import ValidationError

from jaxinfer.json_lines import distinct
from jaxinfer.openai.bodies import Body
from jaxinfer.openai.errors import RefusedError, refused_body
from jaxinfer.validation import shown

MAX_VALUES = 2**18  # and keys, of a body; some thousand numbers of a list count as one
MAX_FEW = 2**14  # commas and brackets of a text that the C reader takes in one call, of some milliseconds
_SPACE = re.compile(r"[ \t\n\r]*")
# The C reader takes a run at a time, so lists of token ids are read fast.
_NUMBERS = re.compile(r"(?:-?[0-9][0-9.eE+-]*[ \t\n\r]*,[ \t\n\r]*){1,4096}")
_DECODER = json.JSONDecoder(object_pairs_hook=distinct)

B = TypeVar("B", bound=Body)


def require_json(content_type: str | None) -> None:
    """Raises RefusedError 400 for a body whose header Content-Type does not say that it is JSON.

    A page of another origin can send any other type without asking the server before.
    """
    message = Message()
    message["content-type"] = content_type or ""
    is_json = message.get_content_subtype() == "json" or message.get_content_subtype().endswith("+json")
    if content_type is None or message.get_content_maintype() != "application" or not is_json:
        given = "is missing" if content_type is None else f"is {shown(content_type)}"
        raise RefusedError(
            400,
            f"the header Content-Type {given}, and the body has to be JSON; send Content-Type: application/json, with"
            " curl by -H 'Content-Type: application/json'",
            code="content_type_not_json",
        )


def read_body(content: bytes, model: type[B]) -> B:
    """Returns the body that a model describes; raises RefusedError 400 with the field and the way out."""
    if not content.strip():
        raise RefusedError(400, "the body is empty; send a JSON object")
    values = _read_json(content)
    if not isinstance(values, dict):
        raise RefusedError(400, f"the body is {_KINDS.get(type(values), 'a number')}; send a JSON object")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise refused_body(error.errors(include_url=False, include_input=False)) from None


_KINDS = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}


def _read_json(content: bytes) -> Any:
    try:
        text = content.decode(json.detect_encoding(content), "surrogatepass")
        if sum(map(text.count, ",[{")) <= MAX_FEW:
            return _DECODER.decode(text)
        return _Reader(text).read()
    except RefusedError:
        raise
    except RecursionError:
        raise RefusedError(400, "the body is nested too deeply; give fewer levels") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise RefusedError(400, f"the body is no JSON: {error.msg} at {place}; send a JSON object") from None
    except UnicodeDecodeError:
        raise RefusedError(400, "the body is no JSON: it is no UTF-8; send a JSON object in UTF-8") from None
    except ValueError as error:
        if str(error).startswith("keys "):
            raise RefusedError(400, f"the body is ambiguous: {error}") from None
        digits = sys.get_int_max_str_digits()
        raise RefusedError(400, f"the body has an integer of more than {digits:,} digits; give fewer") from None


class _Reader:
    """Reads a JSON text of many values; the interpreter may turn to other threads after each."""

    def __init__(self, text: str) -> None:
        self._text, self._num_values = text, 0

    def read(self) -> Any:
        value, at = self._value(self._after_space(0))
        if (end := self._after_space(at)) != len(self._text):
            raise json.JSONDecodeError("Extra data", self._text, end)
        return value

    def _value(self, at: int) -> tuple[Any, int]:
        first = self._text[at : at + 1]
        if first == "[":
            return self._list(at + 1)
        if first == "{":
            return self._object(at + 1)
        self._count()
        return _DECODER.raw_decode(self._text, at)

    def _list(self, at: int) -> tuple[list[Any], int]:
        self._count()
        items: list[Any] = []
        at = self._after_space(at)
        if self._text.startswith("]", at):
            return items, at + 1
        while True:
            if run := _NUMBERS.match(self._text, at):
                items += self._numbers(run)
                at = run.end()
            value, at = self._value(at)
            items.append(value)
            at, is_end = self._after_item(at, "]")
            if is_end:
                return items, at

    def _numbers(self, run: re.Match[str]) -> list[Any]:
        try:
            return json.loads(f"[{run[0].rstrip()[:-1]}]")
        except json.JSONDecodeError as error:
            raise json.JSONDecodeError(error.msg, self._text, run.start() + error.pos - 1) from None

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        self._count()
        pairs: list[tuple[str, Any]] = []
        at = self._after_space(at)
        if self._text.startswith("}", at):
            return {}, at + 1
        while True:
            if not self._text.startswith('"', at):
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", self._text, at)
            self._count()
            key, at = _DECODER.raw_decode(self._text, at)
            at = self._after_space(at)
            if not self._text.startswith(":", at):
                raise json.JSONDecodeError("Expecting ':' delimiter", self._text, at)
            value, at = self._value(self._after_space(at + 1))
            pairs.append((key, value))
            at, is_end = self._after_item(at, "}")
            if is_end:
                return distinct(pairs), at

    def _after_item(self, at: int, closing: str) -> tuple[int, bool]:
        """Returns the place after an item and its comma or closing bracket, and True if it is the latter."""
        at = self._after_space(at)
        if self._text.startswith(closing, at):
            return at + 1, True
        if not self._text.startswith(",", at):
            raise json.JSONDecodeError("Expecting ',' delimiter", self._text, at)
        return self._after_space(at + 1), False

    def _after_space(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        assert found is not None  # which may be empty
        return found.end()

    def _count(self) -> None:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise RefusedError(400, f"the body has more than {MAX_VALUES:,} keys and values; send several smaller ones")
