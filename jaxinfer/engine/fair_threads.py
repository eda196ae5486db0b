"""`FairThreads`: a few threads for the work of many tenants, who take turns."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from jaxinfer.engine.request.request import QueueFullError

T = TypeVar("T")


class _Job(NamedTuple):
    future: Future[Any]
    work: Callable[[], Any]


class FairThreads:
    """Runs the work of tenants on `num_threads` threads.

    The tenant whose work has taken the fewest seconds has the next turn. One that was away has saved up none: it begins
    with the seconds of the tenant that has the fewest. `max_at_once` bounds the work of one tenant that runs at the
    same time, and `max_waiting` the work of one tenant that waits.
    """

    def __init__(self, num_threads: int, name: str, *, max_at_once: int, max_waiting: int) -> None:
        self._name, self._max_at_once, self._max_waiting = name, max_at_once, max_waiting
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = Lock()
        # Of tenants with work alone.
        self._waiting: dict[str, deque[_Job]] = {}
        self._num_running: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    def submit(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        """Queues a function and returns its future result; QueueFullError if too much of the tenant's work waits.

        A future that is cancelled before its turn is left out. Raises RuntimeError after `close`.
        """
        future: Future[T] = Future()
        with self._lock:
            jobs = self._waiting.setdefault(tenant, deque())
            if len(jobs) >= self._max_waiting:
                raise QueueFullError(f"{len(jobs)} calls wait for {self._name}, the most there may be; try again")
            if tenant not in self._seconds:
                self._seconds[tenant] = min(self._seconds.values(), default=0.0)
            jobs.append(_Job(future, work))
        self._threads.submit(self._run)
        return future

    def close(self) -> None:
        """Cancels the work that has not begun, without waiting for the rest."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            jobs = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
        for job in jobs:
            job.future.cancel()

    def _run(self) -> None:
        """Runs work until none may run: what a bound of its tenant holds back is run by the thread that makes room."""
        while (turn := self._take()) is not None:
            tenant, job = turn
            began = time.monotonic()
            if job.future.set_running_or_notify_cancel():
                try:
                    job.future.set_result(job.work())
                except BaseException as error:
                    job.future.set_exception(error)
            self._leave(tenant, time.monotonic() - began)

    def _take(self) -> tuple[str, _Job] | None:
        with self._lock:
            ready = [
                tenant
                for tenant, jobs in self._waiting.items()
                if jobs and self._num_running[tenant] < self._max_at_once
            ]
            if not ready:
                return None
            tenant = min(ready, key=self._seconds.__getitem__)  # of equal ones the first that came
            self._num_running[tenant] += 1
            return tenant, self._waiting[tenant].popleft()

    def _leave(self, tenant: str, seconds: float) -> None:
        with self._lock:
            self._num_running[tenant] -= 1
            self._seconds[tenant] += seconds
            if not self._num_running[tenant] and not self._waiting.get(tenant):
                self._waiting.pop(tenant, None)
                del self._num_running[tenant], self._seconds[tenant]
