"""What of a request is handed to the user."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jaxinfer.engine.metrics import Timings

# "exhausted": the request's parameters ruled out every token. "error": the result cannot be trusted any further.
FinishReason = Literal["stop", "length", "exhausted", "abort", "deadline", "error"]


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
