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

    assert harmonic_mean([x for row in rows for x in row]) > 0.97
    assert harmonic_mean([row[0] for row in rows]) > 0.94


@pytest.mark.parametrize(("drafter_type", "share"), [(HostDrafter, 0.9), (DraftModel, 0.8)])
@pytest.mark.parametrize("rate", [0.6, 0.7, 0.8, 0.9, 0.96])
def test_drafts_that_pay_bring_nearly_what_the_best_fixed_number_brings(drafter_type, share, rate):
    rows = [row[1:] for row in outputs(drafter_type, [rate] * 8)]  # the first begins without drafts

    assert harmonic_mean([x for row in rows for x in row]) > share * bound(rate, costs_of(drafter_type))


@pytest.mark.parametrize(("drafter_type", "good_share"), [(HostDrafter, 0.9), (DraftModel, 0.8)])
def test_requests_of_two_kinds_hardly_hurt_each_other(drafter_type, good_share):
    rates = [0.96] * 8 + [0.0, 0.96] * 4  # by when the drafter is known
    rows = [row[8:] for row in outputs(drafter_type, rates)]

    bad, good = (harmonic_mean([x for row in rows for x in row[start::2]]) for start in (0, 1))
    assert bad > 0.9  # a draft model has read the prompt in vain
    assert good > good_share * bound(0.96, costs_of(drafter_type))
