"""The running queue: admits requests with a row and pages, and preempts requests if rows or pages run out."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from typing import overload

from jaxinfer.engine.kv_cache.block_tables import BlockTables
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.hand_over import Arrival
from jaxinfer.engine.scheduling.mask_turns import MAX_SECONDS, waiting_for_masks
from jaxinfer.engine.scheduling.metrics import Observer, Tally
from jaxinfer.engine.scheduling.policy import step_order
from jaxinfer.engine.scheduling.step import Chunks, Rows
from jaxinfer.engine.scheduling.waiting import WaitingQueue

logger = logging.getLogger(__name__)


class RunningQueue(Sequence[Request]):
    """At most `max_num_seqs` requests in the order of admission. They have pages, requests in `waiting` have none.

    Counts its events in `tally` and reports preemptions to the `observers`. `index` is that of its replica.

    If it `hands_over`, a request that has sampled a token waits in `prefilled` for a replica that decodes. There it has
    a row and pages at once, and is in `arriving` until its pages are.
    """

    def __init__(
        self,
        max_num_seqs: int,
        *,
        tables: BlockTables,
        waiting: WaitingQueue,
        tally: Tally,
        observers: Sequence[Observer],
        index: int = 0,
        hands_over: bool = False,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.num_scheduled = 0  # steps
        self.hands_over = hands_over
        self.prefilled: dict[Request, None] = {}  # in the order of their tokens; a step may still sample the last one's
        self.arriving: dict[Request, Arrival] = {}
        self._index = index
        self._tables = tables
        self._waiting = waiting
        self._tally = tally
        self._observers = observers
        self._requests: list[Request] = []
        # All running requests, if all decode. Reset to None if a request is admitted, leaves, or is rewound.
        self._decode_rows: Rows | None = None

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

    @property
    def advancing(self) -> Sequence[Request]:
        """Returns the requests that take part in the next step."""
        if not self.prefilled and not self.arriving:
            return self._requests
        return [other for other in self._requests if other not in self.prefilled and other not in self.arriving]

    def can_take(self, request: Request, budget: int) -> bool:
        """True if a step's token budget lasts for the request, and there is a row for it; preempts nothing."""
        if len(self) >= self.max_num_seqs and not self._victims(request):
            return False  # the usual case if many wait, and cheap: it does not sum over the running requests
        return self.num_ahead(request) < budget

    def num_ahead(self, request: Request) -> int:
        """Returns the tokens that running requests want before the request has a part of a step's budget.

        Uncomputed tokens of batch work do not count against an interactive request.
        """
        return sum(other.num_uncomputed for other in self.advancing if other.is_preemptible <= request.is_preemptible)

    def num_found(self, request: Request) -> int:
        """Returns the first tokens of a request whose pages are in the pool, or will be once running prompts are."""
        keys, page_size = request.keys, self._tables.page_size
        if keys is None:
            return 0
        token_ids, most = request.token_ids, request.max_skipped // page_size
        count = 0
        while count < most and self._tables.pages.find(keys.key(count, token_ids)) is not None:
            count += 1
        for other in self._requests:
            if other.num_uncomputed > 1 and other.keys is not None:
                last = min(most, len(other.token_ids) // page_size)
                while count < last and other.keys.key(count, other.token_ids) == keys.key(count, token_ids):
                    count += 1
        return count * page_size

    def begin(self, request: Request) -> None:
        """Gives a request, which is no longer in `waiting`, a row and pages for all its tokens so far.

        Requests with a sliding window get at most the pages of one window.
        """
        if (origin := request.table.origin) is not None and origin.replica != self._index:
            request.table.origin = None  # its pages are in another pool
        request.replica = self._index
        self._decode_rows = None
        self._requests.append(request)
        self._tally.num_found_tokens += self._tables.begin(request)

    def take_over(self, request: Request, arrival: Arrival) -> None:
        """Gives a request that has its pages here, whose contents are on their way, a row."""
        request.replica = self._index
        self._decode_rows = None
        self._requests.append(request)
        self.arriving[request] = arrival

    def hand_over(self, request: Request) -> None:
        """Takes the row of a prefilled request, which goes on elsewhere."""
        del self.prefilled[request]
        self._requests.remove(request)

    def receive(self) -> None:
        """Lets the requests go on whose pages have arrived."""
        for request in [request for request, arrival in self.arriving.items() if arrival.is_done]:
            self.wait_for(request)

    def wait_for(self, request: Request) -> None:
        """Waits for the pages of a request if they are on their way; damaged ones send it back to be prefilled."""
        if (arrival := self.arriving.get(request)) is None:
            return
        if not arrival.is_intact():
            self._tally.num_damaged_hand_overs += 1
            logger.error("the pages of a request arrived damaged at replica %d; it is prefilled again", self._index)
            self.preempt(request)
            return
        del self.arriving[request]
        self._decode_rows = None
        self._tables.record(request, 0, request.num_known)

    def hand_out(self, budget: int, now: float, num_reserved: int = 0) -> Chunks:
        """Splits the token budget of a step and allocates the pages for it; preempts requests if pages run out.

        If some request decodes, those that prefill leave `num_reserved` tokens for drafts, but get half of the tokens
        that decoding requests leave, or more.
        """
        # Here, so that a step without long masks, as most are, asks nothing further.
        mask_seconds = sum([request.mask_seconds for request in self.advancing])
        waiting = waiting_for_masks(self.advancing, mask_seconds) if mask_seconds > MAX_SECONDS else ()
        chunks = self._advance_decode_batch() if len(self) <= budget and not waiting else None
        if chunks is None:
            chunks = self._split_budget(budget, now, num_reserved, waiting)
        if waiting:
            for request in chunks.requests:
                request.mask_step = self.num_scheduled + 1
        return chunks

    def _advance_decode_batch(self) -> Chunks | None:
        """Returns one token per request if all decode, as in the last step, and free pages suffice; else None."""
        if self._decode_rows is None:
            return None
        requests, page_size = self._decode_rows.requests, self._tables.page_size
        starts = [request.num_computed for request in requests]
        for row in [row for row, start in enumerate(starts) if start % page_size == 0]:  # others need no page
            if not self._tables.reserve(requests[row], 1):
                return None
        for tenant, count in self._decode_rows.tenants.items():
            self._waiting.charge(tenant, count)
        return Chunks(self._decode_rows, starts, [1] * len(starts))

    def _split_budget(self, budget: int, now: float, num_reserved: int, waiting: Collection[Request]) -> Chunks:
        requests: list[Request] = []
        starts: list[int] = []
        lens: list[int] = []
        are_decoding = True
        for request in step_order(self.advancing):
            if not request.table.pages:  # preempted for an earlier request of this loop
                continue
            if request in waiting:
                continue
            num_tokens = request.num_uncomputed
            if num_tokens > 1:
                if are_decoding and requests:  # the first after all decoding requests
                    budget -= min(num_reserved, budget // 2)
                are_decoding = False
                self._tally.num_found_tokens += self._tables.share(request)
                num_tokens = min(request.num_uncomputed, self._tables.max_chunk(request))
            start, num_tokens = request.num_computed, min(num_tokens, budget)
            if num_tokens == 0 or not self._make_room(request, num_tokens, requests):
                continue
            requests.append(request)
            starts.append(start)
            lens.append(num_tokens)
            budget -= num_tokens
            if request.record.first_step is None:
                request.record.first_step = now
            if num_tokens > 1 or start < request.num_prompt_tokens:
                self._tally.num_prefill_tokens += num_tokens
            self._waiting.charge(request.tenant, num_tokens)
        rows = Rows(requests)
        self._decode_rows = rows if are_decoding and len(requests) == len(self._requests) else None
        return Chunks(rows, starts, lens)

    def advance(self, chunks: Chunks) -> list[Request]:
        """Marks the chunks of a launched step as computed: later steps find them in the cache.

        Returns the requests that sample their last token in this step, which leave the queue. Their pages can be reused
        at once: steps run in order, so the next step writes them after this step has read them.
        """
        leaving: list[Request] = []
        rows, page_size = chunks.rows, self._tables.page_size
        # `BlockTables.record` is due when a page fills up. With a window it is also due at the first token of a page,
        # which no longer sees a page behind the window.
        num_after = int(self._tables.frees_pages)
        columns = rows.requests, rows.epochs, chunks.starts, chunks.lens, chunks.max_new_tokens
        for request, epoch, start, count, num_new in zip(*columns, strict=True):
            if request.epoch != epoch:  # the request has ended or was rewound
                continue
            end = start + count
            request.num_computed = end
            if end % page_size < count + num_after:
                self._tables.record(request, start, end)
            if end == len(request.token_ids):
                request.num_pending = num_new
                request.num_computed = end + num_new - 1  # a loop feeds its tokens back, all but the last
                if end + num_new >= request.max_len:
                    leaving.append(request)
                elif self.hands_over:
                    self._decode_rows = None
                    self.prefilled[request] = None
        for request in leaving:
            self.leave(request)
        return leaving

    def rewind(self, request: Request) -> None:
        """Frees the pages past the tokens of a shortened request; preempts the request if that is not possible."""
        self._decode_rows = None
        if not self._tables.rewind(request):
            self.preempt(request)

    def restart(self, request: Request) -> None:
        """Takes the pages of a request whose last page has an unknown content, and moves it to the waiting queue."""
        self._tables.release(request)
        self.preempt(request)

    def preempt(self, request: Request) -> None:
        """Moves a request back to the waiting queue and takes its pages."""
        self._decode_rows = None
        self._requests.remove(request)
        self.prefilled.pop(request, None)
        if self.arriving.pop(request, None) is not None:  # its pages may have other contents than their keys say
            self._tables.release(request)
        self._tables.swap_out(request)
        self.requeue(request)
        self._tally.num_preemptions += 1
        for observer in self._observers:
            observer.preempted(request)

    def requeue(self, request: Request) -> None:
        """Moves a request without row and pages back to the waiting queue; launched steps may contain it."""
        request.left_after = self.num_scheduled
        self._waiting.wait(request)

    def preempt_all(self) -> None:
        """Moves all requests back to the waiting queue and takes their pages."""
        for request in tuple(self._requests):
            self.preempt(request)

    def leave(self, request: Request) -> None:
        """Takes the row and pages, if any, of a request that samples no more tokens."""
        if request in self._requests:
            self._decode_rows = None
            self._requests.remove(request)
            self.prefilled.pop(request, None)
            self.arriving.pop(request, None)
        self._tables.release(request)

    def make_way(self, request: Request) -> bool:
        """True if the request can run now; preempts batch work for an interactive request if necessary."""
        if self.has_room(request):
            return True
        victims = self._victims(request)
        if not victims or not self.has_room(request, victims):
            return False
        while not self.has_room(request):
            self.preempt(victims.pop())
        return True

    def _victims(self, request: Request) -> list[Request]:
        """Returns the requests that may be preempted for `request`; preempt from the end, the latest admitted first."""
        return [other for other in self._requests if other.is_preemptible] if request.priority == "interactive" else []

    def has_room(self, request: Request, victims: Sequence[Request] = ()) -> bool:
        """True if a row and pages are left for a waiting request, beside all running requests but the victims."""
        staying = [other for other in self._requests if other not in victims] if victims else self._requests
        if len(staying) >= self.max_num_seqs:
            return False
        num_reserved = sum(map(self._tables.num_wanted, staying))
        return self._tables.can_hold(request, num_reserved, victims)

    def _make_room(self, request: Request, num_tokens: int, scheduled: Sequence[Request]) -> bool:
        """Gives the request its pages; returns False if the request itself had to be preempted.

        Preempts batch work first, the latest admitted first. Never preempts a request in `scheduled`, which already has
        its part of this step.
        """
        while not self._tables.reserve(request, num_tokens):
            line = sorted(self._requests, key=lambda other: other.is_preemptible)
            victim = next((other for other in reversed(line) if other not in scheduled), request)
            self.preempt(victim)
            if victim is request:
                return False
        return True
