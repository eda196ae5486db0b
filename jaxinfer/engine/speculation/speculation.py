"""Speculation as the scheduler sees it: adds drafts to steps and learns from their results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxinfer.config import CacheConfig
from jaxinfer.engine.drafters.drafters import Drafter
from jaxinfer.engine.execution.engine_model import DeviceDrafter, EngineModel, LendCache
from jaxinfer.engine.execution.pipeline import Device
from jaxinfer.engine.kv_cache.block_tables import BlockTables
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.drafts import Drafts
from jaxinfer.engine.scheduling.step import Chunks, Step
from jaxinfer.engine.scheduling.step_results import SampledToken
from jaxinfer.engine.speculation.draft_choice import share_out
from jaxinfer.engine.speculation.policy import Attempt, DraftPolicy, num_to_come
from jaxinfer.engine.speculation.proposer import DraftProposer
from jaxinfer.engine.speculation.step_times import StepTimeTable
from jaxinfer.model.params import Params


class Speculation:
    """Adds up to `max_drafts` drafts per request to steps of at most `max_tokens` tokens, drafts included.

    A `DraftPolicy` chooses the drafts that are worth their time by the step times in `times`. With None, every step
    verifies all drafts that it has room for.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        max_drafts: int,
        max_tokens: int,
        times: StepTimeTable | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._max_drafts = max_drafts
        self._max_tokens = max_tokens
        self._clock = clock
        self.proposer = DraftProposer(drafter, clock)
        self._policy = None if times is None else DraftPolicy(times, self.proposer, max_tokens)
        self._attempt = Attempt()
        self._has_waited = False  # the next step is launched late because of drafts
        self._error: Exception | None = None  # the first exception of the drafter
        self.num_drafts: tuple[int, ...] = ()  # of each request in the last step that decoded every request
        self.num_reserved = 0  # drafts for which requests that prefill leave room in the next step

    def decide_overlap(self, step: Step) -> bool:
        """Decides on drafts after `step`, which is launched; True if the next step need not wait for its tokens."""
        self._has_waited = not self._reserve_drafts(step)
        return not self._has_waited

    def _reserve_drafts(self, step: Step) -> bool:
        """Counts the drafts that the step after `step` is to have room for; True if it takes none."""
        if self._policy is None or step.is_verify:
            return False
        self.num_reserved = 0
        if not self._policy.take_turn():
            return True
        requests = [chunk.request for chunk in step.chunks if chunk.is_last]
        others = [chunk for chunk in step.chunks if not chunk.is_last]
        # One token is on its way, and the last one comes without a draft.
        limits = [max(min(self._max_drafts, num_to_come(request) - 2), 0) for request in requests]
        if not any(limits) or not self._can_mix(chunk.request for chunk in others):
            return True
        num_others = sum(len(chunk.request.token_ids) - chunk.start - chunk.num_tokens for chunk in others)
        with self._noted_errors():
            self.num_reserved = self._policy.count_promising(requests, limits, num_others)
        return self.num_reserved == 0

    def add_drafts(self, chunks: Chunks, tables: BlockTables) -> Chunks:
        """Returns the chunks with drafts for the rows that decode, after allocating free pages for the drafts."""
        self._attempt, self._has_waited = Attempt(has_waited=self._has_waited), False
        rows = [row for row, chunk in enumerate(chunks) if chunk.num_tokens == 1 and chunk.is_last]
        others = set(range(len(chunks))).difference(rows)
        if not rows or not self._can_mix(chunks.requests[row] for row in others):
            return chunks
        self._attempt.rows = rows
        began = self._clock()
        drafts: list[Drafts] = [[] for _ in chunks]
        with self._noted_errors():
            requests = [chunks.requests[row] for row in rows]
            proposed = self._draft(requests, sum(chunks.lens[row] for row in others), tables)
            for row, own in zip(rows, proposed, strict=True):
                drafts[row] = own
        self._attempt.drafting = self._clock() - began
        if not others:
            self.num_drafts = tuple(map(len, drafts))
        # One more per row than now, so that the number can grow.
        self.num_reserved = 0 if self.proposer.takes_trees else sum(map(len, drafts)) + len(rows)
        return replace(chunks, drafts=drafts)

    def observe(
        self, step: Step, emitted: Sequence[Sequence[SampledToken]], seconds: float | None, hidden: Any = None
    ) -> None:
        """Learns from a step's tokens and time, drafting included; `hidden` are its hidden states, on the device.

        `seconds` is None if the time of the step is unknown.
        """
        with self._noted_errors():
            if self.device_drafter is not None:
                self.device_drafter.observe(step, emitted, hidden)
            if self._policy is None:
                return
            if seconds is not None:
                attempt = Attempt() if step.is_ahead else self._attempt
                self._policy.observe(step, emitted, seconds, attempt)
            rates = self.proposer.rates
            for chunk, tokens in zip(step.chunks, emitted, strict=True) if rates.is_waiting else ():
                if chunk.is_last and chunk.request.finish_reason is None:
                    rates.compare(chunk.request, [token_id for token_id, *_ in tokens])

    def prepare(self, target: EngineModel) -> None:
        """Compiles the drafter's steps for this target. Called again if the cache size changes."""
        self.proposer.vocab_size = target.model_config.vocab_size
        self.proposer.takes_trees = target.engine_config.draft_trees
        if self.proposer.takes_trees and target.model_config.is_recurrent:
            raise ValueError(
                "draft_trees=True needs layers that can see any path of a tree, and this model has recurrent layers;"
                " leave out EngineConfig.draft_trees"
            )
        window, num_tokens = target.model_config.smallest_window, 1 + target.engine_config.max_drafts
        if self.proposer.takes_trees and window is not None and window < num_tokens:
            raise ValueError(
                f"draft_trees=True lets a draft see all that it follows, and this model's sliding_window={window} is"
                f" less than max_drafts={num_tokens - 1} and a token; leave out EngineConfig.draft_trees"
            )
        if self.device_drafter is not None:
            self._max_drafts = min(self._max_drafts, self.device_drafter.prepare(target))

    @property
    def device_drafter(self) -> DeviceDrafter | None:
        """Returns the drafter if it runs on the device."""
        return self.proposer.device_drafter

    @property
    def layer_cuts(self) -> tuple[int, ...]:
        """Returns the numbers of target layers after which a layer group must end."""
        return () if self.device_drafter is None else self.device_drafter.layer_cuts

    def attach(self, lend_cache: LendCache) -> None:
        """Gives a drafter on the device access to the target's cache, before the first draft."""
        if self.device_drafter is not None:
            self.device_drafter.attach(lend_cache)

    def update_target(self, params: Params) -> None:
        """Gives a drafter on the device the target's new parameters."""
        if self.device_drafter is not None:
            self.device_drafter.update_target(params)

    def rehearse(self, device: Device, cache_config: CacheConfig) -> None:
        """Measures steps and drafts on an engine without requests, before the first request."""
        if self._policy is None:
            return
        times, pages = self._policy.times, (cache_config.num_pages, cache_config.page_size)
        num_kinds = 1 + len(cache_config.num_bounded_pages)
        times.rehearse(device, *pages, self._clock, num_kinds=num_kinds)
        if self.device_drafter is not None:
            for step in times.full_decode_steps(*pages, num_kinds):
                compute = lambda step=step: device.read(device.launch(step)).hidden  # noqa: E731
                self.proposer.rehearse(step, compute, self._max_drafts)

    def forget(self, request: Request) -> None:
        """Drops the state of a request that has ended."""
        if self._policy is not None:
            self._policy.expect_others()
        with self._noted_errors():
            self.proposer.forget(request)

    def take_error(self) -> Exception | None:
        """Returns the first exception of the drafter since the last call."""
        error, self._error = self._error, None
        return error

    @contextlib.contextmanager
    def _noted_errors(self) -> Iterator[None]:
        """Keeps an exception of the drafter until the step is committed: no request depends on drafts."""
        try:
            yield
        except Exception as error:
            error.add_note(f"raised by the drafter {type(self.proposer.drafter).__name__}; no token was lost by it")
            self._error = self._error or error

    def _can_mix(self, others: Iterable[Request]) -> bool:
        """True if a step can verify drafts beside requests that prefill; not for trees and prompt log-probabilities."""
        return all(not self.proposer.takes_trees and other.sampling.prompt_log_probs is None for other in others)

    def _draft(self, requests: Sequence[Request], num_others: int, tables: BlockTables) -> Sequence[Drafts]:
        limits = [tables.reserve_ahead(request, self._max_drafts) for request in requests]
        if self._policy is not None:
            return self._policy.draft(requests, limits, num_others, self._attempt)
        room = min(self._max_tokens - len(requests) - num_others, sum(limits))
        drafts = self.proposer.draft(requests, limits) if room > 0 else [[] for _ in requests]
        counts = share_out([len(own) for own in drafts], max(room, 0))
        return [own[:count] for own, count in zip(drafts, counts, strict=True)]
