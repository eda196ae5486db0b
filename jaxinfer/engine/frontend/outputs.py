"""The way of deltas out of the engine: each request has one sink."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from jaxinfer.engine.frontend.sample_group import SampleGroup
from jaxinfer.engine.request.completion import Delta
from jaxinfer.engine.request.request import Request

# Receives the deltas of one request, between two steps and on the engine's thread. The last of them carries the
# completion of the last sample. If a sink raises, its request ends and it receives nothing more. A sink returns at once
# and may not call the engine.
Sink = Callable[[Delta], object]


class _Route:
    """The sink of a request's samples, of which `num_left` are unfinished."""

    __slots__ = ("deliver", "num_left", "samples", "sink")

    def __init__(self, samples: SampleGroup, sink: Sink) -> None:
        self.samples = samples
        self.sink = sink
        self.num_left = len(samples.requests)
        self.deliver: Sink = sink if self.num_left == 1 else partial(_hand_out, samples, sink)


def _hand_out(samples: SampleGroup, sink: Sink, delta: Delta) -> None:
    for one in samples.hand_out(delta):
        sink(one)


def _drop(_: Delta) -> None:
    """The sink of a request whose own sink has raised."""


class OutputRoutes:
    """Gives each delta to the sink of its request. All samples of a prompt have the request id of the first."""

    def __init__(self) -> None:
        self._routes: dict[int, _Route] = {}  # of unfinished requests, by the id of each sample

    @property
    def sinks(self) -> dict[int, Sink]:
        """Returns the sinks of unfinished requests, by request id."""
        return {route.samples.request_id: route.sink for route in self._routes.values()}

    def sample_ids(self, request_id: int) -> list[int]:
        """Returns the ids of all samples of an unfinished request; none for an unknown id."""
        route = self._routes.get(request_id)
        return [] if route is None else [request.request_id for request in route.samples.requests]

    def request(self, sample_id: int) -> Request | None:
        """Returns an unfinished request by the id of its sample."""
        route = self._routes.get(sample_id)
        return None if route is None else next(one for one in route.samples.requests if one.request_id == sample_id)

    def open(self, samples: SampleGroup, sink: Sink) -> None:
        """Gives the deltas of these samples to `sink` from now on."""
        route = _Route(samples, sink)
        self._routes.update((request.request_id, route) for request in samples.requests)

    def close(self, request_id: int) -> None:
        """Gives the sink of a request nothing more."""
        for sample_id in self.sample_ids(request_id):
            del self._routes[sample_id]

    def deliver(self, deltas: Iterable[Delta]) -> dict[int, Exception]:
        """Gives each delta to its sink, if it has one. Returns the exceptions of sinks by request id.

        The caller ends the requests of these.
        """
        failures: dict[int, Exception] = {}
        routes = self._routes
        for delta in deltas:
            route = routes.get(delta.request_id)
            if route is None:
                continue
            try:
                route.deliver(delta)
            except Exception as error:
                failures[route.samples.request_id] = error
                route.deliver = route.sink = _drop
            if delta.completion is not None:
                route.num_left -= 1
                if route.num_left == 0:
                    self.close(delta.request_id)
        return failures


class DeltaBuffer:
    """A sink that keeps deltas until they are taken."""

    def __init__(self) -> None:
        self._deltas: deque[Delta] = deque()
        self.append = self._deltas.append

    def __len__(self) -> int:
        return len(self._deltas)

    def take(self) -> list[Delta]:
        """Returns the deltas since the last call. Another thread may add some meanwhile."""
        return [self._deltas.popleft() for _ in range(len(self._deltas))]
