"""The engine's counters, in seconds, tokens and pages, and the observer of its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from jaxinfer.engine.kv_cache.tiers import TierMetrics
from jaxinfer.engine.request.completion import Timings
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.step import Step


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The most that a request may take to be a good one, in seconds."""

    ttft: float = math.inf
    tpot: float = math.inf

    def are_met(self, timings: Timings) -> bool:
        """A request without a token has met none; one of a single token has no time between tokens."""
        return timings.ttft is not None and timings.ttft <= self.ttft and (timings.tpot or 0.0) <= self.tpot


NO_TARGETS = Targets()


@dataclass(kw_only=True)
class Tally:
    """What has happened since the engine started."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_finished: int = 0  # requests, aborted ones included
    num_good: int = 0  # of them those that came to their own end within both targets
    num_prefill_tokens: int = 0  # computed of prompts, and again after preemptions
    num_found_tokens: int = 0  # not computed because they were in the prefix cache
    num_output_tokens: int = 0
    num_drafted_tokens: int = 0  # drafts that were verified
    num_accepted_tokens: int = 0  # drafts that were right
    busy_seconds: float = 0.0  # from the scheduling of each step to its result


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The engine at one moment. What `Tally` counts goes on from the start: take the difference of two for a rate."""

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
    num_drafts: tuple[int, ...]  # of each request in the last step in which all decoded: the chosen K
    tiers: tuple[TierMetrics, ...] = ()  # fastest first
    num_late_compiles: int = 0  # that a step had to wait for; everything should have been compiled before

    @property
    def prefix_hit_rate(self) -> float:
        """The part of all tokens to prefill that was found in the cache."""
        return self.num_found_tokens / max(self.num_found_tokens + self.num_prefill_tokens, 1)

    @property
    def acceptance_rate(self) -> float:
        """The part of the verified drafts that was right."""
        return self.num_accepted_tokens / max(self.num_drafted_tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second in which the engine had something to do."""
        return self.num_output_tokens / self.busy_seconds if self.busy_seconds > 0 else 0.0

    @property
    def goodput(self) -> float:
        """Good requests, by EngineConfig.ttft_target and tpot_target, per second in which there was something to do."""
        return self.num_good / self.busy_seconds if self.busy_seconds > 0 else 0.0


class Observer(Protocol):
    """Is told each event as it happens; moments are on the scheduler's clock. `Timeline` is one."""

    def arrived(self, request: Request) -> None: ...

    def preempted(self, request: Request) -> None: ...

    def scheduled(self, now: float, metrics: Metrics) -> None:
        """How it stands after a step was scheduled, or none was left to be."""
        ...

    def computed(self, step: Step, began: float, ended: float) -> None:
        """A step has its result, of which its requests know nothing yet."""
        ...

    def ended(self, request: Request) -> None: ...
