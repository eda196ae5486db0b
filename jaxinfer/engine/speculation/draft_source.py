"""A drafter and what its drafts have shown: how long they take, and whose are right how often."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxinfer.engine.drafters.drafters import Drafter
from jaxinfer.engine.execution.engine_model import DeviceDrafter
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.drafts import Drafts, DraftTree, first_of, parents_of, rest_of, some_of
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.speculation.cost_fit import NUM_REHEARSALS
from jaxinfer.engine.speculation.draft_estimates import (
    ALIKE_TRIES,
    DRAFTER_MEMORY,
    FIRST_LIKENESS,
    FIRST_RANK_RATE,
    FIRST_RATE,
    FIRST_TRIES,
    LIKENESS_MEMORY,
    LIKENESS_TRIES,
    Acceptance,
    Belief,
    DraftTimes,
)
from jaxinfer.validation import shown


class DraftSource:
    """Asks a drafter, and holds its drafts against the tokens that come, whether they are verified or not."""

    def __init__(self, drafter: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        self.drafter = drafter
        self._looked_at: Drafter | None = None
        self._device_drafter: DeviceDrafter | None = None
        self.vocab_size: int | None = None
        self.takes_trees = False
        self._clock = clock
        self._times = DraftTimes()
        self._of_drafter = Acceptance(FIRST_RATE, DRAFTER_MEMORY, FIRST_TRIES)
        self._likeness = Acceptance(FIRST_LIKENESS, LIKENESS_MEMORY, LIKENESS_TRIES)  # of requests to others
        self._of_request: dict[int, Belief] = {}
        self._of_rank: list[Acceptance] = []  # of the second, third, … drafts for a place, where those before are wrong
        self._parents: Sequence[int] = ()  # of the largest tree so far
        self._pending: dict[int, Drafts] = {}  # drafts that the next tokens of a request will be held against
        self._num_seen: dict[int, int] = {}  # tokens that a request had when a drafter on the host was asked

    @property
    def device_drafter(self) -> DeviceDrafter | None:
        """The drafter, if it runs on the device."""
        if self._looked_at is not self.drafter:  # to look takes a tenth of a millisecond
            self._looked_at = self.drafter
            self._device_drafter = self.drafter if isinstance(self.drafter, DeviceDrafter) else None
        return self._device_drafter

    @property
    def is_waiting(self) -> bool:
        """Whether there are drafts that the next tokens will be held against."""
        return any(self._pending.values())

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Drafts]:
        """Returns up to `counts[i]` drafts for each request, as far as its structure allows them."""
        num_unseen = self.num_unseen(requests)
        began = self._clock()
        drafts = self._as_drafts(requests, counts, self.drafter.draft(requests, counts))
        seconds, count = self._clock() - began, max(map(len, drafts))
        for i, request in enumerate(requests):
            drafts[i] = drafts[i][: counts[i]]
            if self.device_drafter is not None and not isinstance(drafts[i], DraftTree):
                # Where the logits of a draft model are bad it has none.
                drafts[i] = list(itertools.takewhile(lambda token_id: token_id >= 0, drafts[i]))
            if drafts[i]:
                self._check(request, drafts[i])
                if request.grammar is not None:
                    places = request.grammar.allowed(drafts[i], parents_of(drafts[i]))
                    drafts[i] = some_of(drafts[i], places)
            self._pending[request.request_id] = drafts[i]
            self._num_seen[request.request_id] = len(request.token_ids)
        num_read = num_unseen - self.num_unseen(requests) + len(requests)
        self._times.enter(num_read, len(requests), count, seconds)
        return drafts

    def rehearse(self, step: Step, compute: Callable[[], Any], most: int) -> None:
        """Measures drafts on the device after a made-up decode step, so that something is known before the first real
        one. `compute` returns its states [T, D].
        """
        assert self.device_drafter is not None
        hidden = compute()
        requests, emitted = step.chunks.requests, [[(0, 0.0, {})]] * len(step.chunks)
        for request in requests:
            request.token_ids.append(0)  # what the step has drawn
        counts = [most] * len(requests)
        for read in (self.drafter.draft, self.draft):  # the first run touches new memory
            for request in requests:
                self.forget(request)
            self.device_drafter.observe(step, emitted, hidden)
            read(requests, counts)
        while self.num_unseen(requests) > len(requests):
            self.drafter.draft(requests, counts)
        self.drafter.draft(requests, counts)
        for count in (1, most) * NUM_REHEARSALS:
            compute()  # which leaves the device's caches as drafts find them
            self.draft(requests, [count] * len(requests))
        for request in requests:
            self.forget(request)

    def num_unseen(self, requests: Sequence[Request]) -> int:
        """Returns how many tokens the drafter has not read yet, one at least of each request."""
        if self.device_drafter is not None:
            return sum(map(self.device_drafter.num_unseen, requests))
        seen = self._num_seen
        return sum(max(len(request.token_ids) - seen.get(request.request_id, 0), 1) for request in requests)

    def seconds(self, requests: Sequence[Request], most: int) -> tuple[np.ndarray, float]:
        """Returns what 0, 1, … `most` drafts for each request take, f64[most + 1], and what comes to that now, for
        tokens that the drafter has not seen.
        """
        return self._times.seconds(len(requests), most), self._times.seconds_per_token * (
            self.num_unseen(requests) - len(requests)
        )

    def likelihoods(self, request: Request, parents: Sequence[int]) -> list[float]:
        """Returns how likely the request emits each of some drafts: that it is right, and all that it follows.

        For drafts one after another these are the powers of the rate at which a request's drafts are right, which is
        one of two.
        """
        (first, rate), (second, other) = self._belief(request).rates
        if isinstance(parents, range):
            return [first * rate**length + second * other**length for length in range(1, len(parents) + 1)]
        pairs = zip(self._likelihoods_in_tree(rate, parents), self._likelihoods_in_tree(other, parents), strict=True)
        return [first * a + second * b for a, b in pairs]

    def _likelihoods_in_tree(self, rate: float, parents: Sequence[int]) -> list[float]:
        """Returns the same where the first drafts for a place are right at this rate, if what they follow is."""
        rates = [rate, *(rank.rate for rank in self._of_rank)]
        likelihoods: list[float] = []
        left: dict[int, tuple[float, int]] = {}  # by draft: that it is emitted and none after it so far, and how many
        for parent in parents:
            likelihood, rank = left.get(parent) or (1.0 if parent < 0 else likelihoods[parent], 0)
            likelihoods.append(likelihood * (rates[rank] if rank < len(rates) else FIRST_RANK_RATE))
            left[parent] = (likelihood - likelihoods[-1], rank + 1)
        return likelihoods

    def expected(self, requests: Sequence[Request], count: int) -> np.ndarray:
        """Returns how likely each request emits each of `count` drafts that are still to be made, f64[B, count]."""
        parents = self._parents[:count] or range(-1, count - 1)
        rows = [self.likelihoods(request, parents) for request in requests]
        return np.pad(np.array(rows).reshape(len(rows), len(parents)), ((0, 0), (0, count - len(parents))))

    def compare(self, request: Request, token_ids: Sequence[int]) -> None:
        """Holds a request's last drafts against the tokens that came."""
        pending = self._pending.get(request.request_id)
        if not pending:
            return
        own = self._belief(request)
        for token_id in token_ids:
            for rank, draft in enumerate(first_of(pending)):
                is_right = token_id == draft
                for acceptance in (own, self._of_drafter) if rank == 0 else (self._acceptance_of_rank(rank),):
                    acceptance.enter(is_right)
                if is_right:
                    break
            pending = rest_of(pending, token_id)
        self._pending[request.request_id] = pending

    def forget(self, request: Request) -> None:
        """Is told that a request has ended."""
        belief = self._of_request.pop(request.request_id, None)
        if belief is not None and belief.is_tried:
            self._likeness.enter(belief.likeness)
        for known in (self._pending, self._num_seen):
            known.pop(request.request_id, None)
        self.drafter.forget(request)

    def _belief(self, request: Request) -> Belief:
        found = self._of_request.get(request.request_id)
        if found is None:
            found = self._of_request[request.request_id] = Belief(self._of_drafter, self._likeness.rate)
        return found

    def _acceptance_of_rank(self, rank: int) -> Acceptance:
        while len(self._of_rank) < rank:
            self._of_rank.append(Acceptance(FIRST_RANK_RATE, DRAFTER_MEMORY, ALIKE_TRIES))
        return self._of_rank[rank - 1]

    def _as_drafts(self, requests: Sequence[Request], counts: Sequence[int], answer: Any) -> list[Drafts]:
        """Returns up to `counts[i]` drafts for each request, as integers or a tree; ValueError if it is neither."""
        rows = list(itertools.islice(answer, len(requests) + 1)) if isinstance(answer, Iterable) else []
        if len(rows) != len(requests):
            raise ValueError(
                f"{type(self.drafter).__name__} drafted {shown(answer)} for {len(requests)} requests; give a sequence"
                " of token ids for each of them, an empty one for no drafts"
            )
        for i, row in enumerate(rows):
            if not isinstance(row, DraftTree):
                try:
                    rows[i] = list(map(operator.index, itertools.islice(row, counts[i])))
                except TypeError:
                    raise self._refusal(requests[i], row) from None
        return rows

    def _check(self, request: Request, drafts: Drafts) -> None:
        if isinstance(drafts, DraftTree):
            if not self.takes_trees:
                raise ValueError(
                    f"{type(self.drafter).__name__} drafted a tree for request {request.request_id}, and this engine"
                    " verifies lists; set EngineConfig.draft_trees to True"
                )
            self._parents = max(self._parents, drafts.parents, key=len)
        if self.vocab_size is not None and not 0 <= min(drafts) <= max(drafts) < self.vocab_size:
            raise self._refusal(request, list(drafts))

    def _refusal(self, request: Request, drafts: Any) -> ValueError:
        most = "" if self.vocab_size is None else f" to {self.vocab_size - 1}"
        return ValueError(
            f"{type(self.drafter).__name__} drafted {shown(drafts)} for request {request.request_id}; give a sequence"
            f" of token ids, of this model integers from 0{most}"
        )
