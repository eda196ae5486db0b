"""Timeline of an engine for Perfetto: its steps, its load, and the phases of each request."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.display.html import Span, lanes
from jaxinfer.engine.execution.compiled_steps import choose_bucket
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.metrics import Metrics
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.engine.scheduling.step import Rows, Step
from jaxinfer.plan.step_shapes import Bucket

MAX_STEPS = 100_000
PHASES = ("queue", "prefill", "decode", "preempted")
# Processes of the trace: Perfetto shows each as a group of tracks.
ENGINE, REQUESTS = 1, 2


class StepSpan(NamedTuple):
    """A step, from the moment the device was free for it until its result; `bucket` names its compiled shape."""

    began: float
    ended: float
    kind: str
    num_rows: int
    num_tokens: int
    bucket: str
    replica: int = 0


class Load(NamedTuple):
    """Requests and pages after the scheduler made a step."""

    moment: float
    num_running: int
    num_waiting: int
    num_owned_pages: int
    num_cached_pages: int


class RequestSpan(NamedTuple):
    """One phase of a request: queue or preempted until its next step, prefill until it samples a token, then decode."""

    request_id: int
    phase: str
    began: float
    ended: float


class Timeline:
    """Observes a scheduler on the scheduler's clock. Keeps the last `max_steps` steps, loads and spans each.

    * `steps`: a `StepSpan` for each step.
    * `loads`: a `Load` for each change of the numbers of requests and pages.
    * `spans`: a `RequestSpan` for each phase of a request.

    Moments are seconds of that clock. In a notebook the object shows itself as a picture.
    """

    def __init__(self, scheduler: Scheduler, buckets: tuple[Bucket, ...], max_steps: int) -> None:
        self._clock = scheduler.clock
        self._buckets = buckets
        self._phases: dict[int, tuple[str, float]] = {}  # phase and its start, of unfinished requests
        # By replica: all rows decode, and another step of these Rows changes no phase.
        self._decoding: dict[int, Rows | None] = {}
        self.num_pages = scheduler.metrics().num_pages  # of all replicas
        self._num_replicas = len(scheduler.replicas)
        self.steps: deque[StepSpan] = deque(maxlen=max_steps)
        self.loads: deque[Load] = deque(maxlen=max_steps)
        self.spans: deque[RequestSpan] = deque(maxlen=max_steps)

    @property
    def start(self) -> float:
        """The earliest moment in the kept steps, loads and spans."""
        moments = itertools.chain((step.began for step in self.steps), (load.moment for load in self.loads))
        return min(itertools.chain(moments, (span.began for span in self.spans)), default=0.0)

    def arrived(self, request: Request) -> None:
        self._phases[request.request_id] = ("queue", request.arrival)

    def preempted(self, request: Request) -> None:
        self._enter(request, "preempted", self._clock())

    def scheduled(self, now: float, metrics: Metrics) -> None:
        counts = metrics.num_running, metrics.num_waiting, metrics.num_owned_pages, metrics.num_cached_pages
        if not self.loads or self.loads[-1][1:] != counts:
            self.loads.append(Load(now, *counts))

    def computed(self, step: Step, began: float, ended: float) -> None:
        name = choose_bucket(self._buckets, step).name
        self.steps.append(StepSpan(began, ended, step.kind, len(step.chunks), step.num_tokens, name, step.replica))
        rows = step.chunks.rows
        if rows is self._decoding.get(step.replica):
            return
        self._enter_phases(step, began, ended)
        do_decode = [self._phases.get(request.request_id, ("", 0.0))[0] == "decode" for request in rows.requests]
        self._decoding[step.replica] = rows if all(do_decode) else None

    def _enter_phases(self, step: Step, began: float, ended: float) -> None:
        for chunk in step.chunks:
            phase, since = self._phases.get(chunk.request.request_id, ("", began))
            # The request was preempted during this step, and has no pages until a later step.
            if chunk.is_stale or (phase == "preempted" and not chunk.request.table.pages):
                continue
            if phase not in ("prefill", "decode"):
                # If the prefix cache still has all its pages, a preempted request decodes again without a prefill.
                is_decode = chunk.num_tokens == 1 and chunk.request.num_output_tokens > 0
                phase = "decode" if is_decode else "prefill"
                self._enter(chunk.request, phase, max(began, since))
            if phase == "prefill" and chunk.is_last:
                self._enter(chunk.request, "decode", ended)

    def ended(self, request: Request) -> None:
        self._leave(request.request_id, self._clock())

    def close(self) -> None:
        """Ends the spans of requests that are still unfinished."""
        for request_id in list(self._phases):
            self._leave(request_id, self._clock())

    def save(self, path: str | Path) -> None:
        """Writes the Chrome trace event format, for ui.perfetto.dev; times count from the first event."""
        with Path(path).open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(map(json.dumps, self._events())))
            file.write("\n]}\n")

    def _repr_html_(self) -> str:
        start = self.start
        spans = (Span(f"request {i}", phase, began - start, ended - start) for i, phase, began, ended in self.spans)
        return lanes(spans, PHASES)

    def _enter(self, request: Request, phase: str, now: float) -> None:
        self._leave(request.request_id, now)
        self._phases[request.request_id] = (phase, now)

    def _leave(self, request_id: int, now: float) -> None:
        phase, began = self._phases.pop(request_id, ("", now))
        if now > began:
            self.spans.append(RequestSpan(request_id, phase, began, now))

    def _events(self) -> Iterator[dict[str, Any]]:
        start = self.start
        for pid, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for replica in range(self._num_replicas):
            name = "steps" if self._num_replicas == 1 else f"steps of replica {replica}"
            yield {"ph": "M", "name": "thread_name", "pid": ENGINE, "tid": 1 + replica, "args": {"name": name}}
        for request_id in sorted({span.request_id for span in self.spans}):
            name = {"name": f"request {request_id}"}
            yield {"ph": "M", "name": "thread_name", "pid": REQUESTS, "tid": request_id, "args": name}
        for step in self.steps:
            arguments = {"rows": step.num_rows, "tokens": step.num_tokens, "bucket": step.bucket}
            yield _span(step.kind, ENGINE, 1 + step.replica, step.began - start, step.ended - start) | {
                "args": arguments
            }
        for load in self.loads:
            counters = {
                "requests": {"running": load.num_running, "waiting": load.num_waiting},
                "pages": {"used": load.num_owned_pages, "cached": load.num_cached_pages},
            }
            for name, values in counters.items():
                yield {"ph": "C", "name": name, "pid": ENGINE, "ts": _microseconds(load.moment - start), "args": values}
        for span in self.spans:
            yield _span(span.phase, REQUESTS, span.request_id, span.began - start, span.ended - start)


@contextlib.contextmanager
def recorded_timeline(scheduler: Scheduler, buckets: tuple[Bucket, ...], max_steps: int) -> Iterator[Timeline]:
    """Records the scheduler's steps and requests until the end of the `with` block."""
    timeline = Timeline(scheduler, buckets, max_steps)
    scheduler.observers.append(timeline)
    try:
        yield timeline
    finally:
        scheduler.observers.remove(timeline)
        timeline.close()


def _span(name: str, pid: int, tid: int, began: float, ended: float) -> dict[str, Any]:
    times = {"ts": _microseconds(began), "dur": _microseconds(ended - began)}
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, **times}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
