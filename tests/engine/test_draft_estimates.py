"""What making drafts takes, as far as it was measured."""

from __future__ import annotations

import pytest

from jaxinfer.engine.draft_estimates import DraftTimes


def test_who_has_read_many_texts_at_first_is_not_believed_to_take_as_long_every_time():
    times = DraftTimes()
    times.enter(num_unseen=7000, num_requests=32, count=3, seconds=0.18)
    assert times.seconds(32, 3)[-1] == pytest.approx(0.18 * 32 / 7000)  # each has a token more then

    times.enter(num_unseen=32, num_requests=32, count=4, seconds=0.0005)

    assert times.seconds(32, 4)[-1] == pytest.approx(0.0005, rel=0.2)
