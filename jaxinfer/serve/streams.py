"""Server-sent events, and the end of a request whose client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxinfer.serve.errors import RefusedError

T = TypeVar("T")
# Proxies close a connection on which nothing comes for a minute or less.
HEARTBEAT_SECONDS = 15.0
HEARTBEAT = b": a sign of life\n\n"  # a comment, which clients leave out
DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client has closed its connection before its answer was complete."""


def event(value: Any) -> bytes:
    """Returns a JSON value as a server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, which is cancelled if the client closes its connection: then ClientGoneError."""
    tasks = asyncio.create_task(work), asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientGoneError
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An answer of server-sent events, with heartbeats while none comes.

    An exception of the iterator becomes the last event, in OpenAI's form of an error. If the client goes away, the
    iterator is closed.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGoneError):
            await unless_gone(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        heart = asyncio.create_task(self._beat(send))
        try:
            async for item in self._events:
                await self._send(send, item)
        except RefusedError as error:
            await self._send(send, event(error.body()))
        finally:
            heart.cancel()
            await self._events.aclose()  # type: ignore[attr-defined]  # an asynchronous generator
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _beat(self, send: Send) -> None:
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if self._num_sent == num_sent:
                await self._send(send, HEARTBEAT)

    async def _send(self, send: Send, body: bytes) -> None:
        self._num_sent += 1
        await send({"type": "http.response.body", "body": body, "more_body": True})
