"""What steps take beside what their fit says."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.speculation.cost_drift import CostDrift


def follow(drift, truth, kind, times, seed=0):
    """Enters steps that take so many times what the fit says, and vary."""
    noise = np.exp(0.1 * np.random.default_rng(seed).standard_normal(times))
    for factor in truth * noise:
        drift.enter(kind, 0.01, 0.01 * factor)


def test_what_was_measured_is_expected():
    drift = CostDrift()

    follow(drift, 1.3, "plain", 200)

    assert drift.factor("plain") == pytest.approx(1.3, rel=0.1)


def test_a_machine_that_has_slowed_down_is_slow_for_steps_of_the_other_kind():
    drift = CostDrift()
    for _ in range(10):
        follow(drift, 1.0, "plain", 10)
        follow(drift, 1.5, "verify", 10)
    ratio = drift.factor("verify") / drift.factor("plain")
    assert ratio == pytest.approx(1.5, rel=0.1)

    follow(drift, 2.0, "plain", 200)

    assert drift.factor("plain") == pytest.approx(2.0, rel=0.1)
    assert drift.factor("verify") == pytest.approx(3.0, rel=0.15)

    follow(drift, 1.5, "verify", 200)

    assert drift.factor("plain") == pytest.approx(1.0, rel=0.15)


def test_a_kind_that_the_fit_misjudges_is_known_after_some_steps():
    drift = CostDrift()

    follow(drift, 1.0, "plain", 50)
    follow(drift, 1.4, "verify", 10)

    assert drift.factor("verify") == pytest.approx(1.4, rel=0.1)
    for _ in range(20):
        follow(drift, 1.0, "plain", 4)
        follow(drift, 1.4, "verify", 4)
    assert drift.factor("plain") == pytest.approx(1.0, rel=0.1)
    assert drift.factor("verify") == pytest.approx(1.4, rel=0.1)


def test_one_step_that_was_interrupted_tells_little():
    drift = CostDrift()
    follow(drift, 1.0, "plain", 100)
    before = drift.factor("plain")

    drift.enter("plain", 0.01, 1.0)

    assert drift.factor("plain") < 1.1 * before
