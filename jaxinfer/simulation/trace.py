"""Traces of requests: arrivals, lengths and shared prefixes.

A trace is a JSON-lines file in the format of the Mooncake traces (Qin et al. 2024): `timestamp` in milliseconds,
`input_length` and `output_length` in tokens, and optionally `hash_ids`. They have one id per block of 512 prompt
tokens; equal ids mean equal blocks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jaxinfer.json_lines import lines_of, parse_line
from jaxinfer.validation import shown

BLOCK_LEN = 512
MAX_LEN = 2**24  # of a prompt or an output, in tokens
# Token ids at the start of a block that spell its id; the first tells shared blocks from the blocks of one request.
ID_DIGITS = 8


@dataclass(frozen=True, kw_only=True)
class TracedRequest:
    """A request of a trace: `arrival` in seconds from the start, lengths in tokens, the ids of its shared blocks."""

    arrival: float
    input_len: int
    output_len: int
    block_ids: tuple[int, ...] = ()


def read_trace(path: str | Path) -> Iterator[TracedRequest]:
    """Yields the requests of a file, one line at a time, in order of arrival.

    Raises ValueError if the file cannot be read or has no request. For an invalid line the error names its number and
    the reason.
    """
    try:
        with Path(path).open("rb") as lines:
            yield from _read_requests(lines, path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a trace of JSON lines") from None


def _read_requests(lines: BinaryIO, path: str | Path) -> Iterator[TracedRequest]:
    request = None
    for number, line in enumerate(lines_of(lines), 1):
        if not line.strip():
            continue
        last = 0.0 if request is None else request.arrival
        try:
            request = _parse(parse_line(line))
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{path}, line {number}: {error}; correct the line") from None
        if request.arrival < last:
            raise ValueError(f"{path}, line {number}: timestamp {1e3 * request.arrival:g} lies before the line above")
        yield request
    if request is None:
        raise ValueError(f"{path} has no request; give a trace of one JSON object per line")


def _parse(fields: Any) -> TracedRequest:
    if not isinstance(fields, dict):
        raise ValueError(f"{shown(fields)} is not a JSON object")
    timestamp = fields.get("timestamp")
    if not isinstance(timestamp, int | float) or isinstance(timestamp, bool) or not 0 <= timestamp < float("inf"):
        raise ValueError(f"timestamp={shown(timestamp)} is not a number of milliseconds of at least 0")
    for name in ("input_length", "output_length"):
        length = fields.get(name)
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= MAX_LEN:
            raise ValueError(f"{name}={shown(length)} is not a number of tokens from 1 to {MAX_LEN:,}")
    ids = fields.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"hash_ids={shown(ids)} is not a list of integers of at least 0")
    return TracedRequest(
        arrival=timestamp / 1e3,
        input_len=fields["input_length"],
        output_len=fields["output_length"],
        block_ids=tuple(ids),
    )


def random_trace(
    count: int, *, input_lens: tuple[int, int], output_lens: tuple[int, int], rate: float, seed: int
) -> Iterator[TracedRequest]:
    """Yields `count` requests without shared prefixes, `rate` per second on average (Poisson arrivals).

    `input_lens` and `output_lens` bound the lengths, which are uniformly distributed. With an infinite rate all
    requests arrive at once.
    """
    draw, arrival = random.Random(seed), 0.0
    for _ in range(count):
        yield TracedRequest(arrival=arrival, input_len=draw.randint(*input_lens), output_len=draw.randint(*output_lens))
        arrival += draw.expovariate(rate) if rate < math.inf else 0.0


def make_prompt(request: TracedRequest, index: int, vocab_size: int) -> list[int]:
    """Returns `input_len` token ids, which match the prompts of other requests in exactly the shared blocks.

    Tokens without a block id are unique to the request; `index` is its number in the trace.
    """
    blocks = [(0, block_id) for block_id in request.block_ids[: -(-request.input_len // BLOCK_LEN)]]
    covered = min(len(blocks) * BLOCK_LEN, request.input_len)
    tokens: list[int] = []
    for kind, number in blocks:
        tokens += _spell(kind, number, vocab_size, BLOCK_LEN)
    rest = request.input_len - covered
    return tokens[:covered] + _spell(1, index, vocab_size, rest)


def _spell(kind: int, number: int, vocab_size: int, count: int) -> list[int]:
    """Returns `count` token ids that begin with `kind` and `number`, in base vocab_size."""
    digits = [kind]
    for _ in range(ID_DIGITS - 1):
        number, digit = divmod(number, vocab_size)
        digits.append(digit)
    if number:
        raise ValueError(f"a block id does not fit {ID_DIGITS - 1} token ids of a vocabulary of {vocab_size}")
    return (digits + [2 % vocab_size] * max(count - ID_DIGITS, 0))[:count]
