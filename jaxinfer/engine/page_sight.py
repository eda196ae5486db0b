"""Which of its pages a request sees, where that is not all: those behind are given back while it runs."""

from __future__ import annotations

import sys

from jaxinfer.engine.page_copies import CopyTurned, PageCopies
from jaxinfer.engine.page_window import PageWindow, window_for
from jaxinfer.engine.pages import PageAllocator
from jaxinfer.engine.request import Request


class PageSight:
    """Takes the pages behind a `window`, if there is one, and lets endless requests close up over them.

    An endless request keeps its first pages, the sinks. The keys in them have to be as near to its last tokens as its
    table says, so each time that it gives a page back they are copied anew, turned by all that lies between.
    """

    def __init__(self, window: PageWindow | None, pages: PageAllocator, copies: PageCopies, page_size: int) -> None:
        self._window = window
        self._endless = window if window is not None and window.num_sinks > 0 else None
        # Asked for every row of a step, as little else is.
        self.has_window, self.is_endless = window is not None, self._endless is not None
        self._pages = pages
        self._copies = copies
        self._page_size = page_size

    def window_of(self, request: Request) -> PageWindow | None:
        """Returns the window that the request sees, None where it keeps all of its pages."""
        return window_for(self._window, request.sampling)

    def free_behind(self, request: Request, position: int) -> None:
        """Takes the pages that no token from this position on sees."""
        window = self.window_of(request)
        if window is None:
            return
        behind = window.behind(position // self._page_size)
        if behind and behind.stop > request.freed.stop:
            self._pages.release(request.pages[max(request.freed.stop, behind.start) : behind.stop])
            request.freed = behind

    def has_lost(self, request: Request) -> bool:
        """Whether pages were given back that the next token sees, for the request was set back since."""
        if self._window is None:
            return False
        return request.freed.stop > self._window.behind(request.num_computed // self._page_size).stop

    def num_alike(self, request: Request) -> int:
        """Returns how many tokens at most, from the next on, may be computed together, for they see the same pages."""
        if self._endless is None:
            return sys.maxsize
        end = self._endless.first_apart(request.num_computed // self._page_size) * self._page_size
        return end - request.num_computed

    def num_unturned(self, request: Request) -> int:
        """Returns how many pages the request lacks for turned sinks."""
        if self._endless is None or request.turned:
            return 0
        num_tokens = request.num_computed + request.num_uncomputed
        return self._endless.num_sinks if num_tokens > self._endless.num_seen * self._page_size else 0

    def close_up(self, request: Request) -> None:
        """Takes the pages that the next token of an endless request does not see."""
        if self._endless is not None:
            self.free_behind(request, request.num_computed)

    def turn_sinks(self, request: Request) -> None:
        """Has the sinks turned if the request, which has the pages for it, has closed up since they were."""
        num_hidden = len(request.freed) * self._page_size if request.turned else 0
        if num_hidden != request.num_hidden:
            request.num_hidden = num_hidden
            sinks = request.pages[: len(request.turned)]
            self._copies.append(CopyTurned(sinks, request.turned, num_hidden))
