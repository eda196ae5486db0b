"""`LLM`: an engine for scripts and notebooks, text in, text out."""

from __future__ import annotations

import contextlib
import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np

from jaxinfer.config import EngineConfig, SamplingParams, with_fields
from jaxinfer.display.html import TokenView
from jaxinfer.display.progress import is_shown
from jaxinfer.engine.agreement import DESCRIBE_PROMPT, Agreement
from jaxinfer.engine.drafters.drafters import Drafter
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.compiled_steps import DESCRIPTION
from jaxinfer.engine.execution.warm_up import Ready
from jaxinfer.engine.frontend.admission import Prompt, RequestOptions, as_prompts
from jaxinfer.engine.frontend.beam_search import MAX_LENGTH_PENALTY, complete
from jaxinfer.engine.frontend.chats import Conversation, render_chats
from jaxinfer.engine.frontend.outputs import DeltaBuffer
from jaxinfer.engine.guarded_engine import GuardedEngine
from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.engine.scheduling.metrics import Metrics
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.timeline import MAX_STEPS, Timeline
from jaxinfer.model.params import Params
from jaxinfer.sampling.processors import LogitsProcessor
from jaxinfer.validation import as_path, is_int, require, require_int, require_real


class LLM:
    """A model that is loaded, compiled and ready to generate.

    * `model`: a folder with a Hugging Face checkpoint, a GGUF file, or a Hub id of either. None takes the model
      of the package.
    * `config`: the limits and options of the engine. Its fields may also be given as `fields`, keywords of the
      constructor: `LLM(model, max_model_len=4096)`.
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
    * `devices`: the devices of this process that share the model, in the order of the mesh. Their number is that of
      `EngineConfig.parallelism`. None takes the first ones. They may also be the devices of all processes.

    The constructor loads the weights and compiles a step that can compute any request, so no request waits for either.
    The faster steps of smaller shapes are compiled beside the requests that want them; `warm_up` compiles them all.

    `show_progress`, here and in the methods, shows a bar on standard error; by default in a terminal or a notebook.

    `add` queues requests, and each `step` advances them together; `generate` and `stream` do both for you. One thread
    at a time may call an LLM; a call from a second thread raises RuntimeError. `close`, the end of a `with` block, or
    the end of the last reference frees its memory. After a device error every call raises RuntimeError. A program with
    several threads or an event loop takes `AsyncLLM` instead.

    Over the devices of several processes, all make the same LLM. Process 0 uses it; in the others the constructor makes
    the launches of process 0 until that process ends, and then raises SystemExit(0).

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
        devices: Sequence[Any] | None = None,
        show_progress: bool | None = None,
        **fields: Any,
    ):
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
        self.tokenizer, self.answers = self._engine.tokenizer, self._engine.answers
        self.model_names = self._engine.model_names
        self._guarded = GuardedEngine(self._engine)
        self._outputs = DeltaBuffer()  # of the requests of `add`, for `step`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LLM {self._engine.description}>"

    def _repr_html_(self) -> str:
        ready = self._engine.ready()
        return f"<div>{html.escape(repr(self))}</div>{'' if ready is None else ready._repr_html_()}"

    def close(self) -> None:
        """Frees the memory of parameters, cache and compiled steps. Unfinished requests are lost.

        Every later call raises RuntimeError, except `close` itself.
        """
        self._guarded.close()

    @contextlib.contextmanager
    def engine(self) -> Iterator[Engine]:
        """Gives this thread the engine itself for the length of a `with`: `with llm.engine() as engine: ...`.

        Other threads are refused meanwhile, and Ctrl-C takes effect at the end.
        """
        with self._guarded.entered():
            yield self._engine

    @property
    def on_step(self) -> Callable[[Step, float], None] | None:
        """The function that is called after each step with the step and its seconds, or None."""
        self._engine.check()
        return self._engine.on_step

    @on_step.setter
    def on_step(self, function: Callable[[Step, float], None] | None) -> None:
        self._engine.check()
        self._engine.on_step = function

    @property
    def has_unfinished(self) -> bool:
        """True if a request is unfinished, or if `step` has outputs to return."""
        return self._engine.num_unfinished > 0 or len(self._outputs) > 0

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that give none: those that the checkpoint's generation_config.json states."""
        return self._engine.default_sampling_params

    def warm_up(self, *, show_progress: bool | None = None, description: str = DESCRIPTION) -> Ready:
        """Compiles all steps, waits for them, and returns their number, compile seconds and memory plan.

        Call it before you measure: until then larger steps stand in for smaller ones, and the compiler shares the
        host. Any thread may call it, beside others that generate. `description` labels the progress bar. Raises the
        compiler's exception if a step fails to compile.
        """
        show_progress = is_shown(show_progress)
        require(isinstance(description, str), "description", description, "text")
        return self._engine.warm_up(show_progress=show_progress, description=description)

    def identity(self) -> dict[str, str]:
        """Returns the properties of this LLM that determine the text of a request: see `text_identity`."""
        return self._engine.identity()

    def metrics(self) -> Metrics:
        """Returns the present numbers of requests and pages, and the engine's counters since the start."""
        return self._engine.metrics()

    def show(self, completion: Completion) -> TokenView:
        """Returns a completion's tokens for a notebook, coloured by probability, with the alternatives on hover.

        The alternatives are there if `SamplingParams.log_probs` asked for them. A checkpoint without a tokenizer shows
        token ids.
        """
        self._engine.check()
        require(isinstance(completion, Completion), "completion", completion, "a Completion")
        return TokenView.of(completion, str if self.tokenizer is None else self.tokenizer.text_of)

    def timeline(self, *, max_steps: int = MAX_STEPS) -> AbstractContextManager[Timeline]:
        """Records steps, load and the phases of requests inside a `with`: `with llm.timeline() as timeline: ...`.

        The timeline keeps the last `max_steps` steps; `timeline.save("timeline.json")` writes them for
        ui.perfetto.dev. First compiles all steps, like `warm_up`.
        """
        require_int("max_steps", max_steps, 1)
        self.warm_up()
        with self.engine() as engine:
            return engine.timeline(max_steps)

    def add(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> int:
        """Queues a prompt, text or token ids, and returns its request id; `step` returns its tokens.

        `options` are those of `RequestOptions`. Raises ValueError if the engine cannot honour the request exactly, and
        QueueFullError if too many requests wait. Neither changes anything.
        """
        samples = self._engine.admit(prompt, sampling_params, **options)
        return self._guarded.begin(lambda engine: engine.submit(samples, self._outputs.append))

    def abort(self, request_id: int) -> None:
        """Ends a request early; its completion comes out as usual, with finish reason "abort".

        Does nothing if the request has already finished.
        """
        require(is_int(request_id), "request_id", request_id, "an id that `add` has returned")
        with self.engine() as engine:
            engine.abort(request_id)

    def drop(self, request_id: int) -> None:
        """Ends a request early, without a completion; `step` returns no more of its tokens.

        Any thread may call it at any time, beside a thread that uses the LLM: then the request ends before the next
        step. Does nothing if the request or the LLM has ended.
        """
        require(is_int(request_id), "request_id", request_id, "an id that `add` has returned")
        self._guarded.drop(request_id)

    def fork(self, request_id: int, *, seed: int | None = None) -> int:
        """Branches an unfinished request and returns the id of the branch: see `Branches.fork`.

        Raises QueueFullError if too many requests wait.
        """
        return self._guarded.begin(lambda engine: engine.fork(request_id, self._outputs.append, seed=seed))

    def rewind(self, request_id: int, num_tokens: int, *, seed: int | None = None) -> None:
        """Drops the last `num_tokens` tokens of an unfinished request's output: see `Branches.rewind`."""
        with self.engine() as engine:
            engine.rewind(request_id, num_tokens, seed=seed)

    def save(self, request_id: int, path: str | Path) -> None:
        """Writes an unfinished request with its pages to a file, for `restore`: see `Branches.save`."""
        with self.engine() as engine:
            engine.save(request_id, as_path("path", path))

    def restore(self, path: str | Path) -> int:
        """Queues the request that `save` wrote to a file, and returns its id in this LLM: see `Branches.restore`.

        Raises QueueFullError if too many requests wait.
        """
        return self._guarded.begin(lambda engine: engine.restore(as_path("path", path), self._outputs.append))

    def update_params(self, params: Params) -> None:
        """Replaces the model's parameters while requests run, as the training of a model does between its steps.

        `params` has the structure, shapes and dtypes of what `load_checkpoint` returns for this engine, over its mesh
        or for one device. Unfinished requests keep their tokens so far; their next tokens are those of the new
        parameters. For that their pages are computed again. Nothing that is cached is found afterwards, and no file
        that `save` wrote before is restored. Drafters keep their own weights, which change no token.

        Copies no array that is on the device already: never donate these arrays to another function afterwards. Frees
        each old tensor before it copies a new one, so the device needs room for one set of parameters. Raises
        ValueError that names the first difference from the engine's parameters, and then changes nothing.
        """
        with self.engine() as engine:
            engine.update_params(params)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters."""
        return self._engine.adapters

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Loads an adapter that PEFT has saved, from a folder or the Hub; requests take it by `adapter=name`.

        Requests with different adapters, and without, share steps, and each gets the tokens that it gets alone. Others
        may run meanwhile, and nothing is compiled. Raises ValueError if EngineConfig.max_adapters leaves no slot, if
        the name is taken, or if the adapter cannot be honoured exactly; then nothing has changed.
        """
        with self.engine() as engine:
            engine.load_adapter(name, engine.read_adapter(path))

    def unload_adapter(self, name: str) -> None:
        """Frees the slot of an adapter for another. Raises ValueError if unfinished requests use it."""
        with self.engine() as engine:
            engine.unload_adapter(name)

    def step(self) -> list[Delta]:
        """Computes one step and returns its new tokens for the requests of `add`.

        They may be none, as of a part of a prompt or while a request waits for the compiler: see `has_unfinished`.
        """
        self._guarded.advance()
        return self._outputs.take()  # if an interrupt leaves deltas there, the next step returns them

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Iterator[Delta]:
        """Yields a prompt's output piece by piece; the last piece of a sample carries its completion.

        Closing the iterator aborts the request; any thread may close it at any time. The call itself raises ValueError
        if the engine cannot honour the request. The first `next` queues the request, or raises QueueFullError.
        `options` are as for `add`.
        """
        return self._guarded.stream(self._engine.admit(prompt, sampling_params, **options))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Completes one prompt or several, text or token ids, and returns the completions in the prompts' order.

        A prompt with `n` above 1 has n completions in a row, by sample_index, or best first with `best_of`.
        `sampling_params` is one object for all prompts or one per prompt; `options` are as for `add`. Before computing
        anything, raises ValueError if the engine cannot honour some prompt, and QueueFullError if there are too many.
        Ctrl-C aborts the requests and leaves the LLM usable.
        """
        show_progress = is_shown(show_progress)
        return self._guarded.collect(self._engine.admit_all(prompts, sampling_params, **options), show_progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        answer_style: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        show_progress: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Completes one conversation or several, rendered by the chat template, in their order.

        A conversation is a list of messages, such as [{"role": "user", "content": "Hello"}].

        * `tool_choice` and `parallel_tool_calls`: as in OpenAI's API, see `read_tools`. A structure keeps each call to
          the schema of its function.
        * `answer_style`: a name of `jaxinfer.text.answers.styles.table.STYLES`, in which the model writes reasoning and
          calls. The chat template shows it, unless it is one of the user's own.
        * `tools`, `documents`, `chat_template`, `add_generation_prompt`, `continue_final_message`: those of
          `Tokenizer.apply_chat_template`; `chat_template_kwargs` are its variables. All others are those of `generate`.

        The prompt ends with the beginning of an answer (add_generation_prompt=True), unless continue_final_message=True
        leaves the last message open. Each completion has `content`, `reasoning` and `tool_calls` beside its whole text.

        Raises ValueError if a conversation cannot be rendered, if a call is demanded of a model whose style is unknown,
        if the schema of a function cannot be honoured, or as `generate` does.
        """
        self._engine.check()
        chats = render_chats(
            self.answers,
            self.default_sampling_params,
            messages,
            sampling_params,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            documents=documents,
            chat_template=chat_template,
            answer_style=answer_style,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return chats.answered(self.generate(chats.prompts, chats.params, show_progress=show_progress, **options))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool = True,
        show_progress: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> np.ndarray:
        """Returns a vector for each prompt, text or token ids, f32[len(prompts), vector_size] in the prompts' order.

        The vector is what the checkpoint's modules.json makes of the states after the model's final norm. Without that
        file, and with pooling="last", it is the state of the prompt's last token; with pooling="mean" it is the mean of
        the states of all its tokens. `normalize` scales each vector to length 1. The steps that serve requests compute
        the states, so other requests go on and nothing is compiled. Limits and `options` are as for `generate`, and so
        is Ctrl-C.

        Before computing anything, raises ValueError if the engine cannot honour some prompt, and QueueFullError if
        there are too many. Raises RuntimeError if a prompt's logits are not finite or its deadline passes.
        """
        reading = self._engine.reader.embedding(prompts, pooling, normalize)
        return self._guarded.read(reading, show_progress, options)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        activate: bool = True,
        show_progress: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> np.ndarray:
        """Returns a number for each label of a classifier, f32[len(prompts), labels]; the names are `labels`.

        They are probabilities, of one label among several or of each alone as `problem_type` in config.json says, or
        logits with activate=False. All else is as for `embed`; no ...ForSequenceClassification is a ValueError too.
        """
        reading = self._engine.reader.classification(prompts, activate)
        return self._guarded.read(reading, show_progress, options)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        chat_template: str | None = None,
        answer_tokens: Sequence[str] | None = None,
        activate: bool = True,
        show_progress: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> np.ndarray:
        """Returns how well each document answers its query, f32[len(documents)]; one query may have all documents.

        A classifier of one label scores by it; a language model by the logits of its `answer_tokens`, by default those
        that modules.json states, else ("yes", "no"); an embedding model by cosines. Scores but cosines are from 0 to 1,
        or logits with activate=False. `chat_template` renders prompts: Jinja that shows the messages of roles query and
        document, and system with the `instruction`; by default the checkpoint's if it knows these roles, else
        Qwen3-Reranker's. All else is as for `embed`.
        """
        how = {"instruction": instruction, "chat_template": chat_template, "answer_tokens": answer_tokens}
        scoring = self._engine.reader.scoring(queries, documents, activate=activate, **how)
        return self._guarded.read(scoring, show_progress, options)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels of `classify`; () for a model that is no classifier."""
        self._engine.check()
        return self._engine.reader.labels

    def agreement(
        self, texts: Prompt | Completion | Sequence[Prompt | Completion], *, show_progress: bool | None = None
    ) -> Agreement:
        """Returns how far the engine's log-probabilities of texts are from those that training differentiates.

        The latter are those of `jaxinfer.log_probs` under `jax.value_and_grad`, with the engine's present parameters.
        On CPU in float32 they are equal, to the bit. On other devices the result says by how much they differ there.

        A text is a completion, of which the log-probabilities that it reports are compared; or a prompt, text or token
        ids, which the engine computes first. The latter needs EngineConfig.max_prompt_log_probs.

        Compiles a gradient for each power of two of the texts' lengths. The device needs memory for the gradient of
        one text beside that of the engine. Before computing gradients, raises ValueError if a text has no
        log-probabilities or is too long, if the weights are quantized, or as `generate` does.
        """
        show_progress = is_shown(show_progress)
        several: Any = [texts] if isinstance(texts, Completion) else texts
        items: list[Any] = as_prompts(several)
        prompts = [item for item in items if not isinstance(item, Completion)]
        computed = iter(self.generate(prompts, DESCRIBE_PROMPT, show_progress=show_progress) if prompts else ())
        completions = [
            item if isinstance(item, Completion) else replace(next(computed), token_ids=(), log_probs=())
            for item in items
        ]
        with self._guarded.entered() as take_effect:
            return self._engine.agreement(completions, between_texts=take_effect)

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
        require_int("num_beams", num_beams, 1)
        self._engine.check_samples("num_beams", num_beams)
        require_real("length_penalty", length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=ignore_eos, skip_special_tokens=skip_special_tokens, temperature=0
        )
        (request,) = self._engine.admit(prompt, sampling, **options).requests
        return complete(
            request,
            partial(self.generate, show_progress=False, **options),
            num_beams=num_beams,
            length_penalty=length_penalty,
            vocab_size=self.model_config.vocab_size,
            max_log_probs=self.engine_config.max_log_probs,
            tokenizer=self.tokenizer,
        )
