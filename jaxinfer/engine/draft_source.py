"""A drafter and what its drafts have shown: how long they take, and whose are right how often."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxinfer.engine.device_drafter import DeviceDrafter
from jaxinfer.engine.draft_estimates import DRAFTER_MEMORY, FIRST_RATE, REQUEST_MEMORY, Acceptance, DraftTimes
from jaxinfer.engine.drafters import Drafter
from jaxinfer.engine.request import Request


class DraftSource:
    """Asks a drafter, and holds its drafts against the tokens that come, whether they are verified or not."""

    def __init__(self, drafter: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        self.drafter = drafter
        self._looked_at: Drafter | None = None
        self._device_drafter: DeviceDrafter | None = None
        self.vocab_size: int | None = None
        self._clock = clock
        self._times = DraftTimes()
        self._of_drafter = Acceptance(FIRST_RATE, DRAFTER_MEMORY)
        self._of_request: dict[int, Acceptance] = {}
        self._pending: dict[int, list[int]] = {}  # drafts that the next tokens of a request will be held against
        self._num_seen: dict[int, int] = {}  # tokens that a request had when it was drafted for

    @property
    def device_drafter(self) -> DeviceDrafter | None:
        """The drafter, if it runs on the device."""
        if self._looked_at is not self.drafter:  # to look takes a tenth of a millisecond
            self._looked_at = self.drafter
            self._device_drafter = self.drafter if isinstance(self.drafter, DeviceDrafter) else None
        return self._device_drafter

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Returns up to `counts[i]` drafts for each request, as far as its structure allows them."""
        num_unseen = self.num_unseen(requests)
        began = self._clock()
        drafts = self.drafter.draft(requests, counts)
        self._times.enter(num_unseen, len(requests), max(counts), self._clock() - began)
        for i, request in enumerate(requests):
            drafts[i] = drafts[i][: counts[i]]
            if drafts[i]:
                self._check(request, drafts[i])
                if request.grammar is not None:
                    drafts[i] = drafts[i][: request.grammar.num_allowed(drafts[i])]
            self._pending[request.request_id] = drafts[i]
            if drafts[i] or self.device_drafter is None:  # a model that drafts nothing is still reading
                self._num_seen[request.request_id] = len(request.token_ids)
        return drafts

    def rehearse(self, requests: Sequence[Request], most: int) -> None:
        """Measures drafts for made-up requests, so that something is known before the first real one."""
        for count in (1, most):
            self.drafter.draft(requests, [count] * len(requests))  # the first run touches new memory
            for request in requests:
                self.drafter.forget(request)
            for _ in range(2):  # with all tokens unseen, and with one
                self.draft(requests, [count] * len(requests))
            for request in requests:
                self.forget(request)

    def num_unseen(self, requests: Sequence[Request]) -> int:
        """Returns how many tokens the drafter was not shown yet."""
        seen = self._num_seen
        return sum(max(len(request.token_ids) - seen.get(request.request_id, 0), 1) for request in requests)

    def seconds(self, requests: Sequence[Request], most: int) -> tuple[np.ndarray, float]:
        """Returns what 0, 1, … `most` drafts for each request take, f64[most + 1], and what comes to that now, for
        tokens that the drafter has not seen.
        """
        return self._times.seconds(len(requests), most), self._times.seconds_per_token * (
            self.num_unseen(requests) - len(requests)
        )

    def rates(self, requests: Sequence[Request]) -> np.ndarray:
        """Returns how likely each request's next draft is right, f64[B]."""
        return np.array([self._acceptance(request).rate for request in requests])

    def compare(self, request: Request, token_ids: Sequence[int]) -> None:
        """Holds a request's last drafts against the tokens that came."""
        pending = self._pending.get(request.request_id)
        if not pending:
            return
        own = self._acceptance(request)
        for i, token_id in enumerate(token_ids[: len(pending)]):
            is_right = token_id == pending[i]
            own.enter(is_right)
            self._of_drafter.enter(is_right)
            if not is_right:
                del self._pending[request.request_id]
                return
        self._pending[request.request_id] = pending[len(token_ids) :]

    def forget(self, request: Request) -> None:
        """Is told that a request has ended."""
        self.drafter.forget(request)
        for known in (self._of_request, self._pending, self._num_seen):
            known.pop(request.request_id, None)

    def _acceptance(self, request: Request) -> Acceptance:
        found = self._of_request.get(request.request_id)
        if found is None:
            found = self._of_request[request.request_id] = Acceptance(self._of_drafter.rate, REQUEST_MEMORY)
        return found

    def _check(self, request: Request, drafts: Sequence[int]) -> None:
        if self.vocab_size is not None and not 0 <= min(drafts) <= max(drafts) < self.vocab_size:
            raise ValueError(
                f"{type(self.drafter).__name__} drafted {list(drafts)} for request {request.request_id}; token ids of"
                f" this model are integers from 0 to {self.vocab_size - 1}"
            )
