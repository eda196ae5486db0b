"""Which tokens of which requests are computed in the next step.

Each request has `num_computed` tokens in the cache and wants all of its prompt and output there. A step hands out a
token budget so that they catch up. Prefill, chunks of it, prefixes found in the cache, decoding and recomputation after
preemption are one rule. Memory pressure is one as well: preempt the request that was admitted last, batch work first,
until the others fit (`running`). Whose turn it is says `policy`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from jaxinfer.engine.kv_cache.attention_window import AttentionWindow
from jaxinfer.engine.kv_cache.block_tables import BlockTables
from jaxinfer.engine.kv_cache.tiers import PageTiers
from jaxinfer.engine.request.completion import Delta, FinishReason
from jaxinfer.engine.request.request import QueueFullError, Request
from jaxinfer.engine.scheduling.metrics import NO_TARGETS, Metrics, Observer, Tally, Targets
from jaxinfer.engine.scheduling.running import RunningQueue
from jaxinfer.engine.scheduling.step import Chunks, Step
from jaxinfer.engine.scheduling.step_results import (
    SampledToken,
    SampledTokens,
    append_plain,
    append_tokens,
    record_prompt_log_probs,
)
from jaxinfer.engine.scheduling.waiting import Deadlines, WaitingQueue


class Speculator(Protocol):
    """What the scheduler asks of speculation (`speculation.Speculation`), which itself knows the compiled shapes."""

    @property
    def num_drafts(self) -> tuple[int, ...]:
        """The number of drafts of each request in the last step that decoded every request."""
        ...

    def can_overlap(self, step: Step) -> bool:
        """Returns True if the step after this launched one takes no drafts, so it need not wait for its tokens."""
        ...

    def add_drafts(self, chunks: Chunks, tables: BlockTables) -> Chunks:
        """Returns the chunks with drafts, for which it takes free pages."""
        ...

    def observe(
        self, step: Step, emitted: Sequence[Sequence[SampledToken]], seconds: float | None, hidden: Any = None
    ) -> None:
        """Learns from a step's tokens and time; `hidden` are its hidden states, on the device."""
        ...

    def forget(self, request: Request) -> None:
        """Drops what it keeps for a request that has ended."""
        ...

    def take_error(self) -> Exception | None:
        """Returns the first exception of the drafter since the last call."""
        ...


class Scheduler:
    """Holds all unfinished requests: those that wait have no pages, those that run advance in every step if they can.

    `max_mixed_tokens` bounds the tokens of a step in which somebody decodes, `max_waiting` the requests beyond those
    that can run; None leaves either open. `tiers` keep pages that the pool has no room for; none is kept for a request
    behind its `window`. `speculation` adds drafts where all decode; else such a step may go on for `decode_loop_steps`.
    The goodput counts by the `targets`. `clock` counts seconds and never goes back. `observers` are told what happens.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_pages: int,
        page_size: int,
        max_mixed_tokens: int | None = None,
        max_waiting: int | None = None,
        decode_loop_steps: int = 1,
        tiers: PageTiers | None = None,
        window: AttentionWindow | None = None,
        speculation: Speculator | None = None,
        targets: Targets = NO_TARGETS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_mixed_tokens = max_mixed_tokens or max_num_batched_tokens
        self._max_waiting = max_waiting
        self._decode_loop_steps = decode_loop_steps
        self._speculation = speculation
        # Whether a step may be scheduled before the tokens of the last are known: there is one of each request, then.
        self._overlap = decode_loop_steps == 1
        self._targets = targets
        self.clock = clock
        self.tiers = tiers
        self._tables = BlockTables(num_pages, page_size, tiers, window)
        self.copies = self._tables.copies  # which the next step makes before it computes anything
        self._orders = itertools.count()
        self._requests: dict[int, Request] = {}  # all that are unfinished
        self._waiting, self._deadlines = WaitingQueue(), Deadlines()
        self._tally = Tally()
        self.observers: list[Observer] = []
        self._running = RunningQueue(
            max_num_seqs, tables=self._tables, waiting=self._waiting, tally=self._tally, observers=self.observers
        )
        self._entered: Step | None = None  # which is not committed yet
        self._leaving: list[Request] = []  # which draw their last token in it, and have no pages any more
        self._committed = 0.0  # when a step was for the last time

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_available_pages(self) -> int:
        """Pages that no request uses, whether something is cached in them or not."""
        return self._tables.pages.num_available

    def metrics(self) -> Metrics:
        return Metrics(
            num_running=len(self._running),
            num_waiting=self._num_waiting,
            **self._tables.pages.counts(),
            num_drafts=() if self._speculation is None else self._speculation.num_drafts,
            **vars(self._tally),
            tiers=() if self.tiers is None else self.tiers.metrics(),
        )

    @property
    def _num_waiting(self) -> int:
        return len(self._requests) - len(self._running) - len(self._leaving)

    def check_room(self, count: int) -> None:
        """Raises QueueFullError where `count` requests more would be too many."""
        if self._max_waiting is None or self.num_unfinished + count <= self._max_num_seqs + self._max_waiting:
            return
        raise QueueFullError(
            f"{count} requests more than the {self.num_unfinished} unfinished ones are too many for max_num_seqs="
            f"{self._max_num_seqs} that run and max_waiting={self._max_waiting}; step until some are finished, or raise"
            " EngineConfig.max_waiting"
        )

    def add(self, request: Request) -> None:
        """Queues a request; QueueFullError where that is one too many."""
        self.check_room(1)
        request.arrival, request.order = self.clock(), next(self._orders)
        self._requests[request.request_id] = request
        self._waiting.enter(request)
        self._deadlines.enter(request)
        for observer in self.observers:
            observer.arrived(request)

    def take_error(self) -> Exception | None:
        """Returns what a drafter has raised since the last time; steps are computed and committed without it."""
        return None if self._speculation is None else self._speculation.take_error()

    def find(self, request_id: int) -> Request | None:
        """Returns an unfinished request."""
        return self._requests.get(request_id)

    def time_left(self, request: Request) -> float:
        return request.deadline - self.clock()

    def rewind(self, request: Request) -> None:
        """Enters that a request has fewer tokens than before."""
        if request in self._leaving:
            self._leaving.remove(request)
            self._waiting.wait(request)
        else:
            self._running.rewind(request)

    def abort(self, request_id: int) -> Delta | None:
        """Ends a request wherever it is and frees its pages; None if there is no such request any more."""
        return None if (request := self.find(request_id)) is None else self._end(request, "abort")

    def expire(self) -> list[Delta]:
        """Ends the requests whose deadline has passed, wherever they are."""
        requests = map(self.find, self._deadlines.passed(self.clock()))
        return [self._end(request, "deadline") for request in requests if request is not None]

    def schedule(self, after: Step | None = None) -> Step | None:
        """Returns the next step, or None when there is nothing to do. Preempts where pages run out.

        `after` is a step that is launched and not committed: its requests have a token more, whatever it is. None where
        one must be known first, and where another step is launched already. A token that ends its request is met too
        late: then what this step draws for it is void.
        """
        if after is not None and not self._look_ahead(after):
            return None
        began = self.clock()
        is_mixed = any(request.num_uncomputed == 1 for request in self._running)
        budget = self._max_mixed_tokens if is_mixed else self._max_num_batched_tokens
        self._running.admit(budget, began)
        chunks = self._running.hand_out(budget, began)
        if self._speculation is not None and after is None:
            chunks = self._speculation.add_drafts(chunks, self._tables)
        elif self._decode_loop_steps > 1:
            chunks = _extend_for_multi_step(chunks, self._tables, self._decode_loop_steps)
        for observer in self.observers:
            observer.scheduled(began, self.metrics())
        return Step(chunks, self.copies, self._num_waiting > 0, began, after is not None) if chunks else None

    def commit(self, step: Step, output: Any) -> list[Delta]:
        """Enters a step's result (`StepOutput` of host arrays, one row per chunk); frees what is finished."""
        now = self.clock()
        seconds, self._committed = now - max(step.began, self._committed) - step.idle_seconds, now
        is_timed = step.idle_seconds <= seconds  # else it took longer than `seconds`, nobody knows by how much
        self._tally.num_steps += 1
        self._tally.busy_seconds += seconds
        if self.tiers is not None and is_timed and not (step.is_decode or step.is_verify):
            self.tiers.observe_prefill(step.num_tokens, seconds)
        sampled = SampledTokens(step, output)
        if self._speculation is not None:
            self._speculation.observe(step, sampled, seconds if is_timed else None, output.hidden)
        record_prompt_log_probs(step, output)
        self._enter(step)
        self._entered, self._leaving = None, []
        for observer in self.observers:
            observer.computed(step, now - seconds, now)
        is_simple = step.is_plain and output.tokens.ndim == 1
        deltas = append_plain(step.chunks.requests, output, now) if is_simple else self._hand_over(step, sampled, now)
        self._tally.num_output_tokens += sum([len(delta.token_ids) for delta in deltas])
        for completion in [c for delta in deltas if (c := delta.completion) is not None]:
            self._tally.num_good += self._targets.are_met(completion.timings)
            self._forget(self._requests[completion.request_id])
        return deltas

    def _hand_over(self, step: Step, sampled: SampledTokens, now: float) -> list[Delta]:
        """Gives requests what was drawn for them, several tokens each or more than tokens."""
        deltas = []
        for chunk, tokens in zip(step.chunks, sampled, strict=True):
            request = chunk.request
            if not request.num_pending:
                continue
            deltas.append(append_tokens(request, tokens, now))
            if len(tokens) > 1:
                # All but the last are computed: drafts that were right, or a loop went on by them.
                self._tables.advance(request, request.num_computed + min(len(tokens) - 1, request.num_uncomputed))
            if chunk.drafts:
                self._tally.num_drafted_tokens += len(chunk.drafts)
                self._tally.num_accepted_tokens += len(tokens) - 1
        return deltas

    def _look_ahead(self, step: Step) -> bool:
        """Whether the step after this one can be scheduled before its tokens are known; enters it if so."""
        can_overlap = self._speculation is None or self._speculation.can_overlap(step)
        if not can_overlap or not self._overlap:
            return False
        self._enter(step)
        return True

    def _enter(self, step: Step) -> None:
        """Enters once that a step is launched: its tokens are in the cache for whatever is computed later."""
        if step is not self._entered:
            self._entered = step
            self._leaving = self._running.advance(step.chunks)

    def _end(self, request: Request, reason: FinishReason) -> Delta:
        delta = request.finish(reason)
        self._forget(request)
        return delta

    def _forget(self, request: Request) -> None:
        self._running.leave(request)
        if request in self._leaving:
            self._leaving.remove(request)
        self._waiting.leave(request)
        if self._speculation is not None:
            self._speculation.forget(request)
        self._tally.num_finished += 1
        del self._requests[request.request_id]
        for observer in self.observers:
            observer.ended(request)


def _extend_for_multi_step(chunks: Chunks, tables: BlockTables, max_steps: int) -> Chunks:
    """Returns the chunks with as many tokens to draw as a request wants and free pages hold, at most `max_steps`.

    That is one each unless all decode, and where one has a structure: the mask of its next token comes from the host.
    """
    if not chunks.are_last_tokens or any(request.grammar for request in chunks.requests):
        return chunks
    max_new_tokens = [1 + tables.extend_ahead(request, max_steps - 1) for request in chunks.requests]
    return replace(chunks, max_new_tokens=max_new_tokens)
