"""The engine's counters of seconds, tokens and pages, and the protocol of its observers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Protocol

from jaxinfer.display.html import table
from jaxinfer.engine.kv_cache.tiers import TierMetrics
from jaxinfer.engine.request.completion import Timings
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.step import Step


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The latency limits of a good request, in seconds."""

    ttft: float = math.inf
    tpot: float = math.inf

    def are_met(self, timings: Timings) -> bool:
        """True if both targets are met. A request without tokens meets none; one token has no TPOT to check."""
        return timings.ttft is not None and timings.ttft <= self.ttft and (timings.tpot or 0.0) <= self.tpot


NO_TARGETS = Targets()


@dataclass(kw_only=True)
class Tally:
    """Counters since the engine started."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_finished: int = 0  # requests, aborted ones included
    num_good: int = 0  # finished requests, neither aborted nor expired, within both targets
    num_prefill_tokens: int = 0  # computed prompt tokens, and tokens recomputed after preemptions
    num_found_tokens: int = 0  # tokens found in the prefix cache instead of computed
    num_output_tokens: int = 0
    num_drafted_tokens: int = 0  # verified drafts
    num_accepted_tokens: int = 0  # accepted drafts
    num_hand_overs: int = 0  # of prefilled requests to replicas that decode
    num_damaged_hand_overs: int = 0  # whose pages did not arrive as they were sent; the request is prefilled again
    busy_seconds: float = 0.0  # from the scheduling of each step to its result; shared seconds of replicas count once


@dataclass(frozen=True, kw_only=True)
class ReplicaMetrics:
    """A replica at one moment, with its steps since the start; fields are as in `Metrics`."""

    num_running: int
    num_steps: int
    num_pages: int
    num_owned_pages: int
    num_cached_pages: int
    num_free_pages: int


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The engine at one moment. The counters of `Tally` run from the start: subtract two snapshots for a rate.

    * `num_running`, `num_waiting`: requests that steps compute, and requests in the queue.
    * `num_pages`: all pages of the pool. Running requests own `num_owned_pages`, the prefix cache alone has
      `num_cached_pages`, and `num_free_pages` hold nothing.
    * `busy_seconds`, and the numbers of steps, preemptions, requests and tokens: see `Tally`.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_owned_pages: int
    num_cached_pages: int
    num_free_pages: int
    num_steps: int
    num_preemptions: int
    num_finished: int
    num_good: int
    num_prefill_tokens: int
    num_found_tokens: int
    num_output_tokens: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    busy_seconds: float
    num_drafts: tuple[int, ...]  # the chosen K per request in the last step in which every request decoded
    num_hand_overs: int = 0
    num_damaged_hand_overs: int = 0
    tiers: tuple[TierMetrics, ...] = ()  # fastest first
    replicas: tuple[ReplicaMetrics, ...] = ()  # whose sums the other numbers are; () for one replica
    num_late_compiles: int = 0  # compilations that a step had to wait for; should be 0

    @property
    def prefix_hit_rate(self) -> float:
        """Returns the fraction of tokens to prefill that were found in the prefix cache."""
        return self.num_found_tokens / max(self.num_found_tokens + self.num_prefill_tokens, 1)

    @property
    def acceptance_rate(self) -> float:
        """Returns the fraction of verified drafts that were accepted."""
        return self.num_accepted_tokens / max(self.num_drafted_tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        """Returns the output tokens per busy second."""
        return self.num_output_tokens / self.busy_seconds if self.busy_seconds > 0 else 0.0

    @property
    def goodput(self) -> float:
        """Returns the good requests, by EngineConfig.ttft_target and tpot_target, per busy second."""
        return self.num_good / self.busy_seconds if self.busy_seconds > 0 else 0.0

    def _repr_html_(self) -> str:
        rates = ("prefix_hit_rate", "acceptance_rate", "tokens_per_second", "goodput")
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        return table({**counts, **{name: f"{getattr(self, name):.3f}" for name in rates}})


class Observer(Protocol):
    """Receives each event of the scheduler as it happens; times are on the scheduler's clock. `Timeline` is one."""

    def arrived(self, request: Request) -> None: ...

    def preempted(self, request: Request) -> None: ...

    def scheduled(self, now: float, metrics: Metrics) -> None:
        """Receives the metrics after each scheduling, even if it found nothing to compute."""
        ...

    def computed(self, step: Step, began: float, ended: float) -> None:
        """Receives a step whose result has arrived and is not yet applied to its requests."""
        ...

    def ended(self, request: Request) -> None: ...
