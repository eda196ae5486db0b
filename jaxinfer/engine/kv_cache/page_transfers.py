"""A queue of page copies that the runner makes before the next step, in the scheduler's order; free of jax."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# The content of one page in all layers, u8[page_bytes]; opaque to all code but the page copier.
Content = Any


@dataclass(frozen=True)
class SwapOut:
    """Copies the page to the tiers under this key, before another request overwrites it."""

    page: int
    key: bytes
    kind: int = 0  # of pages


@dataclass(frozen=True)
class SwapIn:
    """Writes this content to the page."""

    page: int
    content: Content
    kind: int = 0


@dataclass(frozen=True)
class CopyPage:
    """Copies page `source` to `page`."""

    source: int
    page: int
    kind: int = 0


@dataclass(frozen=True)
class RotatePages:
    """Copies `sources` to `pages`, with keys rotated (RoPE) as if the tokens stood `num_positions` later."""

    sources: tuple[int, ...]
    pages: tuple[int, ...]
    num_positions: int


Copy = SwapOut | SwapIn | CopyPage | RotatePages


class PageTransfers:
    """The copies still to be made. The next step makes the copies that an interrupted step left undone."""

    def __init__(self) -> None:
        self.queue: deque[Copy] = deque()

    def append(self, copy: Copy) -> None:
        self.queue.append(copy)

    def clear(self) -> None:
        """Drops all copies, once no page that they write is read again."""
        self.queue.clear()

    def batches(self, limit: int) -> Iterator[list[Copy]]:
        """Yields all copies in order, in batches of up to `limit` of one type and one kind of pages.

        Asking for the next dequeues a batch.

        The copies of a batch have different pages, so the caller may make them in any order. Making a batch twice,
        after an interrupt, does no harm: no step runs in between.
        """
        while self.queue:
            batch = self._first_batch(limit)
            yield batch
            for _ in batch:
                self.queue.popleft()

    def _first_batch(self, limit: int) -> list[Copy]:
        batch: list[SwapOut | SwapIn] = []
        for copy in self.queue:
            if isinstance(copy, CopyPage | RotatePages):
                return list(batch) or [copy]
            is_alike = not batch or (type(copy) is type(batch[0]) and copy.kind == batch[0].kind)
            if not is_alike or len(batch) == limit:
                break
            if any(copy.page == other.page for other in batch):
                break
            batch.append(copy)
        return list(batch)
