"""An engine without a model, with the methods of `LLM` that a job uses."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

from jaxinfer.config import SamplingParams
from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.engine.request.request import LoadedAdapter, QueueFullError
from jaxinfer.text.answers.parts import Answer
from jaxinfer.text.chat_template import ChatTemplates

MAX_PROMPT_TOKENS = 8
MAX_RUNNING = 3


class FakeTokenizer:
    """Has a name for each token; a chat is rendered as its last message."""

    chat_templates = ChatTemplates({"default": "fake {{ tools }}"}, {})

    def text_of(self, token_id: int) -> str:
        return f"t{token_id}"

    def render_chat(self, conversation: Any, **arguments: Any) -> str:
        if not conversation:
            raise ValueError("no messages")
        self.rendered = {"conversation": conversation, **arguments}
        return conversation[-1]["content"]

    def encode(self, text: str, *, add_special_tokens: bool) -> str:
        assert not add_special_tokens  # the template writes them
        return text


class FakeAnswers:
    """The form of an answer: its whole text is content."""

    def __init__(self, tokenizer: FakeTokenizer) -> None:
        self.tokenizer = tokenizer

    def check_text(self, name: str, text: str) -> None:
        pass

    def form(self, *_: Any, **__: Any) -> FakeAnswers:
        return self

    def sampling_params(self, params: SamplingParams, _: Any) -> SamplingParams:
        return params

    def read(self, token_ids: Any, *_: Any) -> Answer:
        return Answer(f"{len(token_ids)} tokens")


def digest_of_adapter(path: str) -> str:
    """Returns the digest of the adapter at a path, by which its contents are told apart."""
    return blake2b(path.encode()).hexdigest()


class FakeSamples(NamedTuple):
    request_id: int
    prompt: Any
    params: SamplingParams
    adapter: LoadedAdapter | None = None

    @property
    def requests(self) -> tuple[FakeSamples, ...]:
        return (self,)


class FakeLLM:
    """Draws tokens from the seed and the prompt alone; raises `killed_by` after `steps_left` steps.

    `room` is how many requests it takes at a time. It is its own engine.
    """

    def __init__(
        self, steps_left: int | None = None, killed_by: BaseException | None = None, room: float = math.inf
    ) -> None:
        self._room = room
        self.tokenizer = FakeTokenizer()
        self.answers: Any = FakeAnswers(self.tokenizer)
        self._steps_left = steps_left
        self._killed_by = killed_by
        self._waiting: list[tuple[FakeSamples, Callable[[Delta], Any]]] = []
        self._tokens: dict[int, list[int]] = {}
        self._default_queue: list[Delta] = []
        self.num_added = 0
        self.max_unfinished = 0
        self.priorities: set[str] = set()
        self.loaded_adapters: dict[str, str] = {}

    default_sampling_params = SamplingParams()
    model_names = ("m",)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._default_queue)

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.loaded_adapters)

    def load_adapter(self, name: str, path: str) -> None:
        self.loaded_adapters[name] = path

    def identity(self) -> dict[str, str]:
        return {"model": "fake", "dtype": "float32"}

    @property
    def adapter_digests(self) -> dict[str, str]:
        return {name: digest_of_adapter(path) for name, path in self.loaded_adapters.items()}

    @contextlib.contextmanager
    def engine(self) -> Iterator[FakeLLM]:
        yield self

    def admit(
        self,
        prompt: str | tuple[int, ...],
        sampling_params: SamplingParams,
        *,
        priority: str = "interactive",
        adapter: str | None = None,
    ) -> FakeSamples:
        if adapter is not None and adapter not in self.loaded_adapters:
            raise ValueError(f"adapter={adapter} is not loaded")
        if len(prompt) > MAX_PROMPT_TOKENS:
            raise ValueError(f"prompt has {len(prompt)} tokens")
        self.priorities.add(priority)
        loaded = None if adapter is None else LoadedAdapter(adapter, 1, self.adapter_digests[adapter])
        return FakeSamples(self.num_added + 1, prompt, sampling_params, loaded)

    def submit(self, samples: FakeSamples, sink: Callable[[Delta], Any]) -> int:
        if len(self._waiting) + samples.params.n > self._room:
            raise QueueFullError(f"{samples.params.n} more are too many")
        self.num_added += 1
        self._waiting.append((samples, sink))
        self.max_unfinished = max(self.max_unfinished, len(self._waiting))
        return samples.request_id

    def close(self) -> None:
        pass

    def drop(self, request_id: int) -> None:
        self._end(request_id)

    def _end(self, request_id: int) -> None:
        self._waiting = [entry for entry in self._waiting if entry[0].request_id != request_id]

    def advance(self) -> list[int] | None:
        """Returns the requests of the step."""
        if self._killed_by is not None and self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left < 0:
                raise self._killed_by
        running = self._waiting[:MAX_RUNNING]
        for samples, sink in running:
            tokens = self._tokens.setdefault(samples.request_id, [])
            tokens.append(random.Random(f"{samples.params.seed} {samples.prompt} {len(tokens)}").randrange(100))
            reason = "length" if len(tokens) == samples.params.max_tokens else None
            sink(self._delta(*samples[:3], (tokens[-1],), reason))
            if reason is not None:
                self._end(samples.request_id)
        return [samples.request_id for samples, _ in running] or None

    def take_error(self) -> None:
        """Has no drafter."""

    def add(self, prompt: str | tuple[int, ...], sampling_params: SamplingParams, **options: Any) -> int:
        return self.submit(self.admit(prompt, sampling_params, **options), self._default_queue.append)

    def abort(self, request_id: int) -> None:
        for samples, sink in [entry for entry in self._waiting if entry[0].request_id == request_id]:
            self._end(request_id)
            sink(self._delta(*samples[:3], token_ids=(), finish_reason="abort"))

    def step(self) -> list[Delta]:
        self.advance()
        deltas = self._default_queue[:]
        self._default_queue.clear()
        return deltas

    def _delta(self, request_id: int, prompt: Any, params: SamplingParams, token_ids: Any, finish_reason: Any) -> Delta:
        tokens = tuple(self._tokens.get(request_id, ()))
        log_probs = tuple(-token / 7 for token in tokens)
        completion = Completion(
            request_id=request_id,
            prompt_token_ids=tuple(range(len(prompt))),
            text="".join(chr(0x4E00 + token) for token in tokens),
            token_ids=tokens,
            log_probs=log_probs,
            top_log_probs=tuple({token: -0.5, 101: float("-inf")} for token in tokens) if params.log_probs else (),
            prompt_log_probs=() if params.prompt_log_probs is None else (None, *[-0.5] * (len(prompt) - 1)),
            prompt_top_log_probs=() if params.prompt_log_probs is None else ({}, *[{7: -0.25}] * (len(prompt) - 1)),
            finish_reason=finish_reason,
            seed=params.seed or 0,
        )
        return Delta(
            request_id=request_id,
            text="",
            token_ids=token_ids,
            log_probs=log_probs[-1:],
            completion=completion if finish_reason else None,
        )
