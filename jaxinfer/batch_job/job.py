"""Runs a file of requests through one engine. A job can be killed at any moment and resumed."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from jaxinfer.batch_job.files import File, as_file
from jaxinfer.batch_job.input import check_errors_path, check_input, check_paths, open_lines
from jaxinfer.batch_job.line_form import PLAIN, LineForm
from jaxinfer.batch_job.output import ConvertedOutput, Done, OutputFile, match_lines, open_output
from jaxinfer.batch_job.records import (
    InvalidLine,
    JobRequest,
    completion_line,
    error_line,
    error_of,
    is_of_line,
    read_requests,
    refusal_line,
)
from jaxinfer.batch_job.shards import WHOLE, Shard, as_shard
from jaxinfer.config import SamplingParams
from jaxinfer.display.progress import Bar, is_shown
from jaxinfer.engine.frontend.chats import Chats, render_chats
from jaxinfer.engine.frontend.guard import deferred_interrupts
from jaxinfer.engine.frontend.sample_group import CompletionCollector
from jaxinfer.engine.request.request import QueueFullError
from jaxinfer.validation import as_tuple, require, require_int, shown

if TYPE_CHECKING:
    from jaxinfer.engine.async_llm import AsyncLLM
    from jaxinfer.engine.frontend.admission import Prompt
    from jaxinfer.engine.frontend.sample_group import SampleGroup
    from jaxinfer.engine.llm import LLM
    from jaxinfer.engine.request.completion import Completion, Delta

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 128
NUM_FIRST_TEXTS = 2  # that a summary has
ADAPTER_DIGEST_LEN = 16  # hexadecimal digits, of an adapter in a record


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Result of one run. `num_done_before` of `num_requests` were already in the output, some with an error."""

    num_requests: int
    num_done_before: int
    num_errors_before: int
    num_completed: int
    num_errors: int
    num_tokens: int  # generated, in this run
    num_prompt_tokens: int  # of the lines completed in this run
    num_cached_tokens: int  # of these, computed before for another line or request
    seconds: float
    first_texts: tuple[tuple[str, str], ...]  # of the first lines completed in this run: custom_id, prompt and answer


class Progress:
    """Counters of a run, which the job writes and its observer reads."""

    def __init__(self, *, num_requests: int, num_done_before: int, num_errors_before: int) -> None:
        self.num_requests, self.num_done_before = num_requests, num_done_before
        self.num_errors_before = num_errors_before
        self.num_completed = self.num_errors = 0
        self.num_tokens = self.num_prompt_tokens = self.num_cached_tokens = 0
        self.first_texts: tuple[tuple[str, str], ...] = ()
        self._started_at = time.monotonic()

    @property
    def num_done(self) -> int:
        """The number of lines with a record, from this run or an earlier one."""
        return self.num_done_before + self.num_completed + self.num_errors

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started_at

    def summary(self) -> Summary:
        """Returns the counters as they are now."""
        return Summary(**{field.name: getattr(self, field.name) for field in fields(Summary)})


def run_batch(
    llm: LLM,
    input_path: str | Path,
    output_path: str | Path,
    *,
    errors_path: str | Path | None = None,
    show_progress: bool | None = None,
    max_in_flight: int = MAX_IN_FLIGHT,
    shard: tuple[int, int] | None = None,
    served_names: Sequence[str] = (),
    form: LineForm = PLAIN,
) -> Summary:
    """Runs the requests of `input_path` without a record in `output_path`, and appends a record as each ends.

    When all have one, the records are put in the order of their lines.

    The input is text in UTF-8, plain or compressed by gzip, or a Parquet file with a row for each line. The output is
    compressed if its name ends in ".gz", and a Parquet file if in ".parquet"; until all is done, its records are beside
    it. Both may be URLs that fsspec knows. A line of the input is `{"custom_id": str, "prompt": str or token
    ids, ...fields of SamplingParams}`. Instead of "prompt" it may have "messages" of a conversation, and with them the
    arguments of `LLM.chat` by their names. Or it is in OpenAI's batch format, with "custom_id", "method", "url" and
    "body", and so is its record then; its "model" is an adapter, the name that the model was loaded by, or one of
    `served_names`, such as that of the model for which the lines were written. "priority"
    is "batch" unless the line gives it; "tenant", "deadline" and "cache_salt" are as for `LLM.add`. Any other line gets
    a record with `error`. The engine has at most `max_in_flight` of the requests at a time. Memory holds only the
    custom_ids and digests of lines.

    A line without a custom_id has its number as one. `form` has what all lines have in common, see `LineForm`.

    With `errors_path` the records of failed lines go into that file, and all others into the output.

    With `shard` (index, count) it runs the lines of one shard and writes to `shard_path(output_path, shard)`; index is
    from 1 to count. `merge_shards` then makes the output.

    After a kill, the next call completes the output to that of an undisturbed run. To repeat a request, delete its
    record from the output; to repeat all that have failed, delete the file at `errors_path`.

    Raises ValueError, with the output unchanged, if the input has another format or encoding, or if another job uses
    the output or it cannot be locked. The same holds if a record has changed since it was written, or if its `made_by`
    differs from `llm.identity()`, the adapter that is loaded by its name, and the input line's digest. Raises OSError
    if a record cannot be written; run the job again then.
    """
    check_job(input_path, output_path, errors_path=errors_path, max_in_flight=max_in_flight, shard=shard)
    names = as_tuple("served_names", served_names, "a list of names")
    require(all(isinstance(name, str) for name in names), "served_names", names, "a list of names")
    if taken := sorted({*names} & {*llm.adapters}):
        raise ValueError(
            f"served_names has {shown(taken[0])}, the name of an adapter; load the adapter by another name"
        )
    bar = Bar(unit="request", show=is_shown(show_progress))

    def show(progress: Progress) -> None:
        bar.total = progress.num_requests
        bar.update(progress.num_done - bar.count, f"{progress.num_tokens / max(progress.seconds, 1e-9):.0f} tokens/s")

    with bar:
        return run_job(
            _SteppedEngine(llm, max_in_flight, names),
            as_file("input_path", input_path),
            as_file("output_path", output_path),
            None if errors_path is None else as_file("errors_path", errors_path),
            shard=as_shard(shard),
            form=form,
            observe=show,
        )


def run_job(
    engine: JobEngine,
    source: File,
    output_file: File,
    errors_file: File | None,
    *,
    shard: Shard = WHOLE,
    form: LineForm = PLAIN,
    observe: Callable[[Progress], object],
) -> Summary:
    """Runs a job on any engine, as `run_batch` does on that of an `LLM`; `observe` is called after each record."""
    identity = {**engine.llm.identity(), **form.identity()}
    loaded = {name: digest[:ADAPTER_DIGEST_LEN] for name, digest in engine.adapter_digests().items()}
    file = shard.path(output_file)
    with ExitStack() as files:
        output = files.enter_context(open_output(file))
        done = output.read_done(identity, loaded)
        errors = output
        if errors_file is not None:
            errors = files.enter_context(open_output(shard.path(errors_file)))
            failed = errors.read_done(identity, loaded)
            done = _join_errors(done, failed, file, shard.path(errors_file))
        if missing := sorted({*output.adapters, *errors.adapters} - loaded.keys()):
            raise ValueError(
                f"{file} was made with the adapter {shown(missing[0])}, which is not loaded; nothing was changed, load"
                " it, or give another output"
            )
        with open_lines(source, shard) as lines:
            num_requests = match_lines(lines, done, source, file)
        for each in dict.fromkeys((output, errors)):
            each.drop_incomplete()
        progress = Progress(
            num_requests=num_requests,
            num_done_before=len(done),
            num_errors_before=sum(record.has_error for record in done.values()),
        )
        observe(progress)
        is_table = any(f is not None and f.name.endswith(".parquet") for f in (output_file, errors_file))
        job = _Job(engine, identity, output, errors, progress, observe, form=form, is_table=is_table)
        with open_lines(source, shard) as lines, job:
            try:
                job.run(read_requests(lines, done, engine.llm.default_sampling_params, form))
                if progress.num_done == num_requests:
                    for each in dict.fromkeys((output, errors)):
                        each.finish()
            except KeyboardInterrupt:
                message = f"{progress.num_done} of {num_requests} requests done; run it again to finish the rest"
                raise KeyboardInterrupt(f"interrupted with {message}") from None
    return progress.summary()


def _join_errors(
    done: Mapping[int, Done], failed: Mapping[int, Done], file: File, errors_file: File
) -> dict[int, Done]:
    """Returns the records of both files; ValueError if a record is in the wrong one, or a line has one in each."""
    for records, path, is_errors in ((done, file, False), (failed, errors_file, True)):
        for line, record in records.items():
            if record.has_error != is_errors:
                kind = "an error" if record.has_error else "a result"
                raise ValueError(
                    f"{path} has {kind} of line {line}, which belongs into the other file; nothing was changed, delete"
                    " the record to compute the line again, or give the files of an earlier run"
                )
    return {**done, **failed}


def check_job(
    input_path: str | Path,
    output_path: str | Path,
    *,
    errors_path: str | Path | None = None,
    max_in_flight: int = MAX_IN_FLIGHT,
    shard: tuple[int, int] | None = None,
) -> None:
    """Checks the arguments of `run_batch` before a model is loaded; ValueError if it would refuse them.

    Reads the whole input, and creates the output.
    """
    require_int("max_in_flight", max_in_flight, 1)
    part = as_shard(shard)
    source, output = check_paths(input_path, output_path)
    outputs = [output] if errors_path is None else [output, check_errors_path(source, output, errors_path)]
    check_input(source)
    for file in outputs:
        with open_output(part.path(file)):
            pass


def shard_path(output_path: str | Path, shard: tuple[int, int]) -> str | Path:
    """Returns the path or URL of the file to which `run_batch` writes the records of a shard."""
    file = as_shard(shard).path(as_file("output_path", output_path))
    return file if isinstance(file, Path) else str(file)


class InFlight(NamedTuple):
    """A request in the engine, the form of its answer if it is a conversation, and its adapter as in its record."""

    request_id: int
    chats: Chats | None
    adapter: Mapping[str, str]

    @classmethod
    def of(cls, samples: SampleGroup, chats: Chats | None) -> InFlight:
        adapter = samples.requests[0].adapter
        told = {} if adapter is None else {"adapter": f"{adapter.name}={adapter.digest[:ADAPTER_DIGEST_LEN]}"}
        return cls(samples.request_id, chats, told)


class JobEngine(Protocol):
    """The engine of a job, as the job uses it."""

    @property
    def llm(self) -> LLM | AsyncLLM:
        """The model, which has the tokenizer of answers and the parameters that a line leaves out."""
        ...

    @property
    def max_in_flight(self) -> int:
        """The number of requests that the engine may have of the job at present."""
        ...

    @property
    def may_make_room(self) -> bool:
        """True if the queue may have room later, though it is full and no request of the job is in the engine."""
        ...

    def adapter_digests(self) -> Mapping[str, str]:
        """Returns the digests of the loaded adapters, by name."""
        ...

    def begin(self, request: JobRequest) -> InFlight:
        """Gives the engine a request; ValueError if it cannot be honoured, QueueFullError if there is no room.

        RuntimeError, OSError and MemoryError end the job; any other error is recorded for the line.
        """
        ...

    def outputs(self) -> Iterator[Delta | Refusal]:
        """Waits until requests of the job have gone on, and yields their deltas, and refusals that came late."""
        ...

    def drop(self, request_id: int) -> None:
        """Ends a request, which has no output any more."""
        ...


class Refusal(NamedTuple):
    """A request that the engine has refused after `begin`, such as for want of room in its queue."""

    request_id: int
    error: QueueFullError | ValueError


class _SteppedEngine:
    """The engine of an `LLM`, whose steps the job computes."""

    def __init__(self, llm: LLM, max_in_flight: int, served_names: Sequence[str]) -> None:
        self.llm, self._served_names = llm, served_names
        self.max_in_flight = max_in_flight
        self._deltas: deque[Delta] = deque()  # of the job; other requests of the engine have their own sinks

    @property
    def may_make_room(self) -> bool:
        return self.llm.has_unfinished

    def adapter_digests(self) -> dict[str, str]:
        with self.llm.engine() as engine:
            return engine.adapter_digests

    def begin(self, request: JobRequest) -> InFlight:
        if request.body is not None:
            # The extra that the line was read with.
            from jaxinfer.openai.errors import require_known_model

            names = [*self.llm.model_names, *self._served_names, *self.llm.adapters]
            way_out = "; give served_names (--served-name) the name that lines for this model have"
            require_known_model(request.body.model, names, "job", way_out)
        prompt, params, chats = prepared(request, self.llm)
        options: Any = {"priority": "batch", **options_of(request, self.llm)}
        with self.llm.engine() as engine:
            samples = engine.admit(prompt, params, **options)
            engine.submit(samples, self._deltas.append)
            return InFlight.of(samples, chats)

    def outputs(self) -> Iterator[Delta]:
        with self.llm.engine() as engine:
            if engine.advance() is None and not self._deltas:
                if not engine.num_unfinished:
                    raise RuntimeError("the engine is idle but has not finished the requests of the job")
                engine.wait_for_change()  # for a text's check or a compilation
            error = engine.take_error()
        while self._deltas:
            yield self._deltas.popleft()
        if error is not None:
            raise error

    def drop(self, request_id: int) -> None:
        self.llm.drop(request_id)


def options_of(request: JobRequest, llm: LLM | AsyncLLM) -> dict[str, Any]:
    """Returns the options of a request. A line in OpenAI's format may name an adapter as its model."""
    if request.body is None or request.body.model not in llm.adapters:
        return {**request.options}
    return {**request.options, "adapter": request.body.model}


def prepared(request: JobRequest, llm: LLM | AsyncLLM) -> tuple[Prompt, SamplingParams, Chats | None]:
    """Returns the prompt and parameters of a request; messages are rendered, and come with the form of answers."""
    if request.prompt is not None:
        return request.prompt, request.sampling_params, None
    assert request.chat is not None
    if llm.tokenizer is None:
        raise ValueError("messages need a tokenizer, which this checkpoint does not have; give token ids as prompt")
    chat = request.chat
    if request.is_openai:
        # The extra that the line was read with.
        from jaxinfer.openai.parameters import with_effort

        chat = with_effort(llm.tokenizer, chat)
    chats = render_chats(llm.answers, llm.default_sampling_params, sampling_params=request.sampling_params, **chat)
    return chats.prompts[0], chats.params[0], chats


class _Job:
    """One run of a job: its requests in the engine, and counters of finished ones."""

    def __init__(
        self,
        engine: JobEngine,
        identity: Mapping[str, str],
        output: OutputFile | ConvertedOutput,
        errors: OutputFile | ConvertedOutput,
        progress: Progress,
        observe: Callable[[Progress], object],
        *,
        form: LineForm,
        is_table: bool,
    ) -> None:
        self._engine, self._form = engine, form
        self._identity = identity
        self._output, self._errors = output, errors
        self._progress, self._observe = progress, observe
        self._is_table = is_table
        self._in_flight: dict[int, tuple[JobRequest, InFlight, CompletionCollector]] = {}
        self._held_back: deque[JobRequest] = deque()  # wait until the engine has room

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # After an interrupt or an error the caller may use the engine for other work.
        with deferred_interrupts():
            for request_id in self._in_flight:
                self._engine.drop(request_id)

    def run(self, entries: Iterator[JobRequest | InvalidLine]) -> None:
        while self._submit(entries):
            self._step()

    def _submit(self, entries: Iterator[JobRequest | InvalidLine]) -> bool:
        """Adds requests as far as there is room; returns False if nothing is left to run."""
        while len(self._in_flight) < self._engine.max_in_flight:
            entry = self._held_back.popleft() if self._held_back else next(entries, None)
            if entry is None:
                return bool(self._in_flight)
            if isinstance(entry, InvalidLine):
                self._record(self._errors, error_line(entry, entry.message, self._identity), has_error=True)
                continue
            if entry.is_openai and self._is_table:
                raise ValueError("OpenAI's batch format has no columns for a Parquet file; name the output .jsonl")
            try:
                begun = self._engine.begin(entry)
                collector = CompletionCollector({begun.request_id: entry.sampling_params})
                self._in_flight[begun.request_id] = entry, begun, collector
            except QueueFullError as error:
                if self._in_flight or self._engine.may_make_room:  # these make room when they end
                    self._held_back.appendleft(entry)
                    return True
                self._refuse(entry, error)
            except Exception as error:
                self._refuse(entry, error)
        return True

    def _step(self) -> None:
        for output in self._engine.outputs():
            if isinstance(output, Refusal):
                request, *_ = self._in_flight.pop(output.request_id)
                if isinstance(output.error, QueueFullError):
                    self._held_back.append(request)
                else:
                    self._refuse(request, output.error)
                continue
            if output.completion is not None:
                self._take(output, output.completion)

    def _take(self, delta: Delta, completion: Completion) -> None:
        request, begun, collector = self._in_flight[delta.request_id]
        collector.add(delta)
        self._progress.num_tokens += len(completion.token_ids)
        if not collector.num_missing:
            del self._in_flight[delta.request_id]
            completions = collector.completions()
            self._progress.num_prompt_tokens += len(completion.prompt_token_ids)
            self._progress.num_cached_tokens += min(each.num_cached_tokens for each in completions)
            self._record_completions(request, begun, completions)

    def _record_completions(self, request: JobRequest, begun: InFlight, completions: list[Completion]) -> None:
        # Another caller has aborted it, so it gets no record and the next run repeats it.
        if any(completion.finish_reason == "abort" for completion in completions):
            return
        has_error = error_of(completions) is not None
        try:
            completions = completions if begun.chats is None else begun.chats.answered(completions)
            identity = {**self._identity, **begun.adapter}
            record = completion_line(request, completions, identity, self._engine.llm.tokenizer, self._form)
        except Exception as error:
            self._refuse(request, error)
            return
        if not has_error and len(self._progress.first_texts) < NUM_FIRST_TEXTS:
            prompt = request.prompt if isinstance(request.prompt, str) else ""
            self._progress.first_texts += ((request.custom_id, prompt + completions[0].text),)
        self._record(self._errors if has_error else self._output, record, has_error=has_error)

    def _refuse(self, request: JobRequest, error: Exception) -> None:
        """Records the error of a line; raises one that is not the line's own."""
        if not isinstance(error, QueueFullError) and not is_of_line(error):
            raise error
        if not isinstance(error, QueueFullError | ValueError):
            logger.exception("line %d has failed", request.line, exc_info=error)
        self._record(self._errors, refusal_line(request, error, self._identity), has_error=True)

    def _record(self, file: OutputFile | ConvertedOutput, record: bytes, *, has_error: bool) -> None:
        file.append(record)
        self._progress.num_errors += has_error
        self._progress.num_completed += not has_error
        self._observe(self._progress)
