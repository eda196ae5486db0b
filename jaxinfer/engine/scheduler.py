"""Which tokens of which requests are computed in the next step.

Each request has `num_computed` tokens in the cache and wants all of its prompt and output there. A step hands out a
token budget so that they catch up. Prefill, chunks of it, prefixes found in the cache, decoding and recomputation after
preemption are one rule.
Memory pressure is one rule as well: preempt the request that was admitted last, until the others fit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.engine.block_tables import BlockTables
from jaxinfer.engine.request import Delta, Request


@dataclass(frozen=True)
class Chunk:
    """The next `num_tokens` tokens of a request that are not in the cache, from position `start`."""

    request: Request
    start: int
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the request has caught up after this chunk, so that its next token is drawn."""
        return self.start + self.num_tokens == len(self.request.token_ids)


@dataclass(frozen=True)
class Step:
    """The chunks to compute, decoding requests first. `is_decode`: every chunk is one token."""

    chunks: tuple[Chunk, ...]

    @property
    def is_decode(self) -> bool:
        return all(chunk.num_tokens == 1 for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class Scheduler:
    """Holds all unfinished requests: `waiting` have no pages, `running` advance in every step if they can."""

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, num_pages: int, page_size: int):
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._tables = BlockTables(num_pages, page_size)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in the order of admission
        self.num_preemptions = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def num_available_pages(self) -> int:
        """Pages that no request uses, whether something is cached in them or not."""
        return self._tables.pages.num_available

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def abort(self, request_id: int) -> Delta | None:
        """Ends a request wherever it is and frees its pages; None if there is no such request any more."""
        for queue in (self._running, self._waiting):
            for request in queue:
                if request.request_id == request_id:
                    queue.remove(request)
                    self._tables.release(request)
                    return request.finish("abort")
        return None

    def schedule(self) -> Step | None:
        """Returns the next step, or None when there is nothing to do. Preempts where pages run out."""
        chunks: list[Chunk] = []
        budget = self._max_num_batched_tokens
        # Decoding requests first: a long prompt must not hold up those who wait for their next token.
        for request in sorted(self._running, key=lambda request: request.num_uncomputed > 1):
            if not request.pages:  # preempted for one before it
                continue
            self._tables.share_prefix(request)
            num_tokens = min(request.num_uncomputed, budget)
            if num_tokens > 0 and self._make_room(request, num_tokens, chunks):
                chunks.append(Chunk(request, request.num_computed, num_tokens))
                budget -= num_tokens
        # Nobody preempted just now can come in again: it needs at least the pages that it had to give up.
        while budget > 0 and self._can_admit():
            request = self._waiting.popleft()
            self._running.append(request)
            self._tables.share_prefix(request)
            num_tokens = min(request.num_uncomputed, budget)
            self._tables.extend(request, num_tokens)
            chunks.append(Chunk(request, request.num_computed, num_tokens))
            budget -= num_tokens
        return Step(tuple(chunks)) if chunks else None

    def _can_admit(self) -> bool:
        if not self._waiting or len(self._running) >= self._max_num_seqs:
            return False
        # Pages for all its tokens, though the first chunk may need fewer: half a prompt in the cache helps nobody.
        return self._tables.can_hold(self._waiting[0])

    def commit(self, step: Step, output: Any) -> list[Delta]:
        """Enters a step's result (`StepOutput` of host arrays, one row per chunk); frees what is finished."""
        tokens, log_probs = output.tokens.tolist(), output.log_probs.tolist()
        deltas = []
        for row, chunk in enumerate(step.chunks):
            request = chunk.request
            if request.finish_reason is not None:  # aborted while the step ran
                continue
            is_last = chunk.is_last
            self._tables.advance(request, chunk.num_tokens)
            if not is_last:
                continue
            delta = request.append(tokens[row], log_probs[row], _top_log_probs(output, row, request.sampling.log_probs))
            deltas.append(delta)
            if delta.completion is not None:
                self._running.remove(request)
                self._tables.release(request)
        return deltas

    def _make_room(self, request: Request, num_tokens: int, chunks: list[Chunk]) -> bool:
        """Gives the request its pages, preempting from the end of the line; False if it was preempted itself."""
        scheduled = {chunk.request.request_id for chunk in chunks}
        while self._tables.num_missing(request, num_tokens) > self.num_available_pages:
            victim = next(r for r in reversed(self._running) if r.request_id not in scheduled)
            self._running.remove(victim)
            self._tables.release(victim)
            self._waiting.appendleft(victim)
            self.num_preemptions += 1
            if victim is request:
                return False
        self._tables.extend(request, num_tokens)
        return True


def _top_log_probs(output: Any, row: int, count: int) -> dict[int, float]:
    if count == 0:
        return {}
    tokens, log_probs = (
        np.asarray(output.top_tokens[row, :count]),
        np.asarray(output.top_log_probs[row, :count]),
    )
    return dict(zip(tokens.tolist(), log_probs.tolist(), strict=True))
