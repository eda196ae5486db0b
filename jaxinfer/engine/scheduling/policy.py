"""Who is served first: one ordering of waiting requests, and one of running ones.

Nothing starves: a lane (a tenant's requests of one priority) that had no turn for PATIENCE seconds counts as
interactive once; among equals the tenant that was served least has the next turn, and within a lane nobody is
overtaken by who came more than PATIENCE seconds later. The rest is arithmetic on these three lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from jaxinfer.engine.request.request import Request

PATIENCE = 30.0  # seconds


def due(request: Request) -> float:
    """Returns when a request wants its turn at the latest: the order within a lane."""
    return min(request.deadline, request.arrival + PATIENCE)


def rank(request: Request, *, now: float, last_turn: float, served: float) -> tuple[bool, float, float]:
    """Returns the place of the first request of a lane; the smallest goes first.

    `last_turn`: when the lane had one. `served`: tokens computed for the tenant (virtual token counters, Sheng et al.
    2024, with one price for all tokens).
    """
    has_waited = now - max(request.arrival, last_turn) >= PATIENCE
    return (request.priority == "batch" and not has_waited, served, due(request))


def step_order(requests: Iterable[Request]) -> list[Request]:
    """Returns requests in the order in which they have a part of a step's token budget; else it stays as it is.

    Who decodes comes first: a long prompt must not hold up those who wait for their next token.
    """
    groups: tuple[list[Request], ...] = ([], [], [], [])
    for request in requests:
        groups[2 * (request.num_uncomputed > 1) + request.is_preemptible].append(request)
    return list(chain.from_iterable(groups))
