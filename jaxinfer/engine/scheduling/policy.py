"""The scheduling policy: one ordering of waiting requests, and one of running ones.

A lane is a tenant's requests of one priority. Three rules keep every request from starving:

1. A batch lane without a turn for PATIENCE seconds counts as interactive for one turn.
2. Among lanes of equal priority, the tenant with the fewest tokens computed has the next turn.
3. Within a lane, no request is overtaken by one that arrived more than PATIENCE seconds later.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from jaxinfer.engine.request.request import Request

PATIENCE = 30.0  # seconds


def due(request: Request) -> float:
    """Returns the latest time at which a request should have its turn, by which its lane is sorted."""
    return min(request.deadline, request.arrival + PATIENCE)


def rank(request: Request, *, now: float, last_turn: float, served: float) -> tuple[bool, float, float]:
    """Returns the sort key of the first request of a lane; the smallest key goes first.

    `last_turn`: time of the lane's last turn. `served`: tokens computed for the tenant (virtual token counters, Sheng
    et al. 2024, with one price for all tokens).
    """
    has_waited = now - max(request.arrival, last_turn) >= PATIENCE
    return (request.priority == "batch" and not has_waited, served, due(request))


def step_order(requests: Iterable[Request]) -> list[Request]:
    """Returns requests in the order in which they take a part of a step's token budget.

    Decoding requests come first, so that a long prompt does not delay their tokens; then interactive before batch. Ties
    keep their order.
    """
    groups: tuple[list[Request], ...] = ([], [], [], [])
    for request in requests:
        groups[2 * (request.num_uncomputed > 1) + request.is_preemptible].append(request)
    return list(chain.from_iterable(groups))
