"""Where the deltas of requests go: to `generate` or `stream` where they wait for them, else to `step`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from jaxinfer.engine.request import Delta
from jaxinfer.engine.samples import Samples


class Mailroom:
    """Hands out what the samples of one prompt yield as the deltas of one request."""

    def __init__(self) -> None:
        self._outbox: list[Delta] = []  # for step()
        self._mailboxes: dict[int, deque[Delta]] = {}  # of generate() and stream(), by request
        self._samples: dict[int, Samples] = {}  # where there are several, by each of their requests

    @property
    def has_mail(self) -> bool:
        """Whether `take` has anything to give."""
        return bool(self._outbox)

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything."""
        return not (self._outbox or self._mailboxes or self._samples)

    def expect(self, samples: Samples) -> None:
        if len(samples.requests) > 1:
            self._samples.update(dict.fromkeys((request.request_id for request in samples.requests), samples))

    def open_mailbox(self, request_ids: Iterable[int]) -> deque[Delta]:
        """Returns where the deltas of these requests will come from now on."""
        mailbox: deque[Delta] = deque()
        self._mailboxes.update(dict.fromkeys(request_ids, mailbox))
        return mailbox

    def post(self, deltas: Iterable[Delta]) -> None:
        if not (self._samples or self._mailboxes):  # all of them come out of step()
            self._outbox += deltas
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
        self._mailboxes.get(delta.request_id, self._outbox).append(delta)

    def take(self) -> list[Delta]:
        """Returns what came for those who have no mailbox."""
        deltas, self._outbox = self._outbox, []
        return deltas

    def sample_ids(self, request_id: int) -> list[int]:
        """Returns the requests that are the samples of this one, itself included."""
        samples = self._samples.get(request_id)
        return [request_id] if samples is None else [request.request_id for request in samples.requests]

    def forget(self, request_id: int) -> None:
        """Closes the mailbox of a request and whatever else was kept for it."""
        self._forget_samples(request_id)
        self._mailboxes.pop(request_id, None)

    def _forget_samples(self, request_id: int) -> None:
        for sample_id in self.sample_ids(request_id):
            self._samples.pop(sample_id, None)
