"""The hand-over of prefilled requests to replicas that decode, from those that prefill (DistServe, Zhong et al. 2024).

waiting ──► prefill replica ──first token──► prefilled ──room──► decode replica: arriving ──checked──► decoding
   ▲             its pages stay here until a decode replica has a row and pages for it             │        │
   └──────────────────────────── damaged on the way, or preempted ─────────────────────────────────┴────────┘

A request has a row and pages in one replica at a time, so that it can end at any moment like any other request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from jaxinfer.engine.request.request import Request
    from jaxinfer.engine.scheduling.replica import Replica


class Arrival(Protocol):
    """The contents of a request's pages on their way to a replica."""

    @property
    def is_done(self) -> bool:
        """True if `is_intact` need not wait."""
        ...

    def is_intact(self) -> bool:
        """Waits for the contents; returns True if their checksum is that of the contents sent."""
        ...


class PageMover(Protocol):
    """Copies contents of pages between replicas; `engine.page_mover.DevicePageMover` is one."""

    def move(self, source: Replica, target: Replica, pages: Sequence[Sequence[tuple[int, int]]]) -> Arrival:
        """Launches the copies, before all later steps of both replicas.

        `pages`: (page of the source, page of the target) pairs of each kind.
        """
        ...


def hand_over_all(
    sources: Sequence[Replica], targets: Sequence[Replica], mover: PageMover, *, scheduled: Replica
) -> int:
    """Moves prefilled requests to the replicas that decode, while these have rows and pages; returns their number.

    Interactive requests go first, then those that arrived first. If there is no room for the next one, it waits with
    those behind it, and keeps its row and pages where it was prefilled. `scheduled`: the replica whose step comes next,
    the only one where an interactive request may preempt batch work, since steps of others are under way.
    """
    ready = [(request, source) for source in sources for request in source.running.prefilled]
    # While the host does not know its token, the step that samples it may still end the request.
    ready = [(request, source) for request, source in ready if not request.num_pending]
    ready.sort(key=lambda pair: (pair[0].is_preemptible, pair[0].order))
    for count, (request, source) in enumerate(ready):
        target = choose_decode_replica(request, targets, scheduled)
        if target is None:
            return count
        hand_over(request, source, target, mover)
    return len(ready)


def choose_decode_replica(request: Request, replicas: Sequence[Replica], scheduled: Replica) -> Replica | None:
    """Returns the replica with the fewest requests that has room for a prefilled one, None if none has.

    An interactive request preempts batch work at `scheduled` if necessary.
    """
    by_load = sorted(replicas, key=lambda replica: (len(replica.running), -replica.tables.pages.num_available))
    for replica in by_load:
        if replica.running.has_room(request):
            return replica
    return scheduled if scheduled in replicas and scheduled.running.make_way(request) else None


def hand_over(request: Request, source: Replica, target: Replica, mover: PageMover) -> None:
    """Moves a request with the contents of its pages; changes nothing if the copies cannot be launched."""
    new = target.tables.allocate_like(request)
    try:
        owned = request.table.owned_pages
        pairs = [list(zip(*pages, strict=True)) for pages in zip(owned, new, strict=True)]
        arrival = mover.move(source, target, pairs)
    except BaseException:
        target.tables.give_back(new)
        raise
    source.running.hand_over(request)
    source.tables.move_to(request, new)
    target.running.take_over(request, arrival)
