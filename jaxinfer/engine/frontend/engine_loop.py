"""The engine loop: the only owner of the pipeline and of the output queues."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from tqdm import tqdm

from jaxinfer.engine.execution.compiled_steps import CompileCounter
from jaxinfer.engine.execution.pipeline import Device, Pipeline
from jaxinfer.engine.frontend.guard import Guard, deferred_interrupts
from jaxinfer.engine.frontend.outputs import OutputQueues
from jaxinfer.engine.frontend.sample_group import SampleGroup, in_order
from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.engine.scheduling.step import Step


class EngineLoop:
    """Submits requests to the scheduler, advances the pipeline and routes deltas to the waiting calls.

    A thread may read a stream that another thread created, so the loop enters `guard` too.
    """

    def __init__(self, scheduler: Scheduler, device: Device, guard: Guard) -> None:
        self._scheduler = scheduler
        self._pipeline = Pipeline(scheduler, device)
        self._guard = guard
        self._compile_counter = CompileCounter()
        self.queues = OutputQueues()
        self.on_step: Callable[[Step, float], None] | None = None  # called with each step and its seconds

    @property
    def num_late_compiles(self) -> int:
        """The number of compilations that a step had to wait for."""
        return self._compile_counter.count

    def advance(self) -> None:
        """Computes a step, if any request can advance, and routes its deltas; then raises a drafter's exception."""
        with deferred_interrupts(), self._guard, self._compile_counter:
            self.queues.route(self._scheduler.expire())
            advance = self._pipeline.advance()
            if advance is not None:
                self.queues.route(advance.deltas)
            elif self._scheduler.num_unfinished:
                raise RuntimeError(f"requests are unfinished and no step can be computed: {self._scheduler.metrics()}")
        if advance is not None and self.on_step is not None:
            self.on_step(advance.step, advance.seconds)
        if (error := self._scheduler.take_error()) is not None:
            raise error

    def settle(self) -> None:
        """Ends the steps that are on their way, and routes their deltas: states are then those of the known tokens."""
        with deferred_interrupts(), self._guard, self._compile_counter:
            self.queues.route(self._pipeline.settle())

    def submit(self, samples: SampleGroup) -> None:
        """Adds all samples of a prompt to the scheduler, or none of them: QueueFullError if too many would wait."""
        with deferred_interrupts(), self._guard:
            self._scheduler.check_room(len(samples.requests))
            self.queues.expect(samples)
            for request in samples.requests:
                self._scheduler.add(request)

    def abort(self, request_id: int) -> None:
        """Ends all samples of a request early and routes their completions."""
        for sample_id in self.queues.sample_ids(request_id):
            delta = self._scheduler.abort(sample_id)
            if delta is not None:
                self.queues.route([delta])

    def stream(self, samples: SampleGroup) -> Iterator[Delta]:
        """Submits one prompt and yields its deltas; aborts the prompt if the caller closes the iterator."""
        num_to_come = samples.num_completions
        try:
            queue = self.queues.open_queue([samples.request_id])
            self.submit(samples)
            while num_to_come:
                while not queue:
                    self.advance()
                delta = queue.popleft()
                num_to_come -= delta.completion is not None
                yield delta
        finally:
            self.forget([samples.request_id])

    def collect(
        self, groups: Sequence[SampleGroup], show_progress: bool, between_steps: Callable[[], None]
    ) -> list[Completion]:
        """Submits all prompts or none, and returns their completions in the prompts' order."""
        self._scheduler.check_room(sum(len(samples.requests) for samples in groups))
        ids = [samples.request_id for samples in groups]
        try:
            queue = self.queues.open_queue(ids)
            for samples in groups:
                self.submit(samples)
            count = sum(samples.num_completions for samples in groups)
            completions = self._wait(queue, count, show_progress, between_steps)
        finally:
            self.forget(ids)
        return [c for samples in groups for c in in_order(completions[samples.request_id], samples.sampling)]

    def _wait(
        self, queue: deque[Delta], count: int, show_progress: bool, between_steps: Callable[[], None]
    ) -> dict[int, list[Completion]]:
        completions: defaultdict[int, list[Completion]] = defaultdict(list)
        num_completions = num_tokens = 0
        with tqdm(total=count, unit="request", disable=not show_progress, smoothing=0) as progress:
            while num_completions < count:
                self.advance()
                between_steps()
                while queue:
                    delta = queue.popleft()
                    num_tokens += len(delta.token_ids)
                    if delta.completion is not None:
                        completions[delta.request_id].append(delta.completion)
                        num_completions += 1
                        progress.update()
                elapsed = max(progress.format_dict["elapsed"], 1e-9)
                progress.set_postfix_str(f"{num_tokens / elapsed:.1f} tokens/s", refresh=False)
        return completions

    def forget(self, ids: Iterable[int]) -> None:
        """Aborts requests and drops their deltas. Ctrl-C takes effect only after all are dropped."""
        with deferred_interrupts():
            for request_id in ids:
                for sample_id in self.queues.sample_ids(request_id):
                    self._scheduler.abort(sample_id)
                self.queues.forget(request_id)
