"""Which of its tokens a request sees, by definition."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.engine.page_window import PageWindow, endless_window, page_window
from jaxinfer.engine.request import Request


class Endless(NamedTuple):
    """How many slots there are for what a request sees, and for its sinks; a page goes where they are full."""

    num_sinks: int
    num_seen: int
    page_size: int


# How many tokens a model sees, or what an endless request does; None for all.
Sight = int | Endless | None


def seen(request: Request, position: int, sight: Sight) -> Sequence[int]:
    """Which tokens a request sees when it draws the one at a position."""
    if sight is None or request.sampling.reads_context:
        return range(position)
    if isinstance(sight, Endless):
        return seen_before(2 ** max(position.bit_length(), 7), *sight)[position - 1] if position else ()
    return range(max(position - sight, 0), position)


@functools.cache
def seen_before(num_tokens: int, num_sinks: int, num_seen: int, page_size: int) -> list[list[int]]:
    """Which tokens each token of an endless request sees, itself included: what is in its cache then."""
    cache, seen = [], []
    for token in range(num_tokens):
        if len(cache) == num_seen:
            del cache[num_sinks : num_sinks + page_size]
        cache.append(token)
        seen.append(list(cache))
    return seen


def window_of(sight: Sight, page_size: int, budget: int) -> PageWindow | None:
    """What a scheduler is told whose steps have so many tokens."""
    if isinstance(sight, Endless):
        return endless_window(sight.num_seen, sight.num_sinks, page_size)
    return None if sight is None else page_window(sight, page_size, budget)
