"""`TextChecks`: holds finished texts against their schemas, on threads beside the engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import NamedTuple

from jaxinfer.engine.fair_threads import FairThreads
from jaxinfer.engine.request.completion import Delta, FinishReason
from jaxinfer.engine.request.request import Request
from jaxinfer.validation import MAX_INT

# A check takes a second or two for some schemas. The checks of one tenant wait for one another.
NUM_THREADS, CHECKS_OF_TENANT = 2, 1


class _Check(NamedTuple):
    delta: Delta
    result: Future[str | None]


class TextChecks:
    """Keeps the last deltas of requests back until their texts have been checked.

    The requests have ended for the scheduler: their rows and pages are free. `on_change` is called on another thread
    when a check is over. All else belongs to one thread, the engine's.
    """

    def __init__(self) -> None:
        self._threads = FairThreads(NUM_THREADS, "text checks", max_at_once=CHECKS_OF_TENANT, max_waiting=MAX_INT)
        self.pending: dict[int, _Check] = {}  # by the id of the sample
        self.on_change: Callable[[], object] = lambda: None

    def begin(self, request: Request, delta: Delta) -> None:
        """Keeps the last delta of a request back, and begins to check its text."""
        assert request.check is not None
        result = self._threads.submit(request.tenant, request.check)
        self.pending[request.request_id] = _Check(delta, result)
        result.add_done_callback(lambda _: self.on_change())

    def wait(self, seconds: float | None = None) -> None:
        """Waits until a check is over, if there is one, at most for these seconds."""
        wait([check.result for check in self.pending.values()], seconds, return_when="FIRST_COMPLETED")

    def take(self) -> list[Delta]:
        """Returns the deltas whose checks are over, in the order of `begin`."""
        over = [sample_id for sample_id, check in self.pending.items() if check.result.done()]
        return [_checked(*self.pending.pop(sample_id)) for sample_id in over]

    def abort(self, sample_ids: Iterable[int]) -> list[Delta]:
        """Ends checks early; returns the deltas, with finish reason "abort"."""
        deltas = []
        for sample_id in sample_ids:
            if (check := self.pending.pop(sample_id, None)) is not None:
                check.result.cancel()
                deltas.append(_with_end(check.delta, "abort", None))
        return deltas

    def close(self) -> None:
        self.pending.clear()
        self._threads.close()


def _checked(delta: Delta, result: Future[str | None]) -> Delta:
    fault = result.result()
    return delta if fault is None else _with_end(delta, "error", fault)


def _with_end(delta: Delta, reason: FinishReason, error: str | None) -> Delta:
    assert delta.completion is not None
    return delta._replace(completion=replace(delta.completion, finish_reason=reason, error=error))
