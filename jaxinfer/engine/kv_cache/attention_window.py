"""The pages that a request keeps if attention sees only a window of its tokens (sliding window, attention sinks)."""

from __future__ import annotations

from dataclasses import dataclass

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
