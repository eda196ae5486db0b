"""The requests that run: who is let in, with a row and pages, and who gives way where they run out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from jaxinfer.engine.kv_cache.block_tables import BlockTables
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.metrics import Observer, Tally
from jaxinfer.engine.scheduling.policy import step_order
from jaxinfer.engine.scheduling.step import Chunks, Rows
from jaxinfer.engine.scheduling.waiting import WaitingQueue


class RunningQueue(Sequence[Request]):
    """`max_num_seqs` requests at most, in the order of admission; they have pages, those in the `waiting` line none.

    What is done is counted in `tally`, and told to the `observers`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        *,
        tables: BlockTables,
        waiting: WaitingQueue,
        tally: Tally,
        observers: Sequence[Observer],
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._tables = tables
        self._waiting = waiting
        self._tally = tally
        self._observers = observers
        self._requests: list[Request] = []
        self._decode_rows: Rows | None = None  # all who run, where all decode, until somebody comes or goes

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        return self._requests[index]

    def admit(self, budget: int, now: float) -> None:
        """Lets requests run, as many as a step has tokens for, with pages for all tokens that they have so far.

        Those that see no further than a window get as many as they ever have at once.
        """
        while (request := self._waiting.first(now)) is not None:
            if len(self) >= self._max_num_seqs and not self._victims(request):
                return  # nearly always where many wait, and known without a look at all who run
            # Batch work that waits for its tokens is no reason to keep an interactive request waiting.
            wanted = sum(
                other.num_uncomputed for other in self._requests if other.is_preemptible <= request.is_preemptible
            )
            if wanted >= budget or not self._make_way(request):
                return
            self._waiting.take(request, now)
            self._decode_rows = None
            self._requests.append(request)
            self._tally.num_found_tokens += self._tables.share_prefix(request)
            self._tables.extend(request, self._tables.num_wanted(request))

    def hand_out(self, budget: int, now: float) -> Chunks:
        """Shares the token budget of a step, and gives the requests the pages for it, preempting where they run out."""
        chunks = self._advance_decode_batch() if len(self) <= budget else None
        return self._split_budget(budget, now) if chunks is None else chunks

    def _advance_decode_batch(self) -> Chunks | None:
        """Returns the next token of each where all decode and are the same as in the step before, if there is room."""
        if self._decode_rows is None:
            return None
        requests, page_size, windowed = self._decode_rows.requests, self._tables.page_size, self._tables.windowed
        starts = [request.num_computed for request in requests]
        for row in [row for row, start in enumerate(starts) if start % page_size == 0]:  # others are amid a page
            if windowed.is_endless:
                windowed.evict_behind_window(requests[row])
            num_missing = self._tables.num_missing(requests[row], 1)
            if num_missing > self._tables.pages.num_available:
                return None
            self._tables.extend(requests[row], num_missing)
            if windowed.is_endless:
                windowed.rotate_sinks(requests[row])
        for tenant, count in self._decode_rows.tenants.items():
            self._waiting.charge(tenant, count)
        return Chunks(self._decode_rows, starts, [1] * len(starts))

    def _split_budget(self, budget: int, now: float) -> Chunks:
        requests: list[Request] = []
        starts: list[int] = []
        lens: list[int] = []
        are_decoding = True
        for request in step_order(self._requests):
            if not request.pages:  # preempted for one before it
                continue
            num_tokens = request.num_uncomputed
            if num_tokens > 1:
                are_decoding = False
                self._tally.num_found_tokens += self._tables.share_prefix(request)
                num_tokens = min(request.num_uncomputed, self._tables.windowed.max_uniform_chunk(request))
            start, num_tokens = request.num_computed, min(num_tokens, budget)
            if num_tokens == 0 or not self._make_room(request, num_tokens, requests):
                continue
            requests.append(request)
            starts.append(start)
            lens.append(num_tokens)
            budget -= num_tokens
            if request.first_step is None:
                request.first_step = now
            if num_tokens > 1 or start < request.num_prompt_tokens:
                self._tally.num_prefill_tokens += num_tokens
            self._waiting.charge(request.tenant, num_tokens)
        rows = Rows(requests)
        self._decode_rows = rows if are_decoding and len(requests) == len(self._requests) else None
        return Chunks(rows, starts, lens)

    def advance(self, chunks: Chunks) -> list[Request]:
        """Enters that chunks are in the cache for whatever is computed later: their step is launched.

        Returns the requests that draw their last token in it. They have left: steps run one after another, so what the
        next one does with their pages comes after this one has read them.
        """
        leaving: list[Request] = []
        rows, page_size = chunks.rows, self._tables.page_size
        # A page is full, or the token after it is there, from which on one behind a window is not seen.
        num_after = int(self._tables.windowed.has_window)
        for request, epoch, start, count in zip(rows.requests, rows.epochs, chunks.starts, chunks.lens, strict=True):
            if request.epoch != epoch:  # it has ended or was set back
                continue
            end = start + count
            if end % page_size < count + num_after:
                self._tables.advance(request, end)
            request.num_computed = end
            if end == len(request.token_ids):
                request.num_pending = 1
                if end + 1 >= request.max_len:
                    leaving.append(request)
        for request in leaving:
            self.leave(request)
        return leaving

    def rewind(self, request: Request) -> None:
        """Enters that a request has fewer tokens than before."""
        self._decode_rows = None
        if not self._tables.rewind(request):
            self.preempt(request)

    def preempt(self, request: Request) -> None:
        """Lets a request wait again, without its pages."""
        self._decode_rows = None
        self._requests.remove(request)
        self._tables.swap_out(request)
        self._waiting.wait(request)
        self._tally.num_preemptions += 1
        for observer in self._observers:
            observer.preempted(request)

    def leave(self, request: Request) -> None:
        """Takes the row and the pages of a request that draws no more, if it has any."""
        if request in self._requests:
            self._decode_rows = None
            self._requests.remove(request)
        self._tables.release(request)

    def _make_way(self, request: Request) -> bool:
        """Whether the request can run, if need be in the place of batch work, which is preempted for it."""
        if self._has_room(request):
            return True
        victims = self._victims(request)
        if not victims or not self._has_room(request, victims):
            return False
        while not self._has_room(request):
            self.preempt(victims.pop())
        return True

    def _victims(self, request: Request) -> list[Request]:
        """Returns those who would give way to the request, the last of them first."""
        return [other for other in self._requests if other.is_preemptible] if request.priority == "interactive" else []

    def _has_room(self, request: Request, victims: Sequence[Request] = ()) -> bool:
        """Whether there are a row and pages for a waiting request, beside all who run but the victims."""
        staying = [other for other in self._requests if other not in victims] if victims else self._requests
        if len(staying) >= self._max_num_seqs:
            return False
        num_reserved = sum(map(self._tables.num_wanted, staying))
        return self._tables.can_hold(request, num_reserved, victims)

    def _make_room(self, request: Request, num_tokens: int, scheduled: Sequence[Request]) -> bool:
        """Gives the request its pages, preempting from the end of the line; False if it was preempted itself."""
        windowed = self._tables.windowed
        if windowed.is_endless:
            windowed.evict_behind_window(request)
        num_missing = self._tables.num_missing(request, num_tokens)
        while num_missing > self._tables.pages.num_available:
            line = sorted(self._requests, key=lambda other: other.is_preemptible)
            victim = next((other for other in reversed(line) if other not in scheduled), request)
            self.preempt(victim)
            if victim is request:
                return False
        if num_missing > 0:  # nearly never, for one who decodes
            self._tables.extend(request, num_missing)
        if windowed.is_endless:
            windowed.rotate_sinks(request)
        return True
