"""Readers of JSON lines with bounded memory, for batch jobs and traces; free of jax."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

from jaxinfer.validation import shown

MAX_LINE_BYTES = 2**24
MAX_DIGITS = 4_000  # of an integer; Python's own default limit is little higher
_SKIPPED_BYTES = 2**20  # bytes read at a time while skipping the rest of a line that is too long


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yields a file's lines with their ends; cuts longer lines to MAX_LINE_BYTES + 1 bytes."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        rest = line if is_too_long(line) else b""
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(_SKIPPED_BYTES)


def is_too_long(line: bytes) -> bool:
    """True if a line of `lines_of` is longer than MAX_LINE_BYTES."""
    return len(line.rstrip(b"\n")) > MAX_LINE_BYTES


def parse_line(line: bytes) -> Any:
    """Parses one line. ValueError if it is not JSON, is nested too deeply or too long, or repeats a key."""
    if is_too_long(line):
        raise ValueError(f"the line has more than {MAX_LINE_BYTES:,} bytes; give shorter ones")
    return parse_json(line)


def parse_json(line: bytes) -> Any:
    """Parses a line of any length, with the other checks of `parse_line`."""
    try:
        return json.loads(line.decode("utf-8-sig"), object_pairs_hook=distinct, parse_int=_integer)
    except RecursionError:
        raise ValueError("the line is nested too deeply; give one flat JSON object") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not JSON in UTF-8 ({error}); convert it, and give one JSON object") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is not JSON ({error}); give one JSON object per line") from None


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of some keys and values. ValueError for a key that is there twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        repeated = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"keys {shown(repeated)} are given more than once; give each once")
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"the line has an integer of {len(digits):,} digits; give at most {MAX_DIGITS:,}")
    return int(digits)
