"""Copies of pages to make before the next step, in the order in which the scheduler thought of them; free of jax."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# What one page holds in all layers, u8[page_bytes]; only who copies looks inside.
Content = Any


@dataclass(frozen=True)
class SwapOut:
    """The page's content goes to the tiers under this key: somebody else is about to write the page."""

    page: int
    key: bytes


@dataclass(frozen=True)
class SwapIn:
    """This content goes onto the page."""

    page: int
    content: Content


@dataclass(frozen=True)
class CopyPage:
    """The content of one page goes onto another."""

    source: int
    page: int


@dataclass(frozen=True)
class RotatePages:
    """The content of some pages goes onto others as if their tokens stood `num_positions` later."""

    sources: tuple[int, ...]
    pages: tuple[int, ...]
    num_positions: int


Copy = SwapOut | SwapIn | CopyPage | RotatePages


class PageTransfers:
    """What is still to be copied. A copy that an interrupted step left undone is the first of the next step."""

    def __init__(self) -> None:
        self._queue: deque[Copy] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def append(self, copy: Copy) -> None:
        self._queue.append(copy)

    def batches(self, limit: int) -> Iterator[list[Copy]]:
        """Yields all copies in order, up to `limit` of one kind together; takes each as made when asked on.

        Those of a batch are onto different pages, so that they may be made in any order. To be interrupted and make a
        batch twice does no harm, for no step has come between.
        """
        while self._queue:
            batch = self._first_batch(limit)
            yield batch
            for _ in batch:
                self._queue.popleft()

    def _first_batch(self, limit: int) -> list[Copy]:
        batch: list[SwapOut | SwapIn] = []
        for copy in self._queue:
            if isinstance(copy, CopyPage | RotatePages):
                return list(batch) or [copy]
            if batch and (type(copy) is not type(batch[0]) or len(batch) == limit):
                break
            if any(copy.page == other.page for other in batch):
                break
            batch.append(copy)
        return list(batch)
