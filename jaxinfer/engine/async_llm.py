"""`AsyncLLM`: an engine for asyncio, text in, text out."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

import numpy as np

from jaxinfer.config import EngineConfig, SamplingParams, with_fields
from jaxinfer.display.progress import is_shown
from jaxinfer.engine.drafters.drafters import Drafter
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.engine_thread import EngineThread
from jaxinfer.engine.execution.warm_up import Ready
from jaxinfer.engine.fair_threads import FairThreads
from jaxinfer.engine.frontend.admission import ONE_TOKEN, Prompt, RequestOptions, check_names
from jaxinfer.engine.frontend.chats import ChatOptions, Chats, Conversation, Rendering, render_chats
from jaxinfer.engine.frontend.embeddings import Reading, StateReader, begin_pooling, states_of
from jaxinfer.engine.frontend.sample_group import CompletionCollector, SampleGroup
from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.engine.scheduling.metrics import Metrics
from jaxinfer.sampling.processors import LogitsProcessor
from jaxinfer.validation import MAX_INT, require, require_int

T = TypeVar("T")
# Threads that check, render and tokenize prompts, and others that compile structures: no other prompt waits for these.
# Of both, one tenant leaves some free for others.
ADMISSION_THREADS, ADMISSIONS_OF_TENANT = 4, 3
STRUCTURE_THREADS, STRUCTURES_OF_TENANT = 4, 2
MAX_ADMITTING = 1_024  # calls of one tenant that wait for either


class SlowReaderError(RuntimeError):
    """The reader of a stream has left more tokens unread than `max_unread_tokens`, and its request has ended."""


class AsyncLLM:
    """A model for any number of asyncio tasks, threads and event loops at once.

        async with AsyncLLM(model) as llm:
            async for delta in llm.stream("Hello"):
                print(delta.text, end="")

    The arguments are those of `LLM`, and so are the tokens. An engine thread computes the steps, and some threads more
    check and tokenize prompts, so no call holds up an event loop. The constructor does: it loads the weights and
    compiles a step. `await asyncio.to_thread(AsyncLLM, model)` leaves the loop free meanwhile.

    A task that is cancelled, or leaves the loop over a stream, ends its requests and frees their pages. A stream whose
    reader has left `max_unread_tokens` tokens unread ends with SlowReaderError. If the engine fails, every waiting call
    raises RuntimeError with the cause.

    The end of an `async with`, `close`, or the end of the last reference frees the memory.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        dtype: str | None = None,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        speculation: str | Path | Drafter | None = None,
        devices: Sequence[Any] | None = None,
        show_progress: bool | None = None,
        max_unread_tokens: int = 16_384,
        **fields: Any,
    ) -> None:
        require_int("max_unread_tokens", max_unread_tokens, 1)
        self._engine = Engine(
            model,
            config=with_fields(type(self), config, fields),
            dtype=dtype,
            logits_processors=logits_processors,
            speculation=speculation,
            devices=devices,
            show_progress=show_progress,
        )
        self.engine_config, self.model_config = self._engine.engine_config, self._engine.model_config
        self.tokenizer, self.max_model_len = self._engine.tokenizer, self._engine.max_model_len
        self.answers = self._engine.answers
        self.max_unread_tokens = max_unread_tokens
        self._admitting = FairThreads(
            ADMISSION_THREADS, "admission", max_at_once=ADMISSIONS_OF_TENANT, max_waiting=MAX_ADMITTING
        )
        self._compiling = FairThreads(
            STRUCTURE_THREADS, "structures", max_at_once=STRUCTURES_OF_TENANT, max_waiting=MAX_ADMITTING
        )
        self._thread = EngineThread(self._engine)
        # Of the loops that have a reader, which alone keeps the queue.
        self._queues: weakref.WeakValueDictionary[asyncio.AbstractEventLoop, _DeltaQueue]
        self._queues = weakref.WeakValueDictionary()
        # The collector may run on the engine's thread, which cannot wait for its own end.
        self._finalizer = weakref.finalize(self, _close_elsewhere, self._thread)
        self._finalizer.atexit = False  # the engine's thread sees to that itself

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncLLM {self._engine.description}>"

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Takes no more requests and frees the memory, after unfinished requests have had `drain_seconds`.

        Requests that are unfinished then end with finish reason "abort". Later calls raise RuntimeError.
        """
        await asyncio.to_thread(self._thread.close, drain_seconds=drain_seconds)
        self._admitting.close()
        self._compiling.close()
        self._finalizer.detach()

    @property
    def engine_thread(self) -> EngineThread:
        """The engine's thread, for threads without an event loop; see `EngineThread`. `close` is the LLM's own."""
        return self._thread

    @property
    def failure(self) -> BaseException | None:
        """The exception that has ended the engine, or None."""
        return self._thread.failure

    @property
    def is_open(self) -> bool:
        """True unless the engine is closed or has failed."""
        try:
            self._engine.check()
        except RuntimeError:
            return False
        return True

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that give none: those that the checkpoint's generation_config.json states."""
        return self._engine.default_sampling_params

    def metrics(self) -> Metrics:
        """Returns the present numbers of requests and pages, and the engine's counters since the start."""
        return self._engine.metrics()

    def identity(self) -> dict[str, str]:
        """Returns the properties of this engine that determine the text of a request: see `text_identity`."""
        return self._engine.identity()

    async def warm_up(self, *, show_progress: bool | None = None) -> Ready:
        """Compiles all steps, as `LLM.warm_up` does."""
        show_progress = is_shown(show_progress)
        return await asyncio.to_thread(self._engine.warm_up, show_progress=show_progress)

    async def call(self, command: Callable[[Engine], T]) -> T:
        """Returns the result of a function of the engine, which runs between two steps on the engine's thread.

        This is the way to `fork`, `rewind`, `save`, `restore` and `update_params`; see `Engine`.
        """
        require(callable(command), "command", command, "a function of the engine")
        return await asyncio.wrap_future(self._thread.call(command))

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters."""
        return self._engine.adapters

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Loads a LoRA adapter while requests run: see `LLM.load_adapter`."""
        adapter = await asyncio.to_thread(self._engine.read_adapter, path)
        await self.call(lambda engine: engine.load_adapter(name, adapter))

    async def unload_adapter(self, name: str) -> None:
        """Frees the slot of an adapter: see `LLM.unload_adapter`."""
        await self.call(lambda engine: engine.unload_adapter(name))

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[Delta]:
        """Yields a prompt's output piece by piece; the last piece of a sample carries its completion.

        The first piece comes after the prompt has been admitted: then ValueError is raised if the engine cannot honour
        the request, and QueueFullError if too many requests wait. `options` are those of `LLM.add`.
        """
        async with await self.open([prompt], sampling_params, **options) as stream:
            async for delta in stream:
                yield delta

    async def open(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Queues all prompts or none, and returns the stream of their deltas: `async with await llm.open(…) as stream`.

        Raises ValueError if the engine cannot honour some prompt, and QueueFullError if too many requests wait.
        """
        groups = await self._admitted(prompts, sampling_params, options)
        return await self._open(groups, self._reader(self.max_unread_tokens * len(groups)))

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Completes one prompt or several, text or token ids, and returns the completions as `LLM.generate` does.

        Before computing anything, raises ValueError if the engine cannot honour some prompt, and QueueFullError if
        there are too many.
        """
        return await self._complete(await self._admitted(prompts, sampling_params, options))

    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]:
        """Completes one conversation or several, rendered by the chat template; the arguments are those of `LLM.chat`.

        To stream an answer, `render` its conversation, and read the stream with a reader of its form.
        """
        rendering: Any = {name: value for name, value in options.items() if name in Rendering.__annotations__}
        others: Any = {name: value for name, value in options.items() if name not in rendering}
        check_names(others)
        chats = await self.render(messages, sampling_params, tenant=others.get("tenant", ""), **rendering)
        completions = await self.generate(chats.prompts, chats.params, **others)
        return await asyncio.to_thread(chats.answered, completions)

    async def render(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tenant: str = "",
        **rendering: Unpack[Rendering],
    ) -> Chats:
        """Returns conversations as prompts with the parameters and the form of their answers: see `LLM.chat`.

        `tenant`: the conversations of tenants are rendered in turns.
        """
        work = partial(render_chats, self.answers, self.default_sampling_params, messages, sampling_params, **rendering)
        threads = self._admitting if rendering.get("tools") is None else self._compiling
        return await self._on_thread(threads, tenant, work)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, tenant: str = "") -> list[int]:
        """Returns the token ids of a text, by default with those that the tokenizer adds to a prompt."""
        work = partial(self._engine.tokenize, text, add_special_tokens=add_special_tokens)
        return await self._on_thread(self._admitting, tenant, work)

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool = True,
        **options: Unpack[RequestOptions],
    ) -> np.ndarray:
        """Returns a vector for each prompt, f32[len(prompts), vector_size]: see `LLM.embed`."""
        return await self.read(lambda reader: reader.embedding(prompts, pooling, normalize), **options)

    async def classify(
        self, prompts: Prompt | Sequence[Prompt], *, activate: bool = True, **options: Unpack[RequestOptions]
    ) -> np.ndarray:
        """Returns a number for each label of a classifier, f32[len(prompts), labels]: see `LLM.classify`."""
        return await self.read(lambda reader: reader.classification(prompts, activate), **options)

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        chat_template: str | None = None,
        answer_tokens: Sequence[str] | None = None,
        activate: bool = True,
        **options: Unpack[RequestOptions],
    ) -> np.ndarray:
        """Returns how well each document answers its query, f32[len(documents)]: see `LLM.score`."""
        how = {"instruction": instruction, "chat_template": chat_template, "answer_tokens": answer_tokens}
        return await self.read(lambda reader: reader.scoring(queries, documents, activate=activate, **how), **options)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels of `classify`; () for a model that is no classifier."""
        self._engine.check()
        return self._engine.reader.labels

    async def read(
        self,
        prepare: Callable[[StateReader], Reading],
        on_admitted: Callable[[list[int]], object] = lambda _: None,
        **options: Unpack[RequestOptions],
    ) -> np.ndarray:
        """Returns what is read from the states of texts; threads prepare them, and read their states.

        `on_admitted` gets the numbers of tokens of the prompts before they are computed.
        """
        on_thread = partial(self._on_thread, self._admitting, options.get("tenant", ""))
        reading = await on_thread(partial(prepare, self._engine.reader))
        groups = await self._admitted(reading.prompts, ONE_TOKEN, options)
        on_admitted([samples.requests[0].num_prompt_tokens for samples in groups])
        poolings = [begin_pooling(samples, reading.pooling) for samples in groups]
        return await on_thread(partial(reading.result, states_of(await self._complete(groups), poolings)))

    async def _admitted(
        self, prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None, options: RequestOptions
    ) -> list[SampleGroup]:
        """Returns prompts as the engine takes them, checked on a thread of their own."""

        def admit() -> list[SampleGroup]:
            return self._engine.admit_all(prompts, params, **options)

        each = params if isinstance(params, list | tuple) else [params]
        has_structure = any(isinstance(one, SamplingParams) and self._engine.must_compile(one) for one in each)
        return await self._on_thread(
            self._compiling if has_structure else self._admitting, options.get("tenant", ""), admit
        )

    async def _on_thread(self, threads: FairThreads, tenant: Any, work: Callable[[], T]) -> T:
        """Returns the result of a function that checks prompts of a tenant."""
        self._engine.check()
        return await asyncio.wrap_future(threads.submit(tenant if isinstance(tenant, str) else "", work))

    async def _complete(self, groups: Sequence[SampleGroup]) -> list[Completion]:
        """Submits all prompts or none, and returns their completions in the prompts' order."""
        collector = CompletionCollector.of_groups(groups)
        async with await self._open(groups, self._reader(), are_whole=True) as stream:
            async for delta in stream:
                collector.add(delta)
        return collector.completions()

    async def _open(self, groups: Sequence[SampleGroup], reader: _Reader, *, are_whole: bool = False) -> Stream:
        """Submits all prompts or none; with `are_whole` the reader gets completions alone, and so wakes less often."""

        def send_whole(item: Delta | Exception) -> None:
            if isinstance(item, Exception) or item.completion is not None:
                reader.send(item)
            else:
                reader.require_loop()

        def submit(engine: Engine) -> None:
            engine.require_room(groups)
            for samples in groups:
                samples.while_held_back = reader.require_loop
                engine.submit(samples, send_whole if are_whole else reader.send)

        stream = Stream(groups, reader, self._thread)
        try:
            await self.call(submit)
        except BaseException:  # of a cancelled task too, whose requests may be there already
            await stream.close()
            raise
        return stream

    def _reader(self, max_unread_tokens: int = MAX_INT) -> _Reader:
        loop = asyncio.get_running_loop()
        queue = self._queues.get(loop)
        if queue is None:
            self._queues[loop] = queue = _DeltaQueue(loop)
        return _Reader(queue, max_unread_tokens)


class Stream:
    """The deltas of one prompt or several, as they come; the last delta of a sample carries its completion.

    The end of an `async with`, or `close`, ends the requests that are unfinished and frees their pages. So does an
    exception that the iteration raises; the iteration is then over.
    """

    def __init__(self, groups: Sequence[SampleGroup], reader: _Reader, thread: EngineThread) -> None:
        self.request_ids = tuple(samples.request_id for samples in groups)  # in the prompts' order
        self.num_prompt_tokens = sum(samples.requests[0].num_prompt_tokens for samples in groups)
        self._reader, self._thread = reader, thread
        self._num_to_come = sum(samples.num_completions for samples in groups)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if not self._num_to_come:
            raise StopAsyncIteration
        try:
            delta = await self._reader.receive()
        except Exception:
            await self.close()
            raise
        if delta is None:
            raise StopAsyncIteration
        self._num_to_come -= delta.completion is not None
        if not self._num_to_come:
            self._reader.close()
        return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the requests that are unfinished, without waiting for their end."""
        if self._num_to_come:
            self._num_to_come = 0
            self._reader.close()
            self._thread.call(self._drop)

    def _drop(self, engine: Engine) -> None:
        for request_id in self.request_ids:
            engine.drop(request_id)


class _DeltaQueue:
    """The way of deltas from the engine's thread into an event loop, which wakes once for those of many readers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[_Reader, Delta | Exception]] = deque()
        self._is_waking = False

    def post(self, reader: _Reader, item: Delta | Exception) -> None:
        self._items.append((reader, item))
        if not self._is_waking:
            self._is_waking = True  # before the call, for the loop may run at once
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed; this ends the request, and those that post after it
                self._is_waking = False
                raise

    def require_loop(self) -> None:
        """Raises RuntimeError if the event loop is closed, so that nothing can wait for a delta."""
        if self._loop.is_closed():
            raise RuntimeError("the event loop of this request is closed")

    def _deliver(self) -> None:
        self._is_waking = False  # before the items are taken: what comes from here on wakes the loop again
        while self._items:
            reader, item = self._items.popleft()
            reader.put(item)


class _Reader:
    """The unread deltas of one call."""

    def __init__(self, queue: _DeltaQueue, max_unread_tokens: int = MAX_INT) -> None:
        self._queue = queue
        self._max_unread_tokens = max_unread_tokens
        self._items: deque[Delta | Exception] = deque()
        self._has_items = asyncio.Event()
        self._is_closed = False
        self.require_loop = queue.require_loop  # the engine's thread asks while it has nothing to send
        self._num_sent, self._num_read = 0, 0  # tokens; the engine's thread writes the first, the loop the second

    def send(self, item: Delta | Exception) -> None:
        """Takes a delta, or the exception that ends the request; the sink of the engine's thread."""
        if isinstance(item, Delta):
            self._num_sent += len(item.token_ids)
            num_unread = self._num_sent - self._num_read
            if num_unread > self._max_unread_tokens:
                item = SlowReaderError(
                    f"{num_unread} tokens of the stream are unread, more than"
                    f" max_unread_tokens={self._max_unread_tokens}, so its request has ended; read faster or give"
                    " AsyncLLM a greater max_unread_tokens"
                )
        self._queue.post(self, item)
        if isinstance(item, SlowReaderError):
            raise item  # so that the engine ends the request

    def put(self, item: Delta | Exception) -> None:
        self._items.append(item)
        self._has_items.set()

    def close(self) -> None:
        """Lets every `receive` return, because no more is to be read."""
        self._is_closed = True
        self._has_items.set()

    async def receive(self) -> Delta | None:
        """Returns the next delta, or None after `close`; raises the exception that ends the request."""
        while not self._items and not self._is_closed:
            self._has_items.clear()
            await self._has_items.wait()
        if self._is_closed:
            return None
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        self._num_read += len(item.token_ids)
        return item


def _close_elsewhere(thread: EngineThread) -> None:
    threading.Thread(target=partial(thread.close, drain_seconds=0.0), name="close", daemon=True).start()
