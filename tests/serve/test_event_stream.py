"""What the server streams is read back by the decoder of the `openai` package, wherever the network cuts its bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from jaxinfer import SamplingParams
from jaxinfer.serve.streams import DONE, HEARTBEAT, EventStream, event
from tests.serve.servers import NAME

# Line ends of the format, of Unicode, and fields and comments of the format.
NASTY = [
    "\r",
    "\n",
    "\r\n\r\n",
    "\x0b",
    "\x85",
    "\u2028",
    "\u2029",
    "\ufeff",
    "data: ",
    ": ",
    "\n\nevent: x",
    "[DONE]",
    "é中😀",
]
TEXTS = st.lists(st.text() | st.sampled_from(NASTY), max_size=4).map("".join)
VALUES = st.dictionaries(TEXTS, TEXTS | st.integers() | st.none() | st.lists(TEXTS, max_size=3), max_size=3)


def decoded(stream: bytes, cuts: list[int]) -> list[str]:
    """Returns the data of the events in a stream that comes in pieces, cut at these places."""
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]

    def pieces() -> Iterator[bytes]:
        for begin, end in pairwise(places):
            yield stream[begin:end]

    events = list(SSEDecoder().iter_bytes(pieces()))
    assert [found.event for found in events] == [None] * len(events)
    return [found.data for found in events]


async def sent(items: list[bytes]) -> bytes:
    """Returns the bytes of the answer that has these events."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def events() -> AsyncIterator[bytes]:
        for item in items:
            yield item

    async def close() -> None:
        pass

    await EventStream(events(), close)({"type": "http"}, receive, send)
    return b"".join(message.get("body", b"") for message in messages)


@given(values=st.lists(VALUES, max_size=4), heartbeats=st.sets(st.integers(0, 4)), cuts=st.lists(st.integers(0, 400)))
def test_any_values_come_back_from_bytes_that_are_cut_anywhere(values, heartbeats, cuts):
    items = [event(value) for value in values]
    for place in sorted(heartbeats, reverse=True):
        items.insert(min(place, len(items)), HEARTBEAT)

    stream = asyncio.run(sent([*items, DONE]))

    *found, done = decoded(stream, cuts)
    assert [json.loads(text) for text in found] == values
    assert done == "[DONE]"
    # Many clients cut a text into lines as Python does, by the line ends of Unicode too.
    lines = [line for line in stream.decode().splitlines() if line and not line.startswith(":")]
    assert [json.loads(line.removeprefix("data: ")) for line in lines[:-1]] == values


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    prompt=st.lists(st.integers(1, 95), min_size=1, max_size=12)
    | st.text("ab \n\u2028é", max_size=8).map("a{}".format),
    stops=st.lists(st.text("abcdefghijklmnopqrstuvwxyz .,\n", min_size=1, max_size=2), max_size=4),
    fields=st.fixed_dictionaries(
        {"n": st.integers(1, 3), "max_tokens": st.integers(1, 12), "seed": st.integers(0, 99)},
        optional={"temperature": st.sampled_from([0.3, 1.0, 2.0]), "skip_special_tokens": st.booleans()},
    ),
    has_usage=st.booleans(),
    cuts=st.lists(st.integers(0, 6000), max_size=30),
)
def test_streamed_texts_are_those_of_llm(llm, http, stays_idle, prompt, stops, fields, has_usage, cuts):
    body = {"model": NAME, "prompt": prompt, "stream": True, "return_token_ids": True, **fields}
    body |= {"stop": stops} if stops else {}
    body |= {"stream_options": {"include_usage": True}} if has_usage else {}
    completions = llm.generate([prompt], SamplingParams(**fields, stop=stops), show_progress=False)

    *chunks, done = decoded(http.post("/v1/completions", json=body).raise_for_status().content, cuts)

    texts, tokens, reasons = ([""] * fields["n"], [[] for _ in completions], [None] * fields["n"])
    usage = [json.loads(chunk)["usage"] for chunk in chunks if not json.loads(chunk)["choices"]]
    for chunk in map(json.loads, chunks):
        for choice in chunk["choices"]:
            index = choice["index"]
            assert reasons[index] is None  # nothing comes after the end
            texts[index] += choice["text"]
            tokens[index] += choice["token_ids"]
            reasons[index] = choice.get("engine_finish_reason")
    assert done == "[DONE]"
    assert texts == [completion.text for completion in completions]
    assert tokens == [list(completion.token_ids) for completion in completions]
    assert reasons == [completion.finish_reason for completion in completions]
    assert [found["completion_tokens"] for found in usage] == [sum(map(len, tokens))] * has_usage
