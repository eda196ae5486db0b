"""The pages of one kind, and the tables of the requests that own them.

Requests wait and are preempted for pages of a model's first kind. The other kinds are bounded: a request keeps a window
of its tokens or its last recurrent state, and the pool has pages for every running request.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxinfer.engine.kv_cache.attention_window import AttentionWindow, window_for
from jaxinfer.engine.kv_cache.page_allocator import PageAllocator
from jaxinfer.engine.kv_cache.page_transfers import Content, CopyPage, PageTransfers, RotatePages, SwapIn
from jaxinfer.engine.request.page_keys import key_of_kind
from jaxinfer.engine.request.page_table import KindTable
from jaxinfer.engine.request.request import Request


@dataclass(frozen=True)
class BoundedKind:
    """A kind of pages of which a request keeps the page of its last token and `num_kept` pages before it."""

    num_kept: int
    num_pages: int  # in the pool
    is_state: bool = False  # a page holds the state after its last computed token
    is_open: bool = False  # a page that is full is not needed by the tokens after it, but for the `num_kept`

    @property
    def window(self) -> AttentionWindow:
        return AttentionWindow(self.num_kept, self.num_pages)


@dataclass(frozen=True, slots=True)
class Copied:
    """The source of a copy: a page of the pool, or a content."""

    page: int | None = None
    content: Content = None


Found = int | Copied  # a page of the pool to be shared, or the source of a copy


class PagePool:
    """Gives pages of a kind to requests, and frees those behind the `window`, if there is one.

    An endless request keeps its first pages, the sinks, and its block table closes the gap of the freed pages. Each
    time it frees a page, the sinks are copied again, their keys rotated by the positions of that gap.
    """

    def __init__(
        self,
        kind: int,
        pages: PageAllocator,
        page_size: int,
        copies: PageTransfers,
        window: AttentionWindow | None = None,
        is_state: bool = False,
        is_open: bool = False,
    ) -> None:
        """`kind`: its index in `ModelConfig.page_kinds`."""
        self.kind = kind
        self.pages = pages
        self.window = window
        # A plain attribute, because the scheduler reads it for many rows of a step.
        self.is_endless = window is not None and window.num_sinks > 0
        self.is_state = is_state
        self.is_open = is_open
        self._page_size = page_size
        self._copies = copies

    def table_of(self, request: Request) -> KindTable:
        return request.table.kinds[self.kind]

    def window_of(self, request: Request) -> AttentionWindow | None:
        """Returns the window of the request, or None if it keeps all of its pages."""
        # Parameters that read the whole context read it in pages of the first kind.
        return window_for(self.window, request.sampling) if self.kind == 0 else self.window

    def needed(self, request: Request, num_tokens: int, first: int) -> Sequence[int]:
        """Returns the indices, from `first` on, of the pages without which no token follows the first `num_tokens`."""
        window, end = self.window_of(request), -(-num_tokens // self._page_size)
        if window is None:
            return range(first, end)
        kept = range(max(self._first_kept(window, num_tokens), first), end)
        return [*range(first, min(window.num_sinks, end)), *kept] if window.num_sinks else kept

    @property
    def needs_full_pages(self) -> bool:
        """False if no token needs a page that is full."""
        return not self.is_open or (self.window is not None and self.window.num_kept > 0)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Returns the number of pages the request lacks to compute its next `num_tokens` tokens."""
        table = request.table.kinds[self.kind]
        num_missing = max(-(-(request.num_computed + num_tokens) // self._page_size) - len(table.pages), 0)
        return num_missing + self.num_missing_sinks(request) if self.is_endless else num_missing

    def extend(self, request: Request, count: int) -> None:
        """Gives the request new pages, those for rotated copies of its sinks first."""
        if count == 0:  # the usual case of a decoding request
            return
        pages, table = self.pages.allocate(count), request.table.kinds[self.kind]
        if self.is_endless and (num_missing_sinks := self.num_missing_sinks(request)):
            table.rotated_sinks, pages = tuple(pages[:num_missing_sinks]), pages[num_missing_sinks:]
        table.pages += tuple(pages)

    def put(self, request: Request, found: Mapping[int, Found], num_tokens: int) -> None:
        """Gives the request these pages, with which its first `num_tokens` tokens are in the cache.

        The shared ones have the request as a user already. Copies go to pages that it owns, or to new ones.
        """
        table, window = self.table_of(request), self.window_of(request)
        if window is not None:
            self._free(table, range(window.num_sinks, self._first_kept(window, num_tokens)))
        num_pages = max(max(found, default=-1) + 1, table.freed.stop)
        pages = list(table.pages) + [0] * (num_pages - len(table.pages))
        for index, source in found.items():
            own = pages[index : index + 1] if index < len(table.pages) else []
            if isinstance(source, int):
                self.pages.release(own)
                pages[index] = source
                continue
            (pages[index],) = own or self.pages.allocate(1)
            if source.page is not None:
                self._copies.append(CopyPage(source.page, pages[index], self.kind))
            else:
                self._copies.append(SwapIn(pages[index], source.content, self.kind))
        table.pages = tuple(pages)

    def register(self, request: Request, index: int, key: bytes) -> None:
        """Gives a full page its key, by which other requests find it; `key` is that of the first kind."""
        table = request.table.kinds[self.kind]
        if index in table.freed:
            return
        page = table.pages[index]
        known = self.pages.register(page, key_of_kind(key, self.kind))
        if known != page:
            table.put(index, known)

    def free_behind(self, request: Request, position: int) -> None:
        """Frees the pages that no token from `position` on needs."""
        if self.window is not None and (window := self.window_of(request)) is not None:
            self._free(self.table_of(request), window.behind(position // self._page_size))

    def release(self, request: Request) -> None:
        """Frees all pages of the request."""
        table = self.table_of(request)
        self.pages.release(table.owned_pages)
        table.clear()

    def has_lost(self, request: Request) -> bool:
        """True if a rewind went back to tokens whose window is already freed; the request must be recomputed."""
        if self.window is None:
            return False
        return self.table_of(request).freed.stop > self.window.behind(request.num_computed // self._page_size).stop

    def max_uniform_chunk(self, request: Request) -> int:
        """Returns the longest chunk, from the next token on, whose tokens all attend to the same pages."""
        if self.window is None or not self.is_endless:
            return sys.maxsize
        end = self.window.next_boundary(request.num_computed // self._page_size) * self._page_size
        return end - request.num_computed

    def num_missing_sinks(self, request: Request) -> int:
        """Returns the number of pages the request lacks for rotated copies of its sinks."""
        if self.window is None or not self.is_endless or self.table_of(request).rotated_sinks:
            return 0
        num_tokens = request.num_computed + request.num_uncomputed
        return self.window.num_sinks if num_tokens > self.window.num_seen * self._page_size else 0

    def rotate_sinks(self, request: Request) -> None:
        """Queues a rotated copy of the sinks if pages were freed since the last one; the request has pages for it."""
        table = self.table_of(request)
        num_evicted_tokens = len(table.freed) * self._page_size if table.rotated_sinks else 0
        if num_evicted_tokens != table.num_evicted_tokens:
            table.num_evicted_tokens = num_evicted_tokens
            sinks = table.pages[: len(table.rotated_sinks)]
            self._copies.append(RotatePages(sinks, table.rotated_sinks, num_evicted_tokens))

    def _first_kept(self, window: AttentionWindow, num_tokens: int) -> int:
        """Returns the first page after the sinks that a request of `num_tokens` computed tokens needs to go on."""
        first = num_tokens // self._page_size - window.num_kept
        if not self.is_open:
            first = min(first, (num_tokens - 1) // self._page_size)
        return max(first, window.num_sinks)

    def _free(self, table: KindTable, behind: range) -> None:
        if behind.stop > max(table.freed.stop, behind.start):
            self.pages.release(table.pages[max(table.freed.stop, behind.start) : behind.stop])
            table.freed = behind
