"""Which requests a step computes, and who gives way when pages run out."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.engine.scheduling.step import Step
from tests.engine.fake_device import FakeDevice, make_request


def make_scheduler(*, max_num_seqs=4, max_num_batched_tokens=32, num_pages=16, page_size=16) -> Scheduler:
    return Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_pages=num_pages,
        page_size=page_size,
    )


def run_one_step(scheduler: Scheduler, device: FakeDevice):
    step = scheduler.schedule()
    assert step is not None
    return step, scheduler.commit(step, device.run(step))


def chunks_of(step: Step | None) -> list[tuple[int, int, int]]:
    assert step is not None
    return [(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in step.chunks]


def test_there_is_no_step_without_requests():
    assert make_scheduler().schedule() is None


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    scheduler, device = make_scheduler(max_num_batched_tokens=32), FakeDevice(16)
    scheduler.add(make_request(0, 70, 5))

    steps = [run_one_step(scheduler, device)[0] for _ in range(4)]

    assert [chunks_of(step) for step in steps] == [[(0, 0, 32)], [(0, 32, 32)], [(0, 64, 6)], [(0, 70, 1)]]


def test_a_chunk_before_the_last_yields_no_token():
    scheduler, device = make_scheduler(max_num_batched_tokens=32), FakeDevice(16)
    scheduler.add(make_request(0, 33, 5))

    deltas = [run_one_step(scheduler, device)[1] for _ in range(2)]

    assert [len(d) for d in deltas] == [0, 1]


def test_requests_are_admitted_in_the_order_they_came():
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id in (7, 3, 5):
        scheduler.add(make_request(request_id, 4, 5))

    assert chunks_of(scheduler.schedule()) == [(7, 0, 4), (3, 0, 4)]


def test_a_long_prompt_does_not_hold_up_who_decodes():
    scheduler, device = make_scheduler(max_num_batched_tokens=8), FakeDevice(16)
    scheduler.add(make_request(0, 4, 9))
    run_one_step(scheduler, device)
    scheduler.add(make_request(1, 60, 1))

    steps = [run_one_step(scheduler, device)[0] for _ in range(3)]

    assert [chunks_of(step) for step in steps] == [
        [(0, 4, 1), (1, 0, 7)],
        [(0, 5, 1), (1, 7, 7)],
        [(0, 6, 1), (1, 14, 7)],
    ]


def test_a_step_is_a_decode_step_when_every_chunk_is_one_token():
    scheduler, device = make_scheduler(), FakeDevice(16)
    scheduler.add(make_request(0, 4, 9))
    scheduler.add(make_request(1, 6, 9))

    kinds = [run_one_step(scheduler, device)[0].is_decode for _ in range(2)]

    assert kinds == [False, True]


def test_a_request_waits_until_there_are_pages_for_its_whole_prompt():
    scheduler, device = make_scheduler(num_pages=4), FakeDevice(16)
    scheduler.add(make_request(0, 30, 2))
    scheduler.add(make_request(1, 33, 2))  # 3 pages, of which 2 are free

    steps = [run_one_step(scheduler, device)[0] for _ in range(3)]

    assert [chunks_of(step) for step in steps] == [[(0, 0, 30)], [(0, 30, 1)], [(1, 0, 32)]]


def test_the_request_admitted_last_is_preempted_when_pages_run_out():
    scheduler, device = make_scheduler(num_pages=2), FakeDevice(16)
    scheduler.add(make_request(0, 16, 3))
    scheduler.add(make_request(1, 14, 3))
    run_one_step(scheduler, device)

    step, _ = run_one_step(scheduler, device)

    assert (chunks_of(step), scheduler.metrics().num_preemptions) == ([(0, 16, 1)], 1)


def test_a_preempted_request_is_computed_again_from_its_first_token():
    scheduler, device = make_scheduler(num_pages=2), FakeDevice(16)
    scheduler.add(make_request(0, 16, 3))
    scheduler.add(make_request(1, 14, 3))

    steps = [run_one_step(scheduler, device)[0] for _ in range(4)]

    assert chunks_of(steps[-1]) == [(1, 0, 15)]  # the prompt and the token drawn before


def test_a_preempted_request_comes_before_those_that_came_later():
    scheduler, device = make_scheduler(num_pages=2, max_num_seqs=2), FakeDevice(16)
    for request_id, num_prompt_tokens in enumerate((16, 14, 4)):
        scheduler.add(make_request(request_id, num_prompt_tokens, 3))

    steps = [run_one_step(scheduler, device)[0] for _ in range(4)]

    assert [chunk[0] for chunk in chunks_of(steps[-1])] == [1, 2]


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_aborting_frees_the_pages_of_a_waiting_or_running_request(num_steps):
    scheduler, device = make_scheduler(), FakeDevice(16)
    scheduler.add(make_request(0, 33, 9))
    for _ in range(num_steps):
        run_one_step(scheduler, device)

    scheduler.abort(0)

    assert (scheduler.num_available_pages, scheduler.num_unfinished) == (16, 0)


def test_aborting_an_unknown_request_changes_nothing():
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 4, 9))

    assert scheduler.abort(1) is None
    assert scheduler.num_unfinished == 1


def test_alternatives_are_handed_out_only_to_who_asked():
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 4, 1, log_probs=2))
    scheduler.add(make_request(1, 4, 1))
    output = SimpleNamespace(
        tokens=np.array([9, 9]),
        log_probs=np.array([-1.0, -1.0]),
        top_tokens=np.array([[9, 4, 2], [9, 4, 2]]),
        top_log_probs=np.array([[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]]),
        sampling_log_probs=None,
    )
    step = scheduler.schedule()
    assert step is not None

    deltas = scheduler.commit(step, output)

    assert [d.completion and d.completion.top_log_probs for d in deltas] == [({9: -1.0, 4: -2.0},), ()]
