"""Who wants to be told what the scheduler does."""

from __future__ import annotations

from typing import Protocol

from jaxinfer.engine.metrics import Metrics
from jaxinfer.engine.request import Request
from jaxinfer.engine.step import Step


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
