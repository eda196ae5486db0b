"""Who owns which page of the pool."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Hands out the pages 0 … num_pages - 1, each to one owner at a time."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        # The page given back last is given out first: it is the likeliest to be in a cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = [True] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages; RuntimeError when fewer are free (ask `num_free` first)."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back; RuntimeError for a page that is free already."""
        for page in pages:
            if self._is_free[page]:
                raise RuntimeError(f"page {page} was given back twice")
            self._is_free[page] = True
            self._free.append(page)
