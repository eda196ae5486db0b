"""Runs the engine's own admission, scheduler and pipelines under a virtual clock, without a device."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.config import EngineConfig, Parallelism, SamplingParams
from jaxinfer.device import resolve_dtype
from jaxinfer.engine.assembly import plan_host
from jaxinfer.engine.device_choice import memory_question
from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.engine.execution.compiled_steps import choose_bucket
from jaxinfer.engine.execution.pipeline import Device, Pipeline, advance
from jaxinfer.engine.frontend.admission import Admission
from jaxinfer.engine.request.completion import Delta
from jaxinfer.engine.scheduling.metrics import Metrics
from jaxinfer.engine.scheduling.replica import Replica
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.timeline import MAX_STEPS, Timeline, recorded_timeline
from jaxinfer.model.cache import page_bytes
from jaxinfer.parallel.placement import DEFAULT_DEVICE
from jaxinfer.plan.limits import fit_limits
from jaxinfer.plan.step_shapes import loop_steps, max_rows, plan_buckets
from jaxinfer.simulation.step_times import StepTimes, require_known_steps
from jaxinfer.validation import require, shown


class VirtualClock:
    """Seconds since the start; the simulation sets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


class SimulatedDevice(Device):
    """The devices of a replica: steps take the seconds that `step_times` predicts, one after another."""

    def __init__(self, config: EngineConfig, clock: VirtualClock, step_times: StepTimes) -> None:
        self._clock = clock
        self._buckets = plan_buckets(config)
        self._step_times = step_times
        # Any token will do, because only its length ends a request.
        rows = max_rows(config)
        self._output = SimpleNamespace(
            tokens=np.zeros(rows, np.int32), log_probs=np.zeros(rows, np.float32), sampling_log_probs=None
        )
        self.busy_until = 0.0
        self._ends: deque[float] = deque(maxlen=2)  # of the last steps; no more than two are launched at a time

    @property
    def next_end(self) -> float:
        """The time at which the next launched step ends, infinite without one."""
        return min((end for end in self._ends if end > self._clock.now), default=math.inf)

    def launch(self, step: Step) -> float:
        """Returns the time at which the device finishes the step, after all earlier steps."""
        for _ in step.copies.batches(len(step.copies.queue)):
            pass  # drop the transfers: simulated pages have no contents
        seconds = self._step_times.seconds(step, choose_bucket(self._buckets, step))
        self.busy_until = max(self.busy_until, self._clock.now) + seconds
        self._ends.append(self.busy_until)
        return self.busy_until

    def is_done(self, output: float) -> bool:
        return output <= self._clock.now

    def read(self, output: float) -> SimpleNamespace:
        """Advances the clock to the end of the step, the time in `output`."""
        self._clock.wait_until(output)
        return self._output


class SimulatedArrival(NamedTuple):
    """Pages that arrive at a time; its wait advances the clock."""

    clock: VirtualClock
    end: float

    @property
    def is_done(self) -> bool:
        return self.end <= self.clock.now

    def is_intact(self) -> bool:
        self.clock.wait_until(self.end)
        return True


class SimulatedPageMover:
    """Sends pages behind the launched steps of the source, one request after another on the link of each replica."""

    def __init__(
        self, devices: Sequence[SimulatedDevice], clock: VirtualClock, page_bytes: Sequence[int], bandwidth: float
    ) -> None:
        self._devices = devices
        self._clock = clock
        self._page_bytes = page_bytes  # of each kind
        self._bandwidth = bandwidth  # bytes per second
        self._busy_until = [0.0] * len(devices)  # the links of sources
        self.num_bytes = 0  # sent so far

    def move(self, source: Replica, target: Replica, pages: Sequence[Sequence[tuple[int, int]]]) -> SimulatedArrival:
        num_bytes = sum(len(pairs) * size for pairs, size in zip(pages, self._page_bytes, strict=True))
        self.num_bytes += num_bytes
        began = max(self._clock.now, self._devices[source.index].busy_until, self._busy_until[source.index])
        self._busy_until[source.index] = end = began + num_bytes / self._bandwidth
        return SimulatedArrival(self._clock, end)


class SimulatedEngine:
    """Schedules like an engine with this admission and scheduler; `devices` compute the steps of each replica."""

    def __init__(
        self, admission: Admission, scheduler: Scheduler, clock: VirtualClock, devices: Sequence[SimulatedDevice]
    ) -> None:
        self._admission = admission
        self._clock = clock
        self._scheduler = scheduler
        self._devices = devices
        self._buckets = plan_buckets(admission.engine_config)
        self._ids = itertools.count()
        self._pipelines = [Pipeline(scheduler, device, clock, replica=i) for i, device in enumerate(devices)]

    @property
    def num_steps(self) -> int:
        return self._scheduler.metrics().num_steps

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.metrics().num_preemptions

    def metrics(self) -> Metrics:
        return self._scheduler.metrics()

    def now(self) -> float:
        return self._clock.now

    def wait_until(self, moment: float) -> None:
        self._clock.wait_until(moment)

    @property
    def vocab_size(self) -> int:
        return self._admission.model_config.vocab_size

    @property
    def max_model_len(self) -> float:
        return self._admission.max_model_len if self._admission.engine_config.num_sink_tokens is None else math.inf

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        (request,) = self._admission.admit(self._ids, prompt, params)
        self._scheduler.add(request)
        return request.request_id

    def step(self) -> list[Delta]:
        result = advance(self._pipelines, pause=self._pause)
        return [] if result is None else result.deltas

    def _pause(self) -> None:
        """Advances the clock to the end of the next step of any replica."""
        self._clock.wait_until(min(device.next_end for device in self._devices))

    def timeline(self) -> AbstractContextManager[Timeline]:
        return recorded_timeline(self._scheduler, self._buckets, MAX_STEPS)


def load_simulated_engine(
    model: str | Path | None,
    engine_config: EngineConfig,
    step_times: StepTimes,
    dtype: str | None = None,
    *,
    link_bandwidth: float | None = None,
) -> SimulatedEngine:
    """Returns a simulation of `LLM(model, config=engine_config, dtype=dtype)`, without its weights.

    `step_times` are those of a replica. `link_bandwidth`: bytes per second that a replica which only prefills sends;
    required if there are such replicas, and an error without them.
    """
    require_known_steps(engine_config)
    parallelism, num_prefill = engine_config.parallelism or Parallelism(), engine_config.num_prefill_replicas
    is_one = parallelism.devices_per_replica == 1
    require(is_one, "parallelism", engine_config.parallelism, "that of replicas of one device each in a simulation")
    if (link_bandwidth is None) == (num_prefill > 0) or not (link_bandwidth is None or 0 < link_bandwidth < math.inf):
        raise ValueError(
            f"link_bandwidth={shown(link_bandwidth)} does not fit Parallelism.prefill={num_prefill}: give the bytes per"
            " second of a hand-over if some replicas only prefill, and None otherwise"
        )
    require(model != "", "model", model, "a folder or Hub id, or None for the bundled model")
    dtype = resolve_dtype(dtype)
    checkpoint = open_checkpoint(BUNDLED_MODEL if model is None else model)
    clock = VirtualClock()
    engine_config = replace(engine_config, decode_loop_steps=loop_steps(engine_config))
    question, _ = memory_question(checkpoint, engine_config, dtype)
    model_config, engine_config = question.model, fit_limits(question)
    placements = [DEFAULT_DEVICE] * parallelism.num_replicas
    options: dict[str, Any] = {"tokenizer": None, "placements": placements, "clock": clock}
    admission, scheduler = plan_host(checkpoint, replace(question, config=engine_config), **options)
    devices = [SimulatedDevice(engine_config, clock, step_times) for _ in placements]
    if link_bandwidth is not None:
        kinds = range(len(model_config.page_kinds))
        sizes = [page_bytes(model_config, admission.cache_config, kind=kind) for kind in kinds]
        scheduler.mover = SimulatedPageMover(devices, clock, sizes, link_bandwidth)
    return SimulatedEngine(admission, scheduler, clock, devices)
