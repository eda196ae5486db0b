"""`Engine`: the loop that advances requests step by step, and the verbs that change them."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from jaxinfer.checkpoint import name_of, open_checkpoint
from jaxinfer.checkpoint.adapters import read_adapter
from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.device import enable_compilation_cache, resolve_dtype
from jaxinfer.display.progress import is_shown
from jaxinfer.engine.agreement import Agreement, agreement
from jaxinfer.engine.assembly import build_engine
from jaxinfer.engine.drafters.drafters import Drafter
from jaxinfer.engine.execution.compiled_steps import DESCRIPTION, CompileCounter, wait_for_one
from jaxinfer.engine.execution.engine_model import abstract
from jaxinfer.engine.execution.params_update import fitting
from jaxinfer.engine.execution.pipeline import Advance, Pipeline, advance
from jaxinfer.engine.execution.warm_up import Ready
from jaxinfer.engine.frontend.admission import (
    Admission,
    Prompt,
    RequestOptions,
    as_params,
    as_prompts,
    check_names,
    checked_adapter_name,
    refusals_of,
)
from jaxinfer.engine.frontend.branches import Branches
from jaxinfer.engine.frontend.embeddings import StateReader
from jaxinfer.engine.frontend.guard import FAILURE_NOTE, Lifecycle, require_own_process
from jaxinfer.engine.frontend.outputs import OutputRoutes, Sink
from jaxinfer.engine.frontend.page_identity import describe_dtype, text_identity
from jaxinfer.engine.frontend.sample_group import SampleGroup
from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.metrics import Metrics
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.text_checks import TextChecks
from jaxinfer.engine.timeline import Timeline, recorded_timeline
from jaxinfer.model.adapted_params import Adapter
from jaxinfer.model.params import Params
from jaxinfer.sampling.processors import LogitsProcessor, checked_processors
from jaxinfer.sampling_params import Form
from jaxinfer.text.answers.answers import Answers
from jaxinfer.validation import as_bool, require

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.5  # for a compilation, between looks at deadlines and interrupts
BUNDLED_MODEL = Path(__file__).parent.parent / "assets" / "tiny"


class Engine:
    """A model, its requests and its device. One thread at a time uses it, by `GuardedEngine` or `EngineThread`.

    The life of a request: `admit` checks a prompt, `submit` queues it with a sink, and each `advance` computes a step
    and gives its deltas to the sinks. The arguments of the constructor are those of `LLM`.

    Any thread may call the methods up to `warm_up` at any time. After `close` or a failure of the device every call
    raises RuntimeError with the cause.
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
    ) -> None:
        show_progress = is_shown(show_progress)
        config = EngineConfig() if config is None else config
        is_path = model is None or (isinstance(model, str | Path) and model != "")
        require(is_path, "model", model, "a folder or Hub id as text or Path, or None for the bundled model")
        require(isinstance(config, EngineConfig), "config", config, "an EngineConfig, or None for the default")
        custom = checked_processors(logits_processors)
        require_own_process()
        enable_compilation_cache()
        self._dtype = resolve_dtype(dtype)
        self._checkpoint = open_checkpoint(BUNDLED_MODEL if model is None else model)
        # In requests that name their model: the shorter name, and the one that was given.
        self.model_names = tuple(dict.fromkeys((name_of(model), str(model or name_of(model)))))
        self._lifecycle = Lifecycle("LLM", FAILURE_NOTE)
        parts = build_engine(
            self._checkpoint,
            config,
            self._dtype,
            custom=custom,
            speculation=speculation,
            devices=devices,
            on_failure=self._lifecycle.fail,
            show_progress=show_progress,
        )
        self.engine_config, self.model_config, self.tokenizer = parts.engine_config, parts.model_config, parts.tokenizer
        self._admission, self._scheduler = parts.admission, parts.scheduler
        self.answers = None if self.tokenizer is None else Answers(self.tokenizer, self._admission.check_characters)
        self._warm_ups, self._runners, self._speculation = parts.warm_ups, parts.runners, parts.speculation
        self._placement = self._warm_ups[0].model.placement
        self._pipelines = [
            Pipeline(parts.scheduler, runner, replica=index, on_failure=self._lifecycle.fail)
            for index, runner in enumerate(parts.runners)
        ]
        self._routes, self._checks = OutputRoutes(), TextChecks()
        self._compile_counter = CompileCounter()
        self._ids = itertools.count()
        self.on_step: Callable[[Step, float], None] | None = None  # gets each step and its seconds
        self._branches = self._make_branches()
        self.reader = StateReader(self._checkpoint, self.model_config, self.tokenizer, lambda: self._runners[0].params)

    def __repr__(self) -> str:
        return f"<Engine {self.description}>"

    @property
    def description(self) -> str:
        """The model, its limits and the engine's state in a line."""
        model, state = self.model_config, "closed"
        if not self._lifecycle.is_closed:
            state = f"{self._scheduler.num_unfinished} unfinished requests" if self._lifecycle.is_open else "failed"
        dtype = describe_dtype(self._dtype, self.engine_config)
        return (
            f"{self._checkpoint.path}: {model.num_layers} layers of hidden_size={model.hidden_size}, {dtype},"
            f" max_num_seqs={self.engine_config.max_num_seqs}, {state}"
        )

    def check(self) -> None:
        """Raises RuntimeError if the engine is closed, has failed, or belongs to another process."""
        self._lifecycle.check()

    @property
    def failure(self) -> BaseException | None:
        """The exception of the device that ended the engine, or None; None after `close`, which frees it."""
        return self._lifecycle.failure

    @property
    def num_unfinished(self) -> int:
        """The number of unfinished requests, samples counted one by one."""
        self.check()
        return self._scheduler.num_unfinished + len(self._checks.pending)

    @property
    def has_steps(self) -> bool:
        """True if a step can be computed; else requests wait for checks of their texts, or for a compilation."""
        self.check()
        return self._scheduler.num_unfinished > self._scheduler.num_held

    def on_change(self, on_change: Callable[[], object]) -> None:
        """Has a function called on another thread when `advance` may go on, after a check or a compilation."""
        for source in (self._checks, *(warm_up.steps for warm_up in self._warm_ups)):
            source.on_change = on_change

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an output of the model."""
        return self._admission.eos_token_ids

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that give none: those that the checkpoint's generation_config.json states."""
        self.check()
        return self._admission.default_sampling_params

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and output together that a request can see."""
        self.check()
        return self._admission.max_model_len

    def admit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> SampleGroup:
        """Checks and tokenizes a prompt for `submit`; changes nothing in the engine.

        Raises ValueError if the engine cannot honour the request exactly.
        """
        self.check()
        check_names(options)
        admission = self._admission
        return self._group(admission, admission.admit(self._ids, prompt, sampling_params, **options))

    def must_compile(self, sampling_params: SamplingParams) -> bool:
        """True if `admit` compiles a structure for these parameters, or waits for another thread that compiles it."""
        self.check()
        return self._admission.grammars.must_compile(sampling_params)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text; ValueError for one that no prompt may be as long as."""
        self.check()
        require(isinstance(text, str), "text", text, "text")
        return self._admission.encode(
            text, "text", add_special_tokens=as_bool("add_special_tokens", add_special_tokens)
        )

    def admit_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        **options: Unpack[RequestOptions],
    ) -> list[SampleGroup]:
        """Admits prompts, with one SamplingParams for all or for each; ValueError names the prompt that is refused."""
        check_names(options)
        several, groups = as_prompts(prompts), list[SampleGroup]()
        for i, (prompt, sampling) in enumerate(zip(several, as_params(sampling_params, len(several)), strict=True)):
            with refusals_of(f"prompt {i}"):
                groups.append(self.admit(prompt, sampling, **options))
        return groups

    def check_samples(self, name: str, count: int) -> None:
        """Raises ValueError if `count`, the value of parameter `name`, exceeds `EngineConfig.max_samples`."""
        self.check()
        self._admission.check_samples(name, count)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters."""
        self.check()
        return tuple(adapter.name for adapter in self._admission.adapters.loaded)

    @property
    def adapter_digests(self) -> dict[str, str]:
        """The digest of each loaded adapter, by its name."""
        return {adapter.name: adapter.digest for adapter in self._admission.adapters.loaded}

    def read_adapter(self, path: str | Path) -> Adapter:
        """Reads an adapter for `load_adapter`; changes nothing in the engine. Raises ValueError if it does not fit."""
        self.check()
        if not self.engine_config.max_adapters:
            raise ValueError(
                "this engine has no slots for adapters (max_adapters=0); raise EngineConfig.max_adapters to the"
                " number of adapters that may be loaded at once"
            )
        return read_adapter(path, self._checkpoint, self.model_config, **self._warm_ups[0].model.adapter_options)

    def metrics(self) -> Metrics:
        """Returns the present numbers of requests and pages, and the engine's counters since the start."""
        self.check()
        return replace(self._scheduler.metrics(), num_late_compiles=self._compile_counter.count)

    def identity(self) -> dict[str, str]:
        """Returns the properties that determine the text of a request: see `text_identity`."""
        self.check()
        return text_identity(self._checkpoint, self._admission)

    def ready(self) -> Ready | None:
        """Returns the state of compilation at this moment, with the memory plan; None after `close` or a failure."""
        return Ready.of_all([warm_up.ready() for warm_up in self._warm_ups]) if self._lifecycle.is_open else None

    def warm_up(self, *, show_progress: bool, description: str = DESCRIPTION) -> Ready:
        """Compiles all steps, waits for them, and returns their number, compile seconds and memory plan."""
        self.check()
        warm_ups = self._warm_ups
        for warm_up in warm_ups:
            warm_up.steps.wait(show_progress=show_progress, description=description)
        return Ready.of_all([warm_up.ready() for warm_up in warm_ups])

    def __getattr__(self, name: str) -> Any:
        if "_lifecycle" in vars(self):
            self.check()  # `close` has removed the attribute while another thread was in one of these methods
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # The loop: one thread at a time from here on.

    def close(self) -> None:
        """Frees the memory of parameters, cache and compiled steps. No sink receives anything more."""
        if self._lifecycle.is_closed:
            return
        self._lifecycle.close()
        self._lifecycle.failure = None  # its traceback may refer to the device's memory
        self._checks.close()
        for runner in self._runners:
            runner.close()  # a drafter may still refer to it
        del self._admission, self._scheduler, self._warm_ups, self._runners, self._speculation
        del self._pipelines, self._branches, self.reader

    def submit(self, samples: SampleGroup, sink: Sink) -> int:
        """Queues all samples of a prompt, or none of them, and returns their request id.

        Raises QueueFullError if too many requests would wait, ValueError if they were queued before or are another
        engine's.
        """
        self.require_room([samples])
        if samples.ids is not self._ids:
            raise ValueError(
                f"request {samples.request_id} was admitted by another engine; admit its prompt with this one"
            )
        if samples.is_submitted:
            raise ValueError(f"request {samples.request_id} was submitted before; admit its prompt again")
        adapter = samples.requests[0].adapter
        if adapter is not None and self._admission.adapters.find(adapter.name) is not adapter:
            raise ValueError(f"adapter={adapter.name!r} was unloaded after the prompt was admitted; admit it again")
        samples.is_submitted = True
        if samples.params_version != self._admission.params_version:
            for request in samples.requests:
                request.keys = self._admission.renewed_keys(request)
        self._routes.open(samples, sink)
        for request in samples.requests:
            self._scheduler.add(request)
        return samples.request_id

    def require_room(self, groups: Sequence[SampleGroup]) -> None:
        """Raises QueueFullError if too many requests would wait with these, which are of one tenant."""
        self.check()
        if requests := [request for samples in groups for request in samples.requests]:
            self._scheduler.check_room(requests)

    def advance(self) -> Advance | None:
        """Computes a step and gives its deltas to their sinks; None if there is nothing to compute.

        With several replicas it is a step of one, while the others compute theirs.

        First ends the requests whose deadline has passed. After an exception the next call computes the step again,
        unless the device has failed.
        """
        self.check()
        with self._compile_counter:
            if self._checks.pending:
                self._hand_out(self._checks.take())
            self._deliver([*self._scheduler.expire(), *self._scheduler.release_held()])
            result = advance(self._pipelines)
            if result is not None:
                self._deliver(result.deltas)
            elif self._scheduler.num_unfinished > self._scheduler.num_held:
                raise RuntimeError(f"requests are unfinished and no step can be computed: {self._scheduler.metrics()}")
        if result is not None and self.on_step is not None:
            self.on_step(result.step, result.seconds)
        return result

    @property
    def held_forms(self) -> set[Form]:
        """The forms of draws that requests wait for, until they are compiled."""
        return self._scheduler.held_forms

    def wait_for_change(self) -> None:
        """Waits for a text under check, and hands it out, or for a compilation, then at most WAIT_SECONDS."""
        if self._checks.pending:
            self._checks.wait(WAIT_SECONDS if self._scheduler.num_held else None)
            self._hand_out(self._checks.take())
        elif self._scheduler.num_held:
            wait_for_one([warm_up.steps for warm_up in self._warm_ups], WAIT_SECONDS)

    def take_error(self) -> Exception | None:
        """Returns the first exception of the drafter since the last call; no token was lost by it."""
        self.check()
        return self._scheduler.take_error()

    def abort(self, request_id: int) -> None:
        """Ends a request early: its sink receives the completion, with finish reason "abort".

        Does nothing if the request has ended.
        """
        self.check()
        sample_ids = self._routes.sample_ids(request_id)
        self._hand_out(self._checks.abort(sample_ids))
        for sample_id in sample_ids:
            delta = self._scheduler.abort(sample_id)
            self._deliver([] if delta is None else [delta])

    @property
    def sinks(self) -> dict[int, Sink]:
        """Returns the sinks of unfinished requests, by request id; also of an engine that has failed."""
        return self._routes.sinks

    def abort_all(self) -> None:
        """Ends all requests early."""
        self.check()
        for request_id in self._routes.sinks:
            self.abort(request_id)

    def drop(self, request_id: int) -> None:
        """Ends a request, whose sink receives nothing more. Does nothing if the request or the engine has ended."""
        if not self._lifecycle.is_open:
            return
        sample_ids = self._routes.sample_ids(request_id)
        self._routes.close(request_id)
        self._checks.abort(sample_ids)
        for sample_id in sample_ids:
            self._scheduler.abort(sample_id)

    def fork(self, request_id: int, sink: Sink, *, seed: int | None = None) -> int:
        """Branches an unfinished request and returns the id of the branch: see `Branches.fork`."""
        self.check()
        branch = self._branches.fork(request_id, next(self._ids), seed)
        return self.submit(self._group(self._admission, [branch]), sink)

    def rewind(self, request_id: int, num_tokens: int, *, seed: int | None = None) -> None:
        """Drops the last `num_tokens` tokens of an unfinished request's output: see `Branches.rewind`."""
        self.check()
        self._branches.rewind(request_id, num_tokens, seed)

    def save(self, request_id: int, path: Path) -> None:
        """Writes an unfinished request with its pages to a file, for `restore`: see `Branches.save`."""
        self.check()
        self._placement.require_one_process("save")
        if self._scheduler.has_states:  # a launched step has moved on the states; they are then those of its tokens
            for deltas in itertools.chain.from_iterable(pipeline.settle() for pipeline in self._pipelines):
                self._deliver(deltas)
        self._branches.save(request_id, path)

    def restore(self, path: Path, sink: Sink) -> int:
        """Queues the request that `save` wrote to a file, and returns its id here: see `Branches.restore`."""
        self.check()
        self._placement.require_one_process("restore")
        request = self._branches.restore(path, next(self._ids))
        return self.submit(self._group(self._admission, [request]), sink)

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Makes an adapter of `read_adapter` available to requests under a name: see `LLM.load_adapter`."""
        self.check()
        require(isinstance(adapter, Adapter), "adapter", adapter, "the result of read_adapter")
        adapters = self._admission.adapters
        loaded = adapters.choose(checked_adapter_name(name), adapter.digest)
        for runner in self._runners:
            runner.insert_adapter(loaded.slot, adapter)
        adapters.put(loaded)

    def unload_adapter(self, name: str) -> None:
        """Frees the slot of an adapter: see `LLM.unload_adapter`."""
        self.check()
        adapters = self._admission.adapters
        loaded = adapters.find(checked_adapter_name(name))
        if count := self._scheduler.count_users(loaded):
            raise ValueError(
                f"adapter {loaded.name!r} cannot be unloaded: {count} unfinished requests use it; let them finish or"
                " abort them first"
            )
        adapters.remove(loaded)

    def update_params(self, params: Params) -> None:
        """Replaces the model's parameters while requests run: see `LLM.update_params`."""
        self.check()
        self._placement.require_one_process("update_params")
        params = fitting(params, self._runners[0].params, self.model_config)
        # Processes share a disk cache, and none of them has these parameters: the version must be unique.
        version = f", updated to {secrets.token_hex(16)}"
        self._admission = replace(self._admission, params_version=version)
        self._branches = self._make_branches()
        self._scheduler.recompute(self._admission.renewed_keys)
        if self._speculation is not None:
            self._speculation.update_target(abstract(params))  # its drafter refers to the old tensors too
        for runner in self._runners:
            runner.update_params(params)
        if self._speculation is not None:
            self._speculation.update_target(self._runners[0].params)

    def agreement(
        self, completions: Sequence[Completion], *, between_texts: Callable[[], None] = lambda: None
    ) -> Agreement:
        """Compares the log-probabilities that completions report with those of training: see `LLM.agreement`.

        A completion whose request asked for `prompt_log_probs` is compared in its prompt too.
        """
        self.check()
        self._placement.require_one_process("agreement")
        return agreement(
            completions,
            self._runners[0].params,
            config=self.model_config,
            page_size=self._admission.cache_config.page_size,
            dtype=self._dtype,
            mesh=self._placement.mesh,
            between_texts=between_texts,
        )

    def timeline(self, max_steps: int) -> AbstractContextManager[Timeline]:
        """Records the last `max_steps` steps inside a `with`: see `LLM.timeline`."""
        self.check()
        return recorded_timeline(self._scheduler, self._runners[0].buckets, max_steps)

    def _deliver(self, deltas: Iterable[Delta]) -> None:
        """Hands out the deltas of requests, but those whose whole texts are to be checked before."""
        whole = []
        for delta in deltas:
            request = None if delta.completion is None else self._routes.request(delta.request_id)
            if request is None or request.check is None:
                whole.append(delta)
            else:
                self._checks.begin(request, delta)
        self._hand_out(whole)

    def _hand_out(self, deltas: Iterable[Delta]) -> None:
        for request_id, error in self._routes.deliver(deltas).items():
            logger.info("the sink of request %d raised %r, so the request ends", request_id, error)
            self.drop(request_id)

    def _group(self, admission: Admission, requests: Sequence[Request]) -> SampleGroup:
        return SampleGroup(requests, admission.params_version, self._ids)

    def _make_branches(self) -> Branches:
        return Branches(self._admission, self._scheduler, self._runners, self._checkpoint)
