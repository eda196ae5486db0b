"""Masks that take long hold up a step by a bound, and their requests take turns."""

from __future__ import annotations

from collections import Counter

import pytest

from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.mask_turns import MAX_SECONDS, waiting_for_masks
from tests.engine.fake_device import Engine, expected_tokens, make_request


def requests_with(*seconds: float, tenant: str = "") -> list[Request]:
    requests = [make_request(request_id, 1, 1, tenant=tenant) for request_id in range(len(seconds))]
    for request, mask_seconds in zip(requests, seconds, strict=True):
        request.mask_seconds = mask_seconds
    return requests


@pytest.mark.parametrize(
    ("seconds", "waiting"),
    [
        ([0.0, 0.0], []),
        ([0.001] * 90, []),
        ([0.04, 0.04], []),
        ([0.04, 0.04, 0.0], []),
        ([0.04, 0.04, 0.04, 0.0], [2]),
        ([0.04, 0.001, 0.04, 0.001, 0.04], [4]),
        ([9.0, 9.0, 0.0], [1]),  # one has a turn, however long its mask takes
        ([9.0, 9.0], []),  # they hold up no other
    ],
)
def test_the_masks_of_a_step_take_no_more_than_the_bound_and_one_mask(seconds, waiting):
    requests = requests_with(*seconds)

    assert [requests.index(request) for request in waiting_for_masks(requests, sum(seconds))] == waiting


@pytest.mark.parametrize("num_heavy", [3, 10])
def test_requests_with_heavy_masks_take_turns_and_the_others_are_in_every_step(num_heavy):
    engine = Engine(max_num_seqs=32, num_pages=64)
    heavy = [engine.add(i, max_tokens=6) for i in range(num_heavy)]
    light = [engine.add(50 + i, max_tokens=6) for i in range(3)]
    for request in heavy:
        request.mask_seconds = 0.6 * MAX_SECONDS

    steps = [dict(engine.step()) for _ in range(6)]

    assert all({50, 51, 52} < step.keys() for step in steps)
    assert all(len(step) == 4 for step in steps)
    turns = Counter(request_id for step in steps for request_id in step if request_id < 50)
    assert len(turns) == min(num_heavy, 6)
    assert max(turns.values()) - min(turns.values()) <= 1
    engine.run()
    for request in [*heavy, *light]:
        assert list(engine.completions[request.request_id].token_ids) == expected_tokens(request, 6)


def test_tenants_with_heavy_masks_take_turns():
    engine = Engine(max_num_seqs=32, num_pages=64)
    for i in range(6):
        engine.add(i, max_tokens=9, tenant="many").mask_seconds = MAX_SECONDS
    engine.add(6, max_tokens=9, tenant="one").mask_seconds = MAX_SECONDS

    steps = [[request_id for request_id, _ in engine.step()] for _ in range(6)]

    assert all(len(step) == 1 for step in steps)
    assert steps.count([6]) == 3


def test_heavy_masks_do_not_stop_a_prompt():
    engine = Engine(max_num_seqs=32, num_pages=64, max_num_batched_tokens=16)
    for i in range(4):
        engine.add(i, max_tokens=30).mask_seconds = MAX_SECONDS
    engine.step()
    engine.add(7, prompt=60)

    sizes = [dict(engine.step()).get(7, 0) for _ in range(6)]

    assert sum(sizes) == 60
