"""The server's engine as a batch uses it: beside interactive requests, at a lower priority."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from jaxinfer.batch_job.job import InFlight, Refusal, options_of, prepared
from jaxinfer.batch_job.records import JobRequest
from jaxinfer.engine.request.completion import Delta
from jaxinfer.engine.request.request import QueueFullError
from jaxinfer.serve.access import Client, restricted
from jaxinfer.serve.state import ServerState

POLL_SECONDS = 0.1  # until a batch sees that it is to stop, and until it asks a full queue again


class BatchEngine:
    """The engine of the batch of one tenant: a `JobEngine` that any thread may use.

    Its requests have priority "batch". `max_rows` tells how many of them the engine may have at present, and
    `check_stop` raises an exception when the batch is to stop. `clients` are the keys of the tenant; the tokens count
    for the first.
    """

    may_make_room = True  # a request that has room in the empty engine waits for it

    def __init__(
        self,
        state: ServerState,
        tenant: str | None,
        clients: list[Client],
        max_rows: Callable[[], int],
        check_stop: Callable[[], object],
    ) -> None:
        self._state, self.llm = state, state.llm
        self._tenant, self._client = tenant, clients[0] if clients else None
        self._max_rows, self._check_stop = max_rows, check_stop
        self._queue: SimpleQueue[tuple[int, Delta | Exception]] = SimpleQueue()
        self._num_prompt_tokens: dict[int, int] = {}  # of requests that have no completion yet
        self._full_until = 0.0  # on time.monotonic

    @property
    def max_in_flight(self) -> int:
        client = self._client
        if time.monotonic() < self._full_until:
            return 0
        if client is None:  # without keys; or the tenant has none any more, and its batch waits for one
            return self._max_rows() if self._tenant is None else 0
        if client.seconds_to_tokens() > 0:
            return 0
        return int(min(self._max_rows(), client.max_in_flight))

    def adapter_digests(self) -> dict[str, str]:
        return self.llm.engine_thread.engine.adapter_digests

    def begin(self, request: JobRequest) -> InFlight:
        self._check_stop()
        self._state.require_model(request.body.model)
        if request.options.get("priority", "batch") != "batch":
            raise ValueError("priority cannot be honoured: requests of a batch have priority batch; leave it out")
        if request.chat is not None:
            request = replace(request, chat=self._state.with_template(request.chat))
        self._state.require_room(1, request.sampling_params)
        options: Any = {**options_of(request, self.llm), "priority": "batch"}
        if self._tenant is not None:
            options = restricted(options, self._tenant)
        prompt, params, chats = prepared(request, self.llm)
        samples = self.llm.engine_thread.engine.admit(prompt, params, **options)
        self._num_prompt_tokens[samples.request_id] = samples.requests[0].num_prompt_tokens
        self.llm.engine_thread.submit(samples, partial(self._send, samples.request_id))
        return InFlight.of(samples, chats)

    def _send(self, request_id: int, item: Delta | Exception) -> None:
        """Takes the output of a request on the engine's thread; the job reads completions alone, so it seldom wakes."""
        if isinstance(item, Exception) or item.completion is not None:
            self._queue.put((request_id, item))

    def outputs(self) -> Iterator[Delta | Refusal]:
        self._check_stop()
        items = []
        with suppress(Empty):
            items.append(self._queue.get(timeout=POLL_SECONDS))
            while True:
                items.append(self._queue.get_nowait())
        for request_id, item in items:
            num_prompt_tokens = self._num_prompt_tokens.pop(request_id, 0)
            if isinstance(item, QueueFullError):
                self._full_until = time.monotonic() + POLL_SECONDS
                yield Refusal(request_id, item)
            elif isinstance(item, ValueError):  # such as for an adapter that was unloaded meanwhile
                yield Refusal(request_id, item)
            elif isinstance(item, Exception):
                raise item
            elif item.completion is not None:
                if self._client is not None:
                    self._client.count(num_prompt_tokens + len(item.completion.token_ids))
                self._state.metrics.count(item.completion)
                yield item

    def drop(self, request_id: int) -> None:
        self.llm.engine_thread.call(lambda engine: engine.drop(request_id))
