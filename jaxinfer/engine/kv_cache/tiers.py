"""Where pages go that the pool has no room for: memory of the host, then a disk; free of jax.

    pool ──evicted──► host ──least recently used──► disk ──least recently used──► gone
      ◄────found─────   ◄───────────found──────────

A tier knows contents by the keys of the prefix cache. Preemption by swap is this and nothing else: the full pages of
the request that gave way are evicted when somebody needs them, and found when it comes back. Its last page, partly
filled, goes out at once, under the key of the tokens that are in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxinfer.engine.kv_cache.page_transfers import Content


@dataclass(frozen=True, kw_only=True)
class TierMetrics:
    """One tier of the prefix cache at one moment: what it holds, and what it has done since the start."""

    name: str
    num_pages: int
    num_bytes: int
    num_stored: int
    num_hits: int
    num_dropped: int  # for want of room, whether the next tier took them or not
    num_lost: int  # could not be written, or not be read as they were written


class Tier(Protocol):
    """Keeps contents by key, within bytes. What it cannot do is a miss, never an exception."""

    @property
    def seconds_per_page(self) -> float:
        """What it takes to give a page, at best."""
        ...

    def touch(self, key: bytes) -> bool:
        """Returns whether it has this content, which counts as a use of it."""
        ...

    def get(self, key: bytes) -> Content | None: ...

    def put(self, key: bytes, content: Content) -> list[tuple[bytes, Content]]:
        """Takes a content that it does not have and returns those that had to go for it and can be kept elsewhere."""
        ...

    def metrics(self) -> TierMetrics: ...


class PageTiers:
    """Several tiers as one, fastest first, and whether a copy pays, against computing the same tokens again.

    Prices are the best ever seen, so that a pause of the process does not pass for the price of a copy.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tuple(tiers)
        self.seconds_per_copy = 0.0  # of a page out of the pool and in again
        self._seconds_per_token = math.inf  # of prefill; until it is known every copy pays

    def wants(self, key: bytes, num_tokens: int) -> bool:
        """Whether a page of so many tokens is to be copied out."""
        return not self.has(key) and self._pays(self._tiers[0], num_tokens)

    def has(self, key: bytes) -> bool:
        """Returns whether a page is in some tier, which counts as a use of it."""
        return any(tier.touch(key) for tier in self._tiers)

    def get(self, key: bytes, num_tokens: int) -> Content | None:
        """Returns the page that saves computing `num_tokens` tokens, if it is here and pays."""
        for tier in self._tiers:
            content = tier.get(key) if self._pays(tier, num_tokens) and tier.touch(key) else None
            if content is not None:
                self.put(key, content)  # nearer from now on
                return content
        return None

    def put(self, key: bytes, content: Content) -> None:
        """Takes a page. What the first tier has no room for goes to the next."""
        moving = [(key, content)]
        for tier in self._tiers:
            moving = [gone for pair in moving if not tier.touch(pair[0]) for gone in tier.put(*pair)]

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Learns what computing a token costs."""
        self._seconds_per_token = min(self._seconds_per_token, seconds / num_tokens)

    def metrics(self) -> tuple[TierMetrics, ...]:
        return tuple(tier.metrics() for tier in self._tiers)

    def _pays(self, tier: Tier, num_tokens: int) -> bool:
        return self.seconds_per_copy + tier.seconds_per_page <= num_tokens * self._seconds_per_token
