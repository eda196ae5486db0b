"""Asks the drafter: checks its drafts, measures its time, and keeps its acceptance rates."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

from jaxinfer.engine.drafters.drafters import Drafter
from jaxinfer.engine.execution.engine_model import DeviceDrafter
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.drafts import Drafts, DraftTree, parents_of, some_of
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.speculation.acceptance import AcceptanceRates
from jaxinfer.engine.speculation.step_times import MAX_RATIO, NUM_REHEARSALS
from jaxinfer.validation import shown

TIME_GAIN = 0.2  # weight of the last measurement in a running mean of seconds


class DraftProposer:
    """Makes drafts for requests with a drafter on the host or on the device.

    vocab_size: the least token id that is refused; None for no check
    takes_trees: accepts a `DraftTree`
    """

    def __init__(self, drafter: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        self.drafter = drafter
        self.vocab_size: int | None = None
        self.takes_trees = False
        self.rates = AcceptanceRates()
        self._clock = clock
        self._looked_at: Drafter | None = None
        self._device_drafter: DeviceDrafter | None = None
        self._parents: Sequence[int] = ()  # of the largest tree so far
        self._num_seen: dict[int, int] = {}  # tokens of a request when a drafter on the host was last asked
        self._seconds_per_draft = 0.0
        self._seconds_per_token = 0.0  # that the drafter reads beside the last token of each request

    @property
    def device_drafter(self) -> DeviceDrafter | None:
        """Returns the drafter if it runs on the device."""
        if self._looked_at is not self.drafter:  # isinstance of a protocol takes 0.1 ms
            self._looked_at = self.drafter
            self._device_drafter = self.drafter if isinstance(self.drafter, DeviceDrafter) else None
        return self._device_drafter

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Drafts]:
        """Returns up to `counts[i]` drafts for each request, as far as its grammar allows them."""
        num_new = self._num_new(requests)
        began = self._clock()
        drafts = self._checked(requests, counts, self.drafter.draft(requests, counts))
        seconds = self._clock() - began
        for request, proposed in zip(requests, drafts, strict=True):
            self.rates.expect(request, proposed)
            self._num_seen[request.request_id] = len(request.token_ids)
        self._measure(seconds, num_new - self._num_new(requests), counts, max(map(len, drafts)))
        return drafts

    def seconds(self, max_drafts: int) -> np.ndarray:
        """Returns the seconds of drafting 0, 1, … max_drafts tokens per request, f64[max_drafts + 1]."""
        return self._seconds_per_draft * np.arange(max_drafts + 1)

    def reading_seconds(self, requests: Sequence[Request]) -> float:
        """Returns the seconds until the drafter has read the requests' tokens except the last of each."""
        return self._seconds_per_token * self._num_new(requests)

    def is_reading(self, requests: Sequence[Request]) -> bool:
        """True if the drafter must read tokens before it can draft."""
        return self._num_new(requests) > 0

    def likelihoods(self, requests: Sequence[Request], drafts: Sequence[Drafts]) -> list[list[float]]:
        """Returns the probability of each draft that its request emits it."""
        pairs = zip(requests, drafts, strict=True)
        return [self.rates.likelihoods(request, parents_of(own)) for request, own in pairs]

    def expected_likelihoods(self, requests: Sequence[Request], count: int) -> np.ndarray:
        """Returns the same for `count` drafts that are still to be made, f64[B, count]; 0 past the largest tree."""
        parents = self._parents[:count] or range(-1, count - 1)
        rows = [self.rates.likelihoods(request, parents) for request in requests]
        return np.pad(np.array(rows).reshape(len(rows), len(parents)), ((0, 0), (0, count - len(parents))))

    def rehearse(self, step: Step, compute: Callable[[], Any], max_drafts: int) -> None:
        """Measures a drafter on the device after a made-up decode step; `compute` returns its hidden states [T, D]."""
        assert self.device_drafter is not None
        requests, counts = step.chunks.requests, [max_drafts] * len(step.chunks)
        hidden, emitted = compute(), [[(0, 0.0, {}, None)]] * len(requests)
        for request in requests:
            request.token_ids.append(0)  # the token that the step has sampled
        for draft in (self.drafter.draft, self.draft):  # the first run touches new memory
            for request in requests:
                self.forget(request)
            self.device_drafter.observe(step, emitted, hidden)
            draft(requests, counts)
            while self.is_reading(requests):
                draft(requests, counts)
        seconds = []
        for _ in range(NUM_REHEARSALS):
            compute()  # which leaves the device's caches as drafts find them
            began = self._clock()
            self.draft(requests, counts)
            seconds.append(self._clock() - began)
        self._seconds_per_draft = median(seconds) / max_drafts
        for request in requests:
            self.forget(request)

    def forget(self, request: Request) -> None:
        """Drops the state of a request that has ended."""
        self.rates.forget(request)
        self._num_seen.pop(request.request_id, None)
        self.drafter.forget(request)

    def _num_new(self, requests: Sequence[Request]) -> int:
        """Returns how many tokens the drafter has not read, beside the last one of each request."""
        if self.device_drafter is not None:
            return sum(map(self.device_drafter.num_unseen, requests)) - len(requests)
        seen = self._num_seen
        return sum(max(len(request.token_ids) - seen.get(request.request_id, 0) - 1, 0) for request in requests)

    def _measure(self, seconds: float, num_read: int, counts: Sequence[int], num_made: int) -> None:
        """Learns from a call of the drafter; one that reads new text tells nothing of the time of drafts."""
        count = max(counts) if self.device_drafter is None else num_made
        if num_read > sum(counts):  # more than the drafts that were accepted since the last call
            per_token = max(seconds - self._seconds_per_draft * count, 0.0) / num_read
            self._seconds_per_token = _mean(self._seconds_per_token, per_token)
        elif count > 0:
            per_draft = max(seconds - self._seconds_per_token * num_read, 0.0) / count
            self._seconds_per_draft = _mean(self._seconds_per_draft, per_draft)

    def _checked(self, requests: Sequence[Request], counts: Sequence[int], answer: Any) -> list[Drafts]:
        """Returns the drafter's answer as one list or tree for each request; ValueError if it is anything else."""
        rows = list(itertools.islice(answer, len(requests) + 1)) if isinstance(answer, Iterable) else []
        if len(rows) != len(requests):
            raise ValueError(
                f"{type(self.drafter).__name__} drafted {shown(answer)} for {len(requests)} requests; give a sequence"
                " of token ids for each of them, an empty one for no drafts"
            )
        return [self._checked_row(*row) for row in zip(requests, counts, rows, strict=True)]

    def _checked_row(self, request: Request, count: int, row: Any) -> Drafts:
        is_tree = isinstance(row, DraftTree)
        try:
            drafts: Drafts = row[:count] if is_tree else list(map(operator.index, itertools.islice(row, count)))
        except TypeError:
            raise self._refusal(request, row) from None
        if self.device_drafter is not None and not is_tree:
            drafts = list(itertools.takewhile(lambda token_id: token_id >= 0, drafts))  # -1: bad logits
        if not drafts:
            return drafts
        if isinstance(drafts, DraftTree):
            if not self.takes_trees:
                raise ValueError(
                    f"{type(self.drafter).__name__} drafted a tree for request {request.request_id}, and this engine"
                    " verifies lists; set EngineConfig.draft_trees to True"
                )
            self._parents = max(self._parents, drafts.parents, key=len)
        if self.vocab_size is not None and not 0 <= min(drafts) <= max(drafts) < self.vocab_size:
            raise self._refusal(request, list(drafts))
        if request.grammar is None:
            return drafts
        return some_of(drafts, request.grammar.allowed(drafts, parents_of(drafts)))

    def _refusal(self, request: Request, drafts: Any) -> ValueError:
        most = "" if self.vocab_size is None else f" to {self.vocab_size - 1}"
        return ValueError(
            f"{type(self.drafter).__name__} drafted {shown(drafts)} for request {request.request_id}; give a sequence"
            f" of token ids, of this model integers from 0{most}"
        )


def _mean(mean: float, value: float) -> float:
    """Returns the running mean of positive values with one value more; 0 means that there was none."""
    return mean + TIME_GAIN * (min(value, MAX_RATIO * mean) - mean) if mean else value
