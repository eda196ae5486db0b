"""Runs a trace on a real engine, in real time."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager

from jaxinfer.config import SamplingParams
from jaxinfer.display.progress import Bar
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request.completion import Delta
from jaxinfer.engine.timeline import Timeline
from jaxinfer.plan.cache import resolve_max_model_len
from jaxinfer.plan.step_shapes import decode_sizes, max_batched_tokens, max_rows

MAX_SLEEP = 3600.0  # systems bound the seconds of one sleep


class RealEngine:
    """A warmed-up LLM, for this trace alone. Time starts at the first call of `now`."""

    def __init__(self, llm: LLM, *, show_progress: bool = False) -> None:
        llm.warm_up(show_progress=show_progress, description="compiling all steps")
        with Bar(1, unit="load", description="rehearsing", show=show_progress) as bar:
            bar.update(0)
            rehearse(llm)
            bar.update()
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
        while (left := moment - self.now()) > 0:
            time.sleep(min(left, MAX_SLEEP))

    @property
    def vocab_size(self) -> int:
        return self._llm.model_config.vocab_size

    @property
    def max_model_len(self) -> float:
        config = self._llm.engine_config
        return resolve_max_model_len(self._llm.model_config, config) if config.num_sink_tokens is None else math.inf

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        return self._llm.add(prompt, params)

    def step(self) -> list[Delta]:
        return self._llm.step()

    def timeline(self) -> AbstractContextManager[Timeline]:
        return self._llm.timeline()


def rehearse(llm: LLM) -> None:
    """Runs a load that takes every size of decode step, after full prefill steps.

    The first run of a compiled step takes several times longer than later runs, and step times exclude it.
    """
    config, sizes = llm.engine_config, decode_sizes(llm.engine_config)
    num_rows, num_slots = max_rows(config), llm.metrics().num_pages // config.num_replicas * config.page_size
    output_lens = [2 * sum(row < size for size in sizes) for row in range(num_rows)]
    longest = min(resolve_max_model_len(llm.model_config, config) - 1, num_slots - max(output_lens))
    length = min(-(-max_batched_tokens(config) // num_rows), longest)
    last = llm.model_config.vocab_size - 1  # no prompt of a trace begins with this token
    prompts = [[last, *[row % last] * (length - 1)] for row in range(num_rows)]
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in output_lens]
    copies = config.num_replicas  # of each prompt, so that each replica gets one of them
    llm.generate(prompts * copies, params * copies, show_progress=False)
