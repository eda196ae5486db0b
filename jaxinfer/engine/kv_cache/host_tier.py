"""The host tier: pages in host memory."""

from __future__ import annotations

from collections import OrderedDict

from jaxinfer.engine.kv_cache.page_transfers import Content
from jaxinfer.engine.kv_cache.tiers import TierMetrics


class HostTier:
    """Stores up to `max_bytes // page_bytes` pages; evicts the least recently used one first."""

    seconds_per_page = 0.0  # returning a page is free; `PageTiers` counts the copy into the pool

    def __init__(self, max_bytes: int, page_bytes: int) -> None:
        self._max_pages = max_bytes // page_bytes
        self._page_bytes = page_bytes
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
        self._num_stored += 1
        gone = [self._contents.popitem(last=False) for _ in range(len(self._contents) - self._max_pages)]
        self._num_dropped += len(gone)
        return gone

    def metrics(self) -> TierMetrics:
        return TierMetrics(
            name="host",
            num_pages=len(self._contents),
            num_bytes=len(self._contents) * self._page_bytes,
            num_stored=self._num_stored,
            num_hits=self._num_hits,
            num_dropped=self._num_dropped,
            num_lost=0,
        )
