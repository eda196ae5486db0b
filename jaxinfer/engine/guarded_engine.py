"""`GuardedEngine`: an engine whose steps its callers compute, one thread at a time."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxinfer.display.progress import Bar, is_shown
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.frontend.admission import ONE_TOKEN, RequestOptions
from jaxinfer.engine.frontend.embeddings import Reading, begin_pooling, states_of
from jaxinfer.engine.frontend.guard import Guard, deferred_interrupts
from jaxinfer.engine.frontend.sample_group import CompletionCollector, SampleGroup
from jaxinfer.engine.request.completion import Completion, Delta


class GuardedEngine:
    """Lets one thread at a time compute its engine's steps; `EngineThread` computes them on a thread of its own.

    A second thread gets RuntimeError while one is inside, and Ctrl-C takes effect between two steps.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._guard = engine, Guard()

    @contextlib.contextmanager
    def entered(self) -> Iterator[Callable[[], None]]:
        """Lets this thread use the engine inside a `with`; yields a function that lets a pending Ctrl-C take effect."""
        self._engine.check()
        with deferred_interrupts() as take_effect, self._guard:
            yield take_effect

    def close(self) -> None:
        """Closes the engine; does nothing if it is closed."""
        with deferred_interrupts(), self._guard:
            self._engine.close()

    def drop(self, request_id: int) -> None:
        """Ends a request without a completion; any thread may call it at any time, as the collector does too."""
        with deferred_interrupts():
            self._guard.defer(lambda: self._engine.drop(request_id))

    def begin(self, submit: Callable[[Engine], int]) -> int:
        """Returns the request id from `submit`. After Ctrl-C drops the request, because the caller never got its id."""
        request_id = None
        try:
            with self.entered():
                request_id = submit(self._engine)
            return request_id
        except BaseException:
            if request_id is not None:
                with self.entered():
                    self._engine.drop(request_id)
            raise

    def advance(self) -> None:
        """Computes a step; then raises a drafter's exception."""
        with self.entered():
            self._advance()

    def stream(self, samples: SampleGroup) -> Iterator[Delta]:
        """Yields the deltas of a prompt; the end of the iterator ends its request."""
        deltas: deque[Delta] = deque()
        num_to_come = samples.num_completions
        try:
            with self.entered():
                self._engine.submit(samples, deltas.append)
            while num_to_come:
                while not deltas:
                    self.advance()
                delta = deltas.popleft()
                num_to_come -= delta.completion is not None
                yield delta
        finally:
            self.drop(samples.request_id)

    def collect(self, groups: Sequence[SampleGroup], show_progress: bool) -> list[Completion]:
        """Submits all prompts or none, and returns their completions in the prompts' order."""
        collector = CompletionCollector.of_groups(groups)
        with self.entered() as take_effect:
            self._engine.require_room(groups)
            try:
                for samples in groups:
                    self._engine.submit(samples, collector.add)
                started = time.monotonic()
                with Bar(collector.num_missing, unit="request", show=show_progress) as progress:
                    while num_missing := collector.num_missing:
                        self._advance()
                        take_effect()
                        elapsed = max(time.monotonic() - started, 1e-9)
                        rate = f"{collector.num_tokens / elapsed:.1f} tokens/s"
                        held = self._engine.held_forms
                        waits = ", requests wait for the compiler" if held else ""
                        progress.update(num_missing - collector.num_missing, rate + waits)
            finally:
                for samples in groups:
                    self._engine.drop(samples.request_id)
        return collector.completions()

    def read(self, reading: Reading, show_progress: bool | None, options: RequestOptions) -> np.ndarray:
        """Returns what is read from the states of texts."""
        show_progress = is_shown(show_progress)
        groups = self._engine.admit_all(reading.prompts, ONE_TOKEN, **options)
        poolings = [begin_pooling(samples, reading.pooling) for samples in groups]
        return reading.result(states_of(self.collect(groups, show_progress), poolings))

    def _advance(self) -> None:
        self._guard.run_deferred()
        self._engine.advance()
        if not self._engine.has_steps:
            self._engine.wait_for_change()
        if (error := self._engine.take_error()) is not None:
            raise error
