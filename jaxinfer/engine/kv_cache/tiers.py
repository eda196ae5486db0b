"""Tiers for pages evicted from the pool: host memory (here), then a disk (disk_tier.py); free of jax.

    pool ──evicted──► host ──least recently used──► disk ──least recently used──► gone
      ◄────found─────   ◄───────────found──────────

A tier stores contents by the keys of the prefix cache. Preemption by swap needs no other mechanism: the full pages of
a preempted request are evicted when other requests need them, and found when it resumes. Its partly filled last page
is swapped out at once, under the key of the tokens in it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from jaxinfer.engine.kv_cache.page_transfers import Content


@dataclass(frozen=True, kw_only=True)
class TierMetrics:
    """A snapshot of one tier of the prefix cache: its current size and its counters since the start."""

    name: str
    num_pages: int
    num_bytes: int
    num_stored: int
    num_hits: int
    num_dropped: int  # for lack of room, even if the next tier took them
    num_lost: int  # could not be written or read, or had changed when read


class Tier(Protocol):
    """Stores contents by key, within a byte limit. A failure is a miss, never an exception."""

    @property
    def seconds_per_page(self) -> float:
        """The shortest time in which it returned a page, the copy into the pool not included."""
        ...

    def touch(self, key: bytes) -> bool:
        """True if it has this content; the call counts as a use of it."""
        ...

    def get(self, key: bytes) -> Content | None: ...

    def put(self, key: bytes, content: Content) -> list[tuple[bytes, Content]]:
        """Stores a content that it does not have; returns the evicted (key, content) pairs for the next tier."""
        ...

    def metrics(self) -> TierMetrics: ...


class HostTier:
    """Stores contents of up to `max_bytes` in host memory; evicts the least recently used one first."""

    seconds_per_page = 0.0  # returning a page is free; `PageTiers` counts the copy into the pool

    def __init__(self, max_bytes: int, size_of: Callable[[Content], int] = attrgetter("nbytes")) -> None:
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._num_bytes = 0
        self._contents: OrderedDict[bytes, Content] = OrderedDict()
        self._num_stored = self._num_hits = self._num_dropped = 0

    def touch(self, key: bytes) -> bool:
        if key not in self._contents:
            return False
        self._contents.move_to_end(key)
        return True

    def get(self, key: bytes) -> Content | None:
        content = self._contents.get(key)
        self._num_hits += content is not None
        return content

    def put(self, key: bytes, content: Content) -> list[tuple[bytes, Content]]:
        self._contents[key] = content
        self._num_bytes += self._size_of(content)
        self._num_stored += 1
        gone = []
        while self._num_bytes > self._max_bytes:
            gone.append(self._contents.popitem(last=False))
            self._num_bytes -= self._size_of(gone[-1][1])
        self._num_dropped += len(gone)
        return gone

    def metrics(self) -> TierMetrics:
        return TierMetrics(
            name="host",
            num_pages=len(self._contents),
            num_bytes=self._num_bytes,
            num_stored=self._num_stored,
            num_hits=self._num_hits,
            num_dropped=self._num_dropped,
            num_lost=0,
        )


class PageTiers:
    """Several tiers as one, fastest first. Copies a page only if that is faster than computing its tokens again.

    It compares the shortest times ever measured, so that a pause of the process does not look like a slow copy.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tuple(tiers)
        self.seconds_per_copy = 0.0  # to copy a page out of the pool and back
        self._seconds_per_token = math.inf  # of prefill; until a prefill is measured, every copy pays

    def wants(self, key: bytes, num_tokens: int) -> bool:
        """True if a page of `num_tokens` tokens should be swapped out: no tier has it and the copy pays."""
        return not self.has(key) and self._pays(self._tiers[0], num_tokens)

    def has(self, key: bytes) -> bool:
        """True if some tier has the page; the call counts as a use of it."""
        return any(tier.touch(key) for tier in self._tiers)

    def get(self, key: bytes, num_tokens: int) -> Content | None:
        """Returns the page if a tier has it and copying it is faster than computing `num_tokens` tokens."""
        for tier in self._tiers:
            content = tier.get(key) if self._pays(tier, num_tokens) and tier.touch(key) else None
            if content is not None:
                self.put(key, content)  # moves it to the first tier
                return content
        return None

    def put(self, key: bytes, content: Content) -> None:
        """Stores a page. Pages that a tier evicts for it go to the next tier."""
        moving = [(key, content)]
        for tier in self._tiers:
            moving = [gone for pair in moving if not tier.touch(pair[0]) for gone in tier.put(*pair)]

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Updates the shortest prefill time per token."""
        self._seconds_per_token = min(self._seconds_per_token, seconds / num_tokens)

    def metrics(self) -> tuple[TierMetrics, ...]:
        return tuple(tier.metrics() for tier in self._tiers)

    def _pays(self, tier: Tier, num_tokens: int) -> bool:
        return self.seconds_per_copy + tier.seconds_per_page <= num_tokens * self._seconds_per_token
