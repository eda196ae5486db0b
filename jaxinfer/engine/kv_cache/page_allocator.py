"""The pool's pages: the number of users of each, and the prefix-cache keys of their contents.

    free     no request uses it, and its content has no key
    cached   no request uses it, but its content has a key: `find` returns it, `allocate` evicts it
    owned    one or more requests use it; a full page has a key as well and is never written again

free + cached + owned == num_pages, after every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class PageAllocator:
    """Allocates the pages 0 … num_pages - 1 and counts the users of each.

    `on_evict` is called with each evicted page and its key, before the page can be allocated again.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int, bytes], None] | None = None):
        self.num_pages = num_pages
        self._on_evict = on_evict
        # The page released last is allocated first: it is the likeliest to be in a CPU's cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_users = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can return: free and cached ones."""
        return len(self._free) + len(self._cached)

    def counts(self) -> dict[str, int]:
        """Returns the number of pages, in all and in each state."""
        return {
            "num_pages": self.num_pages,
            "num_owned_pages": self.num_pages - self.num_available,
            "num_cached_pages": self.num_cached,
            "num_free_pages": self.num_free,
        }

    def num_users(self, page: int) -> int:
        return self._num_users[page]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, evicting cached ones if too few are free; RuntimeError if both are too few."""
        if count > self.num_available:
            raise RuntimeError(f"{count} pages asked for, {self.num_available} of {self.num_pages} are available")
        if count > len(self._free):
            self.evict(count - len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._num_users[page] = 1
        return pages

    def acquire(self, page: int) -> None:
        """Adds a user to a page that has users or that `find` returned."""
        if self._num_users[page] == 0:
            del self._cached[page]  # KeyError for a free page: a broken invariant
        self._num_users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Removes one user from each page; RuntimeError for a page without users.

        Pages of a prefix are released last first, so eviction begins at its end: a page is found only if all pages
        before it are.
        """
        for page in reversed(pages):
            if self._num_users[page] == 0:
                raise RuntimeError(f"page {page} was given back twice")
            self._num_users[page] -= 1
            if self._num_users[page] > 0:
                continue
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def is_known(self, page: int) -> bool:
        """True if the page's content has a key, so that other requests may read it now or later."""
        return page in self._key_of

    def find(self, key: bytes) -> int | None:
        """Returns the page whose content has this key, or None."""
        return self._page_of.get(key)

    def register(self, page: int, key: bytes) -> int:
        """Gives an owned page's content its key and returns the page that the user must use from now on.

        If another page has this key already, its content is the same: the user moves there and `page` is released.
        """
        known = self._page_of.get(key)
        if known is None:
            self._page_of[key] = page
            self._key_of[page] = key
            return page
        if known != page:
            self.acquire(known)
            self.release([page])
        return known

    def forget_contents(self) -> None:
        """Frees all cached pages without a call of `on_evict`. No request may own a page with a key."""
        self._free += self._cached
        for known in (self._cached, self._key_of, self._page_of):
            known.clear()

    def evict(self, count: int) -> int:
        """Evicts up to `count` cached pages, least recently used first; returns the number evicted."""
        count = max(min(count, len(self._cached)), 0)
        for _ in range(count):
            page, _ = self._cached.popitem(last=False)
            key = self._key_of.pop(page)
            del self._page_of[key]
            self._free.append(page)
            if self._on_evict is not None:
                self._on_evict(page, key)
        return count
