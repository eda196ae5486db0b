"""Steps with drafts: who is asked for them, when, and what becomes of it.

Drafts begin with tokens that are known, so a step with drafts cannot be launched before the last one is read, as others
are: that time is a part of what drafts cost. So it is decided while a step runs whether the next one waits for its
tokens (`draft_decision`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxinfer.config import CacheConfig
from jaxinfer.engine.drafters.drafters import Drafter
from jaxinfer.engine.execution.engine_model import DeviceDrafter, EngineModel, LendCache
from jaxinfer.engine.execution.pipeline import Device
from jaxinfer.engine.kv_cache.block_tables import BlockTables
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.drafts import Drafts
from jaxinfer.engine.scheduling.step import Chunk, Chunks, Step
from jaxinfer.engine.scheduling.step_results import SampledToken
from jaxinfer.engine.speculation.draft_choice import share_out
from jaxinfer.engine.speculation.draft_decision import Attempt, Decision, num_to_come
from jaxinfer.engine.speculation.draft_source import DraftSource
from jaxinfer.engine.speculation.step_costs import StepCosts


class Speculation:
    """Asks a drafter for up to `max_drafts` per request and has those verified that are worth it, in steps of
    `max_tokens` at most.

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
        self._clock = clock
        self._table_width = 1
        self._attempt = Attempt()
        self.source = DraftSource(drafter, clock)
        self._decision = None if costs is None else Decision(self.source, costs, max_tokens, clock)
        self._error: Exception | None = None  # that the drafter has raised
        self.num_drafts: tuple[int, ...] = ()  # of each request in the last step in which all decoded

    def can_overlap(self, step: Step) -> bool:
        """Whether the step after this one, which is launched, is to have no drafts and need not wait for its tokens."""
        if self._decision is None or step.is_verify:
            return False
        if self._decision.takes_rest(step.chunks.requests):
            return True
        chunks = [Chunk(chunk.request, chunk.start + chunk.num_tokens, 1) for chunk in step.chunks]
        # A token is on its way, and one comes without a draft.
        limits = [max(min(self._max_drafts, num_to_come(chunk.request) - 2), 0) for chunk in chunks]
        if not any(limits) or not all(chunk.is_last for chunk in step.chunks):
            return True
        return not self._decision.is_worth_waiting(chunks, limits)

    def add_drafts(self, chunks: Chunks, tables: BlockTables) -> Chunks:
        """Returns the chunks of a step that is not launched ahead with drafts; none unless all decode.

        Takes pages for them where some are free.
        """
        self._attempt = Attempt()
        if not chunks or not chunks.are_last_tokens:
            return chunks
        self.num_drafts = (0,) * len(chunks)
        if self._decision is not None and self._decision.plain_runs.is_wanted:
            return chunks
        began = self._clock()
        drafts: Sequence[Drafts] = [[] for _ in chunks]
        with self._noted_errors():
            drafts = self._propose(chunks, tables)
        self._attempt.seconds = self._clock() - began
        self.num_drafts = tuple(map(len, drafts))
        return replace(chunks, drafts=drafts)

    def observe(
        self, step: Step, emitted: Sequence[Sequence[SampledToken]], seconds: float | None, hidden: Any = None
    ) -> None:
        """Learns from a step: what it took, drafting included, and which drafts were right.

        `seconds` is None where nobody knows what it took. `hidden` are the states of its tokens, for drafters that
        begin with them.
        """
        with self._noted_errors():
            if self.source.device_drafter is not None:
                self.source.device_drafter.observe(step, emitted, hidden)
            if self._decision is not None and seconds is not None:
                self._decision.observe(step, emitted, seconds, self._attempt)

    def prepare(self, target: EngineModel) -> None:
        """Compiles what drafting for this target needs; again for a cache of another size."""
        self.source.vocab_size = target.model_config.vocab_size
        self.source.takes_trees = target.engine_config.draft_trees
        self._table_width = target.table_width
        window, num_tokens = target.model_config.sliding_window, 1 + target.engine_config.max_drafts
        if self.source.takes_trees and window is not None and window < num_tokens:
            raise ValueError(
                f"draft_trees=True lets a draft see all that it follows, and this model's sliding_window={window} is"
                f" less than max_drafts={num_tokens - 1} and a token; leave out EngineConfig.draft_trees"
            )
        if self.source.device_drafter is not None:
            self._max_drafts = min(self._max_drafts, self.source.device_drafter.prepare(target))

    @property
    def device_drafter(self) -> DeviceDrafter | None:
        """The drafter if it has steps of its own on the device."""
        return self.source.device_drafter

    @property
    def first_layers(self) -> int | None:
        """After how many of the target's layers a group of them has to end, if it matters."""
        return None if self.source.device_drafter is None else self.source.device_drafter.first_layers

    def attach(self, lend_cache: LendCache) -> None:
        """Is told how a drafter may compute on the target's cache."""
        if self.source.device_drafter is not None:
            self.source.device_drafter.attach(lend_cache)

    def rehearse(self, device: Device, cache_config: CacheConfig) -> None:
        """Measures what must be known before the first request; `device` computes steps of an engine without any."""
        if self._decision is None:
            return
        costs, pages = self._decision.costs, (cache_config.num_pages, cache_config.page_size)
        costs.rehearse(device, *pages, self._table_width, self._clock)
        if self.source.device_drafter is not None:
            for step in costs.full_decode_steps(*pages):
                self.source.rehearse(step, lambda step=step: device.read(device.launch(step)).hidden, self._max_drafts)

    def forget(self, request: Request) -> None:
        """Is told that a request has ended."""
        with self._noted_errors():
            self.source.forget(request)

    def take_error(self) -> Exception | None:
        """Returns what the drafter has raised first since the last time."""
        error, self._error = self._error, None
        return error

    @contextlib.contextmanager
    def _noted_errors(self) -> Iterator[None]:
        """Keeps what a drafter raises until the step is computed and committed: no request depends on a drafter."""
        try:
            yield
        except Exception as error:
            error.add_note(f"raised by the drafter {type(self.source.drafter).__name__}; no token was lost by it")
            self._error = self._error or error

    def _propose(self, chunks: Chunks, tables: BlockTables) -> Sequence[Drafts]:
        nothing: list[Drafts] = [[] for _ in chunks]
        requests, attempt, decision = chunks.requests, self._attempt, self._decision
        if decision is not None:
            costs = decision.seconds(chunks, self._max_drafts * len(chunks))
            attempt.plain = attempt.expected = costs[0]
            if decision.is_barred(requests):
                return nothing
        limits = [tables.extend_ahead(request, self._max_drafts) for request in requests]
        room = min(self._max_tokens - len(chunks), sum(limits))
        if room == 0:
            return nothing
        if decision is not None:
            return decision.draft(requests, limits, costs[: room + 1], attempt)
        drafts = self.source.draft(requests, limits)
        counts = share_out([len(tokens) for tokens in drafts], room)
        return [tokens[:count] for tokens, count in zip(drafts, counts, strict=True)]
