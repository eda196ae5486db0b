"""`LLM`: text in, text out, with continuous batching over a paged cache."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Unpack

from tqdm import tqdm

from jaxinfer.checkpoint import load_checkpoint, resolve_checkpoint
from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.device import default_dtype, enable_compilation_cache
from jaxinfer.engine.admission import Prompt, Terms, as_params, as_prompts
from jaxinfer.engine.beam_search import Beam, as_completions, num_candidates, search
from jaxinfer.engine.branches import Branches
from jaxinfer.engine.drafters import Drafter
from jaxinfer.engine.interrupts import deferred_interrupts
from jaxinfer.engine.mailroom import Mailroom
from jaxinfer.engine.metrics import Metrics
from jaxinfer.engine.pipeline import Pipeline
from jaxinfer.engine.planning import plan_host
from jaxinfer.engine.request import Completion, Delta
from jaxinfer.engine.runner import Runner
from jaxinfer.engine.samples import Samples, in_order
from jaxinfer.engine.speculation import plan_speculation
from jaxinfer.engine.step import Step
from jaxinfer.processors import LogitsProcessor
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.validation import require_int, require_real

BUNDLED_MODEL = Path(__file__).parent.parent / "assets" / "tiny"


class LLM:
    """A model that is loaded, compiled and ready to generate.

    `model` is a folder with a Hugging Face checkpoint or a Hub id; without it the small model that comes with the
    package is used. `dtype` is float32, bfloat16 or float16; None takes float32 on CPU, bfloat16 where the device
    has it and float16 elsewhere. Weights are loaded here, and what can compute any request is compiled: none ever waits
    for either. What computes small steps faster is compiled meanwhile; `warm_up` waits for it.

    `logits_processors` are functions of the user's, by name: see `jaxinfer.processors.LogitsProcessor`. They become a
    part of the compiled steps, and act on the requests that name them in `SamplingParams.logits_processors`.

    `speculation` guesses tokens ahead, to be verified several at once: "ngram" guesses what followed the last tokens
    where the request had them before, "suffix" also where other outputs had them, the folder or Hub id of a small model
    of the same vocabulary lets that draft, the folder of trained draft heads lets these, a `Drafter` of the user's does
    whatever it does. No token depends on it, only the time that a token takes.

    Requests are added (`add`) and advance together, one `step` at a time; `generate` and `stream` do both for you.
    Not thread-safe: one thread owns an LLM.

    Raises ValueError for a checkpoint that cannot be used, with everything that is wrong with it.
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
        enable_compilation_cache()
        self.engine_config = config = config or EngineConfig()
        path = resolve_checkpoint(BUNDLED_MODEL if model is None else model)
        dtype = dtype or default_dtype()
        params, self.model_config = load_checkpoint(path, dtype, show_progress=show_progress)
        self.tokenizer = Tokenizer.from_path(path)
        custom = dict(logits_processors or {})
        planned = plan_speculation(speculation, config, dtype)
        self._admission, self._scheduler = plan_host(
            path, self.model_config, config, dtype, self.tokenizer, custom=tuple(custom), speculation=planned
        )
        self._runner = Runner(
            params,
            self.model_config,
            config,
            self._admission.cache_config,
            max_model_len=self._admission.max_model_len,
            max_drafts=0 if planned is None else config.max_drafts,
            custom=custom,
            tiers=self._scheduler.tiers,
            show_progress=show_progress,
        )
        if planned is not None:  # which measures what steps take
            self.warm_up(show_progress=show_progress)
            planned.prepare(self._runner.run, self._admission, params, custom)
        self._pipeline = Pipeline(self._scheduler, self._runner)
        self.on_step: Callable[[Step, float], None] | None = None  # told each step and the seconds it took
        self._ids = itertools.count()
        self._mailroom = Mailroom()
        self._branches = Branches(self._ids, self._admission, self._scheduler, self._runner, path)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has tokens to come, or a completion that `step` has not handed out."""
        return self._scheduler.num_unfinished > 0 or self._mailroom.has_mail

    def warm_up(self, *, show_progress: bool = False) -> None:
        """Waits until the compiler is done, for even times from the first request on.

        Until then larger steps stand in for smaller ones, and the compiler takes its share of the host. Raises what the
        compiler raises.
        """
        self._runner.compiled_steps.wait(show_progress=show_progress)

    def metrics(self) -> Metrics:
        """Returns what runs, waits and is cached now, and what was computed since the start."""
        return self._scheduler.metrics()

    def add(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **terms: Unpack[Terms]) -> int:
        """Queues a prompt, text or token ids, and returns its request id; its tokens come out of `step`.

        `terms` are priority, tenant, deadline and cache_salt: see `Terms`. Raises ValueError where the request could
        not be honoured exactly and QueueFullError where too many wait; either changes nothing.
        """
        samples = self._admit(prompt, sampling_params, **terms)
        self._queue(samples)
        return samples.request_id

    def abort(self, request_id: int) -> None:
        """Ends a request early; its completion, with finish reason "abort", comes out like any other.

        A request that has finished already is left as it is.
        """
        for sample_id in self._mailroom.sample_ids(request_id):
            delta = self._scheduler.abort(sample_id)
            if delta is not None:
                self._mailroom.post(delta)

    def fork(self, request_id: int, *, seed: int | None = None) -> int:
        """Branches an unfinished request and returns the id of the branch: see `Branches.fork`."""
        return self._branches.fork(request_id, seed)

    def rewind(self, request_id: int, num_tokens: int, *, seed: int | None = None) -> None:
        """Takes back the last tokens of an unfinished request's output: see `Branches.rewind`."""
        self._branches.rewind(request_id, num_tokens, seed)

    def save(self, request_id: int, path: str | Path) -> None:
        """Writes an unfinished request to a file, all that it needs to go on: see `Branches.save`."""
        self._branches.save(request_id, Path(path))

    def restore(self, path: str | Path) -> int:
        """Queues the request in a file and returns its id here: see `Branches.restore`."""
        return self._branches.restore(Path(path))

    def step(self) -> list[Delta]:
        """Computes one step and returns what it added to the requests of `add`; empty when there is nothing to do."""
        self._advance()
        return self._mailroom.take()

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **terms: Unpack[Terms]
    ) -> Iterator[Delta]:
        """Yields a prompt's completion piece by piece, the completion itself with the last; closing it aborts.

        Raises ValueError here, not at the first piece, where the request could not be honoured. It is queued with the
        first piece that is asked for, or QueueFullError is raised there. `terms` are as for `add`.
        """
        return self._deliver(self._admit(prompt, sampling_params, **terms))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
        **terms: Unpack[Terms],
    ) -> list[Completion]:
        """Completes one prompt or many, text or token ids, and returns the completions in the prompts' order.

        A prompt with `n` above 1 has n of them in a row, by sample_index, or best first with `best_of`.
        `sampling_params` is one for all or one per prompt; `terms` are as for `add`. Raises ValueError before
        anything is computed if any prompt cannot be honoured, QueueFullError if they are too many. When interrupted,
        the requests are aborted and the LLM stays usable.
        """
        prompts = as_prompts(prompts)
        params = as_params(sampling_params, len(prompts))
        groups = [self._numbered(i, *pair, **terms) for i, pair in enumerate(zip(prompts, params, strict=True))]
        self._scheduler.check_room(sum(len(samples.requests) for samples in groups))
        ids = [samples.request_id for samples in groups]
        try:
            mailbox = self._mailroom.open_mailbox(ids)
            for samples in groups:
                self._queue(samples)
            completions = self._collect(mailbox, sum(samples.num_completions for samples in groups), show_progress)
        finally:
            self._forget(ids)
        return [c for samples in groups for c in in_order(completions[samples.request_id], samples.sampling)]

    def beam_search(
        self,
        prompt: Prompt,
        *,
        num_beams: int,
        max_tokens: int = SamplingParams.max_tokens,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
        **terms: Unpack[Terms],
    ) -> list[Completion]:
        """Returns the `num_beams` best continuations that beam search finds, best first, as `transformers` would.

        They are ranked by the sum of log-probabilities over length ** length_penalty. Each step is a request of one
        token for every beam, which finds all but its last page in the prefix cache; `terms` are as for `add`. Raises
        ValueError where the request could not be honoured, or EngineConfig.max_log_probs is too small for the beams.
        """
        require_int("num_beams", num_beams, 1)
        require_real("length_penalty", length_penalty, -math.inf)
        (request,) = self._admit(
            prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, temperature=0), **terms
        ).requests
        count = min(num_candidates(num_beams, len(request.stop_token_ids)), self.model_config.vocab_size)
        params = SamplingParams(max_tokens=1, temperature=0, log_probs=count, ignore_eos=True)

        def extend(beams: Sequence[Beam]) -> list[dict[int, float]]:
            prompts = [[*request.token_ids, *beam.token_ids] for beam in beams]
            completions = self.generate(prompts, params, show_progress=False, **terms)
            return [completion.top_log_probs[0] for completion in completions]

        beams = search(
            extend,
            num_beams=num_beams,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            length_penalty=length_penalty,
        )
        return as_completions(beams, request, self.tokenizer)

    def _advance(self) -> None:
        with deferred_interrupts():
            deltas = self._scheduler.expire()
            advance = self._pipeline.advance()
            for delta in chain(deltas, advance.deltas if advance else ()):
                self._mailroom.post(delta)
        if advance is not None and self.on_step is not None:
            self.on_step(advance.step, advance.seconds)

    def _admit(self, prompt: Prompt, sampling: SamplingParams | None, **terms: Unpack[Terms]) -> Samples:
        return Samples(self._admission.admit(self._ids, prompt, sampling, **terms))

    def _queue(self, samples: Samples) -> None:
        self._scheduler.check_room(len(samples.requests))
        self._mailroom.expect(samples)
        for request in samples.requests:
            self._scheduler.add(request)

    def _deliver(self, samples: Samples) -> Iterator[Delta]:
        self._queue(samples)
        mailbox = self._mailroom.open_mailbox([samples.request_id])
        num_to_come = samples.num_completions
        try:
            while num_to_come:
                while not mailbox:
                    self._advance()
                delta = mailbox.popleft()
                num_to_come -= delta.completion is not None
                yield delta
        finally:
            self._forget([samples.request_id])

    def _collect(self, mailbox: deque[Delta], count: int, show_progress: bool) -> dict[int, list[Completion]]:
        completions: defaultdict[int, list[Completion]] = defaultdict(list)
        num_completions = num_tokens = 0
        with tqdm(total=count, unit="request", disable=not show_progress, smoothing=0) as progress:
            while num_completions < count:
                self._advance()
                while mailbox:
                    delta = mailbox.popleft()
                    num_tokens += len(delta.token_ids)
                    if delta.completion is not None:
                        completions[delta.request_id].append(delta.completion)
                        num_completions += 1
                        progress.update()
                elapsed = max(progress.format_dict["elapsed"], 1e-9)
                progress.set_postfix_str(f"{num_tokens / elapsed:.1f} tokens/s", refresh=False)
        return completions

    def _forget(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            for sample_id in self._mailroom.sample_ids(request_id):
                self._scheduler.abort(sample_id)
            self._mailroom.forget(request_id)

    def _numbered(self, index: int, prompt: Prompt, sampling: SamplingParams | None, **terms: Unpack[Terms]) -> Samples:
        try:
            return self._admit(prompt, sampling, **terms)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
