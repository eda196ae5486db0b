"""The waiting queue, with one lane per tenant and priority, the tokens served to each tenant, and deadlines."""

from __future__ import annotations

import heapq
import math
from collections import Counter

from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.policy import due, rank

Lane = tuple[str, str]  # tenant, priority


class WaitingQueue:
    """Finds the waiting request that is first by the policy, in time linear in the lanes, not in the requests."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, list[tuple[float, int, Request]]] = {}  # heaps by due time, then order of arrival
        self._last_turns: dict[Lane, float] = {}
        self._served: dict[str, float] = {}  # tokens computed per tenant; only tenants with unfinished requests
        self._num_unfinished: Counter[str] = Counter()

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
        heapq.heappush(self._lanes.setdefault(lane, []), (due(request), request.order, request))

    def leave(self, request: Request) -> None:
        """Forgets a request that ended, waiting or running; the count of a tenant without requests is dropped."""
        tenant = request.tenant
        self._num_unfinished[tenant] -= 1
        if self._num_unfinished[tenant] == 0:
            del self._num_unfinished[tenant], self._served[tenant]
            for lane in [lane for lane in self._lanes if lane[0] == tenant]:
                self._lanes.pop(lane)
                self._last_turns.pop(lane, None)

    def charge(self, tenant: str, num_tokens: int) -> None:
        self._served[tenant] += num_tokens

    def first(self, now: float) -> Request | None:
        """Returns the first request by the policy, or None, and sets its `is_preemptible`."""
        best: tuple[tuple[bool, float, float], int, Request] | None = None
        for lane, heap in self._lanes.items():
            while heap and heap[0][2].finish_reason is not None:  # ended while it waited
                heapq.heappop(heap)
            if not heap:
                continue
            _, order, request = heap[0]
            last_turn = self._last_turns.get(lane, -math.inf)
            place = rank(request, now=now, last_turn=last_turn, served=self._served[lane[0]])
            if best is None or (place, order) < best[:2]:
                best = (place, order, request)
        if best is None:
            return None
        best[2].is_preemptible = best[0][0]
        return best[2]

    def take(self, request: Request, now: float) -> None:
        """Removes the request that `first` has returned."""
        lane = (request.tenant, request.priority)
        heapq.heappop(self._lanes[lane])
        self._last_turns[lane] = now


class Deadlines:
    """Finds requests whose deadline has passed. Holds ids only, so that ended requests can be freed."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def enter(self, request: Request) -> None:
        if request.deadline < math.inf:
            heapq.heappush(self._heap, (request.deadline, request.request_id))

    def passed(self, now: float) -> list[int]:
        """Returns the ids of the requests, ended or not, whose deadline has passed since the last call."""
        ids = []
        while self._heap and self._heap[0][0] <= now:
            ids.append(heapq.heappop(self._heap)[1])
        return ids
