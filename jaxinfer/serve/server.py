"""The server's process: sockets, signals and time limits around the application."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.middleware.cors import CORSMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxinfer.engine.async_llm import AsyncLLM
from jaxinfer.serve import DRAIN_SECONDS, MAX_BODY_BYTES
from jaxinfer.serve.access import MAX_HEAD_BYTES, AccessControl, Client, HeadCheck, HostCheck, OriginCheck
from jaxinfer.serve.app import make_app
from jaxinfer.serve.batches.batches import Batches
from jaxinfer.serve.batches.file_store import FileStore
from jaxinfer.serve.batches.routes import FORM_BYTES, UPLOADS
from jaxinfer.serve.bodies import BodyLimit
from jaxinfer.serve.logs import EngineLog, RequestLog
from jaxinfer.serve.state import ServerState

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 60.0  # for a client to send a request, from the connection or the request's first byte on
REQUEST_BYTES = 2**20  # received in these seconds give the client more time; an upload may take minutes
STALL_SECONDS = 60.0  # for a client to take what fills its socket's buffer
KEEP_ALIVE_SECONDS = 75  # longer than load balancers keep an idle connection, so that they close it first
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # the names of this machine, beside the server's own address
CLOSING_SECONDS = 10  # for the last bytes of answers, after their requests have ended


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The server's address, its model's names, and the bounds of its requests.

    * `host`, `port`: port 0 takes a free one.
    * `served_names`: names of the model in requests; answers have the first.
    * `chat_template`: in place of the checkpoint's.
    * `allows_chat_templates`: if requests may bring templates of their own, which are programs.
    * `clients`: the keys; without one every request may enter.
    * `allowed_hosts`: names in the header Host by which the server may be called, beside those of a loopback address.
      Without them any name is allowed if the server has keys or listens at another address.
    * `cors_origins`: origins whose pages may call the server from a browser.
    * `store`: keeps files and batches; without one their routes are refused.
    * `max_body_bytes`: bytes of a request's body.
    * `drain_seconds`: for unfinished requests after SIGTERM.
    * `tls_certificate`, `tls_key`: files in PEM format, for https.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_names: Sequence[str]
    chat_template: str | None = None
    allows_chat_templates: bool = False
    clients: Sequence[Client] = ()
    allowed_hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    store: FileStore | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    drain_seconds: float = DRAIN_SECONDS
    tls_certificate: str | None = None
    tls_key: str | None = None


def make_server(llm: AsyncLLM, config: ServerConfig) -> Server:
    """Returns the server of a model; its `run` serves until SIGTERM or SIGINT."""
    app = make_app(
        llm,
        config.served_names,
        chat_template=config.chat_template,
        allows_chat_templates=config.allows_chat_templates,
        store=config.store,
        clients=config.clients,
    )
    uploads = {} if config.store is None else {UPLOADS: config.store.max_file_bytes + FORM_BYTES}
    asgi: Any = AccessControl(BodyLimit(app, config.max_body_bytes, uploads), config.clients)
    if (hosts := _allowed_hosts(config)) is not None:
        asgi = HostCheck(asgi, hosts)
    if not config.clients:
        asgi = OriginCheck(asgi, config.cors_origins)
    if config.cors_origins:
        # Outermost, for a browser asks without a key whether it may call, and reads refusals too.
        origins, every = [*config.cors_origins], ["*"]
        asgi = CORSMiddleware(asgi, origins, every, every, expose_headers=["Retry-After"])
    asgi = RequestLog(HeadCheck(asgi))
    settings = uvicorn.Config(
        asgi,
        host=config.host,
        port=config.port,
        http=_TimedProtocol,
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        lifespan="off",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSING_SECONDS,
        ssl_certfile=config.tls_certificate,
        ssl_keyfile=config.tls_key,
    )
    return Server(settings, app.state.server, app.state.batches, config.drain_seconds)


def _allowed_hosts(config: ServerConfig) -> Sequence[str] | None:
    """Returns the names by which the server may be called; None for any name.

    A page in a browser on this machine could call a server without keys at a loopback address, by a name of its own
    that leads here (DNS rebinding).
    """
    if _is_loopback(config.host) and not config.clients:
        return [*LOOPBACK, config.host, *config.allowed_hosts]
    return config.allowed_hosts or None


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Server(uvicorn.Server):
    """Drains at the first SIGTERM or SIGINT, and ends at the second.

    While it drains, new requests get 503, /ready too, and running ones have `drain_seconds` to end. Then the engine is
    closed, which ends the rest with their tokens so far. Batches stop at once, and go on with the next start.
    """

    def __init__(
        self, config: uvicorn.Config, state: ServerState, batches: Batches | None, drain_seconds: float
    ) -> None:
        super().__init__(config)
        self._state, self._batches, self._drain_seconds = state, batches, drain_seconds
        self._closing_time: float | None = None
        self._engine_log = EngineLog(state.llm.metrics(), time.monotonic())
        self.on_start: Callable[[int], object] = lambda port: None  # receives the port when the server listens

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            if self._batches is not None:
                self._batches.start()
            self.on_start(self.servers[0].sockets[0].getsockname()[1])

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Serves until a signal, with room for the most connections that the system allows."""
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        super().run(*args, **kwargs)

    def drain(self) -> None:
        """Takes no more requests, and ends when the running ones have ended or `drain_seconds` are over."""
        self._state.is_draining = True
        if self._batches is not None:
            self._batches.stop()
        if self._closing_time is None:
            self._closing_time = time.monotonic() + self._drain_seconds
            logger.info("draining: running requests have %g seconds", self._drain_seconds)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._closing_time is None:
            self.drain()
        else:
            self.should_exit = True
            self.force_exit = self.force_exit or sig == signal.SIGINT

    async def on_tick(self, counter: int) -> bool:
        if self._engine_log.is_due(now := time.monotonic()) and self._state.llm.is_open:
            self._engine_log.write(self._state.llm.metrics(), now)
        if self._state.llm.failure is not None:
            self.drain()  # the supervisor of the process then starts another
        if self._closing_time is not None and not self.should_exit:
            is_idle = not self.server_state.tasks
            self.should_exit = is_idle or time.monotonic() >= self._closing_time
        if self.should_exit:
            await self._state.llm.close()
            if self._batches is not None:
                await asyncio.to_thread(self._batches.close)
        return await super().on_tick(counter)


class _TimedProtocol(H11Protocol):
    """HTTP/1.1 with time limits for clients that send or take nothing.

    connection    first byte       last byte          end of the answer   taken
    │◀ REQUEST_SECONDS ▶│◀ REQUEST_SECONDS ▶│                 │◀ STALL_SECONDS ▶│
                                                              │◀ KEEP_ALIVE_SECONDS, then the next first byte
    """

    _request_timer: asyncio.TimerHandle | None = None
    _num_received = 0  # bytes since the timer has begun
    _stall_timer: asyncio.TimerHandle | None = None
    _num_answers = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin_request_time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._begin_request_time()
        self._num_received += len(data)
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()  # also of requests that came while an earlier one was answered
        self._watch_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        # Closing would wait until the client has taken what is there.
        self._cancel_stall()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel_stall()
        super().resume_writing()
        if self.cycle is not None and self.cycle.response_complete:
            self._watch_rest()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._num_answers += 1
        if self._stall_timer is None:
            self._watch_rest()

    def _watch_rest(self) -> None:
        """Lets the timer run while the client has not taken the rest of an answer, which is too little for a pause."""
        if num_bytes := self.transport.get_write_buffer_size():
            self._stall_timer = self.loop.call_later(STALL_SECONDS, self._check_rest, num_bytes, self._num_answers)

    def _check_rest(self, num_bytes: int, num_answers: int) -> None:
        self._stall_timer = None
        if num_answers == self._num_answers and self.transport.get_write_buffer_size() >= num_bytes:
            self.transport.abort()
        else:
            self._watch_rest()

    def _watch_request(self) -> None:
        """Lets the timer run while the client owes the rest of a request."""
        state = self.conn.their_state
        if state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0]):
            if self._request_timer is None:
                self._begin_request_time()
        elif self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _begin_request_time(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
        self._num_received = 0
        self._request_timer = self.loop.call_later(REQUEST_SECONDS, self._end_request_time)

    def _end_request_time(self) -> None:
        self._request_timer = None
        if self._num_received < REQUEST_BYTES:
            self.transport.abort()
        else:
            self._begin_request_time()

    def _cancel_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _end_timers(self) -> None:
        self._cancel_stall()
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None
