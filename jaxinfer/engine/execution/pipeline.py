"""The engine's loop: schedule a step, launch it, commit its tokens; with several replicas, for each of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from jaxinfer.engine.request.completion import Delta
from jaxinfer.engine.scheduling.step import Step

POLL = 1e-4  # seconds between looks at several replicas' steps: short against any step


class Planner(Protocol):
    """Schedules steps and applies their results to requests; `Scheduler` is one."""

    def schedule(self, after: Step | None = None, replica: int = 0) -> Step | None: ...

    def commit(self, step: Step, output: Any) -> list[Delta]: ...

    def abandon(self, step: Step) -> None:
        """Learns that a step was interrupted at its launch: it may have run or not, and is scheduled again."""
        ...


class Device(Protocol):
    """Computes steps in the order of their launch; `Runner` is one."""

    def launch(self, step: Step) -> Any:
        """Launches a step without waiting for it; returns its output on the device, the argument of `draw`."""
        ...

    def draw(self, step: Step, output: Any) -> Any:
        """Launches the draw that `launch` left out, once the masks are known; returns the argument of `read`."""
        return output

    def is_done(self, output: Any) -> bool:
        """True if a launched step has ended. Of several replicas, each has to say so at last."""
        return False

    def read(self, output: Any) -> Any:
        """Waits for a step and returns its output as host arrays."""
        ...


class Launched(NamedTuple):
    """A launched step whose output is not read yet."""

    step: Step
    began: float
    output: Any
    is_drawn: bool  # False while its draw waits for masks


class Advance(NamedTuple):
    """The result of one turn of the loop."""

    step: Step
    seconds: float  # duration of the step
    deltas: list[Delta]  # the additions to requests


class Pipeline:
    """Launches each step before the host reads the last step's tokens, if the scheduler can plan without them.

    device  |------------- step n -------------|----------- step n + 1 -----------|
    host    commit n-1 · launch n+1 · wait ····|commit n · launch n+2 · wait ·····|

    Host and device work at the same time, and no step waits for the host. A step with grammars draws its tokens when
    the host knows the masks, which it computes while the step runs:

    device  |-- step n --|- draw n -|-- step n + 1 --|- draw n + 1 -|
    host                            |commit n · masks · launch draw n + 1 · launch n + 2 · wait ···|
    """

    def __init__(
        self,
        scheduler: Planner,
        device: Device,
        clock: Callable[[], float] = time.perf_counter,
        *,
        replica: int = 0,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._scheduler = scheduler
        self._replica = replica  # whose steps these are
        self._device = device
        self._clock = clock
        self._on_failure = on_failure  # called with an exception that loses tokens
        self._launched: deque[Launched] = deque()  # two at most, in the order of launch
        self._ended = 0.0  # time of the last commit
        self._interrupted: Step | None = None  # the step whose launch has not returned
        self._error: Exception | None = None  # raised after the last commit, whose deltas it must not hold up

    def advance(self) -> Advance | None:
        """Launches the next step if possible, then commits and returns the oldest; None if there is nothing to do."""
        return self.commit() if self.launch() else None

    def launch(self) -> bool:
        """Launches up to two steps, as far as they can be scheduled; returns True if `commit` has one to read."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self._abandon_interrupted()
        if self._launched and all(chunk.is_stale for chunk in self._launched[0].step.chunks):
            self._launched.popleft()  # all its requests have ended or were rewound
        came = self._clock() if self._launched else 0.0
        if not self._launched and not self._launch():
            return False
        self._draw()
        step = self._launched[0].step
        if came > 0 and self.is_done:
            step.idle_seconds = came - max(self.began, self._ended)  # while the caller did something else
        if len(self._launched) == 1:
            self._launch(after=step)
        return True

    @property
    def began(self) -> float:
        """The time at which the oldest launched step was scheduled."""
        return self._launched[0].began

    @property
    def is_done(self) -> bool:
        """True if the oldest launched step has ended."""
        return self._device.is_done(self._launched[0].output)

    def commit(self) -> Advance:
        """Waits for the oldest launched step, commits its tokens and returns them."""
        step, began, output, _ = self._launched[0]
        deltas = self._commit(step, output)
        self._launched.popleft()
        try:
            self._draw()
        except Exception as error:
            self._error = error
        began, self._ended = max(began, self._ended) + step.idle_seconds, self._clock()
        return Advance(step, self._ended - began, deltas)

    def settle(self) -> Iterator[list[Delta]]:
        """Commits the launched steps without launching others, and yields the additions of each to requests."""
        self._abandon_interrupted()
        while self._launched:
            self._draw()
            step, _, output, _ = self._launched[0]
            is_stale = all(chunk.is_stale for chunk in step.chunks)
            deltas = [] if is_stale else self._commit(step, output)
            self._launched.popleft()
            yield deltas
        self._ended = self._clock()

    def _commit(self, step: Step, output: Any) -> list[Delta]:
        read = self._device.read(output)
        try:
            return self._scheduler.commit(step, read)
        except Exception as error:  # requests may have tokens whose deltas are lost
            self._on_failure(error)
            raise

    def _abandon_interrupted(self) -> None:
        if self._interrupted is not None:
            self._scheduler.abandon(self._interrupted)
            self._interrupted = None

    def _launch(self, after: Step | None = None) -> bool:
        """Launches the next step, if there is one."""
        began = self._clock()
        step = self._scheduler.schedule(after, self._replica)
        if step is None:
            return False
        self._interrupted = step
        self._launched.append(Launched(step, began, self._device.launch(step), not step.needs_masks))
        self._interrupted = None
        return True

    def _draw(self) -> None:
        """Launches the draw of the oldest step, if it is still to come; all earlier tokens are known now."""
        if self._launched and not self._launched[0].is_drawn:
            oldest = self._launched[0]
            self._launched[0] = oldest._replace(output=self._device.draw(oldest.step, oldest.output), is_drawn=True)


def advance(pipelines: Sequence[Pipeline], pause: Callable[[], None] = lambda: time.sleep(POLL)) -> Advance | None:
    """Launches steps of all replicas, then commits and returns one of them; None if there is nothing to do.

    It is the first that has ended. While none of several has, it calls `pause`: waiting for one of them would let the
    devices of the others run idle.
    """
    launched = [pipeline for pipeline in pipelines if pipeline.launch()]
    # The last replica may have let go of a request for which the first one has room.
    launched = launched or [pipeline for pipeline in pipelines if pipeline.launch()]
    while len(launched) > 1:
        if ended := [pipeline for pipeline in launched if pipeline.is_done]:
            return min(ended, key=lambda pipeline: pipeline.began).commit()
        pause()
    return launched[0].commit() if launched else None
