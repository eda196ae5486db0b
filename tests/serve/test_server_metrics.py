"""The time that a refusal tells a client to wait."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxinfer.serve import metrics
from jaxinfer.serve.metrics import ServerMetrics


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1_000.0)
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock.now)
    return clock


@pytest.mark.parametrize("quiet", [0.0, 50.0, 61.0, 3_600.0])
@pytest.mark.parametrize("num_later", [0, 1, 20])
def test_the_time_to_wait_is_that_of_the_last_minute(clock, quiet, num_later):
    observed = ServerMetrics(SimpleNamespace(), "m")  # type: ignore[arg-type]
    assert observed.seconds_to_room() == 1.0
    for seconds in (*[0.05] * 64, quiet, *[0.05] * num_later):
        clock.now += seconds
        if seconds == 0.05:
            observed.observe_departure(1)

    assert observed.seconds_to_room() <= 1.0


def test_requests_that_last_long_are_waited_for(clock):
    observed = ServerMetrics(SimpleNamespace(), "m")  # type: ignore[arg-type]
    for _ in range(64):
        clock.now += 10.0
        observed.observe_departure(1)

    assert observed.seconds_to_room() == pytest.approx(10.0, rel=0.2)
