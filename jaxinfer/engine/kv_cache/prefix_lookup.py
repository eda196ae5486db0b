"""Prefix lookup: finds the content of a request's pages in the pool, in its origin, in a saved file or in the tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxinfer.engine.kv_cache.attention_window import AttentionWindow
from jaxinfer.engine.kv_cache.page_allocator import PageAllocator
from jaxinfer.engine.kv_cache.page_transfers import Content
from jaxinfer.engine.kv_cache.tiers import PageTiers
from jaxinfer.engine.request.page_keys import num_equal
from jaxinfer.engine.request.request import Request

# A copy reads and writes a whole page, so it must save computing at least 1 / MIN_COPIED of a page's tokens.
MIN_COPIED = 8
# The source of a copy: the id of a page of the pool, or a page's content.
Source = int | Content


class PrefixLookup:
    """Finds reusable pages without acquiring them."""

    def __init__(self, pages: PageAllocator, page_size: int, tiers: PageTiers | None) -> None:
        self._pages = pages
        self._page_size = page_size
        self._tiers = tiers
        # By parent key: key and tokens of the last page registered after it. Another request may share some tokens.
        self._successors: dict[bytes, tuple[bytes, Sequence[int]]] = {}
        self._parents: dict[bytes, bytes] = {}  # page key -> parent key, of all registered pages

    def enter(self, key: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        """Adds a registered page with its tokens and the key of the page before it."""
        self._successors[parent] = (key, token_ids)
        self._parents[key] = parent

    def forget(self, key: bytes) -> None:
        """Removes an evicted page."""
        parent = self._parents.pop(key)
        if parent in self._successors and self._successors[parent][0] == key:
            del self._successors[parent]

    def forget_all(self) -> None:
        """Removes all pages."""
        self._successors.clear()
        self._parents.clear()

    def cached_page(self, request: Request, index: int) -> int | None:
        """Returns the pool's page for page `index`; None if it is absent or some of its tokens must be computed."""
        if request.keys is None or index >= request.max_skipped // self._page_size:
            return None
        return self._pages.find(request.keys.key(index, request.token_ids))

    def copy_source(self, request: Request, index: int) -> tuple[int, Source] | None:
        """Returns (end, source): copying `source` gives page `index` up to token `end`; None if there is no source."""
        start = max(index * self._page_size, request.num_computed)
        limit = min((index + 1) * self._page_size, request.max_skipped)
        return (
            self._in_file(request, index, start, limit)
            or self._in_origin(request, index, start, limit)
            or self._in_tiers(request, index, start, limit)
            or self._in_successor(request, index, start, limit)
        )

    def reusable_pages(self, request: Request, window: AttentionWindow | None) -> dict[int, int | None]:
        """Returns the pages, by index, that a request without pages need not compute; None for pages to be copied.

        Without a window, these are the first pages that the pool has without a gap. With a window, the last complete
        window found in the pool or elsewhere is enough, with the sinks; else the first pages without a gap.
        """
        found: list[int | None] = []
        if window is None:
            while (page := self.cached_page(request, len(found))) is not None:
                found.append(page)
            return dict(enumerate(found))
        has = self._full_pages(request)
        num_full = request.max_skipped // self._page_size
        sinks = {index: self.cached_page(request, index) for index in range(min(window.num_sinks, num_full))}
        are_sinks_there = all(page is not None or has(index) for index, page in sinks.items())
        for index in reversed(range(num_full)):
            page = self.cached_page(request, index)
            found = [page, *found] if page is not None or has(index) else []
            if len(found) == window.num_kept and are_sinks_there:
                return sinks | dict(enumerate(found, index))
        return dict(enumerate(found))

    def _full_pages(self, request: Request) -> Callable[[int], bool]:
        """Returns a predicate: True if the page of that index can be copied whole."""
        origin, keys, tiers = request.origin, request.keys, self._tiers
        num_common = 0 if origin is None else min(origin.num_computed, len(request.token_ids))
        if origin is not None and origin.token_ids[:num_common] != request.token_ids[:num_common]:
            num_common = 0

        def has(index: int) -> bool:
            end = (index + 1) * self._page_size
            return (
                (index in request.saved and end <= request.num_saved)
                or (origin is not None and index not in origin.evicted and end <= num_common)
                or (tiers is not None and keys is not None and tiers.has(keys.key(index, request.token_ids)))
            )

        return has

    def _in_file(self, request: Request, index: int, start: int, limit: int) -> tuple[int, Content] | None:
        """Returns page `index` from the request's file, and the end of its tokens."""
        end = min(limit, request.num_saved)
        return (end, request.saved[index]) if end > start and index in request.saved else None

    def _in_origin(self, request: Request, index: int, start: int, limit: int) -> tuple[int, int] | None:
        """Returns the origin's page `index` and the end of the tokens that the request has in common with it."""
        if (origin := request.origin) is None or index in origin.evicted:
            return None
        end = min(limit, origin.num_computed)
        is_common = end > start and origin.token_ids[:end] == request.token_ids[:end]
        return (end, origin.pages[index]) if is_common else None

    def _in_tiers(self, request: Request, index: int, start: int, limit: int) -> tuple[int, Content] | None:
        """Returns page `index` from the tiers, whole or as swapped out at preemption, and the end of its tokens."""
        if self._tiers is None or request.keys is None:
            return None
        keys, num_swapped_tokens = request.keys, request.num_swapped_tokens
        if limit == (index + 1) * self._page_size:
            content = self._tiers.get(keys.key(index, request.token_ids), limit - start)
            if content is not None:
                return limit, content
        if start < num_swapped_tokens <= limit and num_swapped_tokens % self._page_size:
            content = self._tiers.get(
                keys.partial_key(num_swapped_tokens, request.token_ids), num_swapped_tokens - start
            )
            return None if content is None else (num_swapped_tokens, content)
        return None

    def _in_successor(self, request: Request, index: int, start: int, limit: int) -> tuple[int, int] | None:
        """Returns a page of the pool that begins like page `index`, and the end of the tokens in common."""
        if request.keys is None:
            return None
        key, tokens = self._successors.get(request.keys.parent_key(index, request.token_ids), (b"", ()))
        first = index * self._page_size
        end = first + num_equal(request.token_ids[first:limit], tokens)
        page = self._pages.find(key)
        return None if page is None or end < start + max(self._page_size // MIN_COPIED, 1) else (end, page)
