"""Steps keep within what is compiled, and a request that nothing can draw yet holds up no other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.request.completion import Delta
from jaxinfer.engine.request.request import QueueFullError
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.sampling_params import Form
from tests.engine.fake_device import FakeDevice, make_request

PLAIN, FULL = SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, logit_bias={1: 1.0})


@dataclass
class Steps:
    """Steps that are compiled when a test says so."""

    max_tokens: float = math.inf
    forms: set[Form] = field(default_factory=lambda: {"plain"})
    loops: set[Form] = field(default_factory=set)
    failed: dict[Form, str] = field(default_factory=dict)
    num_wanted: int = 0

    def want_tokens(self) -> None:
        self.num_wanted += 1

    def can_draw(self, form: Form) -> bool:
        return form in self.forms

    def draw_error(self, form: Form) -> str | None:
        return self.failed.get(form)

    def can_loop(self, form: Form) -> bool:
        return form in self.loops


def make_scheduler(steps: Sequence[Steps], **options) -> Scheduler:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_pages": 32, "page_size": 16}
    return Scheduler(**limits, num_replicas=len(steps), steps=steps, **options)


def request_of(request_id: int, num_prompt_tokens: int, sampling: SamplingParams, **terms: Any):
    request = make_request(request_id, num_prompt_tokens, 3, **terms)
    request.sampling = sampling
    return request


def run(scheduler: Scheduler, device: FakeDevice, num_steps: int = 1) -> list[list[tuple[int, int]]]:
    """Returns (request, number of tokens) of the chunks of some steps."""
    ran = []
    for _ in range(num_steps):
        step = scheduler.schedule()
        assert step is not None
        ran.append([(chunk.request.request_id, chunk.num_tokens) for chunk in step.chunks])
        scheduler.commit(step, device.run(step))
    return ran


def end_of(delta: Delta | None) -> tuple[str, str | None]:
    """Returns the finish reason of a request's last delta, and its error."""
    assert delta is not None
    assert delta.completion is not None
    return delta.completion.finish_reason, delta.completion.error


def test_steps_keep_within_the_largest_that_is_compiled_and_a_larger_one_is_wanted_only_for_longer_prompts():
    steps = Steps(max_tokens=16)
    scheduler, device = make_scheduler([steps]), FakeDevice(16)
    scheduler.add(request_of(0, 15, PLAIN))
    assert run(scheduler, device) == [[(0, 15)]]
    assert steps.num_wanted == 0

    scheduler.add(request_of(1, 90, PLAIN))
    assert run(scheduler, device) == [[(0, 1), (1, 15)]]
    assert steps.num_wanted == 1
    steps.max_tokens = 64

    assert run(scheduler, device) == [[(0, 1), (1, 63)]]
    assert steps.num_wanted == 1


def test_a_request_whose_draw_is_to_come_is_held_and_those_behind_it_run():
    steps = Steps()
    scheduler, device = make_scheduler([steps]), FakeDevice(16)
    for request_id, sampling in enumerate((FULL, PLAIN, FULL, PLAIN)):
        scheduler.add(request_of(request_id, 4, sampling))

    assert scheduler.release_held() == []
    assert scheduler.num_held == 2
    assert scheduler.metrics().num_waiting == 4
    assert run(scheduler, device) == [[(1, 4), (3, 4)]]
    steps.forms.add("full")
    assert scheduler.release_held() == []

    assert scheduler.num_held == 0
    assert run(scheduler, device) == [[(1, 1), (3, 1), (0, 4), (2, 4)]]


def test_held_requests_count_for_their_tenant_in_a_full_queue():
    scheduler = make_scheduler([Steps()], max_waiting=4)

    for request_id in range(8):  # the rows, and those that may wait
        scheduler.add(request_of(request_id, 4, FULL))

    with pytest.raises(QueueFullError):
        scheduler.add(request_of(8, 4, FULL))


def test_a_full_batch_that_decodes_wants_no_larger_prefill():
    steps = Steps(max_tokens=4)
    scheduler, device = make_scheduler([steps]), FakeDevice(16)
    for request_id in range(4):
        scheduler.add(request_of(request_id, 1, PLAIN))

    assert run(scheduler, device, 2) == [[(i, 1) for i in range(4)]] * 2
    assert steps.num_wanted == 0


def test_every_replica_must_be_able_to_draw_a_request_that_any_may_run():
    first, second = Steps(forms={"plain", "full"}), Steps()
    scheduler = make_scheduler([first, second])
    scheduler.add(request_of(0, 4, FULL))
    assert scheduler.num_held == 1

    second.forms.add("full")
    scheduler.release_held()

    assert scheduler.num_held == 0


def test_a_held_request_ends_by_abort_or_by_its_deadline_and_leaves_nothing():
    now = [0.0]
    scheduler = make_scheduler([Steps()], clock=lambda: now[0])
    scheduler.add(request_of(0, 4, FULL, time_limit=5.0))
    scheduler.add(request_of(1, 4, FULL))

    delta = scheduler.abort(1)
    now[0] = 6.0
    (expired,) = scheduler.expire()

    assert [end_of(delta), end_of(expired)] == [("abort", None), ("deadline", None)]
    assert (scheduler.num_held, scheduler.num_unfinished) == (0, 0)
    assert scheduler.schedule() is None


def test_a_request_whose_draw_cannot_be_compiled_ends_with_the_reason():
    steps = Steps(failed={"full": "full draw 4 cannot be compiled: out of registers"})
    scheduler, device = make_scheduler([steps]), FakeDevice(16)
    scheduler.add(request_of(0, 4, FULL))
    scheduler.add(request_of(1, 4, PLAIN))

    (delta,) = scheduler.release_held()

    assert end_of(delta) == ("error", "full draw 4 cannot be compiled: out of registers")
    assert scheduler.num_unfinished == 1
    assert run(scheduler, device) == [[(1, 4)]]


@pytest.mark.parametrize("loops", [set(), {"plain"}])
def test_decode_steps_are_single_until_a_loop_is_compiled(loops):
    scheduler, device = make_scheduler([Steps(loops=loops)], decode_loop_steps=2), FakeDevice(16)
    scheduler.add(request_of(0, 4, SamplingParams(max_tokens=5)))
    run(scheduler, device)

    step = scheduler.schedule()

    assert step is not None
    assert step.is_loop == bool(loops)
