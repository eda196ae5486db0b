"""What the choice of drafts makes of drafters on a made-up machine, whose steps are never the same."""

from __future__ import annotations

from statistics import harmonic_mean

import pytest

from scripts.measure.simulate_drafts import DraftModel, HostDrafter, SimulatedEngine, bound, costs_of


def outputs(drafter_type, rates):
    """Tokens per second against plain decoding of the outputs of some engines, a row for each."""
    engines = [SimulatedEngine(drafter_type, seed) for seed in range(8)]
    return [[engine.run(rate) for rate in rates] for engine in engines]


@pytest.mark.parametrize("drafter_type", [HostDrafter, DraftModel])
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_drafts_that_do_not_pay_cost_little(drafter_type, rate):
    rows = outputs(drafter_type, [rate] * 5)

    assert min(harmonic_mean(row) for row in rows) > 0.975
    assert harmonic_mean([row[0] for row in rows]) > 0.97


@pytest.mark.parametrize("rate", [0.7, 0.9])
def test_drafts_that_pay_bring_what_they_can(rate):
    rows = [row[1:] for row in outputs(HostDrafter, [rate] * 4)]  # the first begins without drafts

    assert harmonic_mean([x for row in rows for x in row]) > 0.9 * bound(rate, costs_of(HostDrafter))


@pytest.mark.parametrize("drafter_type", [HostDrafter, DraftModel])
def test_requests_of_two_kinds_hardly_hurt_each_other(drafter_type):
    rates = [0.96] * 8 + [0.0, 0.96] * 4  # by when the drafter is known
    rows = [row[8:] for row in outputs(drafter_type, rates)]

    bad, good = (harmonic_mean([x for row in rows for x in row[start::2]]) for start in (0, 1))
    assert bad > 0.955  # a draft model has read the prompt in vain
    assert good > 0.75 * bound(0.96, costs_of(drafter_type))
