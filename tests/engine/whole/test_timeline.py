"""A timeline shows what happened when, by a clock set by hand and by the timings that requests keep themselves."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.timeline import Load, RequestSpan, StepSpan, recorded_timeline
from jaxinfer.plan.step_shapes import plan_buckets
from tests.engine.engines import GREEDY, random_prompts
from tests.engine.fake_device import Engine

BUCKETS = plan_buckets(EngineConfig(max_num_seqs=4, max_num_batched_tokens=64))


def record(engine, max_steps=100):
    return recorded_timeline(engine.scheduler, BUCKETS, max_steps)


def spans_of(timeline, request_id):
    return [span[1:] for span in timeline.spans if span.request_id == request_id]


def test_steps_have_their_kind_rows_tokens_and_shape():
    engine = Engine(max_num_seqs=2)  # one second per step
    engine.add(0, prompt=70, max_tokens=3)
    engine.add(1, prompt=4)

    with record(engine) as timeline:
        engine.run()

    assert list(timeline.steps) == [
        StepSpan(0.0, 1.0, "prefill", 1, 64, "prefill 64"),
        StepSpan(1.0, 2.0, "prefill", 2, 6 + 4, "prefill 64"),
        StepSpan(2.0, 3.0, "decode", 1, 1, "decode 1"),
        StepSpan(3.0, 4.0, "decode", 1, 1, "decode 1"),
    ]


def test_a_request_waits_is_prefilled_and_decodes():
    engine = Engine()  # one row
    with record(engine) as timeline:
        engine.add(0, max_tokens=3)
        engine.add(1, prompt=100, max_tokens=2)
        engine.run()

    assert spans_of(timeline, 0) == [("prefill", 0.0, 1.0), ("decode", 1.0, 3.0)]
    assert spans_of(timeline, 1) == [("queue", 0.0, 3.0), ("prefill", 3.0, 5.0), ("decode", 5.0, 6.0)]


def test_a_preempted_request_waits_until_it_is_computed_again():
    engine = Engine()
    engine.add(0, max_tokens=3, priority="batch")
    with record(engine) as timeline:
        engine.step()
        engine.add(1, max_tokens=4)
        engine.run()

    assert spans_of(timeline, 0) == [
        ("prefill", 0.0, 1.0),
        ("preempted", 1.0, 5.0),
        ("prefill", 5.0, 6.0),
        ("decode", 6.0, 7.0),
    ]


def test_the_load_is_what_the_metrics_say_at_each_step():
    engine = Engine(num_pages=8)
    with record(engine) as timeline:
        engine.add(0, prompt=20, max_tokens=2)
        engine.add(1, prompt=40)
        engine.run()

    assert list(timeline.loads) == [Load(0.0, 1, 1, 2, 0), Load(2.0, 1, 0, 3, 0)]


def test_spans_of_unfinished_requests_end_with_the_recording():
    engine = Engine()
    with record(engine) as timeline:
        engine.add(0, max_tokens=9)
        engine.add(1)
        engine.step()
        engine.step()

    assert spans_of(timeline, 0) == [("prefill", 0.0, 1.0), ("decode", 1.0, 2.0)]
    assert spans_of(timeline, 1) == [("queue", 0.0, 2.0)]


def test_an_aborted_request_was_in_the_queue_until_then():
    engine = Engine()
    with record(engine) as timeline:
        engine.add(0)
        engine.now = 4.0
        engine.scheduler.abort(0)

    assert list(timeline.spans) == [RequestSpan(0, "queue", 0.0, 4.0)]


def test_only_the_last_steps_are_kept_and_nothing_after_the_recording():
    engine = Engine()
    engine.add(0, max_tokens=20)
    with record(engine, max_steps=3) as timeline:
        for _ in range(10):
            engine.step()
    engine.run()

    assert [step.began for step in timeline.steps] == [7.0, 8.0, 9.0]
    assert engine.scheduler.observers == []


def test_the_file_is_a_trace_of_chrome_s_events(tmp_path):
    engine = Engine()
    engine.now = 1000.0
    with record(engine) as timeline:
        engine.add(7, prompt=70, max_tokens=2)
        engine.run()

    timeline.save(tmp_path / "timeline.json")
    trace = json.loads((tmp_path / "timeline.json").read_text())

    events = [(e["ph"], e["name"], e["tid"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    steps = [("X", name, 1, 1e6 * i, 1e6) for i, name in enumerate(("prefill", "prefill", "decode"))]
    assert events == [*steps, ("X", "prefill", 7, 0.0, 2e6), ("X", "decode", 7, 2e6, 1e6)]
    counters = [(e["name"], e["ts"], e["args"]) for e in trace["traceEvents"] if e["ph"] == "C"]
    assert counters[:2] == [
        ("requests", 0.0, {"running": 1, "waiting": 0}),
        ("pages", 0.0, {"used": 5, "cached": 0}),
    ]
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {"engine", "requests", "steps", "request 7"}


def test_a_real_timeline_agrees_with_the_timings_of_its_requests(llm):
    with llm.timeline() as timeline:
        completions = llm.generate(random_prompts(12, max_len=60), GREEDY, show_progress=False)

    for completion in completions:
        times, spans = completion.timings, spans_of(timeline, completion.request_id)
        assert [phase for phase, *_ in spans] == ["queue", "prefill", "decode"]
        assert [end for *_, end in spans[:-1]] == [began for _, began, _ in spans[1:]]
        assert spans[1][2] - spans[0][1] == pytest.approx(times.ttft)
        assert spans[2][2] - spans[2][1] == pytest.approx(sum(times.itl), abs=5e-3)  # read by two looks at the clock
    assert all(earlier.ended <= later.began for earlier, later in pairwise(timeline.steps))
    assert sum(step.num_tokens for step in timeline.steps if step.kind == "prefill") >= 12


@pytest.mark.parametrize("max_steps", [0, 1.5])
def test_a_timeline_without_room_is_refused(llm, max_steps):
    with pytest.raises(ValueError, match=f"max_steps={max_steps} is not allowed"):
        llm.timeline(max_steps=max_steps)
