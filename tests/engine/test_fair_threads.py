"""Tenants take turns at a few threads, and none holds all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import pytest

from jaxinfer.engine.fair_threads import FairThreads
from jaxinfer.engine.request.request import QueueFullError

WAIT = 60.0  # seconds; only a test that fails waits for as long


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def fair_threads(num_threads: int, max_at_once: int, max_waiting: int = 100) -> FairThreads:
    return FairThreads(num_threads, "work", max_at_once=max_at_once, max_waiting=max_waiting)


def hold(fair: FairThreads, tenant: str, gate: threading.Event) -> Future[bool]:
    """Returns the result of work that holds a thread until the gate opens, once it does."""
    has_begun = threading.Event()

    def work() -> bool:
        has_begun.set()
        return gate.wait(WAIT)

    future = fair.submit(tenant, work)
    assert has_begun.wait(WAIT)
    return future


def test_a_result_or_an_exception_reaches_its_caller():
    threads = fair_threads(2, 2)

    assert threads.submit("a", lambda: 7).result(WAIT) == 7
    with pytest.raises(ZeroDivisionError):
        threads.submit("a", lambda: 1 // 0).result(WAIT)


@pytest.mark.parametrize("num_jobs", [3, 40])
def test_a_tenant_that_holds_its_threads_leaves_one_for_others(gate, num_jobs):
    threads = fair_threads(3, 2)
    held = [threads.submit("a", lambda: gate.wait(WAIT)) for _ in range(num_jobs)]

    assert [threads.submit("b", lambda i=i: i).result(WAIT) for i in range(5)] == list(range(5))
    assert not any(future.done() for future in held)
    gate.set()
    assert all(future.result(WAIT) for future in held)


@pytest.mark.parametrize(
    ("jobs", "order"),
    [
        ([*[("a", 0.05)] * 3, ("b", 0.05)], ["a", "b", "a", "a"]),
        ([("slow", 0.5), *[("slow", 0.0)] * 2, *[("quick", 0.001)] * 3], ["slow", *["quick"] * 3, "slow", "slow"]),
    ],
)
def test_the_tenant_that_took_the_fewest_seconds_is_next(gate, jobs, order):
    threads, seen = fair_threads(1, 1), []
    held = hold(threads, "first", gate)

    def work(tenant: str, seconds: float) -> None:
        seen.append(tenant)
        time.sleep(seconds)

    futures = [threads.submit(tenant, lambda job=(tenant, seconds): work(*job)) for tenant, seconds in jobs]
    gate.set()

    assert [future.result(WAIT) for future in (held, *futures)] == [True, *[None] * len(jobs)]
    assert seen == order


def test_work_of_one_tenant_beyond_the_bound_is_refused_and_that_of_others_is_not(gate):
    threads = fair_threads(1, 1, max_waiting=2)
    running = hold(threads, "a", gate)
    waiting = [threads.submit("a", lambda: 1) for _ in range(2)]

    with pytest.raises(QueueFullError, match="2 calls wait for work, the most there may be; try again"):
        threads.submit("a", lambda: 1)
    other = threads.submit("b", lambda: 2)
    gate.set()

    assert running.result(WAIT)
    assert [future.result(WAIT) for future in (*waiting, other)] == [1, 1, 2]
    assert threads.submit("a", lambda: 3).result(WAIT) == 3


def test_work_that_is_cancelled_or_left_at_the_end_does_not_run(gate):
    threads, ran = fair_threads(1, 1), []
    running = hold(threads, "a", gate)
    cancelled, left = [threads.submit("a", lambda: ran.append(1)) for _ in range(2)]

    assert cancelled.cancel()
    threads.close()
    gate.set()

    assert running.result(WAIT)
    with pytest.raises(CancelledError):
        left.result(WAIT)
    assert not ran
    with pytest.raises(RuntimeError):
        threads.submit("a", lambda: 1)


def test_a_tenant_without_work_leaves_no_trace():
    threads = fair_threads(2, 1)
    for i in range(50):
        threads.submit(f"tenant {i}", lambda: 1).result(WAIT)
    end = time.monotonic() + WAIT

    while threads._seconds and time.monotonic() < end:  # a result is there before its thread leaves
        time.sleep(0.001)

    assert (threads._waiting, threads._seconds, dict(threads._num_running)) == ({}, {}, {})
