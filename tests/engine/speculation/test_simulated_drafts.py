"""What the choice of drafts makes of drafters on a made-up machine, whose steps are never the same."""

from __future__ import annotations

from statistics import harmonic_mean

import pytest

from scripts.measure.simulate_drafts import (
    OUTPUT_LEN,
    PLAIN,
    PROMPT_LEN,
    DraftModel,
    HostDrafter,
    SimulatedEngine,
    bound,
    costs_of,
)


def outputs(drafter_type, rates):
    """Tokens per second against plain decoding of the outputs of some engines, a row for each."""
    engines = [SimulatedEngine(drafter_type, seed) for seed in range(8)]
    return [[engine.run(rate) for rate in rates] for engine in engines]


def model_that_reads_in(num_steps):
    """Returns a draft model that takes the time of `num_steps` plain steps to read a prompt."""

    class SlowReader(DraftModel):
        seconds_per_token = num_steps * PLAIN / PROMPT_LEN

    return SlowReader


@pytest.mark.parametrize(
    # The first output pays for the first trials.
    ("drafter_type", "share", "share_of_first"),
    [(HostDrafter, 0.97, 0.94), (DraftModel, 0.95, 0.84), (model_that_reads_in(11), 0.95, 0.8)],
)
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_drafts_that_do_not_pay_cost_little(drafter_type, share, share_of_first, rate):
    rows = outputs(drafter_type, [rate] * 8)

    assert harmonic_mean([x for row in rows for x in row]) > share
    assert harmonic_mean([row[0] for row in rows]) > share_of_first


@pytest.mark.parametrize(("drafter_type", "share"), [(HostDrafter, 0.9), (DraftModel, 0.8)])
@pytest.mark.parametrize("rate", [0.6, 0.7, 0.8, 0.9, 0.96])
def test_drafts_that_pay_bring_nearly_what_the_best_fixed_number_brings(drafter_type, share, rate):
    rows = [row[1:] for row in outputs(drafter_type, [rate] * 8)]  # the first begins without drafts

    assert harmonic_mean([x for row in rows for x in row]) > share * bound(rate, costs_of(drafter_type))


def test_a_draft_model_that_reads_prompts_slowly_is_found_to_pay():
    slow_reader = model_that_reads_in(11)
    rows = [row[1:] for row in outputs(slow_reader, [0.96] * 4)]

    plain_steps = OUTPUT_LEN / bound(0.96, costs_of(slow_reader)) + 11
    assert harmonic_mean([x for row in rows for x in row]) > 0.8 * OUTPUT_LEN / plain_steps


def test_a_trial_that_costs_more_than_the_budget_waits_until_its_time_has_earned_it():
    engine = SimulatedEngine(model_that_reads_in(25), seed=0)
    plain, *_, found = [engine.run(0.96) for _ in range(20)]

    assert plain == pytest.approx(1.0, abs=0.02)
    assert found > 1.2


def test_no_trial_is_made_that_could_not_pay():
    rows = outputs(model_that_reads_in(OUTPUT_LEN), [1.0] * 100)

    assert min(x for row in rows for x in row) > 0.98


@pytest.mark.parametrize(("drafter_type", "good_share"), [(HostDrafter, 0.9), (DraftModel, 0.8)])
def test_requests_of_two_kinds_hardly_hurt_each_other(drafter_type, good_share):
    rates = [0.96] * 8 + [0.0, 0.96] * 4  # by when the drafter is known
    rows = [row[8:] for row in outputs(drafter_type, rates)]

    bad, good = (harmonic_mean([x for row in rows for x in row[start::2]]) for start in (0, 1))
    assert bad > 0.9  # a draft model has read the prompt in vain
    assert good > good_share * bound(0.96, costs_of(drafter_type))
