"""Steps that are launched before the tokens of the last are known; `test_parameters` shows that no bit changes."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.execution.pipeline import Device, Pipeline
from jaxinfer.engine.frontend.guard import deferred_interrupts
from tests.engine.engines import GREEDY, completions_of, content_of, counted_overlaps, drain, forget_prefixes
from tests.engine.fake_device import Engine, expected_tokens
from tests.engine.probe import runner_of


class RecordingDevice(Device):
    """Draws at once what a fake device would, and keeps the order in which steps are launched and read."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.events: list[str] = []
        self.rows: list[dict[int, int]] = []

    def launch(self, step):
        number = len(self.rows)
        self.rows.append({chunk.request.request_id: chunk.start for chunk in step.chunks})
        self.events.append(f"launch {number}")
        return number, self.engine.device.run(step)

    def read(self, output):
        self.events.append(f"read {output[0]}")
        return output[1]


def pipeline_of(engine: Engine) -> tuple[Pipeline, RecordingDevice]:
    device = RecordingDevice(engine)
    return Pipeline(engine.scheduler, device), device


def run(engine: Engine, pipeline: Pipeline) -> None:
    while engine.scheduler.num_unfinished:
        advance = pipeline.advance()
        engine.enter([] if advance is None else advance.deltas)


def test_each_step_is_launched_before_the_last_is_read():
    engine = Engine()
    engine.add(0, prompt=5, max_tokens=3)
    pipeline, device = pipeline_of(engine)

    run(engine, pipeline)

    assert device.events == ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "read 2"]


def test_steps_are_settled_one_by_one_so_that_an_exception_holds_up_no_tokens(monkeypatch):
    engine = Engine()
    engine.add(0, prompt=5, max_tokens=4)
    pipeline, device = pipeline_of(engine)
    advance = pipeline.advance()
    assert advance is not None
    engine.enter(advance.deltas)
    pipeline._launch(after=pipeline._launched[0].step)
    read = device.read

    def read_once(output):
        monkeypatch.setattr(device, "read", fail)
        return read(output)

    def fail(output):
        raise MemoryError("host")

    monkeypatch.setattr(device, "read", read_once)
    settled = pipeline.settle()

    assert [len(delta.token_ids) for delta in next(settled)] == [1]
    with pytest.raises(MemoryError):
        next(settled)
    monkeypatch.setattr(device, "read", read)
    assert [len(delta.token_ids) for deltas in pipeline.settle() for delta in deltas] == [1]


class OneSecondDevice(RecordingDevice):
    """Takes a second for each step, by the engine's clock."""

    ends = 0.0

    def launch(self, step):
        self.ends = max(self.ends, self.engine.now) + 1.0
        return self.ends, *super().launch(step)

    def is_done(self, output):
        return output[0] <= self.engine.now

    def read(self, output):
        self.engine.now = max(self.engine.now, output[0])
        return super().read(output[1:])


@pytest.mark.parametrize(("pause", "busy"), [(0.0, 3.0), (0.4, 3.0), (1.0, 1.0), (60.0, 1.0)])
def test_what_the_caller_does_between_two_steps_does_not_count_as_work(pause, busy):
    engine = Engine()
    engine.add(0, prompt=5, max_tokens=3)
    pipeline, seconds = Pipeline(engine.scheduler, OneSecondDevice(engine), lambda: engine.now), 0.0

    while engine.scheduler.num_unfinished:
        advance = pipeline.advance()
        assert advance is not None
        seconds += advance.seconds
        engine.enter(advance.deltas)
        engine.now += pause

    # A step that ended while nobody looked took up to a second that is not counted, never more than it took.
    assert engine.scheduler.metrics().busy_seconds == seconds == pytest.approx(busy)


def test_requests_yield_what_they_yield_alone():
    engine = Engine(max_num_seqs=3, num_pages=5, max_num_batched_tokens=9)
    requests = [engine.add(i, prompt=3 + 9 * i, max_tokens=20 + i) for i in range(5)]

    run(engine, pipeline_of(engine)[0])

    assert engine.scheduler.metrics().num_preemptions > 0
    for i, request in enumerate(requests):
        assert list(engine.completions[i].token_ids) == expected_tokens(request, 20 + i)


def test_who_draws_the_last_token_makes_room_at_once():
    engine = Engine(num_pages=1)
    for i in range(2):
        engine.add(i, prompt=3, max_tokens=2)
    pipeline, device = pipeline_of(engine)

    run(engine, pipeline)

    assert device.rows == [{0: 0}, {0: 3}, {1: 0}, {1: 3}]
    assert device.events.index("launch 2") < device.events.index("read 1")


def test_what_was_drawn_after_the_end_is_dropped(llm):
    (first,) = llm.generate([5, 6], GREEDY, show_progress=False)
    end = first.token_ids[3]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[end])

    with counted_overlaps(llm) as counts:
        (stopped,) = llm.generate([5, 6], params, show_progress=False)

    assert stopped.token_ids == first.token_ids[: first.token_ids.index(end) + 1]
    assert len(counts) == len(stopped.token_ids) + 1  # one step too many
    assert not llm.has_unfinished


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_token_on_its_way_does_not_come_after_a_rewind(llm, num_tokens):
    params = SamplingParams(seed=1, max_tokens=8, ignore_eos=True)
    (expected,) = llm.generate([5, 6], params, show_progress=False)
    request_id = llm.add([5, 6], params)
    for _ in range(4):
        llm.step()

    llm.rewind(request_id, num_tokens)

    assert completions_of(drain(llm))[request_id].token_ids == expected.token_ids


STRUCTURED = SamplingParams(regex="[a-c]{6}", seed=0, presence_penalty=0.5, log_probs=2)


def test_a_step_runs_while_it_is_worked_out_what_its_structures_allow(llm, monkeypatch):
    events = []
    for name in ("launch", "draw", "read"):
        method = getattr(runner_of(llm), name)
        monkeypatch.setattr(runner_of(llm), name, lambda *args, n=name, m=method: (events.append(n), m(*args))[1])

    llm.generate([5], STRUCTURED, show_progress=False)

    # One step more than there are tokens, for the sixth ends the structure.
    assert events == ["launch", "draw", *["launch", "read", "draw"] * 6]


def test_structures_that_are_launched_ahead_yield_what_each_yields_alone(llm):
    prompts, params = (
        [[5], [6], [7, 8, 9] * 12],
        [STRUCTURED, replace(GREEDY, seed=2), replace(STRUCTURED, seed=1, min_p=0.1)],
    )
    alone = [llm.generate(*pair, show_progress=False)[0] for pair in zip(prompts, params, strict=True)]

    with counted_overlaps(llm) as counts:
        forget_prefixes(llm)
        completions = llm.generate(prompts, params, show_progress=False)

    assert [*map(content_of, completions)] == [*map(content_of, alone)]
    assert max(counts) == 3


@pytest.fixture
def raising_interrupts():
    """Ctrl-C raises, also in a process that was started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("raising_interrupts")
@pytest.mark.parametrize(("count", "expected"), [(0, ["the end"]), (1, ["the end"]), (2, [])])
def test_ctrl_c_waits_for_the_end_of_a_step_but_not_twice(count, expected):
    events = []

    def step():
        with deferred_interrupts():
            for _ in range(count):
                os.kill(os.getpid(), signal.SIGINT)
            events.append("the end")

    with pytest.raises(KeyboardInterrupt) if count else contextlib.nullcontext():
        step()

    assert events == expected


@pytest.mark.usefixtures("raising_interrupts")
def test_an_interrupt_counts_also_where_the_step_has_raised():
    def step():
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("the step")

    with pytest.raises(KeyboardInterrupt) as interrupt:
        step()

    assert isinstance(interrupt.value.__context__, ValueError)
