"""Runs a file of requests through one engine. A job can be killed at any moment and resumed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tqdm import tqdm

from jaxinfer.batch_job.files import as_file
from jaxinfer.batch_job.input import check_input, check_paths, open_lines
from jaxinfer.batch_job.output import ConvertedOutput, OutputFile, match_lines, open_output
from jaxinfer.batch_job.records import (
    InvalidLine,
    JobRequest,
    completion_line,
    error_line,
    error_of,
    read_requests,
)
from jaxinfer.batch_job.shards import as_shard
from jaxinfer.config import SamplingParams
from jaxinfer.engine.frontend.chats import Chats, render_chats
from jaxinfer.engine.frontend.guard import deferred_interrupts
from jaxinfer.engine.frontend.sample_group import in_order
from jaxinfer.engine.request.request import QueueFullError
from jaxinfer.validation import as_bool, require_int

if TYPE_CHECKING:
    from jaxinfer.engine.frontend.admission import Prompt
    from jaxinfer.engine.llm import LLM
    from jaxinfer.engine.request.completion import Completion, Delta

MAX_IN_FLIGHT = 128


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Result of one run. `num_done_before` of `num_requests` were already in the output, some with an error."""

    num_requests: int
    num_done_before: int
    num_errors_before: int
    num_completed: int
    num_errors: int
    num_tokens: int  # generated, in this run
    seconds: float


def run_batch(
    llm: LLM,
    input_path: str | Path,
    output_path: str | Path,
    *,
    show_progress: bool = True,
    max_in_flight: int = MAX_IN_FLIGHT,
    shard: tuple[int, int] | None = None,
) -> Summary:
    """Runs the requests of `input_path` without a record in `output_path`, and appends a record as each ends.

    When all have one, the records are put in the order of their lines.

    The input is text in UTF-8, plain or compressed by gzip, or a Parquet file with a row for each line. The output is
    compressed if its name ends in ".gz", and a Parquet file if in ".parquet"; until all is done, its records are beside
    it. Both may be URLs that fsspec knows. A line of the input is `{"custom_id": str, "prompt": str or token
    ids, ...fields of SamplingParams}`. Instead of "prompt" it may have "messages" of a conversation, and with them the
    arguments of `LLM.chat` by their names. Or it is in OpenAI's batch format, with "custom_id", "method", "url" and
    "body", and so is its record then. "priority" is "batch" unless the line gives it; "tenant", "deadline" and
    "cache_salt" are as for `LLM.add`. Any other line gets a record with `error`. The engine has at most `max_in_flight`
    of the requests at a time. Memory holds only the custom_ids and digests of lines.

    With `shard` (index, count) it runs the lines of one shard and writes to `shard_path(output_path, shard)`; index is
    from 1 to count. `merge_shards` then makes the output.

    After a kill, the next call completes the output to that of an undisturbed run. To repeat a request, delete its
    record from the output.

    Raises ValueError, with the output unchanged, if the input has another format or encoding, or if another job uses
    the output or it cannot be locked. The same holds if a record's `made_by` differs from `llm.identity()` and the
    input line's digest. Raises OSError if a record cannot be written; run the job again then.
    """
    show_progress = as_bool("show_progress", show_progress)
    check_job(input_path, output_path, max_in_flight=max_in_flight, shard=shard)
    source, part = as_file("input_path", input_path), as_shard(shard)
    file = part.path(as_file("output_path", output_path))
    identity = llm.identity()
    with open_output(file) as output:
        done = output.read_done(identity)
        with open_lines(source, part) as lines:
            num_requests = match_lines(lines, done, source, file)
        output.drop_incomplete()
        bar = tqdm(total=num_requests, initial=len(done), disable=not show_progress, unit="request")
        job = _Job(llm, identity, output, bar, is_table=file.name.endswith(".parquet"))
        with bar, open_lines(source, part) as lines, job:
            try:
                job.run(read_requests(lines, done, llm.default_sampling_params), max_in_flight)
                if len(done) + job.num_completed + job.num_errors == num_requests:
                    output.finish()
            except KeyboardInterrupt:
                num_done = len(done) + job.num_completed + job.num_errors
                progress = f"{num_done} of {num_requests} requests done"
                raise KeyboardInterrupt(f"interrupted with {progress}; run it again to finish the rest") from None
    return Summary(
        num_requests=num_requests,
        num_done_before=len(done),
        num_errors_before=sum(record.has_error for record in done.values()),
        num_completed=job.num_completed,
        num_errors=job.num_errors,
        num_tokens=job.num_tokens,
        seconds=job.seconds,
    )


def check_job(
    input_path: str | Path,
    output_path: str | Path,
    *,
    max_in_flight: int = MAX_IN_FLIGHT,
    shard: tuple[int, int] | None = None,
) -> None:
    """Checks the arguments of `run_batch` before a model is loaded; ValueError if it would refuse them.

    Reads the whole input, and creates the output.
    """
    require_int("max_in_flight", max_in_flight, 1)
    part = as_shard(shard)
    source, output = check_paths(input_path, output_path)
    check_input(source)
    with open_output(part.path(output)):
        pass


def shard_path(output_path: str | Path, shard: tuple[int, int]) -> str | Path:
    """Returns the path or URL of the file to which `run_batch` writes the records of a shard."""
    file = as_shard(shard).path(as_file("output_path", output_path))
    return file if isinstance(file, Path) else str(file)


class _InFlight(NamedTuple):
    """A request in the engine, and the form of its answer if it is a conversation."""

    request: JobRequest
    chats: Chats | None


class _Job:
    """One run of a job: its requests in the engine, and counters of finished ones."""

    def __init__(
        self,
        llm: LLM,
        identity: Mapping[str, str],
        output: OutputFile | ConvertedOutput,
        bar: tqdm,
        *,
        is_table: bool = False,
    ) -> None:
        self._llm = llm
        self._identity = identity
        self._output = output
        self._is_table = is_table
        self._bar = bar
        self._in_flight: dict[int, _InFlight] = {}
        self._deltas: deque[Delta] = deque()  # of these requests; other requests of the engine have their own sinks
        self._held_back: JobRequest | None = None  # waits until the engine has room
        self._completions: dict[int, list[Completion]] = {}  # of requests with unfinished samples
        self._started_at = time.monotonic()
        self.num_completed = 0
        self.num_errors = 0
        self.num_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # After an interrupt or an error the caller may use the engine for other work.
        with deferred_interrupts():
            for request_id in self._in_flight:
                self._llm.drop(request_id)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started_at

    def run(self, entries: Iterator[JobRequest | InvalidLine], max_in_flight: int) -> None:
        while self._submit(entries, max_in_flight):
            self._step()

    def _submit(self, entries: Iterator[JobRequest | InvalidLine], max_in_flight: int) -> bool:
        """Adds requests up to `max_in_flight`; returns False if nothing is left to run."""
        while len(self._in_flight) < max_in_flight and (entry := self._held_back or next(entries, None)) is not None:
            self._held_back = None
            if isinstance(entry, InvalidLine):
                self._record_error(entry, entry.message)
                continue
            if entry.is_openai and self._is_table:
                raise ValueError("OpenAI's batch format has no columns for a Parquet file; name the output .jsonl")
            try:
                prompt, params, chats = self._prepared(entry)
                options: Any = {"priority": "batch", **entry.options}
                with self._llm.engine() as engine:
                    samples = engine.admit(prompt, params, **options)
                    engine.submit(samples, self._deltas.append)
                    self._in_flight[samples.request_id] = _InFlight(entry, chats)
            except QueueFullError as error:
                if self._in_flight or self._llm.has_unfinished:  # these make room when they end
                    self._held_back = entry
                    return True
                self._record_error(entry, str(error))
            except ValueError as error:
                self._record_error(entry, str(error).removeprefix("conversation 0: "))  # a line has one
        return bool(self._in_flight)

    def _prepared(self, entry: JobRequest) -> tuple[Prompt, SamplingParams, Chats | None]:
        """Returns the prompt and parameters of a request; messages are rendered, and come with the form of answers."""
        if entry.prompt is not None:
            return entry.prompt, entry.sampling_params, None
        assert entry.chat is not None
        if self._llm.tokenizer is None:
            raise ValueError("messages need a tokenizer, which this checkpoint does not have; give token ids as prompt")
        if entry.is_openai:
            # The extra that the line was read with.
            from jaxinfer.serve.parameters import require_effort_is_read

            require_effort_is_read(self._llm.tokenizer, entry.chat)
        chats = render_chats(
            self._llm.answers, self._llm.default_sampling_params, sampling_params=entry.sampling_params, **entry.chat
        )
        return chats.prompts[0], chats.params[0], chats

    def _step(self) -> None:
        with self._llm.engine() as engine:
            if engine.advance() is None and not self._deltas:
                raise RuntimeError(
                    f"the engine is idle but has not finished {len(self._in_flight)} requests of the job"
                )
            error = engine.take_error()
        while self._deltas:
            delta = self._deltas.popleft()
            self.num_tokens += len(delta.token_ids)
            if delta.completion is not None:
                self._take(delta.request_id, delta.completion)
        if error is not None:
            raise error

    def _take(self, request_id: int, completion: Completion) -> None:
        request, chats = self._in_flight[request_id]
        completions = self._completions.setdefault(request_id, [])
        completions.append(completion)
        if len(completions) == request.sampling_params.n:
            del self._in_flight[request_id]
            completions = in_order(self._completions.pop(request_id), request.sampling_params)
            self._record_completions(request, completions if chats is None else chats.answered(completions))

    def _record_completions(self, request: JobRequest, completions: list[Completion]) -> None:
        # Another caller has aborted it, so it gets no record and the next run repeats it.
        if any(completion.finish_reason == "abort" for completion in completions):
            return
        self._output.append(completion_line(request, completions, self._identity, self._llm.tokenizer))
        has_error = error_of(completions) is not None
        self.num_errors += has_error
        self.num_completed += not has_error
        self._advance()

    def _record_error(self, entry: JobRequest | InvalidLine, message: str) -> None:
        self._output.append(error_line(entry, message, self._identity))
        self.num_errors += 1
        self._advance()

    def _advance(self) -> None:
        self._bar.set_postfix_str(f"{self.num_tokens / max(self.seconds, 1e-9):.0f} tokens/s", refresh=False)
        self._bar.update()
