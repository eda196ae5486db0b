"""A trace on a real engine, by the clock on the wall, measuring every step."""

from __future__ import annotations

import time

from jaxinfer.config import SamplingParams
from jaxinfer.engine.batching import choose_bucket, plan_buckets
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request import Delta
from jaxinfer.engine.step import Step
from jaxinfer.simulation.step_times import MeasuredStep, require_plain_decoding, step_features


class RealEngine:
    """An LLM that nobody else uses; `steps` holds what was measured. Time counts from the first question for it."""

    def __init__(self, llm: LLM) -> None:
        require_plain_decoding(llm.engine_config)
        llm.warm_up()
        self._llm = llm
        self._buckets = plan_buckets(llm.engine_config)
        self._started: float | None = None
        self.steps: list[MeasuredStep] = []
        llm.on_step = self._measure

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    @property
    def num_preemptions(self) -> int:
        return self._llm.metrics().num_preemptions

    def now(self) -> float:
        if self._started is None:
            self._started = time.perf_counter()
        return time.perf_counter() - self._started

    def wait_until(self, moment: float) -> None:
        time.sleep(max(moment - self.now(), 0.0))

    @property
    def vocab_size(self) -> int:
        return self._llm.model_config.vocab_size

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        return self._llm.add(prompt, params)

    def step(self) -> list[Delta]:
        return self._llm.step()

    def _measure(self, step: Step, seconds: float) -> None:
        bucket = choose_bucket(self._buckets, step)
        self.steps.append(MeasuredStep(step.is_decode, step_features(step, bucket), seconds))
