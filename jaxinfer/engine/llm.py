"""`LLM`: text in, text out, with continuous batching over a paged KV cache."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np

from jaxinfer.checkpoint import resolve_checkpoint
from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.device import enable_compilation_cache, resolve_dtype
from jaxinfer.engine.assembly import build_engine
from jaxinfer.engine.drafters.drafters import Drafter
from jaxinfer.engine.execution.params_update import placed_like
from jaxinfer.engine.execution.warm_up import Ready
from jaxinfer.engine.frontend.admission import (
    Conversation,
    Prompt,
    RequestOptions,
    as_conversations,
    as_params,
    as_prompts,
    check_names,
)
from jaxinfer.engine.frontend.beam_search import MAX_LENGTH_PENALTY, complete
from jaxinfer.engine.frontend.branches import Branches
from jaxinfer.engine.frontend.embeddings import ONE_TOKEN, begin_pooling, embeddings_of
from jaxinfer.engine.frontend.engine_loop import EngineLoop
from jaxinfer.engine.frontend.guard import Guard, deferred_interrupts, require_own_process
from jaxinfer.engine.frontend.page_identity import text_identity
from jaxinfer.engine.frontend.sample_group import SampleGroup
from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.engine.request.state_pooling import POOLINGS
from jaxinfer.engine.scheduling.metrics import Metrics
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.timeline import MAX_STEPS, Timeline, recorded_timeline
from jaxinfer.model.params import Params
from jaxinfer.sampling.processors import LogitsProcessor
from jaxinfer.validation import (
    as_path,
    is_int,
    require,
    require_bool,
    require_int,
    require_name,
    require_real,
    shown,
)

BUNDLED_MODEL = Path(__file__).parent.parent / "assets" / "tiny"


class LLM:
    """A model that is loaded, compiled and ready to generate.

    * `model`: a folder with a Hugging Face checkpoint, or a Hub id. None takes the small model of the package.
    * `config`: the limits and options of the engine.
    * `dtype`: float32, bfloat16 or float16, or fp32, bf16 or fp16. None or "auto" takes float32 on CPU, bfloat16 on
      devices that support it, and float16 on all others.
    * `logits_processors`: your own functions by name, see `jaxinfer.sampling.processors.LogitsProcessor`. The engine
      compiles them into its steps. They act on the requests that name them in `SamplingParams.logits_processors`.
    * `speculation`: the source of draft tokens; the engine verifies several of them in one step. It changes the
      speed, never a token.
        * "ngram" drafts the tokens that followed the last tokens earlier in the same request.
        * "suffix" also searches the outputs of other requests.
        * "mtp" uses the layer for multi-token prediction in the checkpoint itself.
        * A folder or Hub id has a small model of the same vocabulary, or an EAGLE-3 head or draft heads trained on this
          model's states.
        * A `Drafter` object drafts in your own way.

    The constructor loads the weights and compiles a step that can compute any request, so no request waits for either.
    The faster steps of smaller shapes compile in the background; `warm_up` waits for them.

    `add` queues requests, and each `step` advances them together; `generate` and `stream` do both for you. One thread
    at a time may call an LLM; a call from a second thread raises RuntimeError. `close`, the end of a `with` block, or
    the end of the last reference frees its memory. After a device error every call raises RuntimeError.

    Raises ValueError for an unusable checkpoint, with a list of everything that is wrong with it.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        dtype: str | None = None,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        speculation: str | Path | Drafter | None = None,
        show_progress: bool = False,
    ):
        config = EngineConfig() if config is None else config
        _check_types(model, config, logits_processors)
        require_own_process()
        enable_compilation_cache()
        self.engine_config = config
        self._dtype = resolve_dtype(dtype)
        self._path = resolve_checkpoint(BUNDLED_MODEL if model is None else model)
        self._guard = Guard()
        parts = build_engine(
            self._path,
            config,
            self._dtype,
            custom=dict(logits_processors or {}),
            speculation=speculation,
            on_failure=self._guard.fail,
            show_progress=show_progress,
        )
        self.model_config, self.tokenizer = parts.model_config, parts.tokenizer
        self._admission, self._scheduler = parts.admission, parts.scheduler
        self._warm_up, self._runner, self._speculation = parts.warm_up, parts.runner, parts.speculation
        self._ids = itertools.count()
        self._loop = EngineLoop(parts.scheduler, parts.runner, self._guard)
        self._branches = self._make_branches()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        model, config = self.model_config, self.engine_config
        state = "closed" if self._guard.is_closed else f"{self._scheduler.num_unfinished} unfinished requests"
        return (
            f"<LLM {self._path}: {model.num_layers} layers of hidden_size={model.hidden_size}, {self._dtype},"
            f" max_num_seqs={config.max_num_seqs}, {state}>"
        )

    def close(self) -> None:
        """Frees the memory of parameters, cache and compiled steps. Unfinished requests are lost.

        Every later call raises RuntimeError, except `close` itself.
        """
        if self._guard.is_closed:
            return
        self._guard.close()
        self._runner.compiled_steps.cancel()
        del self._warm_up, self._admission, self._scheduler, self._runner, self._speculation
        del self._loop, self._branches

    @property
    def on_step(self) -> Callable[[Step, float], None] | None:
        """The function that the engine calls after each step with the step and its seconds, or None."""
        self._guard.check()
        return self._loop.on_step

    @on_step.setter
    def on_step(self, function: Callable[[Step, float], None] | None) -> None:
        self._guard.check()
        self._loop.on_step = function

    @property
    def has_unfinished(self) -> bool:
        """True if a request is unfinished, or if `step` has outputs to return."""
        self._guard.check()
        return self._scheduler.num_unfinished > 0 or self._loop.queues.has_outputs

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that give none: those that the checkpoint's generation_config.json states."""
        self._guard.check()
        return self._admission.default_sampling_params

    def warm_up(self, *, show_progress: bool = False, description: str = "compiling steps") -> Ready:
        """Waits until all steps are compiled, and returns their number, compile seconds and memory plan.

        Call it before you measure: until then larger steps stand in for smaller ones, and the compiler shares the
        host. `description` labels the progress bar. Raises the compiler's exception if a step fails to compile.
        """
        require_bool("show_progress", show_progress)
        require(isinstance(description, str), "description", description, "text")
        with deferred_interrupts(), self._guard:
            steps, warm_up = self._runner.compiled_steps, self._warm_up
        steps.wait(show_progress=show_progress, description=description)
        return warm_up.ready()

    def identity(self) -> dict[str, str]:
        """Returns the properties of this LLM that determine the text of a request: see `text_identity`."""
        self._guard.check()
        return text_identity(self._path, self._admission)

    def metrics(self) -> Metrics:
        """Returns the present numbers of requests and pages, and the engine's counters since the start."""
        self._guard.check()
        return replace(self._scheduler.metrics(), num_late_compiles=self._loop.num_late_compiles)

    def timeline(self, *, max_steps: int = MAX_STEPS) -> AbstractContextManager[Timeline]:
        """Records steps, load and the phases of requests inside a `with`: `with llm.timeline() as timeline: ...`.

        The timeline keeps the last `max_steps` steps; `timeline.save("timeline.json")` writes them for
        ui.perfetto.dev. First waits until all steps are compiled, like `warm_up`.
        """
        require_int("max_steps", max_steps, 1)
        self.warm_up()
        return recorded_timeline(self._scheduler, self._runner.buckets, max_steps)

    def add(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> int:
        """Queues a prompt, text or token ids, and returns its request id; `step` returns its tokens.

        `options` are priority, tenant, deadline and cache_salt: see `RequestOptions`. Raises ValueError if the engine
        cannot honour the request exactly, and QueueFullError if too many requests wait. Neither changes anything.
        """

        def queue() -> int:
            samples = self._admit(prompt, sampling_params, **options)
            self._loop.submit(samples)
            return samples.request_id

        return self._begin(queue)

    def abort(self, request_id: int) -> None:
        """Ends a request early; its completion comes out as usual, with finish reason "abort".

        Does nothing if the request has already finished.
        """
        require(is_int(request_id), "request_id", request_id, "an id that `add` has returned")
        with deferred_interrupts(), self._guard:
            self._loop.abort(request_id)

    def fork(self, request_id: int, *, seed: int | None = None) -> int:
        """Branches an unfinished request and returns the id of the branch: see `Branches.fork`."""
        return self._begin(lambda: self._branches.fork(request_id, seed))

    def rewind(self, request_id: int, num_tokens: int, *, seed: int | None = None) -> None:
        """Drops the last `num_tokens` tokens of an unfinished request's output: see `Branches.rewind`."""
        with deferred_interrupts(), self._guard:
            self._branches.rewind(request_id, num_tokens, seed)

    def save(self, request_id: int, path: str | Path) -> None:
        """Writes an unfinished request with its pages to a file, for `restore`: see `Branches.save`."""
        with deferred_interrupts(), self._guard:
            if self._scheduler.has_states:
                self._loop.settle()
            self._branches.save(request_id, as_path("path", path))

    def restore(self, path: str | Path) -> int:
        """Queues the request that `save` wrote to a file, and returns its id in this LLM: see `Branches.restore`."""
        return self._begin(lambda: self._branches.restore(as_path("path", path)))

    def update_params(self, params: Params) -> None:
        """Replaces the model's parameters while requests run, as the training of a model does between its steps.

        `params` has the structure, shapes and dtypes of what `load_checkpoint` returns for this engine. Unfinished
        requests keep their tokens so far; their next tokens are those of the new parameters. For that their pages are
        computed again. Nothing that is cached is found afterwards, and no file that `save` wrote before is restored.
        Drafters keep their own weights, which change no token.

        Copies no array that is on the device already: never donate these arrays to another function afterwards. Raises
        ValueError that names the first difference from the engine's parameters, and then changes nothing.
        """
        with deferred_interrupts(), self._guard:
            params = placed_like(params, self._runner.params)
            # Processes share a disk cache, and none of them has these parameters: the version must be unique.
            version = f", updated to {secrets.token_hex(16)}"
            self._admission = admission = replace(self._admission, params_version=version)
            self._branches = self._make_branches()
            self._scheduler.recompute(lambda request: request.keys and admission.page_keys(request.cache_salt))
            self._runner.update_params(params)
            if self._speculation is not None:
                self._speculation.update_target(params)

    def step(self) -> list[Delta]:
        """Computes one step and returns its new tokens for the requests of `add`; empty if nothing is left to do."""
        with deferred_interrupts(), self._guard:
            self._loop.advance()
        return self._loop.queues.take()  # if an interrupt leaves deltas there, the next step returns them

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Iterator[Delta]:
        """Yields a prompt's output piece by piece; the last piece of a sample carries its completion.

        Closing the iterator aborts the request. The call itself raises ValueError if the engine cannot honour the
        request. The first `next` queues the request, or raises QueueFullError. `options` are as for `add`.
        """
        with deferred_interrupts(), self._guard:
            return self._loop.stream(self._admit(prompt, sampling_params, **options))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Completes one prompt or several, text or token ids, and returns the completions in the prompts' order.

        A prompt with `n` above 1 has n completions in a row, by sample_index, or best first with `best_of`.
        `sampling_params` is one object for all prompts or one per prompt; `options` are as for `add`. Before computing
        anything, raises ValueError if the engine cannot honour some prompt, and QueueFullError if there are too many.
        Ctrl-C aborts the requests and leaves the LLM usable.
        """
        require_bool("show_progress", show_progress)
        check_names(options)
        with deferred_interrupts() as take_effect, self._guard:
            prompts = as_prompts(prompts)
            params = as_params(sampling_params, len(prompts))
            groups = [self._numbered(i, *pair, **options) for i, pair in enumerate(zip(prompts, params, strict=True))]
            return self._loop.collect(groups, show_progress, take_effect)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        show_progress: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Completes one conversation or several, rendered by the chat template, in their order.

        A conversation is a list of messages, such as [{"role": "user", "content": "Hello"}]. The arguments from `tools`
        on are those of `Tokenizer.apply_chat_template`; `chat_template_kwargs` are its variables. All others are those
        of `generate`. With continue_final_message=True give add_generation_prompt=False. Raises ValueError if a
        conversation cannot be rendered, or as `generate` does.
        """
        with deferred_interrupts(), self._guard:
            prompts: list[Prompt] = [
                self._rendered(
                    conversation,
                    tools=tools,
                    documents=documents,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    variables=chat_template_kwargs,
                )
                for conversation in as_conversations(messages)
            ]
        return self.generate(prompts, sampling_params, show_progress=show_progress, **options)

    def _rendered(
        self, conversation: Conversation, *, variables: Mapping[str, Any] | None, **arguments: Any
    ) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(
                "messages need a tokenizer, which this checkpoint does not have; give token ids to generate"
            )
        is_mapping = variables is None or (
            isinstance(variables, Mapping) and all(isinstance(n, str) for n in variables)
        )
        require(is_mapping, "chat_template_kwargs", variables, "a mapping from the names of variables to values")
        variables = dict(variables or {})
        if taken := sorted(variables.keys() & {*arguments, "conversation", "tokenize"}):
            raise ValueError(f"chat_template_kwargs has {shown(taken[0])}; give it as an argument of its own")
        token_ids = self.tokenizer.apply_chat_template(conversation, tokenize=True, **arguments, **variables)
        assert isinstance(token_ids, list)
        return token_ids

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        show_progress: bool = True,
        **options: Unpack[RequestOptions],
    ) -> np.ndarray:
        """Returns a vector for each prompt, text or token ids, f32[len(prompts), hidden_size] in the prompts' order.

        The vector is the state of the prompt's last token after the model's final norm. With pooling="mean" it is the
        mean of the states of all its tokens. `normalize` scales each vector to length 1. The steps that serve requests
        compute the states, so other requests go on and nothing is compiled. Limits and `options` are as for
        `generate`, and so is Ctrl-C.

        Before computing anything, raises ValueError if the engine cannot honour some prompt, and QueueFullError if
        there are too many. Raises RuntimeError if a prompt's logits are not finite or its deadline passes.
        """
        require_name("pooling", pooling, POOLINGS)
        require_bool("normalize", normalize)
        require_bool("show_progress", show_progress)
        check_names(options)
        with deferred_interrupts() as take_effect, self._guard:
            groups = [self._numbered(i, prompt, ONE_TOKEN, **options) for i, prompt in enumerate(as_prompts(prompts))]
            poolings = [begin_pooling(samples, pooling) for samples in groups]
            completions = self._loop.collect(groups, show_progress, take_effect)
            return embeddings_of(completions, poolings, self.model_config.hidden_size, normalize=normalize)

    def beam_search(
        self,
        prompt: Prompt,
        *,
        num_beams: int,
        max_tokens: int = SamplingParams.max_tokens,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
        skip_special_tokens: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Returns the `num_beams` best continuations by beam search, best first, like `transformers`.

        The score of a beam is its sum of log-probabilities over length ** length_penalty. Each step sends one request
        of one token per beam, which finds all but its last page in the prefix cache. `options` are as for `add`. If
        the deadline passes or a step yields bad logits, the unfinished beams are ranked too, with that finish reason.
        Raises ValueError if the engine cannot honour the request, or if EngineConfig.max_log_probs is too small.
        """
        self._guard.check()
        require_int("num_beams", num_beams, 1)
        self._admission.check_samples("num_beams", num_beams)
        require_real("length_penalty", length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=ignore_eos, skip_special_tokens=skip_special_tokens, temperature=0
        )
        (request,) = self._admit(prompt, sampling, **options).requests
        end = time.monotonic() + request.time_limit

        def generate(prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
            left = max(end - time.monotonic(), 1e-9)  # the deadline applies to the whole search
            limit = RequestOptions(deadline=left if math.isfinite(left) else None)
            return self.generate(prompts, params, show_progress=False, **{**options, **limit})

        return complete(
            request,
            generate,
            num_beams=num_beams,
            length_penalty=length_penalty,
            vocab_size=self.model_config.vocab_size,
            max_log_probs=self.engine_config.max_log_probs,
            tokenizer=self.tokenizer,
        )

    def _make_branches(self) -> Branches:
        return Branches(self._ids, self._admission, self._scheduler, self._runner, self._path)

    def _begin(self, queue: Callable[[], int]) -> int:
        """Returns the request id from `queue`. After Ctrl-C drops the request, because the caller never got its id."""
        request_id = None
        try:
            with deferred_interrupts(), self._guard:
                request_id = queue()
            return request_id
        except BaseException:
            if request_id is not None:
                with deferred_interrupts(), self._guard:
                    self._loop.forget([request_id])
            raise

    def _admit(self, prompt: Prompt, sampling: SamplingParams | None, **options: Unpack[RequestOptions]) -> SampleGroup:
        check_names(options)
        return SampleGroup(self._admission.admit(self._ids, prompt, sampling, **options))

    def _numbered(
        self, index: int, prompt: Prompt, sampling: SamplingParams | None, **options: Unpack[RequestOptions]
    ) -> SampleGroup:
        try:
            return self._admit(prompt, sampling, **options)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None


def _check_types(model: Any, config: Any, processors: Any) -> None:
    is_path = model is None or (isinstance(model, str | Path) and model != "")
    require(is_path, "model", model, "a folder or Hub id as text or Path, or None for the bundled model")
    require(isinstance(config, EngineConfig), "config", config, "an EngineConfig, or None for the default")
    are_named = processors is None or isinstance(processors, Mapping)
    require(are_named, "logits_processors", processors, "a mapping from names to functions")
    for name, function in dict(processors or {}).items():
        require(isinstance(name, str) and bool(name), "logits_processors", name, "named by text that is not empty")
        require(callable(function), f"logits_processors[{shown(name)}]", function, "a function")
