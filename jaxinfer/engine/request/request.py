"""A request on the host: its tokens, its pages, and the deltas and completion made from its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import numpy as np

from jaxinfer.engine.request.completion import Completion, Delta, FinishReason, Timings
from jaxinfer.engine.request.output_record import OutputRecord, SampledToken
from jaxinfer.engine.request.page_keys import PageKeys
from jaxinfer.engine.request.page_table import PageTable
from jaxinfer.engine.request.state_pooling import StatePooling
from jaxinfer.sampling_params import BAD_LOGITS, NO_TOKEN, SamplingParams


@dataclass
class SharedPrompt:
    """State shared by all samples of one prompt, including forks of them and forks of forks."""

    num_samples: int  # each request has its own `sample_index` below this
    # Of the prompt tokens known so far, if requested; one sample computes them for all. None for the first token.
    prompt_log_probs: list[float | None] = field(default_factory=lambda: [None])
    prompt_top_log_probs: list[dict[int, float]] = field(default_factory=lambda: [{}])  # the same for alternatives


class IncrementalDetokenizer(Protocol):
    """Turns tokens into text one at a time; implemented by `jaxinfer.text.tokenizer.Detokenizer`.

    If the next token is in `texts`, its text is `texts[token_id]` and the caller may skip `push`.
    """

    @property
    def texts(self) -> Mapping[int, str]: ...

    @property
    def is_stopped(self) -> bool: ...

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class GrammarState(Protocol):
    """Decides which tokens may come next; implemented by `jaxinfer.text.grammar.Grammar`."""

    @property
    def is_complete(self) -> bool: ...

    @property
    def error(self) -> str | None: ...

    @property
    def has_check(self) -> bool: ...

    def fault(self, text: str) -> str | None: ...

    def begin_again(self) -> GrammarState: ...

    def accept(self, token_id: int) -> None: ...

    def mask(self) -> np.ndarray: ...

    def allowed(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[int]: ...

    def masks(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[np.ndarray]: ...


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in a slot of the device."""

    name: str
    slot: int  # from 1 on: slot 0 is that of requests without an adapter
    digest: str  # of its contents, by which pages, drafts and saved requests are told apart


Priority = Literal["interactive", "batch"]
NO_ALTERNATIVES: dict[int, float] = {}


# Begins the error of a request that ends because of the model, and not because of its structure.
BAD_LOGITS_ERROR = "the logits"


class QueueFullError(RuntimeError):
    """More requests would wait than `EngineConfig.max_waiting` allows its tenant. Nothing was queued; try later."""


class Request:
    """One sample of a prompt: the first `num_computed` of its tokens are in the cache, in the pages of its `table`.

    While a decode loop is under way, some of these tokens are not known yet.

    tokens     |------ prompt ------|-- output --|
    computed   |------------ num_computed ---|      the scheduler still has to schedule the rest

    `keys` identify its full pages in the prefix cache; without keys it shares none. `priority`, `tenant` and
    `deadline` (on the scheduler's clock) affect when it is computed, never the result. `is_preemptible`: the
    scheduler admitted it as batch work, which interactive requests preempt.

    Its tokens determine everything else, so a request that is given another's tokens continues like that one.
    """

    # Each step accesses a dozen of these per row; attributes in a dictionary take a quarter longer.
    __slots__ = (
        *("request_id", "sampling", "seed", "sample_index", "token_ids", "num_prompt_tokens", "max_tokens", "max_len"),
        *("priority", "tenant", "time_limit", "arrival", "order", "is_preemptible", "record", "stop_token_ids"),
        *("num_computed", "num_pending", "epoch", "num_cached_tokens", "table", "keys", "cache_salt", "shared_prompt"),
        *("adapter", "prediction", "replica", "left_after", "finish_reason", "check", "_num_reached", "__weakref__"),
        *("grammar", "mask_seconds", "mask_step", "is_plain", "detokenizer", "pooling"),
    )

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
        detokenizer: IncrementalDetokenizer | None,
        keys: PageKeys | None = None,
        cache_salt: str | None = None,
        adapter: LoadedAdapter | None = None,
        prediction: Sequence[int] = (),
        priority: Priority = "interactive",
        tenant: str = "",
        time_limit: float = math.inf,
        grammar: GrammarState | None = None,
        shared_prompt: SharedPrompt | None = None,
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
        self.is_preemptible = False
        self.record = OutputRecord()
        self.num_computed = 0
        self.num_pending = 0  # tokens that a launched step samples: they count, but the host does not know them yet
        self.epoch = 0  # rewinding and finishing increase it: results of steps launched before are discarded
        self.num_cached_tokens = 0
        self.table = PageTable()
        self.keys = keys
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.prediction = prediction  # tokens that the output may resemble, for drafters
        self.replica: int | None = None  # where it runs or ran last
        self.left_after = 0  # the last step of that replica that may contain it, if it waits again
        self.shared_prompt = shared_prompt or SharedPrompt(sample_index + 1)
        self.finish_reason: FinishReason | None = None
        self._num_reached = 0  # the largest `num_computed` before a rewind or preemption lowered it
        self.max_tokens = max_tokens
        self.max_len = self.num_prompt_tokens + max_tokens
        self.stop_token_ids = frozenset(stop_token_ids)
        self.grammar = grammar
        self.mask_seconds = 0.0  # processor time of its last grammar mask
        self.mask_step = 0  # number of its last step while others waited for theirs
        # No grammar, no alternatives, no prompt log-probabilities: steps take the fast path for such requests.
        self.is_plain = grammar is None and not sampling.log_probs and sampling.prompt_log_probs is None
        # Returns the fault of the whole text, None if it has none. It may take seconds, on any thread.
        self.check: Callable[[], str | None] | None = None
        self.detokenizer = detokenizer
        self.pooling: StatePooling | None = None  # takes the prompt's hidden states; such a request is not plain

    @property
    def adapter_digest(self) -> str:
        """The digest of its adapter, "" without one."""
        return "" if self.adapter is None else self.adapter.digest

    @property
    def deadline(self) -> float:
        return self.arrival + self.time_limit

    @property
    def num_uncomputed(self) -> int:
        """Tokens that exist or are pending but are not in the cache: all of a new prompt, 1 while decoding."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def num_known(self) -> int:
        """The tokens in the cache that the host knows: without those that a launched decode loop feeds back."""
        return min(self.num_computed, len(self.token_ids))

    @property
    def max_skipped(self) -> int:
        """The most leading tokens that may come from a cache; the logits after later tokens are still needed."""
        num_described = len(self.shared_prompt.prompt_log_probs)
        if self.sampling.prompt_log_probs is None or num_described == self.num_prompt_tokens:
            return len(self.token_ids) - 1
        return num_described - 1

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def outputs(self) -> list[SampledToken]:
        """The output tokens with their log-probabilities, as `append` takes them."""
        return self.record.tokens(self.token_ids[self.num_prompt_tokens :])

    def rewind(self, num_tokens: int, detokenizer: IncrementalDetokenizer | None, grammar: GrammarState | None) -> None:
        """Removes the last `num_tokens` output tokens and replays the rest through a new detokenizer and grammar."""
        kept = self.outputs[: self.num_output_tokens - num_tokens]
        self.epoch += 1
        self.num_pending = 0
        # A new list: drafters keep references to the old one.
        self.token_ids = self.token_ids[: self.num_prompt_tokens]
        self.record = self.record.begin_again(len(kept))
        self.detokenizer, self.grammar = detokenizer, grammar
        for output in kept:
            self.append(*output)
        self.keys = None if self.keys is None else self.keys.begin_again(len(self.token_ids))
        self.table.num_saved = min(self.table.num_saved, len(self.token_ids))

    def begin_again(self, keys: PageKeys | None) -> None:
        """Discards everything computed for a request without pages except its tokens; its pages get other keys.

        That includes the tokens that launched steps sample, pooled states, and prompt log-probabilities known only in
        part.
        """
        self.epoch += 1
        self.num_pending = 0
        self.keys = keys
        self.table.forget_sources()
        if len(self.shared_prompt.prompt_log_probs) < self.num_prompt_tokens:
            self.shared_prompt.prompt_log_probs, self.shared_prompt.prompt_top_log_probs = [None], [{}]
        if self.pooling is not None:
            self.pooling.begin_again()

    def give_up(self, num_computed: int) -> None:
        """Lowers `num_computed`: later tokens are no longer in the cache."""
        self._num_reached = max(self._num_reached, self.num_computed)
        self.num_computed = num_computed

    def skip(self, num_computed: int) -> None:
        """Raises `num_computed`: the tokens up to it were found in a cache, so no step computes them."""
        # After a preemption a request finds pages it computed itself; those and its output are not cache hits.
        num_found = min(num_computed, self.num_prompt_tokens) - max(self._num_reached, self.num_computed)
        self.num_cached_tokens += max(num_found, 0)
        self.num_computed = num_computed

    def append(
        self,
        token_id: int,
        log_prob: float,
        top_log_probs: dict[int, float] = NO_ALTERNATIVES,
        sampling_log_prob: float | None = None,
    ) -> Delta:
        """Adds a sampled token; finishes the request if the token ends it or if no token could be sampled."""
        if token_id == NO_TOKEN:
            cause = self.grammar.error if self.grammar is not None else None
            return self.finish("exhausted") if cause is None else self.fail(cause)
        if token_id == BAD_LOGITS:
            return self.fail(self._why_no_logits())
        self._catch_up(len(self.token_ids))
        self.token_ids.append(token_id)
        record = self.record
        record.log_probs.append(log_prob)
        is_stop, text = token_id in self.stop_token_ids, ""
        tops = (top_log_probs,) if self.sampling.log_probs else ()
        sampling: tuple[float, ...] = ()
        if sampling_log_prob is not None:
            record.sampling_log_probs.append(sampling_log_prob)
            sampling = (sampling_log_prob,)
        if not self.is_plain:
            is_stop |= self._observe(token_id, top_log_probs)
        if (stream := self.detokenizer) is not None and (text := stream.texts.get(token_id)) is None:
            text = stream.push(token_id)
            is_stop |= stream.is_stopped
        delta = Delta(self.request_id, text, (token_id,), (log_prob,), self.sample_index, None, tops, sampling)
        if is_stop or len(self.token_ids) >= self.max_len:
            return self.finish("stop" if is_stop else "length", delta)
        record.texts.append(text)
        return delta

    def _catch_up(self, end: int) -> None:
        """Adds the texts of tokens before `end` that the fast path appended without recording their text."""
        if self.detokenizer is not None:
            self.record.catch_up(self.token_ids, self.num_prompt_tokens, end, self.detokenizer.texts)

    def _observe(self, token_id: int, top_log_probs: dict[int, float]) -> bool:
        """Records a token's alternatives and advances the grammar; True if the token completes the grammar."""
        if self.sampling.log_probs:
            self.record.top_log_probs.append(top_log_probs)
        if self.grammar is None:
            return False
        self.grammar.accept(token_id)
        return self.grammar.is_complete

    def fail(self, cause: str) -> Delta:
        """Ends the request with finish reason "error"; its text and tokens so far stay valid."""
        return self.finish("error", error=cause)

    def _why_no_logits(self) -> str:
        names = "".join(f", or the logits processor {name!r}" for name, _ in self.sampling.logits_processors)
        return (
            f"{BAD_LOGITS_ERROR} after {len(self.token_ids)} tokens have NaN or infinity, so no token can be drawn;"
            f" check the checkpoint's weights, the LLM's dtype, whose range they may leave{names}"
        )

    def finish(self, reason: FinishReason, last: Delta | None = None, *, error: str | None = None) -> Delta:
        """Ends the request and returns its last delta, with any text that was held back.

        `last`: the delta of the token that ends it. If the grammar is complete, `check` is to be called before the
        delta is handed out.
        """
        record, last = self.record, last or Delta(self.request_id, "", (), (), self.sample_index)
        self.epoch += 1
        self.num_pending = 0
        self._catch_up(len(self.token_ids) - len(last.token_ids))
        text = last.text + (self.detokenizer.flush() if self.detokenizer else "")
        record.texts.append(text)
        is_cut = self.detokenizer is not None and self.detokenizer.is_stopped  # by a stop string, before its end
        if reason == "stop" and not is_cut and self.grammar is not None and self.grammar.is_complete:
            self.check = partial(self.grammar.fault, "".join(record.texts)) if self.grammar.has_check else None
        self.finish_reason = reason
        wants_prompt = self.sampling.prompt_log_probs is not None
        completion = Completion(
            request_id=self.request_id,
            prompt_token_ids=tuple(self.token_ids[: self.num_prompt_tokens]),
            text="".join(record.texts),
            token_ids=tuple(self.token_ids[self.num_prompt_tokens :]),
            log_probs=tuple(record.log_probs),
            top_log_probs=tuple(record.top_log_probs),
            sampling_log_probs=tuple(record.sampling_log_probs),
            prompt_log_probs=tuple(self.shared_prompt.prompt_log_probs) if wants_prompt else (),
            prompt_top_log_probs=tuple(self.shared_prompt.prompt_top_log_probs) if wants_prompt else (),
            finish_reason=reason,
            seed=self.seed,
            sample_index=self.sample_index,
            num_cached_tokens=self.num_cached_tokens,
            error=error,
            adapter=None if self.adapter is None else self.adapter.name,
            # The last step may have sampled no token, for lack of an allowed one.
            timings=Timings.of(self.arrival, record.first_step, record.times[: self.num_output_tokens]),
        )
        return last._replace(text=text, completion=completion)
