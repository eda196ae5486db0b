"""Server-sent events, and the end of a request whose client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxinfer.openai.errors import UNKNOWN_FAILURE, RefusedError

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Proxies close a connection on which nothing comes for a minute or less.
HEARTBEAT_SECONDS = 15.0
TURN_SECONDS = 0.01  # for the events of one stream at a time
HEARTBEAT = b": a sign of life\n\n"  # a comment, which clients leave out
DONE = b"data: [DONE]\n\n"
# Clients in Python often cut a stream by `str.splitlines`. JSON itself escapes the other characters that end a line.
ESCAPED_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


class ClientGoneError(Exception):
    """The client has closed its connection before its answer was complete."""


def event(value: Any) -> bytes:
    """Returns a JSON value as a server-sent event, which is one line by the line ends of Unicode too."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(ESCAPED_LINE_ENDS)
    return f"data: {text}\n\n".encode(errors="replace")


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

    An exception of the iterator becomes the last event, in OpenAI's form of an error. In the end, or if the client goes
    away, `close` is awaited: it ends what the iterator reads, even if that has not begun.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close = events, close
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGoneError):
                await unless_gone(receive, self._write(send))
        finally:
            await self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        heart = asyncio.create_task(self._beat(send))
        try:
            turn_end = time.monotonic() + TURN_SECONDS
            async for item in self._events:
                await self._send(send, item)
                if time.monotonic() > turn_end:  # of outputs that are there nothing waits, so no other task would run
                    await asyncio.sleep(0)
                    turn_end = time.monotonic() + TURN_SECONDS
        except RefusedError as error:
            await self._send(send, event(error.body()))
        except Exception:
            logger.exception("a stream has failed")
            await self._send(send, event(UNKNOWN_FAILURE.body()))
        finally:
            heart.cancel()
            await asyncio.gather(heart, return_exceptions=True)
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
