"""What making drafts takes and how often they are right, as far as was seen."""

from __future__ import annotations

import math

import pytest
from scipy.special import betaln

from jaxinfer.engine.speculation import draft_estimates
from jaxinfer.engine.speculation.draft_estimates import ALIKE_TRIES, Acceptance, Belief, DraftTimes


def test_who_has_read_many_texts_at_first_is_not_believed_to_take_as_long_every_time():
    times = DraftTimes()
    times.enter(num_read=7000, num_requests=32, num_drafts=3, seconds=0.18)
    assert times.seconds(32, 3)[-1] == pytest.approx(0.18 * 32 / 7000)  # each has a token more then

    times.enter(num_read=32, num_requests=32, num_drafts=4, seconds=0.0005)

    assert times.seconds(32, 4)[-1] == pytest.approx(0.0005, rel=0.2)


@pytest.mark.parametrize("num_right", [0, 1, 5, 9, 10])
def test_a_request_is_as_likely_like_others_as_bayes_has_it(num_right, monkeypatch):
    monkeypatch.setattr(draft_estimates, "REQUEST_MEMORY", 1.0)
    monkeypatch.setattr(draft_estimates, "LEAST_LIKELY", 0.0)
    belief = Belief(Acceptance(0.9, 1.0, 100), 0.75)
    for i in range(10):
        belief.enter(i < num_right)

    # Beta priors: as many right and wrong tries of others as they are believed to outweigh, or one of each.
    right, wrong = 0.9 * ALIKE_TRIES, 0.1 * ALIKE_TRIES
    alike = betaln(right + num_right, wrong + 10 - num_right) - betaln(right, wrong)
    alone = betaln(1 + num_right, 1 + 10 - num_right) - betaln(1, 1)
    expected = 1 / (1 + math.exp(alone - alike) * 0.25 / 0.75)
    assert belief.rates == (
        (pytest.approx(expected), pytest.approx((right + num_right) / (ALIKE_TRIES + 10))),
        (pytest.approx(1 - expected), pytest.approx((1 + num_right) / 12)),
    )


def test_what_hardly_anybody_has_shown_does_not_outweigh_more_than_that():
    belief = Belief(Acceptance(1.0, 1.0, 2), 1.0)

    belief.enter(is_right=False)

    assert belief.rates[0][1] == pytest.approx(2 / 3, rel=0.01)


def test_a_first_wrong_draft_after_thousands_that_were_right_is_possible():
    belief = Belief(Acceptance(1.0, 1.0, 100), 0.99)
    for _ in range(5000):
        belief.enter(is_right=True)
    assert belief.rates[1][1] == 1.0  # as far as a float can tell

    belief.enter(is_right=False)

    assert 0 < belief.likeness < 1
