"""Chooses the requests and tokens that the next step computes.

Each request has `num_computed` tokens in the cache and wants all of its prompt and output there. Each step splits a
token budget among the requests so that they catch up. This one rule covers prefill, chunked prefill, prefix-cache hits,
decoding and recomputation after preemption.

If pages run out, the scheduler preempts the request admitted last, batch work first, until the others fit (`running`).
`policy` orders the requests. With several replicas of the model, `replica` chooses one for each request.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from jaxinfer.engine.kv_cache.attention_window import AttentionWindow
from jaxinfer.engine.kv_cache.block_tables import BlockTables
from jaxinfer.engine.kv_cache.page_pool import BoundedKind
from jaxinfer.engine.kv_cache.tiers import PageTiers
from jaxinfer.engine.request.completion import Delta, FinishReason
from jaxinfer.engine.request.page_keys import PageKeys
from jaxinfer.engine.request.request import LoadedAdapter, QueueFullError, Request
from jaxinfer.engine.scheduling.hand_over import PageMover, hand_over_all
from jaxinfer.engine.scheduling.metrics import NO_TARGETS, Metrics, Observer, Tally, Targets
from jaxinfer.engine.scheduling.replica import EveryStep, ReadySteps, Replica, choose_replica
from jaxinfer.engine.scheduling.running import RunningQueue
from jaxinfer.engine.scheduling.step import Chunks, Step
from jaxinfer.engine.scheduling.step_results import (
    SampledToken,
    SampledTokens,
    append_plain,
    append_tokens,
    pool_states,
    record_prompt_log_probs,
)
from jaxinfer.engine.scheduling.waiting import RequestHeap, WaitingQueue
from jaxinfer.sampling_params import Form

# Steps whose tokens may wait at one of several replicas. With 1, the first request that waits for a busy replica holds
# up those for idle ones: in a simulation of 64 replicas 23 % of the requests met their targets, with 3 it was 93 %.
STEPS_AHEAD = 3
# After a loop that took too long. Contexts may be shorter then, or the loop was the first of its shape.
STEPS_BETWEEN_LOOPS = 64


class Speculator(Protocol):
    """The scheduler's view of `speculation.Speculation`, which itself knows the compiled shapes."""

    @property
    def num_drafts(self) -> tuple[int, ...]:
        """Returns the number of drafts of each request in the last step that decoded every request."""
        ...

    @property
    def num_reserved(self) -> int:
        """Returns the number of drafts for which requests that prefill leave room in the next step."""
        ...

    def decide_overlap(self, step: Step) -> bool:
        """Decides on drafts after `step`, which is launched; True if the next step need not wait for its tokens."""
        ...

    def add_drafts(self, chunks: Chunks, tables: BlockTables) -> Chunks:
        """Returns the chunks with drafts, after allocating free pages for the drafts."""
        ...

    def observe(
        self, step: Step, emitted: Sequence[Sequence[SampledToken]], seconds: float | None, hidden: Any = None
    ) -> None:
        """Learns from a step's tokens and time; `hidden` are its hidden states, on the device."""
        ...

    def forget(self, request: Request) -> None:
        """Drops the speculation state of a request that has ended."""
        ...

    def take_error(self) -> Exception | None:
        """Returns the first exception of the drafter since the last call."""
        ...


class Scheduler:
    """Holds all unfinished requests; waiting requests have no pages, running ones advance in every step if they can.

    num_replicas: copies of the model, each with `max_num_seqs` rows and `num_pages` pages of its own
    num_prefill_replicas: the first of these, which only prefill for the others; 0 if each does both
    mover: copies pages from replicas that prefill to replicas that decode
    max_mixed_tokens: bounds the tokens of a step with decoding requests; None for max_num_batched_tokens
    max_waiting: bounds the requests beyond the rows of all replicas; None for no bound. A tenant with fewer than its
        share of it is still taken, up to twice the bound
    decode_loop_steps: decode steps per launch if every request decodes and none needs the full form of a draw; not with
        speculation
    max_loop_seconds: after a loop that took longer, decode steps are single for a while
    tiers: store the pages that are evicted from the pools
    window: the pages of a request behind this window are released while the request runs
    bounded: the model's bounded kinds of pages
    speculation: adds drafts to steps in which every request decodes; with one replica
    steps: which steps of each replica are compiled so far; () if all are. Steps keep within the largest, and a request
        that draws in a form which is still to come is held, while others run
    targets: the latency targets that the goodput counts by
    clock: returns seconds and never goes back
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_pages: int,
        page_size: int,
        num_replicas: int = 1,
        num_prefill_replicas: int = 0,
        mover: PageMover | None = None,
        max_mixed_tokens: int | None = None,
        max_waiting: int | None = None,
        decode_loop_steps: int = 1,
        max_loop_seconds: float = math.inf,
        tiers: PageTiers | None = None,
        window: AttentionWindow | None = None,
        bounded: Sequence[BoundedKind] = (),
        speculation: Speculator | None = None,
        steps: Sequence[ReadySteps] = (),
        targets: Targets = NO_TARGETS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_mixed_tokens = max_mixed_tokens or max_num_batched_tokens
        self._max_waiting = max_waiting
        self._decode_loop_steps = decode_loop_steps
        self._max_loop_seconds = max_loop_seconds
        self._speculation = speculation
        self._targets = targets
        self.clock = clock
        self.tiers = tiers
        self._orders = itertools.count()
        self._requests: dict[int, Request] = {}  # all that are unfinished
        self._waiting = WaitingQueue()
        self._deadlines = RequestHeap()  # the unfinished requests that have a deadline
        self._tally = Tally()
        self.observers: list[Observer] = []
        shared = {"waiting": self._waiting, "tally": self._tally, "observers": self.observers}
        self.replicas: list[Replica] = []
        for index in range(num_replicas):
            tables = BlockTables(num_pages, page_size, tiers, window, bounded)
            hands_over = index < num_prefill_replicas
            running = RunningQueue(max_num_seqs, tables=tables, index=index, hands_over=hands_over, **shared)
            self.replicas.append(Replica(index, tables, running, steps[index] if steps else EveryStep()))
        self._decoding = self.replicas[num_prefill_replicas:] if num_prefill_replicas else []
        self._entries = self.replicas[: num_prefill_replicas or num_replicas]  # where waiting requests begin
        self.mover = mover
        self._committed = 0.0  # time of the last commit of any replica

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_held(self) -> int:
        """The unfinished requests that wait for a form to be compiled."""
        return len(self._waiting.held)

    @property
    def held_forms(self) -> set[Form]:
        """The forms that held requests wait for."""
        return {request.sampling.form for request in self._waiting.held}

    @property
    def has_states(self) -> bool:
        """True if the model has recurrent states, which a launched step moves on before its tokens are known."""
        return self.replicas[0].tables.has_states

    @property
    def num_available_pages(self) -> int:
        """Returns the number of pages that no request uses, free and cached ones."""
        return sum(replica.tables.pages.num_available for replica in self.replicas)

    def metrics(self) -> Metrics:
        pages: Counter[str] = Counter()
        for replica in self.replicas:
            pages.update(replica.tables.pages.counts())
        return Metrics(
            num_running=sum(len(replica.running) for replica in self.replicas),
            num_waiting=self._num_waiting,
            **pages,
            num_drafts=() if self._speculation is None else self._speculation.num_drafts,
            **vars(self._tally),
            tiers=() if self.tiers is None else self.tiers.metrics(),
            replicas=tuple(replica.metrics() for replica in self.replicas) if len(self.replicas) > 1 else (),
        )

    @property
    def _num_waiting(self) -> int:
        return len(self._requests) - sum(len(replica.running) + len(replica.leaving) for replica in self.replicas)

    def check_room(self, requests: Sequence[Request]) -> None:
        """Raises QueueFullError if the queue is full and has no share left for these requests of one tenant."""
        count, num_rows = len(requests), len(self.replicas) * self._max_num_seqs
        if self._max_waiting is None or self.num_unfinished + count <= num_rows + self._max_waiting:
            return
        tenant, priority = requests[0].tenant, requests[0].priority
        room = self._waiting.room_in_full_queue(tenant, priority, self._max_waiting)
        if count <= room and self.num_unfinished + count <= num_rows + 2 * self._max_waiting:
            return
        each = f" of each of {len(self.replicas)} replicas" if len(self.replicas) > 1 else ""
        raise QueueFullError(
            f"{count} requests more than the {self.num_unfinished} unfinished ones are too many for max_num_seqs="
            f"{self._max_num_seqs}{each} that run and max_waiting={self._max_waiting}; step until some are finished, or"
            " raise EngineConfig.max_waiting"
        )

    def count_users(self, adapter: LoadedAdapter) -> int:
        """Returns the number of unfinished requests with an adapter."""
        return sum(request.adapter is adapter for request in self._requests.values())

    def add(self, request: Request) -> None:
        """Queues a request; raises QueueFullError if the queue is full."""
        self.check_room([request])
        request.arrival, request.order = self.clock(), next(self._orders)
        self._requests[request.request_id] = request
        self._waiting.enter(request)
        if not self._can_draw(request):
            self._waiting.hold(request)
        if request.deadline < math.inf:
            self._deadlines.push(request.deadline, request)
        for observer in self.observers:
            observer.arrived(request)

    def take_error(self) -> Exception | None:
        """Returns the first exception of the drafter since the last call; such an exception stops no step."""
        return None if self._speculation is None else self._speculation.take_error()

    def find(self, request_id: int) -> Request | None:
        """Returns the unfinished request with this id, or None."""
        return self._requests.get(request_id)

    def time_left(self, request: Request) -> float:
        return request.deadline - self.clock()

    def rewind(self, request: Request) -> None:
        """Updates pages and queues after `Request.rewind` has shortened the request."""
        if (replica := self._home_of(request)) is None:  # it has not run yet
            return
        if request in replica.leaving:
            replica.leaving.remove(request)
            replica.running.requeue(request)
        else:
            replica.running.rewind(request)

    def recompute(self, new_keys: Callable[[Request], PageKeys | None]) -> None:
        """Makes all contents of pages void: every request waits, with its tokens so far, to be computed again.

        Tokens that launched steps sample are discarded. `new_keys(request)` are the keys of its future pages; with
        keys that were never used before, no request finds contents that are in the tiers.
        """
        for replica in self.replicas:
            replica.running.preempt_all()
            for request in replica.leaving:
                replica.running.requeue(request)
            replica.leaving = []
        for request in self._requests.values():
            request.begin_again(new_keys(request))
        for replica in self.replicas:
            replica.tables.forget_contents()

    def receive(self, request: Request) -> None:
        """Waits for the pages of a request that are on their way to another replica, if they are."""
        if (replica := self._home_of(request)) is not None:
            replica.running.wait_for(request)

    def abort(self, request_id: int) -> Delta | None:
        """Ends a waiting or running request and frees its pages; returns None if the request has already ended."""
        return None if (request := self.find(request_id)) is None else self._end(request, "abort")

    def expire(self) -> list[Delta]:
        """Ends all waiting and running requests whose deadline has passed."""
        now, deltas = self.clock(), []
        while (request := self._deadlines.first) is not None and request.deadline <= now:
            deltas.append(self._end(request, "deadline"))
        return deltas

    def release_held(self) -> list[Delta]:
        """Queues the held requests whose forms can be drawn by now; ends those whose forms cannot be compiled."""
        deltas = []
        for request in tuple(self._waiting.held):
            form = request.sampling.form
            if self._can_draw(request):
                self._waiting.wait(request)
            elif (error := next(filter(None, (r.steps.draw_error(form) for r in self.replicas)), None)) is not None:
                deltas.append(self._end(request, "error", error))
        return deltas

    def _can_draw(self, request: Request) -> bool:
        are_ready = [replica.steps.can_draw(request.sampling.form) for replica in self.replicas]
        return all(are_ready)  # each replica has been asked, so each has the form compiled

    def schedule(self, after: Step | None = None, replica: int = 0) -> Step | None:
        """Returns the next step of a replica, or None if there is nothing to do. Preempts requests if pages run out.

        `after` is a launched step that is not committed: the new step counts its unknown tokens for its requests.
        Returns None if the new step must know those tokens first, for drafts. If such a token ends its request, the new
        step's tokens for the request are discarded.
        """
        own = self.replicas[replica]
        if after is None:
            own.num_over = own.running.num_scheduled  # none is under way
        elif not self._look_ahead(after):
            return None
        if self._decoding:
            assert self.mover is not None
            self._tally.num_hand_overs += hand_over_all(self._entries, self._decoding, self.mover, scheduled=own)
            own.running.receive()
            if after is None and not own.running.advancing:
                for request in tuple(own.running.arriving):
                    own.running.wait_for(request)
        began, budget = self.clock(), self._budget(own)
        if own in self._entries:
            self._admit(own, budget, began)
        num_reserved = self._speculation.num_reserved if self._speculation is not None and after is None else 0
        chunks = own.running.hand_out(budget, began, num_reserved)
        if own.steps.max_tokens < self._most_tokens(own) and len(chunks) < sum(chunks.lens) >= budget:
            own.steps.want_tokens()
        if self._speculation is not None and after is None:
            chunks = self._speculation.add_drafts(chunks, own.tables)
        elif own.num_single:
            own.num_single -= 1
        elif self._decode_loop_steps > 1 and not own.running.hands_over:
            chunks = self._extend_for_loop(chunks, own)
        for observer in self.observers:
            observer.scheduled(began, self.metrics())
        if not chunks:
            return None
        own.running.num_scheduled += 1
        return Step(chunks, own.tables.copies, began, after is not None, replica, own.running.num_scheduled)

    def _budget(self, replica: Replica) -> int:
        return int(min(self._most_tokens(replica), replica.steps.max_tokens))

    def _most_tokens(self, replica: Replica) -> int:
        """Returns the most tokens of the replica's next step if every step is compiled."""
        is_mixed = any(request.num_uncomputed == 1 for request in replica.running.advancing)
        return self._max_mixed_tokens if is_mixed else self._max_num_batched_tokens

    def _admit(self, replica: Replica, budget: int, now: float) -> None:
        """Gives waiting requests a row and pages, in their order, while the token budgets of the next steps last.

        With several replicas STEPS_AHEAD steps count, so that idle replicas get requests while others are busy.
        Preempts requests of `replica` alone, which is the one whose step is scheduled. The first request that has to
        wait holds up those behind it.
        """
        while (request := self._waiting.first(now)) is not None:
            if request.num_pending > 1:  # a step takes one unknown token of a request, so those of its loop come first
                return
            chosen, num_steps = replica, 1
            if len(self.replicas) > 1:
                num_steps = STEPS_AHEAD
                chosen = choose_replica(request, self._entries, self._home_of(request)) or replica
                if not chosen.may_run(request, self._home_of(request)):
                    return
            limit = budget if chosen is replica else self._budget(chosen)
            if not chosen.running.can_take(request, num_steps * limit) or not chosen.running.make_way(request):
                return
            self._waiting.take(request, now)
            chosen.running.begin(request)

    def abandon(self, step: Step) -> None:
        """Learns that a step was interrupted at its launch: it may have run or not, and is scheduled again.

        Computing keys and values twice changes nothing, but a state may have seen the step's tokens already. So the
        requests with states go back to one at a page's end.
        """
        replica = self.replicas[step.replica]
        if replica.tables.has_states:
            for request in [request for request in step.chunks.requests if request in replica.running]:
                replica.running.restart(request)

    def commit(self, step: Step, output: Any) -> list[Delta]:
        """Applies a step's result (`StepOutput` of host arrays, one row per chunk) and removes finished requests."""
        now, replica = self.clock(), self.replicas[step.replica]
        seconds, replica.committed = now - max(step.began, replica.committed) - step.idle_seconds, now
        is_timed = step.idle_seconds <= seconds  # else the step took longer than `seconds`, by an unknown amount
        if step.is_loop and is_timed and seconds > self._max_loop_seconds:
            replica.num_single = STEPS_BETWEEN_LOOPS
        self._tally.num_steps += 1
        replica.num_steps += 1
        self._tally.busy_seconds += min(seconds, now - self._committed)
        self._committed, replica.num_over = now, step.number
        if self.tiers is not None and is_timed and not (step.is_decode or step.is_verify):
            self.tiers.observe_prefill(step.num_tokens, seconds)
        sampled = SampledTokens(step, output)
        if self._speculation is not None:
            self._speculation.observe(step, sampled, seconds if is_timed else None, output.hidden)
        record_prompt_log_probs(step, output)
        pool_states(step, output)
        self._enter(step)
        replica.entered, replica.leaving = None, []
        for observer in self.observers:
            observer.computed(step, now - seconds, now)
        is_simple = step.is_plain and output.tokens.ndim == 1 and output.sampling_log_probs is None
        deltas = append_plain(step.chunks.requests, output, now) if is_simple else self._append(step, sampled, now)
        self._tally.num_output_tokens += sum([len(delta.token_ids) for delta in deltas])
        for completion in [c for delta in deltas if (c := delta.completion) is not None]:
            self._tally.num_good += self._targets.are_met(completion.timings)
            self._forget(self._requests[completion.request_id])
        return deltas

    def _append(self, step: Step, sampled: SampledTokens, now: float) -> list[Delta]:
        """Appends sampled tokens if a step yields several per request, or log-probabilities, or has grammars."""
        deltas, tables = [], self.replicas[step.replica].tables
        for chunk, tokens in zip(step.chunks, sampled, strict=True):
            request = chunk.request
            if not request.num_pending:
                continue
            deltas.append(append_tokens(request, tokens, now))
            if step.is_loop:  # `_enter` has counted the tokens that the loop fed back; now they are known
                tables.record(request, chunk.start + 1, request.num_known)
            elif len(tokens) > 1:  # all but the last are in the cache: accepted drafts
                start, num_accepted = request.num_computed, min(len(tokens) - 1, request.num_uncomputed)
                request.num_computed += num_accepted
                tables.record(request, start, request.num_computed)
            if chunk.drafts:
                self._tally.num_drafted_tokens += len(chunk.drafts)
                self._tally.num_accepted_tokens += len(tokens) - 1
        return deltas

    def _look_ahead(self, step: Step) -> bool:
        """True if the next step can be scheduled before the tokens of `step` are known; then records its launch."""
        if self._speculation is not None and not self._speculation.decide_overlap(step):
            return False
        if self.replicas[step.replica].running.hands_over and any(chunk.is_last for chunk in step.chunks):
            return False  # else the hand-over of its requests would wait for the next step
        self._enter(step)
        return True

    def _extend_for_loop(self, chunks: Chunks, replica: Replica) -> Chunks:
        """Returns the chunks with `max_new_tokens` of a loop, at most what a request has tokens and pages for.

        Leaves 1 unless every request decodes, can be drawn in a loop and pools no states, which a loop does not return.
        """
        rows, most, tables = chunks.rows, self._decode_loop_steps - 1, replica.tables
        if rows.form == "full" or rows.pool_states or not chunks.are_last_tokens:
            return chunks
        if not replica.steps.can_loop(rows.form):
            return chunks
        max_new_tokens = [1 + tables.reserve_ahead(request, most) for request in chunks.requests]
        for request, count in zip(chunks.requests, max_new_tokens, strict=True):
            self._waiting.charge(request.tenant, count - 1)
        return replace(chunks, max_new_tokens=max_new_tokens)

    def _enter(self, step: Step) -> None:
        """Records once that a step is launched: later steps find its tokens in the cache."""
        replica = self.replicas[step.replica]
        if step is not replica.entered:
            replica.entered = step
            replica.leaving = replica.running.advance(step.chunks)

    def _home_of(self, request: Request) -> Replica | None:
        """Returns the replica where a request runs or ran last, None before its first run."""
        return None if request.replica is None else self.replicas[request.replica]

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> Delta:
        delta = request.finish(reason, error=error)
        self._forget(request)
        return delta

    def _forget(self, request: Request) -> None:
        if (replica := self._home_of(request)) is not None:
            replica.running.leave(request)
            if request in replica.leaving:
                replica.leaving.remove(request)
        self._waiting.leave(request)
        self._deadlines.remove(request)
        if self._speculation is not None:
            self._speculation.forget(request)
        self._tally.num_finished += 1
        del self._requests[request.request_id]
        for observer in self.observers:
            observer.ended(request)
