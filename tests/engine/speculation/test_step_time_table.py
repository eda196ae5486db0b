"""Expected step times against a device whose steps take known times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxinfer import EngineConfig
from jaxinfer.engine.execution.compiled_steps import choose_bucket
from jaxinfer.engine.scheduling.step import Chunk, Chunks, Step
from jaxinfer.engine.speculation.step_times import StepTimeTable
from jaxinfer.plan.step_shapes import max_mixed_tokens, plan_buckets
from tests.engine.fake_device import make_request

BUCKETS = plan_buckets(EngineConfig(max_num_seqs=4), 3)
STEP_BUCKETS = tuple(bucket for bucket in BUCKETS if not bucket.is_prefill)


class FakeDevice:
    """Steps of each shape take a fixed time and a time per token, on a clock of its own."""

    def __init__(self):
        self.now, self.factor = 0.0, 1.0
        self.slowdown = 1.0  # from each step to the next
        self.interruption: Iterator[float] = itertools.repeat(1.0)

    def clock(self):
        return self.now

    def seconds(self, step):
        bucket = choose_bucket(STEP_BUCKETS, step)
        per_token = 4e-5 if bucket.num_tokens < 16 else 6e-5
        return self.factor * (1e-3 + 2e-3 * step.is_verify + per_token * step.num_tokens)

    def launch(self, step):
        self.factor *= self.slowdown
        self.now += self.seconds(step) * next(self.interruption)

    def read(self, output):
        pass


def step_of(num_rows, num_drafts):
    chunks = [Chunk(make_request(i, 20, 100), 19, 1) for i in range(num_rows)]
    for i in range(num_drafts):
        chunks[i % num_rows].drafts = [*chunks[i % num_rows].drafts, 0]
    return Step(Chunks.of(chunks), is_ahead=not num_drafts)


def rehearsed(device):
    table = StepTimeTable(BUCKETS)
    table.rehearse(device, 16, 128, device.clock)
    return table


def real_seconds(device, num_rows, max_drafts):
    return [device.seconds(step_of(num_rows, count)) for count in range(max_drafts + 1)]


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_every_number_of_drafts_is_expected_to_take_its_time(num_rows):
    device = FakeDevice()
    table = rehearsed(device)

    expected = real_seconds(device, num_rows, 3 * num_rows)
    np.testing.assert_allclose(table.seconds(num_rows, 3 * num_rows), expected, rtol=1e-6)


def test_an_interrupted_rehearsal_does_not_count():
    device = FakeDevice()
    device.interruption = itertools.cycle([3.0, *[1.0] * 12])

    table = rehearsed(device)

    np.testing.assert_allclose(table.seconds(4, 12), real_seconds(device, 4, 12), rtol=0.1)


def test_a_machine_that_slows_down_during_the_rehearsal_does_not_make_drafts_look_slow():
    device = FakeDevice()
    device.slowdown = 1.005

    seconds = rehearsed(device).seconds(1, 3)

    device.factor = 1.0
    plain, *_, most = real_seconds(device, 1, 3)
    assert seconds[3] / seconds[0] == pytest.approx(most / plain, rel=0.1)


def test_one_shape_that_slows_down_tells_of_all_of_them():
    device = FakeDevice()
    table = rehearsed(device)
    before = table.seconds(1, 3)

    device.factor = 1.5
    for _ in range(60):
        table.observe(step_of(1, 0), device.seconds(step_of(1, 0)))

    assert table.seconds(1, 3)[0] == pytest.approx(1.5 * before[0], rel=0.01)
    assert table.seconds(1, 3)[3] == pytest.approx(1.5 * before[3], rel=0.1)


def test_a_shape_that_is_misjudged_is_corrected_while_both_kinds_of_steps_run():
    device = FakeDevice()
    table = rehearsed(device)
    before = table.seconds(1, 3)

    for _ in range(200):
        table.observe(step_of(1, 0), before[0])
        table.observe(step_of(1, 3), 1.4 * before[3])

    # The two kinds pull the speed in turn, so what is seen is half of one pull from what is true.
    assert table.seconds(1, 3)[3] / table.seconds(1, 3)[0] == pytest.approx(1.4 * before[3] / before[0], rel=0.05)


def test_a_shape_that_was_never_measured_is_not_expected_to_end():
    table = StepTimeTable(BUCKETS)

    table.observe(step_of(1, 0), 0.01)

    seconds = table.seconds(1, 3)
    assert seconds[0] == pytest.approx(0.01)
    assert np.isinf(seconds[1:]).all()


@pytest.mark.parametrize(("limits", "num_rows"), [({"max_num_seqs": 128}, 65), ({"max_mixed_tokens": 32}, 9)])
def test_a_step_that_hardly_has_room_for_drafts_has_times_for_them(limits, num_rows):
    config = EngineConfig(**limits)
    table = StepTimeTable(plan_buckets(config, 7))
    device: Any = SimpleNamespace(launch=id, read=id)

    table.rehearse(device, 200, 128, clock=partial(next, itertools.count(1.0)))

    assert np.isfinite(table.seconds(num_rows, max_mixed_tokens(config) - num_rows)).all()


def prefill_step(num_tokens, num_decoding=1, num_drafts=0):
    requests = [make_request(i, 20, 100) for i in range(num_decoding)]
    chunks = [Chunk(request, 19, 1, drafts=[0] * num_drafts) for request in requests]
    length = num_tokens - num_decoding * (1 + num_drafts)
    return Step(Chunks.of([*chunks, Chunk(make_request(9, 500, 100), 0, length)]))


def test_a_draft_beside_rows_that_prefill_takes_as_long_as_their_tokens():
    device = FakeDevice()
    table = rehearsed(device)
    assert np.isinf(table.seconds(2, 3, is_mixed=True)[1:]).all()  # no such step was measured

    table.observe_prefill(prefill_step(100, num_decoding=0), 0.05)

    decode = table.seconds(2, 0)[0]
    np.testing.assert_allclose(table.seconds(2, 3, is_mixed=True), decode + 0.0005 * np.arange(4))


def test_mixed_steps_show_what_drafts_take_besides_their_tokens():
    table = rehearsed(FakeDevice())
    for _ in range(100):
        table.observe_prefill(prefill_step(100, num_decoding=0), 0.05)
        table.observe_prefill(prefill_step(100, num_decoding=2, num_drafts=3), 0.053)
        table.observe(step_of(2, 0), table.seconds(2, 0)[0])

    seconds = table.seconds(2, 3, is_mixed=True)

    assert seconds[1] - seconds[0] == pytest.approx(0.0035, rel=0.05)
    assert seconds[2] - seconds[1] == pytest.approx(0.0005, rel=0.05)


def test_where_others_always_prefill_a_token_is_worth_no_more_than_its_part_of_such_a_step():
    table = rehearsed(FakeDevice())
    for _ in range(400):
        table.observe_prefill(prefill_step(100, num_decoding=2), 0.01)

    seconds = table.seconds(2, 3, is_mixed=True)

    np.testing.assert_allclose(seconds, 0.0001 * np.array([2, 3, 4, 5]), rtol=0.01)
