"""Runs the engine's own admission and scheduler under a virtual clock, without a device."""

from __future__ import annotations

import itertools
import math
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from jaxinfer.checkpoint import abstract_checkpoint, resolve_checkpoint
from jaxinfer.config import EngineConfig, Parallelism, SamplingParams
from jaxinfer.device import resolve_dtype
from jaxinfer.engine.assembly import plan_host
from jaxinfer.engine.device_limits import fit_limits
from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.engine.execution.pipeline import Device, Pipeline
from jaxinfer.engine.execution.step_shapes import choose_bucket, loop_steps, max_rows, plan_buckets
from jaxinfer.engine.frontend.admission import Admission
from jaxinfer.engine.request.completion import Delta
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.timeline import MAX_STEPS, Timeline, recorded_timeline
from jaxinfer.simulation.step_times import StepTimes, require_known_steps
from jaxinfer.validation import require


class VirtualClock:
    """Seconds since the start; the simulation sets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedEngine(Device):
    """Schedules like an engine with this admission and scheduler; `step_times` predicts the seconds of each step."""

    def __init__(self, admission: Admission, scheduler: Scheduler, clock: VirtualClock, step_times: StepTimes) -> None:
        self._admission = admission
        self._clock = clock
        self._scheduler = scheduler
        self._buckets = plan_buckets(admission.engine_config)
        self._step_times = step_times
        self._ids = itertools.count()
        self.num_steps = 0
        # Any token will do, because only its length ends a request.
        rows = max_rows(admission.engine_config)
        self._output = SimpleNamespace(
            tokens=np.zeros(rows, np.int32), log_probs=np.zeros(rows, np.float32), sampling_log_probs=None
        )
        self._busy_until = 0.0
        self._pipeline = Pipeline(scheduler, self, clock)

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.metrics().num_preemptions

    def now(self) -> float:
        return self._clock.now

    def wait_until(self, moment: float) -> None:
        self._clock.now = max(self._clock.now, moment)

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
        advance = self._pipeline.advance()
        return [] if advance is None else advance.deltas

    def timeline(self) -> AbstractContextManager[Timeline]:
        return recorded_timeline(self._scheduler, self._buckets, MAX_STEPS)

    def launch(self, step: Step) -> float:
        """Returns the time at which the device finishes the step, after all earlier steps."""
        for _ in step.copies.batches(len(step.copies)):
            pass  # drop the transfers: simulated pages have no contents
        self.num_steps += 1
        seconds = self._step_times.seconds(step, choose_bucket(self._buckets, step))
        self._busy_until = max(self._busy_until, self._clock.now) + seconds
        return self._busy_until

    def read(self, output: float) -> SimpleNamespace:
        """Advances the clock to the end of the step, the time in `output`."""
        self.wait_until(output)
        return self._output


def load_simulated_engine(
    model: str | Path | None, engine_config: EngineConfig, step_times: StepTimes, dtype: str | None = None
) -> SimulatedEngine:
    """Returns a simulation of `LLM(model, config=engine_config, dtype=dtype)`, without its weights."""
    require_known_steps(engine_config)
    is_one = engine_config.parallelism in (None, Parallelism())
    require(is_one, "parallelism", engine_config.parallelism, "that of one device in a simulation, or left out")
    require(model != "", "model", model, "a folder or Hub id, or None for the bundled model")
    dtype = resolve_dtype(dtype)
    path = resolve_checkpoint(BUNDLED_MODEL if model is None else model)
    clock = VirtualClock()
    engine_config = replace(engine_config, decode_loop_steps=loop_steps(engine_config))
    params, model_config = abstract_checkpoint(path, dtype, quantization=engine_config.quantization)
    model_config = model_config.for_length(engine_config.max_model_len)
    engine_config = fit_limits(engine_config, model_config, params, dtype, speculates=False)
    admission, scheduler = plan_host(path, model_config, engine_config, dtype, tokenizer=None, clock=clock)
    return SimulatedEngine(admission, scheduler, clock, step_times)
