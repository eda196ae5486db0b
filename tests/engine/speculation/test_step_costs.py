"""What steps with drafts are expected to take, from steps that were measured."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxinfer import EngineConfig
from jaxinfer.engine.execution.step_shapes import choose_bucket, max_verified_tokens, plan_buckets
from jaxinfer.engine.scheduling.step import Chunk, Chunks, Step
from jaxinfer.engine.speculation.step_costs import StepCosts, made_up_steps, step_features
from tests.engine.fake_device import make_request

BUCKETS = plan_buckets(EngineConfig(max_num_seqs=4), 3)
# Seconds per unit of each of the FEATURES.
PLAIN = np.array([1e-3, 1e-5, 2e-5, 0, 3e-5, 1e-7, 0])
VERIFY = np.array([2e-3, 1e-5, 4e-5, 1e-4, 3e-5, 0, 1e-7])


class FakeClock:
    """A device whose steps take what the weights say, on a clock of its own."""

    def __init__(self):
        self.now, self.factor = 0.0, 1.0
        self.slowdown = 1.0  # from each step to the next

    def __call__(self):
        return self.now

    def seconds(self, step):
        weights = VERIFY if step.is_verify else PLAIN
        buckets = tuple(bucket for bucket in BUCKETS if not bucket.is_prefill)
        return self.factor * float(weights @ step_features(step, choose_bucket(buckets, step)))

    def launch(self, step):
        self.factor *= self.slowdown
        self.now += self.seconds(step)

    def read(self, output):
        pass


@pytest.fixture
def clock():
    return FakeClock()


def steps_of(lens, num_drafts):
    """Rows of so many tokens that decode, with so many drafts in all, and that as a step."""
    chunks = [Chunk(make_request(i, num_tokens, 100), num_tokens - 1, 1) for i, num_tokens in enumerate(lens)]
    for i in range(num_drafts):
        chunks[i % len(chunks)].drafts = [*chunks[i % len(chunks)].drafts, 0]
    return chunks, Step(Chunks.of(chunks), is_ahead=not num_drafts)


def expected(costs, lens):
    return np.array(costs.seconds(steps_of(lens, 0)[0], 3 * len(lens)))


@pytest.mark.parametrize(("limits", "num_rows"), [({"max_num_seqs": 128}, 65), ({"max_mixed_tokens": 32}, 9)])
def test_a_step_that_hardly_has_room_for_drafts_has_costs_for_them(limits, num_rows):
    config = EngineConfig(**limits)
    costs = StepCosts(plan_buckets(config, 7))
    device: Any = SimpleNamespace(launch=id, read=id)

    costs.rehearse(device, 200, 128, clock=partial(next, itertools.count(1.0)))

    room = max_verified_tokens(config) - num_rows
    assert np.isfinite(costs.seconds(steps_of([3] * num_rows, 0)[0], room)).all()


def test_every_number_of_drafts_is_expected_to_take_what_such_steps_took(clock):
    costs = StepCosts(BUCKETS)
    costs.rehearse(clock, 16, 128, clock=clock)

    for lens in ([128], [128, 128], [128] * 4):
        for count, seconds in enumerate(expected(costs, lens)):
            assert seconds == pytest.approx(clock.seconds(steps_of(lens, count)[1]), rel=0.15), (lens, count)


def test_what_tokens_cost_is_told_from_what_their_contexts_cost(clock):
    costs = StepCosts(BUCKETS)
    costs.rehearse(clock, 16, 128, 4, clock)

    for lens in ([40] * 4, [400] * 4):
        for count, seconds in enumerate(expected(costs, lens)):
            assert seconds == pytest.approx(clock.seconds(steps_of(lens, count)[1]), rel=0.08), (lens, count)


def test_a_step_that_was_interrupted_in_its_rehearsal_does_not_count(clock, monkeypatch):
    costs, count, seconds = StepCosts(BUCKETS), itertools.count(), clock.seconds
    monkeypatch.setattr(clock, "seconds", lambda step: seconds(step) * (3 if next(count) % 13 == 0 else 1))
    costs.rehearse(clock, 16, 128, 4, clock)

    for drafts, believed in enumerate(expected(costs, [128] * 4)):
        assert believed == pytest.approx(seconds(steps_of([128] * 4, drafts)[1]), rel=0.1), drafts


def test_a_machine_that_slows_down_while_steps_are_rehearsed_does_not_make_drafts_look_dear(clock):
    costs = StepCosts(BUCKETS)
    clock.slowdown = 1.005
    costs.rehearse(clock, 16, 128, clock=clock)

    clock.factor = 1.0
    seconds = expected(costs, [128])
    ratio = clock.seconds(steps_of([128], 3)[1]) / clock.seconds(steps_of([128], 0)[1])
    assert seconds[3] / seconds[0] == pytest.approx(ratio, rel=0.1)


def test_what_is_measured_later_corrects_all_that_is_expected(clock):
    costs = StepCosts(BUCKETS)
    costs.rehearse(clock, 16, 128, clock=clock)
    before = expected(costs, [128])

    clock.factor = 1.5
    for _ in range(100):
        step = steps_of([128], 0)[1]
        costs.enter(step, clock.seconds(step))

    assert expected(costs, [128]) == pytest.approx(1.5 * before, rel=0.1)


def test_before_a_step_of_a_kind_was_measured_it_is_not_expected_to_end():
    costs = StepCosts(BUCKETS)
    step = made_up_steps(next(bucket for bucket in BUCKETS if bucket.is_decode), 16, 128)[-1]

    costs.enter(step, 0.01)

    seconds = expected(costs, [128])
    assert np.isfinite(seconds[0])
    assert np.isinf(seconds[1:]).all()
