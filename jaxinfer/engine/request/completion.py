"""The results of a request that the engine returns to the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from jaxinfer.text.answers.parts import ToolCall

# "exhausted": the request's parameters ruled out every token. "error": the request's state cannot be trusted any more.
FinishReason = Literal["stop", "length", "exhausted", "abort", "deadline", "error"]


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Latencies of one request, in seconds; None if the request ended before that point."""

    queue: float | None = None  # from arrival to the first step that computes some of its tokens
    ttft: float | None = None  # from arrival to the first output token
    itl: tuple[float, ...] = ()  # between consecutive tokens, waiting after a preemption included

    @classmethod
    def of(cls, arrival: float, first_step: float | None, token_times: Sequence[float]) -> Timings:
        """Returns the timings from the clock times of arrival, first step, and each output token."""
        return cls(
            queue=None if first_step is None else first_step - arrival,
            ttft=token_times[0] - arrival if token_times else None,
            itl=tuple(later - earlier for earlier, later in pairwise(token_times)),
        )

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first."""
        return sum(self.itl) / len(self.itl) if self.itl else None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request.

    Alternatives and prompt log-probabilities are empty unless requested, and sampling log-probabilities unless
    `EngineConfig.sampling_log_probs` is set. A request that ended early has
    log-probabilities for the prompt tokens computed so far.

    `LLM.chat` splits the output into `content`, `reasoning` and `tool_calls`, by the style of the chat template. In
    other completions these three have their defaults.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    text: str  # ends before a stop string
    token_ids: tuple[int, ...]  # all sampled tokens, those of a stop string included
    log_probs: tuple[float, ...]  # of the sampled tokens under the model, before temperature and filters
    top_log_probs: tuple[dict[int, float], ...]  # per token: token id -> log-probability, most probable first
    finish_reason: FinishReason
    seed: int  # reproduces the result
    sample_index: int = 0  # among the samples of one prompt
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache and not computed
    prompt_log_probs: tuple[float | None, ...] = ()  # of each prompt token given those before it; None for the first
    prompt_top_log_probs: tuple[dict[int, float], ...] = ()  # the same for the alternatives; {} for the first token
    error: str | None = None  # the cause of finish reason "error"; tokens and text up to the error are valid
    content: str | None = None  # the text of an answer without reasoning and calls; "" if there is none
    reasoning: str | None = None  # the text that the model wrote for itself; None if there is none
    tool_calls: tuple[ToolCall, ...] = ()  # in the answer's order
    # Of the sampled tokens in the distributions that they were drawn from: after penalties, structure, temperature and
    # filters. 0.0 at temperature 0.
    sampling_log_probs: tuple[float, ...] = ()
    adapter: str | None = None  # the name of its adapter
    timings: Timings = field(default=Timings(), compare=False)


class Delta(NamedTuple):
    """The text and tokens that one step added to a request; the last delta carries the completion.

    `text` can be empty: the detokenizer holds back incomplete characters and possible beginnings of stop strings.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    sample_index: int = 0
    completion: Completion | None = None
    top_log_probs: tuple[dict[int, float], ...] = ()  # per token: token id -> log-probability; empty unless requested
    sampling_log_probs: tuple[float, ...] = ()  # see `Completion`
