"""Acceptance rates against the counts and formulas that define them."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.speculation import acceptance
from jaxinfer.engine.speculation.acceptance import FIRST_RATE, PRIOR_WEIGHT, AcceptanceRates
from tests.engine.fake_device import make_request

CHAIN = range(-1, 3)


def rates_after(outcomes, request):
    """The rates after a draft for each outcome, right or wrong."""
    rates = AcceptanceRates()
    for is_right in outcomes:
        rates.expect(request, [7])
        rates.compare(request, [7 if is_right else 8])
    return rates


def test_an_unknown_drafter_has_the_first_rate():
    assert AcceptanceRates().likelihoods(make_request(0, 4, 9), CHAIN) == [FIRST_RATE**n for n in (1, 2, 3, 4)]


def test_a_rate_is_the_weighted_mean_of_its_drafts_and_its_prior(monkeypatch):
    monkeypatch.setattr(acceptance, "REQUEST_MEMORY", 0.5)
    outcomes = [True, True, False, True]
    request = make_request(0, 4, 9)

    (rate,) = rates_after(outcomes, request).likelihoods(request, [-1])

    weights = [0.5**i for i in (3, 2, 1, 0)]
    prior = PRIOR_WEIGHT * 0.5**4
    num_right = FIRST_RATE * prior + np.dot(weights, outcomes)
    assert rate == pytest.approx(num_right / (prior + sum(weights)))


def test_a_request_begins_at_the_rate_of_the_drafter():
    rates = rates_after([True] * 500, make_request(0, 4, 9))

    (rate,) = rates.likelihoods(make_request(1, 4, 9), [-1])

    assert rate > 0.99


def test_what_a_request_has_shown_outweighs_the_drafter():
    rates, other = rates_after([True] * 500, make_request(0, 4, 9)), make_request(1, 4, 9)
    for _ in range(6):
        rates.expect(other, [7])
        rates.compare(other, [8])

    assert rates.likelihoods(other, [-1])[0] < 0.4


def test_drafts_are_compared_until_the_first_wrong_one():
    request, rates = make_request(0, 4, 9), AcceptanceRates()
    rates.expect(request, [5, 6, 7])
    rates.compare(request, [5])
    assert rates.is_waiting
    before = rates.likelihoods(request, [-1])

    rates.compare(request, [9, 7])

    assert not rates.is_waiting
    assert rates.likelihoods(request, [-1]) < before


def test_a_request_that_has_ended_leaves_nothing():
    request = make_request(0, 4, 9)
    rates = rates_after([True, False], request)
    rates.expect(request, [5, 6])

    rates.forget(request)

    assert not rates.is_waiting
    assert rates._of_request == {}
