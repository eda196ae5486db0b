"""Which of its tokens a request sees, by definition."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.engine.kv_cache.attention_window import AttentionWindow, endless_window, sliding_attention_window
from jaxinfer.engine.request.request import Request


class Endless(NamedTuple):
    """How many slots there are for what a request sees, and for its sinks; a page goes where they are full."""

    num_sinks: int
    num_seen: int
    page_size: int


# How many tokens a model sees, or what an endless request does; None for all.
Sight = int | Endless | None


def seen(request: Request, position: int, windowed: Sight) -> Sequence[int]:
    """Which tokens a request sees when it draws the one at a position."""
    if windowed is None or request.sampling.reads_context:
        return range(position)
    if isinstance(windowed, Endless):
        return seen_before(2 ** max(position.bit_length(), 7), *windowed)[position - 1] if position else ()
    return range(max(position - windowed, 0), position)


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


def window_of(windowed: Sight, page_size: int, budget: int) -> AttentionWindow | None:
    """What a scheduler is told whose steps have so many tokens."""
    if isinstance(windowed, Endless):
        return endless_window(windowed.num_seen, windowed.num_sinks, page_size)
    return None if windowed is None else sliding_attention_window(windowed, page_size, budget)
