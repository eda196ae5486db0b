"""Bodies of requests: their bounds while they come, and their reading beside the event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.engine.fair_threads import FairThreads
from jaxinfer.openai.bodies import Body
from jaxinfer.openai.errors import RefusedError
from jaxinfer.openai.reading import read_body, require_json
from jaxinfer.serve.access import client_of, tenant_of
from jaxinfer.serve.refusals import refusal_response
from jaxinfer.serve.streams import ClientGoneError
from jaxinfer.validation import MAX_INT

SMALL_BYTES = 2**14  # of a body that is read at once, in some milliseconds at most
HELD_BODIES = 16  # of the largest size, may be in memory at a time
HEAVY_AT_ONCE = 2
T = TypeVar("T")


def heavy_threads() -> FairThreads:
    """Returns the threads for work of many milliseconds beside the event loop: two pieces, and one of each tenant."""
    return FairThreads(HEAVY_AT_ONCE, "heavy-work", max_at_once=1, max_waiting=MAX_INT)


async def done_in_turn(request: Request, work: Callable[[], T]) -> T:
    """Returns the result of heavy work once it is the turn of the request's tenant."""
    return await asyncio.wrap_future(request.app.state.heavy_threads.submit(tenant_of(request) or "", work))


class BodyRoute(APIRoute):
    """A route whose body is read by `read_body`; the application's state has `heavy_threads` for large ones."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint, parameters = self.endpoint, inspect.signature(self.endpoint, eval_str=True).parameters
        model = parameters["body"].annotation if "body" in parameters else None
        if model is None:
            return super().get_route_handler()
        assert issubclass(model, Body)
        assert parameters.keys() <= {"body", "request"}

        async def handle(request: Request) -> Response:
            given = {"body": await _read(request, model), "request": request}
            given = {name: given[name] for name in parameters}
            if inspect.iscoroutinefunction(endpoint):
                return await endpoint(**given)
            return await run_in_threadpool(endpoint, **given)

        return handle


async def _read(request: Request, model: type[Body]) -> Body:
    require_json(request.headers.get("content-type"))
    try:
        content = b"".join([piece async for piece in request.stream()])
    except ClientDisconnect:
        raise ClientGoneError from None
    if len(content) <= SMALL_BYTES:
        return read_body(content, model)
    try:
        return await done_in_turn(request, partial(read_body, content, model))
    finally:
        request.scope["state"].get("let_body_go", lambda: None)()


class BodyLimit:
    """Refuses bodies of more bytes than a limit, before they are in memory, and those that all together are too many.

    `max_bytes_of` has the limits of paths with another one, whose bodies go to a file as they come. Bytes of the others
    count until they are read, or their request ends. A tenant's bodies are at most half of all.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_bytes_of: Mapping[str, int]) -> None:
        self._app, self._max_bytes, self._max_bytes_of = app, max_bytes, max_bytes_of
        self._num_held = Counter[str | None]()  # bytes by tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._max_bytes_of.get(scope["path"], self._max_bytes)
        message = f"the body has more than {max_bytes:,} bytes; send a smaller one"
        for name, value in scope["headers"]:
            # The protocol has made sure that it is a number.
            if name == b"content-length" and int(value) > max_bytes:
                response = refusal_response(RefusedError(413, message, code="body_too_large"))
                response.headers["Connection"] = "close"  # or the client would go on sending
                await response(scope, receive, send)
                return
        request = Request(scope)
        has_keys, tenant = client_of(request) is not None, tenant_of(request)
        is_held = scope["path"] not in self._max_bytes_of
        num_bytes = num_held = 0

        async def receive_within_limit() -> Message:
            nonlocal num_bytes, num_held
            received = await receive()
            count = len(received.get("body", b""))
            num_bytes += count
            if num_bytes > max_bytes:
                raise HTTPException(413, message, {"Connection": "close"})
            if is_held and count:
                self._hold(tenant, count, has_keys=has_keys)
                num_held += count
            return received

        def let_go() -> None:
            nonlocal num_held
            self._num_held[tenant] -= num_held
            num_held = 0

        scope.setdefault("state", {})["let_body_go"] = let_go
        try:
            await self._app(scope, receive_within_limit, send)
        finally:
            let_go()

    def _hold(self, tenant: str | None, count: int, *, has_keys: bool) -> None:
        most = HELD_BODIES * self._max_bytes
        if has_keys and self._num_held[tenant] + count > most // 2:
            message = f"the bodies of this tenant's requests that are under way have more than {most // 2:,} bytes"
            raise RefusedError(429, f"{message}; try again", kind="rate_limit_error", code="bodies", retry_after=1.0)
        if self._num_held.total() + count > most:
            message = f"the bodies of all requests that are under way have more than {most:,} bytes"
            raise RefusedError(503, f"{message}; try again", kind="server_error", code="bodies", retry_after=1.0)
        self._num_held[tenant] += count
