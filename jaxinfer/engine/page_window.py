"""How many pages a request needs whose model sees no further than a window."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.sampling_params import SamplingParams


@dataclass(frozen=True)
class PageWindow:
    """Of a request, `num_kept` full pages are kept before the page of its last token, so it never has more than `most`.

    window 20, pages of 16, a step of up to 32 tokens:  num_kept 2, most 5

    pages       | freed | freed |  kept  |  kept  | last token | to be written | to be written |
    """

    num_kept: int
    most: int


def page_window(window: int, page_size: int, max_step_tokens: int) -> PageWindow:
    """Returns it for steps that compute as many tokens of a request at most."""
    # The first token of a page sees window - 1 tokens before it. One page at least, so that a prefix can be found.
    num_kept = max(-(-(window - 1) // page_size), 1)
    return PageWindow(num_kept, num_kept + 1 + -(-max_step_tokens // page_size))


def window_for(window: PageWindow | None, sampling: SamplingParams) -> PageWindow | None:
    """Returns the window behind which a request with these parameters gives pages back, None where it keeps all."""
    return None if window is None or sampling.reads_context else window
