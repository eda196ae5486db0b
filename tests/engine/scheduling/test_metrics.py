"""Every figure is what a clock set by hand, and counting, say it is."""

from __future__ import annotations

import pytest

from jaxinfer.engine.request.completion import Timings
from jaxinfer.engine.scheduling.metrics import Metrics, Targets
from tests.engine.fake_device import Engine


def test_the_timings_of_a_request_are_those_of_its_steps():
    engine = Engine()  # one row, one second per step
    engine.add(0, max_tokens=3)
    engine.add(1, max_tokens=2)
    engine.now = 0.5

    engine.run()

    assert engine.completions[0].timings == Timings(queue=0.5, ttft=1.5, itl=(1.0, 1.0))
    assert engine.completions[1].timings == Timings(queue=3.5, ttft=4.5, itl=(1.0,))


def test_the_time_after_a_preemption_is_time_between_two_tokens():
    engine = Engine()
    engine.add(0, max_tokens=2, priority="batch")
    engine.step()
    engine.add(1, max_tokens=4)

    engine.run()

    assert engine.completions[0].timings == Timings(queue=0.0, ttft=1.0, itl=(5.0,))


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [(0, Timings()), (1, Timings(queue=0.0)), (2, Timings(queue=0.0, ttft=2.0))],
)
def test_what_never_came_has_no_time(num_steps, expected):
    engine = Engine()
    engine.add(0, prompt=100, max_tokens=9)  # two steps of 64 tokens to the first token
    for _ in range(num_steps):
        engine.step()

    delta = engine.scheduler.abort(0)

    assert delta is not None
    assert delta.completion is not None
    assert delta.completion.timings == expected


@pytest.mark.parametrize(("itl", "tpot"), [((), None), ((1.0,), 1.0), ((1.0, 2.0, 6.0), 3.0)])
def test_the_time_per_output_token_is_the_mean_between_tokens(itl, tpot):
    assert Timings(itl=itl).tpot == tpot


def test_timings_have_no_part_in_the_equality_of_completions():
    engines = [Engine(), Engine()]
    engines[1].now = 7.0
    for engine in engines:
        engine.add(0)
        engine.now += 1.0 + engine.now
        engine.run()

    first, second = (engine.completions[0] for engine in engines)
    assert first.timings != second.timings
    assert first == second


def test_the_metrics_are_what_was_done():
    engine = Engine(max_num_seqs=2, num_pages=8)
    engine.add(0, prompt=20, max_tokens=3, cache_salt="")
    engine.run()  # 20 tokens, then 1 and 1
    prompt = list(engine.completions[0].prompt_token_ids)
    engine.add(1, prompt=[*prompt, 5], max_tokens=9, cache_salt="")  # 16 found, 5 computed
    engine.add(2, prompt=40, max_tokens=9)
    engine.add(3, prompt=4)
    engine.step()
    engine.now += 100.0  # nobody computes
    engine.step()

    metrics = engine.scheduler.metrics()

    assert metrics == Metrics(
        num_running=2,
        num_waiting=1,
        num_pages=8,
        num_owned_pages=2 + 3,
        num_cached_pages=0,
        num_free_pages=3,
        num_steps=5,
        num_preemptions=0,
        num_finished=1,
        num_good=1,
        num_prefill_tokens=20 + 5 + 40,
        num_found_tokens=16,
        num_output_tokens=3 + 2 * 2,
        num_drafted_tokens=0,
        num_accepted_tokens=0,
        num_drafts=(),
        busy_seconds=5.0,
    )
    assert metrics.prefix_hit_rate == 16 / 81
    assert metrics.tokens_per_second == 7 / 5


def test_the_metrics_of_an_engine_that_did_nothing_are_zero():
    metrics = Engine().scheduler.metrics()

    assert (metrics.prefix_hit_rate, metrics.tokens_per_second, metrics.num_free_pages) == (0.0, 0.0, 16)


@pytest.mark.parametrize(
    ("targets", "num_good"),
    [(Targets(), 3), (Targets(ttft=2.0), 2), (Targets(ttft=1.9), 1), (Targets(tpot=1.0), 3), (Targets(tpot=0.9), 2)],
    ids=repr,
)
def test_goodput_counts_finished_requests_within_both_targets(targets, num_good):
    engine = Engine(targets=targets)  # one row, one second per step
    for request_id, max_tokens in ((0, 1), (1, 1), (2, 3)):
        engine.add(request_id, max_tokens=max_tokens)  # first tokens after 1, 2 and 3 seconds
    engine.run()

    metrics = engine.scheduler.metrics()

    assert (metrics.num_good, metrics.goodput) == (num_good, num_good / 5)


def test_a_request_that_was_ended_from_outside_is_not_a_good_one():
    engine = Engine()
    engine.add(0, max_tokens=9)
    engine.add(1, max_tokens=9, time_limit=0.5)
    engine.step()
    engine.scheduler.abort(0)
    engine.run()

    metrics = engine.scheduler.metrics()

    assert (metrics.num_finished, metrics.num_good, metrics.goodput) == (2, 0, 0.0)


def test_a_snapshot_does_not_change():
    engine = Engine()
    before = engine.scheduler.metrics()
    engine.add(0)
    engine.run()

    assert (before.num_steps, engine.scheduler.metrics().num_steps) == (0, 1)
