"""Output queues between the engine loop and the calls that wait for deltas."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from jaxinfer.engine.frontend.sample_group import SampleGroup
from jaxinfer.engine.request.completion import Delta


class OutputQueues:
    """Queues deltas for `step`, or for the `generate` or `stream` that waits for the request.

    All samples of one prompt have the request id of the first.
    """

    def __init__(self) -> None:
        self._default_queue: list[Delta] = []  # for `step`
        self._queues: dict[int, deque[Delta]] = {}  # for `generate` and `stream`, by request id
        self._samples: dict[int, SampleGroup] = {}  # groups of several samples, by the id of each sample

    @property
    def has_outputs(self) -> bool:
        """True if `take` would return anything."""
        return bool(self._default_queue)

    @property
    def is_idle(self) -> bool:
        """True if no delta is queued and no call waits for one."""
        return not (self._default_queue or self._queues or self._samples)

    def expect(self, samples: SampleGroup) -> None:
        """Routes later deltas of these samples under their common request id."""
        if len(samples.requests) > 1:
            self._samples.update(dict.fromkeys((request.request_id for request in samples.requests), samples))

    def open_queue(self, request_ids: Iterable[int]) -> deque[Delta]:
        """Returns a queue for the later deltas of these requests."""
        queue: deque[Delta] = deque()
        self._queues.update(dict.fromkeys(request_ids, queue))
        return queue

    def route(self, deltas: Iterable[Delta]) -> None:
        """Puts each delta into the queue of its request."""
        if not (self._samples or self._queues):  # `step` returns all of them
            self._default_queue += deltas
            return
        for delta in deltas:
            samples = self._samples.get(delta.request_id)
            if samples is None:
                self._deliver(delta)
                continue
            for one in samples.hand_out(delta):
                self._deliver(one)
            if samples.is_finished:
                self._forget_samples(samples.request_id)

    def _deliver(self, delta: Delta) -> None:
        self._queues.get(delta.request_id, self._default_queue).append(delta)

    def take(self) -> list[Delta]:
        """Returns the queued deltas of requests without a queue of their own, and drops them."""
        deltas, self._default_queue = self._default_queue, []
        return deltas

    def sample_ids(self, request_id: int) -> list[int]:
        """Returns the ids of all samples in the group of this request, itself included."""
        samples = self._samples.get(request_id)
        return [request_id] if samples is None else [request.request_id for request in samples.requests]

    def forget(self, request_id: int) -> None:
        """Closes the queue of a request and drops its group of samples."""
        self._forget_samples(request_id)
        self._queues.pop(request_id, None)

    def _forget_samples(self, request_id: int) -> None:
        for sample_id in self.sample_ids(request_id):
            self._samples.pop(sample_id, None)
