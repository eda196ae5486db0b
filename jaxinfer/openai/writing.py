"""Writes answers as JSON in pieces, none of which holds the interpreter's lock for long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MAX_ITEMS = 128  # of a list, for one call of the C writer; with 20 alternatives each they take some milliseconds
LEVELS = 4  # of objects that are written key by key: an answer, its choices, one of them, its log-probabilities
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_pieces(value: Any, levels: int = LEVELS) -> Iterator[str]:
    """Yields the JSON text of a value in pieces; an iterator is a list whose items are made one after another."""
    if isinstance(value, Iterator):
        begin = "["
        for item in value:
            yield begin
            yield from json_pieces(item, levels - 1)
            begin = ","
        yield "[]" if begin == "[" else "]"
    elif isinstance(value, dict) and value and levels > 0:
        begin = "{"
        for name, item in value.items():
            yield f"{begin}{_ENCODER.encode(name)}:"
            yield from json_pieces(item, levels - 1)
            begin = ","
        yield "}"
    elif isinstance(value, list) and len(value) > MAX_ITEMS:
        for start in range(0, len(value), MAX_ITEMS):
            yield f"{',' if start else '['}{_ENCODER.encode(value[start : start + MAX_ITEMS])[1:-1]}"
        yield "]"
    else:
        yield _ENCODER.encode(value)
