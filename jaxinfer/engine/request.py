"""A request on the host, and what of it is handed to the user."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np

from jaxinfer.engine.metrics import Timings
from jaxinfer.engine.prefix import PageKeys
from jaxinfer.sampling_params import NO_TOKEN, SamplingParams

# "exhausted": the request's parameters ruled out every token.
FinishReason = Literal["stop", "length", "exhausted", "abort", "deadline"]
Priority = Literal["interactive", "batch"]


class QueueFullError(RuntimeError):
    """More requests wait than `EngineConfig.max_waiting` allows. Nothing was queued; try again later."""


class TextStream(Protocol):
    """Turns tokens into text as they come; `jaxinfer.tokenizer.Detokenizer` is one."""

    @property
    def is_stopped(self) -> bool: ...

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Structure(Protocol):
    """Which tokens may come next; `jaxinfer.grammar.Grammar` is one."""

    @property
    def is_complete(self) -> bool: ...

    def accept(self, token_id: int) -> None: ...

    def mask(self) -> np.ndarray: ...

    def num_allowed(self, token_ids: Sequence[int]) -> int: ...

    def masks(self, token_ids: Sequence[int]) -> list[np.ndarray]: ...


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request. `text` ends before a stop string; `token_ids` are all tokens that were made.

    `sample_index` counts the samples of one prompt. `log_probs` are those of the chosen tokens under the model, before
    temperature and filters. `top_log_probs` has a dictionary from token id to log-probability per token, most probable
    first, if asked for. `seed` repeats the result. `num_cached_tokens` of the prompt were found in the prefix cache and
    not computed. `timings` say what it took, and have no part in equality.
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
    timings: Timings = field(default=Timings(), compare=False)


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What one step added to a request; the last one carries the completion.

    `text` can be empty while an unfinished character or the possible start of a stop string is held back.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    sample_index: int = 0
    completion: Completion | None = None


class Request:
    """One prompt on its way: `num_computed` of its tokens are in the cache, `pages` hold them.

    tokens     |------ prompt ------|-- output --|
    computed   |------------ num_computed ---|      the rest is what the scheduler still has to hand out

    `keys` find its full pages in the prefix cache; without them it shares none. `priority`, `tenant` and `deadline`
    (on the scheduler's clock) say when it is computed, never what comes out. `yields`: it was admitted as batch work,
    which gives way to interactive requests.
    """

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        seed: int,
        sample_index: int = 0,
        max_tokens: int,
        stop_token_ids: Collection[int],
        text_stream: TextStream | None,
        keys: PageKeys | None = None,
        cache_salt: str | None = None,
        priority: Priority = "interactive",
        tenant: str = "",
        time_limit: float = math.inf,
        grammar: Structure | None = None,
    ):
        self.request_id = request_id
        self.sampling = sampling
        self.seed = seed
        self.sample_index = sample_index
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.priority: Priority = priority
        self.tenant = tenant
        self.time_limit = time_limit
        self.arrival = 0.0
        self.order = 0  # of arrival
        self.yields = False
        self.first_step: float | None = None  # when it was in a step for the first time
        self.token_times: list[float] = []  # when each step with a draw ended
        self.num_computed = 0
        self.num_cached_tokens = 0
        self.pages: list[int] = []
        self.keys = keys
        self.cache_salt = cache_salt
        self.finish_reason: FinishReason | None = None
        self.num_parked = 0  # how far it was when it gave way, its last page in a tier
        self._num_reached = 0  # the most that `num_computed` has been
        self.max_tokens = max_tokens
        self.stop_token_ids = frozenset(stop_token_ids)
        self.grammar = grammar
        self._text_stream = text_stream
        self._texts: list[str] = []
        self._log_probs: list[float] = []
        self._top_log_probs: list[dict[int, float]] = []

    @property
    def deadline(self) -> float:
        return self.arrival + self.time_limit

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are known but not in the cache: all of a new prompt, 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def advance(self, num_tokens: int) -> None:
        """Enters that the next `num_tokens` tokens are in the cache."""
        self.num_computed += num_tokens
        self._num_reached = max(self._num_reached, self.num_computed)

    def skip(self, num_computed: int) -> None:
        """Enters that the tokens up to `num_computed` are in the cache without having been computed."""
        # After a preemption a request meets its own pages again, which it did compute; its output is its own as well.
        num_found = min(num_computed, self.num_prompt_tokens) - max(self._num_reached, self.num_computed)
        self.num_cached_tokens += max(num_found, 0)
        self.advance(num_computed - self.num_computed)

    def append(self, token_id: int, log_prob: float, top_log_probs: dict[int, float]) -> Delta:
        """Adds a drawn token and finishes the request where it ends it, or where no token was left to draw."""
        if token_id == NO_TOKEN:
            return self.finish("exhausted")
        self.token_ids.append(token_id)
        self._log_probs.append(log_prob)
        if self.grammar is not None:
            self.grammar.accept(token_id)
        is_complete = self.grammar is not None and self.grammar.is_complete
        if self.sampling.log_probs:
            self._top_log_probs.append(top_log_probs)
        text = self._text_stream.push([token_id]) if self._text_stream else ""
        is_stopped = self._text_stream is not None and self._text_stream.is_stopped
        if token_id in self.stop_token_ids or is_stopped or is_complete:
            return self.finish("stop", text, (token_id,), (log_prob,))
        if self.num_output_tokens >= self.max_tokens:
            return self.finish("length", text, (token_id,), (log_prob,))
        self._texts.append(text)
        return self._delta(text, (token_id,), (log_prob,))

    def finish(
        self,
        reason: FinishReason,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        log_probs: tuple[float, ...] = (),
    ) -> Delta:
        """Ends the request and returns its last delta, with any text that was held back."""
        self.finish_reason = reason
        text += self._text_stream.flush() if self._text_stream else ""
        self._texts.append(text)
        completion = Completion(
            request_id=self.request_id,
            prompt_token_ids=tuple(self.token_ids[: self.num_prompt_tokens]),
            text="".join(self._texts),
            token_ids=tuple(self.token_ids[self.num_prompt_tokens :]),
            log_probs=tuple(self._log_probs),
            top_log_probs=tuple(self._top_log_probs),
            finish_reason=reason,
            seed=self.seed,
            sample_index=self.sample_index,
            num_cached_tokens=self.num_cached_tokens,
            timings=self._timings(),
        )
        return self._delta(text, token_ids, log_probs, completion)

    def _delta(
        self,
        text: str,
        token_ids: tuple[int, ...],
        log_probs: tuple[float, ...],
        completion: Completion | None = None,
    ) -> Delta:
        return Delta(
            request_id=self.request_id,
            sample_index=self.sample_index,
            text=text,
            token_ids=token_ids,
            log_probs=log_probs,
            completion=completion,
        )

    def _timings(self) -> Timings:
        times = self.token_times[: self.num_output_tokens]  # the last draw may have had no token left to draw
        return Timings(
            queue=None if self.first_step is None else self.first_step - self.arrival,
            ttft=times[0] - self.arrival if times else None,
            itl=tuple(later - earlier for earlier, later in pairwise(times)),
        )
