"""The waiting queue, with one lane per tenant and priority, and the tokens served to each tenant."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict

from jaxinfer.engine.request.request import Priority, Request
from jaxinfer.engine.scheduling.policy import due, rank

Lane = tuple[str, str]  # tenant, priority


class RequestHeap:
    """A priority queue of requests that gives up any of them: the least number first, then the order of arrival.

    A removed request leaves an entry in the heap. The heap is built anew when most of its entries are such, so that it
    never has more than twice the requests' number, and a removal takes O(log n) on average.
    """

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}  # by order of arrival
        self._entries: list[tuple[float, int]] = []  # a heap, whose first entry is never that of a removed request

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def first(self) -> Request | None:
        return self._requests[self._entries[0][1]] if self._entries else None

    def push(self, number: float, request: Request) -> None:
        self._requests[request.order] = request
        heapq.heappush(self._entries, (number, request.order))

    def remove(self, request: Request) -> None:
        """Removes a request if it is there."""
        if self._requests.pop(request.order, None) is None:
            return
        if len(self._entries) > 2 * len(self._requests):
            self._entries = [entry for entry in self._entries if entry[1] in self._requests]
            heapq.heapify(self._entries)
        while self._entries and self._entries[0][1] not in self._requests:
            heapq.heappop(self._entries)


class WaitingQueue:
    """Finds the waiting request that is first by the policy, in time linear in the lanes, not in the requests."""

    def __init__(self) -> None:
        self._lanes: defaultdict[Lane, RequestHeap] = defaultdict(RequestHeap)  # by due time
        self._last_turns: dict[Lane, float] = {}
        self._served: dict[str, float] = {}  # tokens computed per tenant; only tenants with unfinished requests
        self._num_unfinished: Counter[str] = Counter()
        self.held: dict[Request, None] = {}  # in no lane, in the order of arrival

    def enter(self, request: Request) -> None:
        """Counts a new request for its tenant and queues it."""
        if self._num_unfinished[request.tenant] == 0:
            # A tenant gains no credit while it has no requests: it starts with the least served tenant's count.
            self._served[request.tenant] = min(self._served.values(), default=0.0)
        self._num_unfinished[request.tenant] += 1
        self.wait(request)

    def wait(self, request: Request) -> None:
        """Queues a request; a preempted one returns to its old place, since its due time is unchanged."""
        lane = (request.tenant, request.priority)
        self.held.pop(request, None)
        self._lanes[lane].push(due(request), request)

    def hold(self, request: Request) -> None:
        """Takes a request out of its lane until `wait` returns it to its place; it still counts for its tenant."""
        self._lanes[request.tenant, request.priority].remove(request)
        self.held[request] = None

    def leave(self, request: Request) -> None:
        """Forgets a request that ended, waiting or running; the count of a tenant without requests is dropped."""
        tenant = request.tenant
        self._lanes[tenant, request.priority].remove(request)
        self.held.pop(request, None)
        self._num_unfinished[tenant] -= 1
        if self._num_unfinished[tenant] == 0:
            del self._num_unfinished[tenant], self._served[tenant]
            for lane in [lane for lane in self._lanes if lane[0] == tenant]:
                self._lanes.pop(lane)
                self._last_turns.pop(lane, None)

    def room_in_full_queue(self, tenant: str, priority: Priority, max_waiting: int) -> int:
        """Returns the number of requests that a tenant may queue although others fill the queue.

        Its share is `max_waiting` in equal parts, at least one: a part for each tenant that waits, itself included.
        Batch requests of all tenants together have one part beside interactive ones, and those of its own do not count
        against the interactive ones.
        """
        counts = Counter({lane: len(heap) for lane, heap in self._lanes.items() if len(heap)})
        counts.update((request.tenant, request.priority) for request in self.held)
        if priority == "interactive":
            others = {name if kind == "interactive" else None for name, kind in counts} - {tenant}
            num_own = counts.get((tenant, "interactive"), 0)
        else:
            others = {name for name, _ in counts} - {tenant}
            num_own = sum(count for (name, _), count in counts.items() if name == tenant)
        return max(max_waiting // (1 + len(others)), 1) - num_own

    def charge(self, tenant: str, num_tokens: int) -> None:
        self._served[tenant] += num_tokens

    def first(self, now: float) -> Request | None:
        """Returns the first request by the policy, or None, and sets its `is_preemptible`."""
        best: tuple[tuple[bool, float, float], int, Request] | None = None
        for lane, heap in self._lanes.items():
            if (request := heap.first) is None:
                continue
            last_turn = self._last_turns.get(lane, -math.inf)
            place = rank(request, now=now, last_turn=last_turn, served=self._served[lane[0]])
            if best is None or (place, request.order) < best[:2]:
                best = (place, request.order, request)
        if best is None:
            return None
        best[2].is_preemptible = best[0][0]
        return best[2]

    def take(self, request: Request, now: float) -> None:
        """Removes the request that `first` has returned."""
        lane = (request.tenant, request.priority)
        self._lanes[lane].remove(request)
        self._last_turns[lane] = now
