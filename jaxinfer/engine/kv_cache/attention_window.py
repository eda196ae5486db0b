"""How many pages a request needs that does not see all of its tokens."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from jaxinfer.engine.kv_cache.page_allocator import PageAllocator
from jaxinfer.engine.kv_cache.page_transfers import PageTransfers, RotatePages
from jaxinfer.engine.request.request import Request
from jaxinfer.sampling_params import SamplingParams


@dataclass(frozen=True)
class AttentionWindow:
    """Of a request, the first `num_sinks` pages are kept, and `num_kept` full ones before the page of its last token.

    So it never has more than `most`.

    window 20, pages of 16, a step of up to 32 tokens:  num_kept 2, most 5

    pages       | freed | freed |  kept  |  kept  | last token | to be written | to be written |

    Without sinks it is the model's own window, and the kernels know what it hides. With them it is that of endless
    requests, whose tables have no freed pages, and copies of the sinks, turned by as many positions.

    64 tokens, 16 of them sinks, pages of 16:  num_sinks 1, num_kept 2, most 5

    pages       | sink | freed | freed |  kept  |  kept  | last token |
    table       | turned sink |  kept  |  kept  | last token |
    """

    num_kept: int
    most: int
    num_sinks: int = 0

    @property
    def num_seen(self) -> int:
        """How many pages an endless request sees at most."""
        return self.num_sinks + self.num_kept + 1

    def behind(self, index: int) -> range:
        """Returns which pages no token of page `index` sees."""
        return range(self.num_sinks, max(index - self.num_kept, self.num_sinks))

    def next_boundary(self, index: int) -> int:
        """Returns the first page after page `index` of which no token sees the same pages as those of page `index`."""
        return max(index + 1, self.num_seen)


def sliding_attention_window(window: int, page_size: int, max_step_tokens: int) -> AttentionWindow:
    """Returns a model's for steps that compute as many tokens of a request at most."""
    # The first token of a page sees window - 1 tokens before it. One page at least, so that a prefix can be found.
    num_kept = max(-(-(window - 1) // page_size), 1)
    return AttentionWindow(num_kept, num_kept + 1 + -(-max_step_tokens // page_size))


def endless_window(num_seen_tokens: int, num_sink_tokens: int, page_size: int) -> AttentionWindow:
    """Returns that of endless requests; the numbers of tokens are multiples of `page_size`."""
    num_seen, num_sinks = num_seen_tokens // page_size, num_sink_tokens // page_size
    # The sinks as they are stay beside the turned ones: whoever turns what was turned adds up roundings.
    return AttentionWindow(num_seen - num_sinks - 1, num_seen + num_sinks, num_sinks)


def window_for(window: AttentionWindow | None, sampling: SamplingParams) -> AttentionWindow | None:
    """Returns the window behind which a request with these parameters gives pages back, None where it keeps all."""
    return None if window is None or sampling.reads_context else window


class WindowedPages:
    """Takes the pages behind a `window`, if there is one, and lets endless requests close up over them.

    An endless request keeps its first pages, the sinks. The keys in them have to be as near to its last tokens as its
    table says, so each time that it gives a page back they are copied anew, turned by all that lies between.
    """

    def __init__(
        self, window: AttentionWindow | None, pages: PageAllocator, copies: PageTransfers, page_size: int
    ) -> None:
        self._window = window
        self._endless = window if window is not None and window.num_sinks > 0 else None
        # Asked for every row of a step, as little else is.
        self.has_window, self.is_endless = window is not None, self._endless is not None
        self._pages = pages
        self._copies = copies
        self._page_size = page_size

    def window_of(self, request: Request) -> AttentionWindow | None:
        """Returns the window that the request sees, None where it keeps all of its pages."""
        return window_for(self._window, request.sampling)

    def free_behind(self, request: Request, position: int) -> None:
        """Takes the pages that no token from this position on sees."""
        window = self.window_of(request)
        if window is None:
            return
        behind = window.behind(position // self._page_size)
        if behind and behind.stop > request.evicted.stop:
            self._pages.release(request.pages[max(request.evicted.stop, behind.start) : behind.stop])
            request.evicted = behind

    def has_lost(self, request: Request) -> bool:
        """Whether pages were given back that the next token sees, for the request was set back since."""
        if self._window is None:
            return False
        return request.evicted.stop > self._window.behind(request.num_computed // self._page_size).stop

    def max_uniform_chunk(self, request: Request) -> int:
        """Returns how many tokens at most, from the next on, may be computed together, for they see the same pages."""
        if self._endless is None:
            return sys.maxsize
        end = self._endless.next_boundary(request.num_computed // self._page_size) * self._page_size
        return end - request.num_computed

    def num_missing_sinks(self, request: Request) -> int:
        """Returns how many pages the request lacks for turned sinks."""
        if self._endless is None or request.rotated_sinks:
            return 0
        num_tokens = request.num_computed + request.num_uncomputed
        return self._endless.num_sinks if num_tokens > self._endless.num_seen * self._page_size else 0

    def evict_behind_window(self, request: Request) -> None:
        """Takes the pages that the next token of an endless request does not see."""
        if self._endless is not None:
            self.free_behind(request, request.num_computed)

    def rotate_sinks(self, request: Request) -> None:
        """Has the sinks turned if the request, which has the pages for it, has closed up since they were."""
        num_evicted_tokens = len(request.evicted) * self._page_size if request.rotated_sinks else 0
        if num_evicted_tokens != request.num_evicted_tokens:
            request.num_evicted_tokens = num_evicted_tokens
            sinks = request.pages[: len(request.rotated_sinks)]
            self._copies.append(RotatePages(sinks, request.rotated_sinks, num_evicted_tokens))
