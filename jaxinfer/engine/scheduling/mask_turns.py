"""Turns of requests whose grammar masks take long: the host computes the masks of a step one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import chain, zip_longest

from jaxinfer.engine.request.request import Request

# Processor time of all masks in a step. Most take less than a millisecond, those of some patterns 40.
MAX_SECONDS = 0.1


def waiting_for_masks(requests: Sequence[Request], seconds: float) -> Collection[Request]:
    """Returns the requests that take no part in a step, if its masks would take `seconds`, more than MAX_SECONDS.

    A request is heavy if its last mask took more than its part of that. Heavy requests take turns, and so do their
    tenants; at least one has a turn. If all requests are heavy and of one tenant, none waits: they hold up no other.
    """
    heavy = [request for request in requests if request.mask_seconds > MAX_SECONDS / len(requests)]
    if len(heavy) == len(requests) and len({request.tenant for request in requests}) == 1:
        return ()
    left = MAX_SECONDS - (seconds - sum(request.mask_seconds for request in heavy))
    waiting = dict.fromkeys(heavy)
    for number, request in enumerate(_in_turn(heavy)):
        left -= request.mask_seconds
        if number and left < 0:
            break
        del waiting[request]
    return waiting.keys()


def _in_turn(requests: Sequence[Request]) -> list[Request]:
    """Returns one request of each tenant, then a second one of each and so on, those first that have waited longest."""
    by_tenant = defaultdict[str, list[Request]](list)
    for request in sorted(requests, key=lambda request: request.mask_step):
        by_tenant[request.tenant].append(request)
    lanes = sorted(by_tenant.values(), key=lambda lane: lane[-1].mask_step)
    return [request for request in chain.from_iterable(zip_longest(*lanes)) if request is not None]
