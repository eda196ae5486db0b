"""How many cases the hostile tests generate, in one place, and the limits of each case.

JAXINFER_HOSTILE_CASES=100000 generates that many in all, at random; the default is the same few in every run.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings

DEFAULT_CASES = 2_000
CASES = int(os.environ.get("JAXINFER_HOSTILE_CASES", DEFAULT_CASES))
# A step takes milliseconds. Seconds of the processor end what computes too long, whatever else the machine does; those
# of the clock end what waits for ever.
SECONDS_PER_CASE, WAIT_PER_CASE = 20.0, 120.0
KIB_PER_CASE = 2**19  # 512 MiB


def cases(share: float, **more: Any) -> settings:
    """Returns the settings of a test that generates this share of all cases."""
    return settings(
        max_examples=max(round(CASES * share), 1),
        derandomize=CASES == DEFAULT_CASES,
        database=None,
        print_blob=False,
        report_multiple_bugs=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        **more,
    )


class TooSlowError(BaseException):
    """A case takes longer than any should. It is no Exception, so no code takes it for an error of its own."""


@contextlib.contextmanager
def limits(seconds: float = SECONDS_PER_CASE) -> Iterator[None]:
    """Ends a case that takes too long, and fails one that takes much memory."""

    def end(number: int, frame: object) -> None:
        raise TooSlowError(f"the case took more than {seconds} s of the processor or {WAIT_PER_CASE} s")

    timers = {
        signal.SIGPROF: (signal.ITIMER_PROF, seconds),
        signal.SIGALRM: (signal.ITIMER_REAL, WAIT_PER_CASE),
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = {number: signal.signal(number, end) for number in timers}
    for timer, until in timers.values():
        signal.setitimer(timer, until)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown < KIB_PER_CASE, f"the case took {grown} KiB"
