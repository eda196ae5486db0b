"""How many pages a request needs that does not see all of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.sampling_params import SamplingParams


@dataclass(frozen=True)
class PageWindow:
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

    def first_apart(self, index: int) -> int:
        """Returns the first page after page `index` of which no token sees the same pages as those of page `index`."""
        return max(index + 1, self.num_seen)


def page_window(window: int, page_size: int, max_step_tokens: int) -> PageWindow:
    """Returns a model's for steps that compute as many tokens of a request at most."""
    # The first token of a page sees window - 1 tokens before it. One page at least, so that a prefix can be found.
    num_kept = max(-(-(window - 1) // page_size), 1)
    return PageWindow(num_kept, num_kept + 1 + -(-max_step_tokens // page_size))


def endless_window(num_seen_tokens: int, num_sink_tokens: int, page_size: int) -> PageWindow:
    """Returns that of endless requests; the numbers of tokens are multiples of `page_size`."""
    num_seen, num_sinks = num_seen_tokens // page_size, num_sink_tokens // page_size
    # The sinks as they are stay beside the turned ones: whoever turns what was turned adds up roundings.
    return PageWindow(num_seen - num_sinks - 1, num_seen + num_sinks, num_sinks)


def window_for(window: PageWindow | None, sampling: SamplingParams) -> PageWindow | None:
    """Returns the window behind which a request with these parameters gives pages back, None where it keeps all."""
    return None if window is None or sampling.reads_context else window
