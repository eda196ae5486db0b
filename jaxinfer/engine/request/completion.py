"""What of a request is handed to the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

# "exhausted": the request's parameters ruled out every token. "error": the result cannot be trusted any further.
FinishReason = Literal["stop", "length", "exhausted", "abort", "deadline", "error"]


@dataclass(frozen=True, kw_only=True)
class Timings:
    """What one request took, in seconds. None where it never came so far."""

    queue: float | None = None  # from its arrival until its first tokens were computed in a step
    ttft: float | None = None  # from its arrival to its first token
    itl: tuple[float, ...] = ()  # from each token to the next; waiting after a preemption is part of it

    @classmethod
    def of(cls, arrival: float, first_step: float | None, token_times: Sequence[float]) -> Timings:
        """Returns the timings of a request from when it arrived, was in a step first, and had each token."""
        return cls(
            queue=None if first_step is None else first_step - arrival,
            ttft=token_times[0] - arrival if token_times else None,
            itl=tuple(later - earlier for earlier, later in pairwise(token_times)),
        )

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first."""
        return sum(self.itl) / len(self.itl) if self.itl else None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request. `text` ends before a stop string; `token_ids` are all tokens that were made.

    `sample_index` counts the samples of one prompt. `log_probs` are those of the chosen tokens under the model, before
    temperature and filters. `top_log_probs` has a dictionary from token id to log-probability per token, most probable
    first, if asked for. `prompt_log_probs` and `prompt_top_log_probs` have the same of each token of the prompt, given
    those before it, if asked for; the first follows nothing and has None. A request that ended early has them as far
    as it came. Where the finish reason is "error", `error` says why; tokens and text up to there stand. `seed` repeats
    the result. `num_cached_tokens` of the prompt were found in the prefix cache and not computed. `timings` say what it
    took, and have no part in equality.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    top_log_probs: tuple[dict[int, float], ...]
    finish_reason: FinishReason
    seed: int
    sample_index: int = 0
    num_cached_tokens: int = 0
    prompt_log_probs: tuple[float | None, ...] = ()
    prompt_top_log_probs: tuple[dict[int, float], ...] = ()
    error: str | None = None
    timings: Timings = field(default=Timings(), compare=False)


class Delta(NamedTuple):
    """What one step added to a request; the last one carries the completion.

    `text` can be empty while an unfinished character or the possible start of a stop string is held back.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    sample_index: int = 0
    completion: Completion | None = None
