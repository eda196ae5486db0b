"""When decoding goes on by itself on the device, and when not; `test_parameters` shows that no bit changes."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.checkpoint import Checkpoint
from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.engine.execution.pipeline import Device, Pipeline
from jaxinfer.engine.request.completion import Delta
from jaxinfer.engine.scheduling.scheduler import STEPS_BETWEEN_LOOPS
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.speculation.load import plan_speculation
from tests.engine.engines import GREEDY, recorded_steps
from tests.engine.fake_device import Engine, expected_tokens

LIMITS = {"max_num_seqs": 2, "num_pages": 16, "decode_loop_steps": 4}


def lengths(engine: Engine, count: int) -> list[list[int]]:
    """How many tokens may be drawn for each request of the next steps."""
    drawn = []
    for _ in range(count):
        step = engine.scheduler.schedule()
        assert step is not None
        drawn.append([chunk.max_new_tokens for chunk in step.chunks])
        engine.scheduler.commit(step, engine.device.run(step))
    return drawn


def test_a_request_goes_on_until_it_has_all_its_tokens():
    engine = Engine(**LIMITS)
    engine.add(0, prompt=5, max_tokens=10)

    # The prompt, four tokens twice, and the last.
    assert lengths(engine, 4) == [[1], [4], [4], [1]]
    assert engine.scheduler.num_unfinished == 0


def test_requests_that_loop_yield_what_they_yield_alone():
    engine = Engine(**LIMITS)
    requests = [engine.add(i, prompt=3 + 9 * i, max_tokens=20 + i) for i in range(4)]

    engine.run()

    for i, request in enumerate(requests):
        assert list(engine.completions[i].token_ids) == expected_tokens(request, 20 + i)


def test_nobody_goes_on_while_another_prefills():
    engine = Engine(**LIMITS, max_num_batched_tokens=8)
    engine.add(0, prompt=4, max_tokens=9)
    lengths(engine, 1)
    engine.add(1, prompt=13, max_tokens=9)

    assert lengths(engine, 3) == [[1, 1], [1, 1], [4, 4]]


def test_a_loop_takes_no_page_from_anybody():
    engine = Engine(**{**LIMITS, "num_pages": 2})
    engine.add(0, prompt=15, max_tokens=12)
    engine.add(1, prompt=14, max_tokens=3)

    assert lengths(engine, 2) == [[1, 1], [1, 2]]
    assert engine.scheduler.metrics().num_preemptions == 0


class SlowDevice(Device):
    """Takes a second for each step and each turn of a loop, in the order of launch; reading a result waits for it."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.ends = engine, 0.0

    def launch(self, step: Step) -> Any:
        self.ends = max(self.ends, self.engine.now) + max(step.chunks.max_new_tokens)
        return self.ends, self.engine.device.run(step)

    def read(self, output: Any) -> Any:
        ends, result = output
        self.engine.now = max(self.engine.now, ends)
        return result


def looping_pipeline(**terms: Any) -> tuple[Engine, Pipeline, SlowDevice]:
    """An engine whose only request is in a loop, of four seconds, behind which another loop is launched."""
    engine = Engine(**LIMITS)
    device = SlowDevice(engine)
    pipeline = Pipeline(engine.scheduler, device, lambda: engine.now)
    engine.add(0, prompt=4, max_tokens=100, **terms)
    for _ in range(3):
        advance(engine, pipeline)
    assert device.ends - engine.now == 4.0
    return engine, pipeline, device


def advance(engine: Engine, pipeline: Pipeline) -> list[Delta]:
    """Does what `Engine.advance` of an LLM does; returns the deltas."""
    deltas = engine.scheduler.expire()
    one = pipeline.advance() if engine.scheduler.num_unfinished else None
    deltas = [*deltas, *(one.deltas if one is not None else ())]
    engine.enter(deltas)
    return deltas


def test_loops_follow_each_other_without_a_gap():
    engine, pipeline, device = looping_pipeline()
    before = engine.now

    for _ in range(5):
        advance(engine, pipeline)

    assert engine.now - before == 20.0
    assert device.ends - engine.now == 4.0


def test_a_new_request_is_computed_when_the_loop_under_way_ends():
    engine, pipeline, _ = looping_pipeline()
    came = engine.now
    engine.add(1, prompt=4, max_tokens=5)

    times = []
    while len(times) < 2:
        times += [engine.now for delta in advance(engine, pipeline) if delta.request_id == 1]

    # A loop of four seconds, then the step with the prompt, and one more.
    assert [time - came for time in times] == [5.0, 9.0]


def test_an_abort_takes_effect_at_once():
    engine, pipeline, _ = looping_pipeline()
    engine.add(1, prompt=4, max_tokens=1)
    came = engine.now

    delta = engine.scheduler.abort(0)

    assert delta is not None
    assert delta.completion is not None
    assert 0 not in {delta.request_id for _ in range(2) for delta in advance(engine, pipeline)}
    assert engine.now - came <= 5.0  # the rest of the loop, and the step of the other request


def test_a_deadline_ends_a_request_within_a_loop():
    engine, pipeline, _ = looping_pipeline(time_limit=14.0)

    while engine.scheduler.num_unfinished:
        advance(engine, pipeline)

    assert engine.completions[0].finish_reason == "deadline"
    assert 14.0 <= engine.now <= 14.0 + 4.0


def test_loops_rest_after_one_that_takes_too_long():
    engine = Engine(**LIMITS | {"max_num_seqs": 1}, max_loop_seconds=0.5)
    engine.add(0, prompt=4, max_tokens=200)

    drawn = []
    while engine.scheduler.num_unfinished:
        step = engine.scheduler.schedule()
        assert step is not None
        drawn.append(step.chunks.max_new_tokens[0])
        engine.now += 1.0
        engine.enter(engine.scheduler.commit(step, engine.device.run(step)))

    assert drawn[:2] == [1, 4]
    assert drawn[2 : 2 + STEPS_BETWEEN_LOOPS + 1] == [1] * STEPS_BETWEEN_LOOPS + [4]


def test_a_request_with_a_structure_comes_back_for_every_mask(looping_llm):
    with recorded_steps(looping_llm) as steps:
        looping_llm.generate([5], SamplingParams(regex="[a-c]{6}", seed=0), show_progress=False)

    assert {chunk.max_new_tokens for step in steps for chunk in step.chunks} == {1}


def test_a_loop_saves_dispatches(looping_llm):
    with recorded_steps(looping_llm) as steps:
        (completion,) = looping_llm.generate([5, 6], GREEDY, show_progress=False)

    # One prefills and draws the first of eight tokens, two draw four and three.
    assert (len(completion.token_ids), len(steps)) == (8, 3)


def test_a_loop_beside_speculation_is_refused():
    with pytest.raises(ValueError, match="decode_loop_steps=4 leaves no place for speculation='ngram'"):
        plan_speculation("ngram", EngineConfig(decode_loop_steps=4), "float32", target=Checkpoint(BUNDLED_MODEL))
