"""Runs a trace on a real engine in real time, or on a simulated engine in virtual time, in one loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from jaxinfer.config import SamplingParams
from jaxinfer.display.progress import Bar, is_shown
from jaxinfer.engine.request.completion import Delta
from jaxinfer.engine.request.request import QueueFullError
from jaxinfer.engine.scheduling.metrics import NO_TARGETS, Targets
from jaxinfer.simulation.report import Outcomes, Report
from jaxinfer.simulation.trace import TracedRequest, make_prompt


class TraceEngine(Protocol):
    """An engine that runs traces. Times are in seconds from the start."""

    @property
    def num_steps(self) -> int: ...

    @property
    def num_preemptions(self) -> int: ...

    def now(self) -> float: ...

    def wait_until(self, moment: float) -> None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> float:
        """The most tokens of a request, its prompt included; infinite if the engine has no limit."""
        ...

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        """Queues a request and returns its id; ValueError or QueueFullError if the engine refuses it."""
        ...

    def step(self) -> list[Delta]:
        """Computes one step, if any request is unfinished."""
        ...


@dataclass
class _InFlight:
    request: TracedRequest
    first: float | None = None


def drive(
    trace: Iterable[TracedRequest],
    engine: TraceEngine,
    *,
    targets: Targets = NO_TARGETS,
    total: int | None = None,
    show_progress: bool | None = False,
) -> Report:
    """Runs a trace to its end. Adds arrived requests between steps.

    `targets`: the latencies that a request must meet to count as goodput. `total`: the number of requests for the
    progress bar, if known. The report counts refused requests, but its other figures leave them out.
    """
    outcomes = Outcomes()
    in_flight: dict[int, _InFlight] = {}
    arrivals = enumerate(trace)
    upcoming = next(arrivals, None)
    with Bar(total, unit="request", show=is_shown(show_progress)) as progress:
        while upcoming is not None or in_flight:
            if upcoming is not None and not in_flight:
                engine.wait_until(upcoming[1].arrival)
            while upcoming is not None and upcoming[1].arrival <= engine.now():
                try:
                    in_flight[_add(engine, *upcoming)] = _InFlight(upcoming[1])
                except (ValueError, QueueFullError):
                    outcomes.num_refused += 1
                upcoming = next(arrivals, None)
            deltas = engine.step() if in_flight else []
            now = engine.now()
            for delta in deltas:
                flight = in_flight[delta.request_id]
                if flight.first is None and delta.token_ids:
                    flight.first = now
                if delta.completion is not None:
                    del in_flight[delta.request_id]
                    progress.update()
                    outcomes.add(
                        arrival=flight.request.arrival,
                        first=now if flight.first is None else flight.first,
                        end=now,
                        num_tokens=len(delta.completion.token_ids),
                        num_prompt_tokens=len(delta.completion.prompt_token_ids),
                        num_cached_tokens=delta.completion.num_cached_tokens,
                    )
    return outcomes.report(num_steps=engine.num_steps, num_preemptions=engine.num_preemptions, targets=targets)


def _add(engine: TraceEngine, index: int, request: TracedRequest) -> int:
    if request.input_len >= engine.max_model_len:  # refused anyway: do not build a long prompt
        raise ValueError(f"input_len={request.input_len} leaves no room in max_model_len={engine.max_model_len}")
    prompt = make_prompt(request, index, engine.vocab_size)
    # Only the number of tokens matters, and a real engine samples greedy tokens fastest.
    return engine.add(prompt, SamplingParams(max_tokens=request.output_len, temperature=0.0, ignore_eos=True))
