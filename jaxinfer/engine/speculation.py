"""How many drafts of which requests a step verifies: as many as bring the most tokens per second, and often none.

A draft costs time whether it is right or not. What a step takes with so many tokens more is known from the engine's own
steps (`step_costs`); how often a request's drafts are right, from what its drafts have met so far, verified or not:
a draft that was not worth verifying is held against the tokens that came all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.engine.admission import Admission
from jaxinfer.engine.batching import max_verified_tokens, plan_buckets
from jaxinfer.engine.block_tables import BlockTables
from jaxinfer.engine.draft_estimates import DRAFTER_MEMORY, FIRST_RATE, REQUEST_MEMORY, Acceptance, DraftTimes
from jaxinfer.engine.draft_model import DraftModel
from jaxinfer.engine.drafters import Drafter, make_drafter
from jaxinfer.engine.emission import Emitted
from jaxinfer.engine.request import Request
from jaxinfer.engine.step import Chunk, Step, all_decode
from jaxinfer.engine.step_costs import StepCosts
from jaxinfer.processors import LogitsProcessor

# Speculation must promise so much before it is tried: costs are known to a few percent.
MARGIN = 1.02
# The part of the time that may go into drafts which only show whether drafting has become worth while.
TRIAL_PART = 0.01
# Steps that pass without asking for drafts while none are worth it: asking costs the host up to some 2 % of a step.
MAX_REST = 4
# A drafter that takes less than this part of a step is asked in every step.
CHEAP = 0.01


class Speculation:
    """Asks a drafter for up to `max_drafts` per request and decides which are verified, in `max_tokens` at most.

    Without `costs` it verifies all that it can get.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        max_drafts: int,
        max_tokens: int,
        costs: StepCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._max_drafts = max_drafts
        self._max_tokens = max_tokens
        self._drafter = drafter
        self._costs = costs
        self._clock = clock
        self._draft_times = DraftTimes()
        self._of_drafter = Acceptance(FIRST_RATE, DRAFTER_MEMORY)
        self._of_request: dict[int, Acceptance] = {}
        self._pending: dict[int, list[int]] = {}  # drafts that the next tokens of a request will be held against
        self._credit = 0.0  # seconds that trials may take
        self._num_idle = self._rest = 0  # how often no draft was worth verifying, and steps until the next are made
        self._drafting = 0.0  # seconds of the step at hand
        self.num_drafts: tuple[int, ...] = ()  # of each request in the last step in which all decoded

    def add_drafts(self, chunks: list[Chunk], tables: BlockTables) -> list[Chunk]:
        """Returns the chunks with drafts, and takes pages for them where some are free; none unless all decode."""
        self._drafting = 0.0
        if not chunks or not all_decode(chunks):
            return chunks
        drafts = self._propose(chunks, [tables.extend_ahead(chunk.request, self._max_drafts) for chunk in chunks])
        self.num_drafts = tuple(map(len, drafts))
        return [replace(chunk, drafts=tokens) for chunk, tokens in zip(chunks, drafts, strict=True)]

    def observe(self, step: Step, emitted: Sequence[Sequence[Emitted]], seconds: float) -> None:
        """Learns from a step: what it took, drafting included, and which drafts were right."""
        if self._costs is None:
            return
        self._costs.enter(step, seconds - self._drafting)
        if step.is_decode:
            self._credit = min(self._credit + TRIAL_PART * seconds, 10 * seconds)
        for chunk, tokens in zip(step.chunks, emitted, strict=True):
            if chunk.is_last and chunk.request.finish_reason is None:
                self._compare(chunk.request, [token_id for token_id, _, _ in tokens])

    def page_bytes(self, cache_config: CacheConfig) -> int:
        """Returns what drafting needs for each page of the cache."""
        return self._drafter.page_bytes(cache_config) if isinstance(self._drafter, DraftModel) else 0

    def prepare(
        self, run: Callable[[Step], Any], admission: Admission, custom: Mapping[str, LogitsProcessor] | None = None
    ) -> None:
        """Does all that must not wait for the first request; `run` computes steps of an engine that has none yet."""
        cache_config = admission.cache_config
        if isinstance(self._drafter, DraftModel):
            self._drafter.prepare(
                admission.engine_config,
                cache_config,
                table_width=-(-admission.max_model_len // cache_config.page_size),
                vocab_size=admission.model_config.vocab_size,
                custom=custom or {},
            )
        if self._costs is not None:
            self._costs.rehearse(run, cache_config.num_pages, cache_config.page_size)

    def forget(self, request: Request) -> None:
        """Is told that a request has ended."""
        self._drafter.forget(request)
        self._of_request.pop(request.request_id, None)
        self._pending.pop(request.request_id, None)

    def _propose(self, chunks: Sequence[Chunk], limits: Sequence[int]) -> list[list[int]]:
        nothing: list[list[int]] = [[] for _ in chunks]
        room = min(self._max_tokens - len(chunks), sum(limits))
        if room == 0:
            return nothing
        requests = [chunk.request for chunk in chunks]
        if self._costs is None:
            return _shared_out(self._draft(requests, limits), room)
        if self._rest > 0:
            self._rest -= 1
            return nothing
        costs = self._costs.seconds(chunks, room)
        count = self._choose_count(chunks, max(limits), costs)
        if count == 0:
            return nothing
        drafts = self._draft(requests, [min(limit, count) for limit in limits])
        chosen = self._choose_drafts(requests, drafts, costs)
        self._num_idle = 0 if any(chosen) else min(self._num_idle + 1, MAX_REST)
        self._rest = self._num_idle
        return chosen

    def _compare(self, request: Request, token_ids: Sequence[int]) -> None:
        """Holds a request's drafts, verified or not, against the tokens that came."""
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

    def _acceptance(self, request: Request) -> Acceptance:
        found = self._of_request.get(request.request_id)
        if found is None:
            found = self._of_request[request.request_id] = Acceptance(self._of_drafter.rate, REQUEST_MEMORY)
        return found

    def _draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        began = self._clock()
        drafts = self._drafter.draft(requests, counts)
        self._drafting = self._clock() - began
        self._draft_times.enter(len(requests), max(counts), self._drafting)
        for i, request in enumerate(requests):
            drafts[i] = drafts[i][: counts[i]]
            if request.grammar is not None and drafts[i]:
                drafts[i] = drafts[i][: request.grammar.num_allowed(drafts[i])]
            self._pending[request.request_id] = drafts[i]
        return drafts

    def _choose_count(self, chunks: Sequence[Chunk], most: int, costs: np.ndarray) -> int:
        """Returns how many drafts of each request to ask for: drafting them has to be paid before they are seen."""
        B = len(chunks)
        if self._draft_times.seconds(B, most) < CHEAP * costs[0]:
            return most
        drafting = np.array([self._draft_times.seconds(B, count) for count in range(most + 1)])
        seconds = costs[::B][: most + 1]
        seconds = seconds + drafting[: len(seconds)]
        if len(seconds) == 1:  # not even one draft each has room
            return 0
        rates = np.array([self._acceptance(chunk.request).rate for chunk in chunks])
        gains = [(rates**depth).sum() for depth in range(1, len(seconds))]
        values = (B + np.cumsum([0.0, *gains])) / seconds
        best = int(values.argmax())
        if best > 0 and values[best] > MARGIN * values[0]:
            return best
        loss = seconds[1] - costs[0]
        if self._credit < loss:
            return 0
        self._credit -= loss
        return 1

    def _choose_drafts(
        self, requests: Sequence[Request], drafts: list[list[int]], costs: np.ndarray
    ) -> list[list[int]]:
        """Returns the drafts that are worth verifying, the likeliest of all requests first."""
        likelihoods = [
            (rate**depth, i)
            for i, rate in enumerate(self._acceptance(request).rate for request in requests)
            for depth in range(1, len(drafts[i]) + 1)
        ]
        likelihoods = sorted(likelihoods, reverse=True)[: len(costs) - 1]
        gains = np.cumsum([0.0, *(likelihood for likelihood, _ in likelihoods)])
        values = (len(requests) + gains) / costs[: len(gains)]
        best = int(values.argmax())
        if best == 0 or values[best] < MARGIN * values[0]:
            return [[] for _ in requests]
        counts = np.bincount([i for _, i in likelihoods[:best]], minlength=len(requests)).tolist()
        return [tokens[:count] for tokens, count in zip(drafts, counts, strict=True)]


def plan_speculation(speculation: str | Path | Drafter | None, config: EngineConfig, dtype: str) -> Speculation | None:
    """Returns what adds drafts to the steps of an engine; ValueError for a drafter that does not exist."""
    if speculation is None:
        return None
    if config.decode_loop_steps > 1:
        raise ValueError(
            f"decode_loop_steps={config.decode_loop_steps} leaves no place for speculation={speculation!r}, which"
            " chooses drafts after every step; set EngineConfig.decode_loop_steps to 1 or leave out speculation"
        )
    if isinstance(speculation, Path) or (isinstance(speculation, str) and "/" in speculation):
        drafter: Drafter = DraftModel(*load_checkpoint(speculation, dtype))
    else:
        drafter = make_drafter(speculation)
    buckets = plan_buckets(config, config.max_drafts)
    return Speculation(
        drafter,
        max_drafts=config.max_drafts,
        max_tokens=max_verified_tokens(config),
        costs=StepCosts(buckets) if config.adaptive_drafts else None,
    )


def _shared_out(drafts: list[list[int]], room: int) -> list[list[int]]:
    """Returns the first drafts of all, then the second ones, as far as there is room."""
    places = sorted((depth, i) for i, tokens in enumerate(drafts) for depth in range(len(tokens)))[:room]
    counts = np.bincount([i for _, i in places], minlength=len(drafts)).tolist()
    return [tokens[:count] for tokens, count in zip(drafts, counts, strict=True)]
