"""A trace on a real engine, by the clock on the wall."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from jaxinfer.config import SamplingParams
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request import Delta
from jaxinfer.engine.timeline import Timeline


class RealEngine:
    """An LLM that nobody else uses. Time counts from the first question for it."""

    def __init__(self, llm: LLM) -> None:
        llm.warm_up()
        self._llm = llm
        self._started: float | None = None
        self._before = llm.metrics()

    @property
    def num_steps(self) -> int:
        return self._llm.metrics().num_steps - self._before.num_steps

    @property
    def num_preemptions(self) -> int:
        return self._llm.metrics().num_preemptions - self._before.num_preemptions

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

    def timeline(self) -> AbstractContextManager[Timeline]:
        return self._llm.timeline()
