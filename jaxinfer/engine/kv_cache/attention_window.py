"""The pages that a request keeps if attention sees only a window of its tokens (sliding window, attention sinks)."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from jaxinfer.engine.kv_cache.page_allocator import PageAllocator
from jaxinfer.engine.kv_cache.page_transfers import PageTransfers, RotatePages
from jaxinfer.engine.request.request import Request
from jaxinfer.sampling_params import SamplingParams


@dataclass(frozen=True)
class AttentionWindow:
    """A window over a request's pages; the request frees the other pages.

    window 20, pages of 16, a step of up to 32 tokens:  num_kept 2, most 5

    pages       | freed | freed |  kept  |  kept  | last token | to be written | to be written |

    Without sinks it is the model's sliding window, which the kernels mask by position. With sinks it is the window of
    endless requests (StreamingLLM). Their block tables leave out the freed pages and begin with copies of the sinks,
    whose keys are rotated (RoPE) by the number of freed tokens.

    64 tokens, 16 of them sinks, pages of 16:  num_sinks 1, num_kept 2, most 5

    pages       | sink | freed | freed |  kept  |  kept  | last token |
    table       | rotated sink |  kept  |  kept  | last token |
    """

    num_kept: int  # full pages kept before the page of the last token
    most: int  # the most pages that a request owns at a time, rotated copies of sinks included
    num_sinks: int = 0  # pages of attention sinks, kept from the start of the request

    @property
    def num_seen(self) -> int:
        """The most pages that an endless request attends to."""
        return self.num_sinks + self.num_kept + 1

    def behind(self, index: int) -> range:
        """Returns the indices of the pages that no token of page `index` attends to."""
        return range(self.num_sinks, max(index - self.num_kept, self.num_sinks))

    def next_boundary(self, index: int) -> int:
        """Returns the first page after `index` whose attention window differs from that of page `index`."""
        return max(index + 1, self.num_seen)


def sliding_attention_window(window: int, page_size: int, max_step_tokens: int) -> AttentionWindow:
    """Returns the window of a sliding-window model, for steps of at most `max_step_tokens` tokens per request."""
    # The first token of a page attends to window - 1 tokens before it. One page at least, to find prefixes by.
    num_kept = max(-(-(window - 1) // page_size), 1)
    return AttentionWindow(num_kept, num_kept + 1 + -(-max_step_tokens // page_size))


def endless_window(num_seen_tokens: int, num_sink_tokens: int, page_size: int) -> AttentionWindow:
    """Returns the window of endless requests; both numbers of tokens are multiples of `page_size`."""
    num_seen, num_sinks = num_seen_tokens // page_size, num_sink_tokens // page_size
    # The unrotated sinks stay beside their copies: rotating a copy again would accumulate rounding errors.
    return AttentionWindow(num_seen - num_sinks - 1, num_seen + num_sinks, num_sinks)


def window_for(window: AttentionWindow | None, sampling: SamplingParams) -> AttentionWindow | None:
    """Returns the window behind which a request with these parameters frees its pages, or None if it keeps all."""
    return None if window is None or sampling.reads_context else window


class WindowedPages:
    """Frees the pages behind a `window`, if there is one, and rotates the sinks of endless requests.

    An endless request keeps its first pages, the sinks, and its block table closes the gap of the freed pages. Each
    time it frees a page, the sinks are copied again, their keys rotated by the positions of that gap.
    """

    def __init__(
        self, window: AttentionWindow | None, pages: PageAllocator, copies: PageTransfers, page_size: int
    ) -> None:
        self._window = window
        self._endless = window if window is not None and window.num_sinks > 0 else None
        # Plain attributes, because the scheduler reads them for every row of a step.
        self.has_window, self.is_endless = window is not None, self._endless is not None
        self._pages = pages
        self._copies = copies
        self._page_size = page_size

    def window_of(self, request: Request) -> AttentionWindow | None:
        """Returns the window of the request, or None if it keeps all of its pages."""
        return window_for(self._window, request.sampling)

    def free_behind(self, request: Request, position: int) -> None:
        """Frees the pages that no token from `position` on attends to."""
        window = self.window_of(request)
        if window is None:
            return
        behind = window.behind(position // self._page_size)
        if behind and behind.stop > request.evicted.stop:
            self._pages.release(request.pages[max(request.evicted.stop, behind.start) : behind.stop])
            request.evicted = behind

    def has_lost(self, request: Request) -> bool:
        """True if a rewind went back to tokens whose window is already freed; the request must be recomputed."""
        if self._window is None:
            return False
        return request.evicted.stop > self._window.behind(request.num_computed // self._page_size).stop

    def max_uniform_chunk(self, request: Request) -> int:
        """Returns the longest chunk, from the next token on, whose tokens all attend to the same pages."""
        if self._endless is None:
            return sys.maxsize
        end = self._endless.next_boundary(request.num_computed // self._page_size) * self._page_size
        return end - request.num_computed

    def num_missing_sinks(self, request: Request) -> int:
        """Returns the number of pages the request lacks for rotated copies of its sinks."""
        if self._endless is None or request.rotated_sinks:
            return 0
        num_tokens = request.num_computed + request.num_uncomputed
        return self._endless.num_sinks if num_tokens > self._endless.num_seen * self._page_size else 0

    def evict_behind_window(self, request: Request) -> None:
        """Frees the pages that the next token of an endless request does not attend to."""
        if self._endless is not None:
            self.free_behind(request, request.num_computed)

    def rotate_sinks(self, request: Request) -> None:
        """Queues a rotated copy of the sinks if pages were freed since the last one; the request has pages for it."""
        num_evicted_tokens = len(request.evicted) * self._page_size if request.rotated_sinks else 0
        if num_evicted_tokens != request.num_evicted_tokens:
            request.num_evicted_tokens = num_evicted_tokens
            sinks = request.pages[: len(request.rotated_sinks)]
            self._copies.append(RotatePages(sinks, request.rotated_sinks, num_evicted_tokens))
