"""Whose turn it is: interactive before batch, tenants in turns, close deadlines first, and nobody waits for ever."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from jaxinfer.engine.request.request import QueueFullError
from jaxinfer.engine.scheduling.policy import PATIENCE
from tests.engine.fake_device import Engine, expected_tokens


def test_interactive_requests_go_before_batch_work_that_came_earlier():
    engine = Engine()
    engine.add(0, priority="batch")
    engine.add(1, priority="batch")
    engine.add(2)

    assert engine.run() == [2, 0, 1]


def test_an_interactive_request_takes_the_row_of_batch_work_which_goes_on_later():
    engine = Engine()
    batch = engine.add(0, max_tokens=5, priority="batch")
    engine.step()
    engine.add(1, max_tokens=2)

    assert engine.step() == [(1, 4)]
    assert engine.run() == [1, 0]
    assert list(engine.completions[0].token_ids) == expected_tokens(batch, 5)
    assert engine.scheduler.metrics().num_preemptions == 1


def test_an_interactive_request_takes_the_pages_of_batch_work():
    engine = Engine(max_num_seqs=4, num_pages=4)
    for request_id in (0, 1):
        engine.add(request_id, prompt=30, max_tokens=3, priority="batch")
    engine.step()
    engine.add(2, prompt=20)

    assert (2, 20) in engine.step()
    assert engine.scheduler.metrics().num_preemptions == 1


def test_batch_work_is_not_preempted_where_that_would_not_help():
    engine = Engine(max_num_seqs=2, num_pages=4)
    engine.add(0, prompt=30, max_tokens=9)
    engine.add(1, prompt=20, max_tokens=9, priority="batch")
    engine.step()
    engine.add(2, prompt=40)  # 3 pages, but with the batch work gone there would be 2

    engine.step()

    assert engine.scheduler.metrics().num_preemptions == 0


def test_interactive_requests_do_not_take_each_others_place():
    engine = Engine()
    engine.add(0, max_tokens=4)
    engine.step()
    engine.add(1)

    assert engine.run() == [0, 1]
    assert engine.scheduler.metrics().num_preemptions == 0


def test_an_interactive_prompt_does_not_wait_for_the_tokens_of_a_batch_prompt():
    engine = Engine(max_num_seqs=2, max_num_batched_tokens=16)
    engine.add(0, prompt=100, priority="batch")
    engine.step()
    engine.add(1, prompt=10)

    assert engine.step() == [(1, 10), (0, 6)]


def test_batch_work_gives_way_first_when_pages_run_out():
    engine = Engine(max_num_seqs=2, num_pages=2)
    engine.add(0, prompt=15, max_tokens=9, priority="batch")
    engine.step()
    engine.add(1, prompt=16, max_tokens=2)  # admitted last, but not preempted
    engine.step()

    assert engine.run() == [1, 0]


def test_batch_work_is_not_starved_by_interactive_requests():
    engine = Engine()
    engine.add(0, max_tokens=5, priority="batch")
    for request_id in range(1, 200):
        engine.add(request_id)
        engine.step()

    # One turn after PATIENCE seconds, which it keeps until it is finished.
    assert engine.finished.index(0) == pytest.approx(PATIENCE, abs=2)


def test_a_stream_of_close_deadlines_does_not_starve_who_has_none():
    engine = Engine()
    engine.add(0)
    for request_id in range(1, 100):
        engine.add(request_id, time_limit=5.0)
        engine.add(request_id + 1000, time_limit=5.0)
        engine.step()

    assert 0 in engine.finished


def test_a_close_deadline_goes_first():
    engine = Engine()
    engine.add(0)
    engine.add(1, time_limit=20.0)
    engine.add(2, time_limit=10.0)

    assert engine.run() == [2, 1, 0]


def test_a_far_deadline_does_not_set_a_request_back():
    engine = Engine()
    engine.add(0, time_limit=10_000.0)
    engine.add(1)

    assert engine.run() == [0, 1]


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_request_ends_at_its_deadline_with_what_it_has_and_frees_everything(num_steps):
    engine = Engine()
    engine.add(0, max_tokens=50, time_limit=5.0)
    for _ in range(num_steps):
        engine.step()
    engine.now = 5.0

    assert engine.step() == []
    assert engine.completions[0].finish_reason == "deadline"
    assert len(engine.completions[0].token_ids) == num_steps
    assert engine.scheduler.num_available_pages == 16


def test_tenants_have_turns():
    engine = Engine()
    for request_id in range(4):
        engine.add(request_id, tenant="many")
    engine.add(4, tenant="one")
    engine.add(5, tenant="one")

    assert engine.run() == [0, 4, 1, 5, 2, 3]


def test_a_tenant_of_long_requests_has_fewer_turns():
    engine = Engine()
    for request_id in range(3):
        engine.add(request_id, prompt=30, tenant="long")
    for request_id in range(3, 9):
        engine.add(request_id, prompt=10, tenant="short")

    assert engine.run() == [0, 3, 4, 5, 1, 6, 7, 8, 2]


def test_a_tenant_that_was_away_has_saved_up_no_turns():
    engine = Engine()
    for request_id in range(8):
        engine.add(request_id, tenant="busy")
    engine.step()
    engine.step()
    for request_id in range(8, 12):
        engine.add(request_id, tenant="new")

    # Equal from here on, and not two turns ahead.
    assert engine.run()[2:8] == [2, 8, 3, 9, 4, 10]


def test_what_is_known_of_a_tenant_goes_with_its_last_request():
    engine = Engine()
    for request_id in range(50):
        engine.add(request_id, tenant=f"tenant {request_id}")
    engine.run()

    line = engine.scheduler._waiting
    assert (line._lanes, line._served, line._last_turns, dict(line._num_unfinished)) == ({}, {}, {}, {})


def test_beside_who_decodes_a_prompt_takes_no_more_than_the_mixed_tokens():
    engine = Engine(max_num_seqs=2, max_mixed_tokens=8)
    engine.add(0, max_tokens=9)
    engine.add(1, prompt=60)

    assert [engine.step() for _ in range(3)] == [[(0, 4), (1, 60)], [(0, 1)], [(0, 1)]]
    engine.add(2, prompt=60)
    assert engine.step() == [(0, 1), (2, 7)]


IDS = itertools.count(100)


def fill(engine: Engine, count: int, **terms: Any) -> None:
    for request_id in itertools.islice(IDS, count):
        engine.add(request_id, **terms)


def num_taken(engine: Engine, **terms: Any) -> int:
    """Adds requests until one is refused, and returns the number of those that were not."""
    for count in range(100):
        try:
            fill(engine, 1, **terms)
        except QueueFullError:
            return count
    raise AssertionError("the queue has no bound")


SHARES = [
    # Who fills the queue of 12, who comes then, and the number of its requests that are taken.
    pytest.param([("flood", "batch")], ("polite", "interactive"), 6, id="interactive beside batch"),
    pytest.param([("flood", "interactive")], ("polite", "interactive"), 6, id="two tenants"),
    pytest.param([("a", "interactive"), ("b", "interactive")], ("c", "interactive"), 4, id="three tenants"),
    pytest.param([("a", "batch"), ("b", "batch")], ("c", "batch"), 4, id="batch beside batch"),
    pytest.param([("a", "batch"), ("b", "batch")], ("a", "interactive"), 6, id="batch of its own"),
    pytest.param([("flood", "batch")], ("flood", "batch"), 0, id="itself"),
    pytest.param([("flood", "interactive")], ("flood", "batch"), 0, id="batch beside its own"),
]


@pytest.mark.parametrize(("floods", "comer", "count"), SHARES)
def test_a_full_queue_takes_the_share_of_a_tenant_and_throws_out_no_request(floods, comer, count):
    engine = Engine(max_waiting=12)
    engine.add(0, max_tokens=50)
    engine.step()
    for tenant, priority in floods:
        fill(engine, 12 // len(floods), tenant=tenant, priority=priority)

    tenant, priority = comer
    assert num_taken(engine, tenant=tenant, priority=priority) == count
    assert len(engine.run()) == 13 + count


def test_each_of_more_tenants_than_places_may_queue_one_up_to_twice_the_bound():
    engine = Engine(max_waiting=3)
    fill(engine, 4, tenant="flood")

    assert [num_taken(engine, tenant=f"tenant {i}") for i in range(4)] == [1, 1, 1, 0]


def test_a_queue_without_places_has_none_for_any_tenant():
    engine = Engine(max_waiting=0)
    engine.add(0, tenant="flood")

    assert num_taken(engine, tenant="polite") == 0


def test_a_tenant_has_room_again_when_its_requests_run():
    engine = Engine(max_waiting=4)
    fill(engine, 5, tenant="flood", priority="batch")
    assert num_taken(engine, tenant="polite") == 2

    engine.step()  # the first of the interactive ones runs

    assert num_taken(engine, tenant="polite") == 1


def test_one_request_too_many_is_refused_and_nothing_is_queued():
    engine = Engine(max_waiting=1)
    engine.add(0)
    engine.add(1)

    with pytest.raises(QueueFullError, match=r"2 unfinished ones .* max_num_seqs=1 .* max_waiting=1; step until"):
        engine.add(2)

    assert engine.run() == [0, 1]
    engine.add(3)
