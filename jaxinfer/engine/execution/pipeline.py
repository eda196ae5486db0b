"""The loop of the engine: what to compute, compute it, hand out what was drawn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jaxinfer.engine.request.completion import Delta
from jaxinfer.engine.scheduling.step import Step


class Planner(Protocol):
    """Says what is computed and hands out what comes of it; `Scheduler` is one."""

    def schedule(self, after: Step | None = None) -> Step | None: ...

    def commit(self, step: Step, output: Any) -> list[Delta]: ...


class Device(Protocol):
    """Computes steps one after another, in the order in which they are launched; `Runner` is one."""

    def launch(self, step: Step) -> Any:
        """Begins a step, without waiting for it, and returns what `draw` takes."""
        ...

    @property
    def defers_sampling(self) -> bool:
        """Whether it can launch a step of which it is not known yet what its structures allow."""
        return False

    def draw(self, step: Step, output: Any) -> Any:
        """Begins to draw the tokens that `launch` has left to be drawn, now that all is known; returns what `read`
        takes.
        """
        return output

    def is_done(self, output: Any) -> bool:
        """Whether a step that was launched has ended; False if nobody can tell without waiting."""
        return False

    def read(self, output: Any) -> Any:
        """Waits for a step and returns its output as host arrays."""
        ...


class Launched(NamedTuple):
    """A step that is on its way."""

    step: Step
    began: float
    output: Any


class Advance(NamedTuple):
    """What one turn of the loop has brought: a step, the seconds that it took, what it added to requests."""

    step: Step
    seconds: float
    deltas: list[Delta]


class Pipeline:
    """Launches each step before the tokens of the one before it are read, where the scheduler knows enough for that.

    device  |------------- step n -------------|----------- step n + 1 -----------|
    host    commit n-1 · launch n+1 · wait ····|commit n · launch n+2 · wait ·····|

    So the host works while the device does, and no step waits for it. What structures allow next is worked out while
    the step runs that it is for, which draws its tokens apart:

    device  |-- step n --|- draw n -|-- step n + 1 --|- draw n + 1 -|
    host                            |commit n · masks · launch draw n + 1 · launch n + 2 · wait ···|
    """

    def __init__(self, scheduler: Planner, device: Device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._scheduler = scheduler
        self._device = device
        self._clock = clock
        self._launched: deque[Launched] = deque()  # two at most, the second after the first
        self._ended = 0.0  # when the last step was committed

    def advance(self) -> Advance | None:
        """Returns what one step has brought, when the next is on its way; None when there is nothing to do."""
        if self._launched and all(chunk.is_stale for chunk in self._launched[0].step.chunks):
            self._launched.popleft()  # nobody wants it any more
        came = self._clock() if self._launched else 0.0
        if not self._launched and not self._launch():
            return None
        step, began, output = self._launched[0]
        if came > 0 and self._device.is_done(output):
            step.idle_seconds = came - max(began, self._ended)  # while the caller did something else
        if len(self._launched) == 1 and (not step.chunks.rows.has_structures or self._device.defers_sampling):
            self._launch(after=step)
        deltas = self._scheduler.commit(step, self._device.read(output))
        self._launched.popleft()
        if self._launched:
            self._draw()
        began, self._ended = max(began, self._ended) + step.idle_seconds, self._clock()
        return Advance(step, self._ended - began, deltas)

    def _launch(self, after: Step | None = None) -> bool:
        """Launches the next step, if there is one."""
        began = self._clock()
        step = self._scheduler.schedule(after)
        if step is None:
            return False
        self._launched.append(Launched(step, began, self._device.launch(step)))
        if after is None:
            self._draw()
        return True

    def _draw(self) -> None:
        """Has the tokens of the step on its way drawn, as all is known that they depend on."""
        launched = self._launched[0]
        if launched.step.needs_masks:
            self._launched[0] = launched._replace(output=self._device.draw(launched.step, launched.output))
