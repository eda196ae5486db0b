"""What drafts would have brought that were not verified."""

from __future__ import annotations

import pytest

from jaxinfer.engine.scheduling.drafts import DraftTree
from jaxinfer.engine.speculation.draft_prospect import MEMORY, Prospect
from tests.engine.fake_device import make_request


def test_drafts_are_held_against_the_tokens_that_came_when_all_have_come():
    prospect, requests = Prospect(), [make_request(i, [5, 6], 20) for i in range(2)]
    tree = DraftTree((7, 9, 8, 4), (-1, -1, 1, 2))  # 7, or 9 8 4
    prospect.look(requests, [[7, 8, 9], tree], cost=1.5)
    for token_id in (7, 8):
        requests[0].append(token_id, 0.0)
    for token_id in (9, 8, 3, 4):
        requests[1].append(token_id, 0.0)
    prospect.look(requests, [[], []], cost=1.0)
    assert prospect.rate == 0  # the third token of one is still to come

    requests[0].append(1, 0.0)
    prospect.look(requests, [[], []], cost=1.0)

    # Two of [7, 8, 9] and two of 9 8 4, of two requests; the look without drafts is over as well.
    assert prospect.rate == pytest.approx((MEMORY * (1 + 4 / 2) + 1) / (MEMORY * 1.5 + 1))


def test_who_has_ended_brings_what_came_before():
    prospect, request = Prospect(), make_request(0, [5, 6], 1)
    prospect.look([request], [[7, 8, 9]], cost=2.0)
    request.append(7, 0.0)

    prospect.look([request], [[]], cost=1.0)

    assert prospect.rate == pytest.approx(2 / 2.0)


def test_to_wait_for_tokens_never_counts_as_a_gain():
    prospect = Prospect()
    prospect.enter_step(1.0, 0.5, 1.0, is_verify=False)
    assert prospect.price_of_waiting == 1

    for _ in range(50):
        prospect.enter_step(1.0, 1.4, 1.0, is_verify=False)

    assert 1 < prospect.price_of_waiting < 1.4


def test_what_steps_take_that_have_waited_corrects_what_is_believed_of_others():
    prospect, request = Prospect(), make_request(0, [5, 6], 20)
    for _ in range(1000):  # of what they should take, those with drafts take 1.5 times as much, the others 1.2 times
        prospect.enter_step(2.0, 1.8, 1.2, is_verify=True)
        prospect.enter_step(1.0, 1.2, 1.0, is_verify=False)
    believed, looks = Prospect(), [[7], []]

    for drafts in looks:
        believed.look([request], [drafts], cost=1.0)
        prospect.look([request], [drafts], cost=1.0)

    assert [look.cost for look in believed._looks] == [1.0, 1.0]
    assert [look.cost for look in prospect._looks] == pytest.approx([1.5, 1.2])
