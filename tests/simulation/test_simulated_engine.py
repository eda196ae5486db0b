"""The simulated engine schedules as the real one does, and its clock adds up what its steps take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxinfer.checkpoint import read_config
from jaxinfer.config import CacheConfig, EngineConfig, Parallelism
from jaxinfer.engine.scheduling.metrics import Targets
from jaxinfer.model.cache import page_bytes
from jaxinfer.plan.step_shapes import plan_buckets
from jaxinfer.simulation import driver
from jaxinfer.simulation.driver import drive
from jaxinfer.simulation.real_engine import RealEngine, rehearse
from jaxinfer.simulation.simulated_engine import load_simulated_engine
from jaxinfer.simulation.step_times import FEATURES, StepTimes, fit_step_times, measured_steps
from jaxinfer.simulation.trace import MAX_LEN, TracedRequest
from tests.engine.engines import SMALL, save_small_checkpoint, small_engine

CONFIG = {**SMALL, "max_model_len": 256, "num_pages": 20}
# One second a step of decoding, ten of any other, whatever is in it.
CONSTANT = StepTimes((1.0,) + (0.0,) * (len(FEATURES) - 1), (10.0,) + (0.0,) * (len(FEATURES) - 1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_small_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def simulate(checkpoint, trace, times=CONSTANT, *, parallelism=None, link_bandwidth=None, **options):
    config = EngineConfig(**CONFIG, parallelism=parallelism)
    engine = load_simulated_engine(checkpoint, config, times, link_bandwidth=link_bandwidth)
    return drive(trace, engine, **options)


def request(arrival, input_len, output_len, *block_ids):
    return TracedRequest(arrival=arrival, input_len=input_len, output_len=output_len, block_ids=block_ids)


def test_the_clock_adds_up_the_steps_of_one_request(checkpoint):
    report = simulate(checkpoint, [request(5.0, 20, 4)])

    # It arrives at 5, is prefilled until 15, and three more tokens take a second each.
    assert report.ttft["mean"] == 10.0
    assert report.tpot["mean"] == 1.0
    assert report.latency["p99"] == 13.0
    assert (report.makespan, report.num_steps) == (18.0, 4)
    assert report.output_tokens_per_second == pytest.approx(4 / 18)


def test_a_request_that_comes_during_a_step_waits_for_the_one_after_the_next(checkpoint):
    report = simulate(checkpoint, [request(0.0, 20, 3), request(2.0, 20, 1)])

    # 0 to 10 and 10 to 11: the first, its second step on its way since 0; 11 to 21: both, and both are done.
    assert report.ttft["mean"] == (10.0 + 19.0) / 2
    assert report.makespan == 21.0


def test_replicas_compute_at_the_same_time(checkpoint):
    trace = [request(0.0, 20, 4)] * 2 + [request(3.0, 20, 1)]

    report = simulate(checkpoint, trace, parallelism=Parallelism(replicas=2))

    # 0 to 11: two tokens each; 11 to 21: the third beside a token of the first, whose last one takes a second more.
    assert report.makespan == 22.0
    assert report.num_steps == 4 + 4


def test_a_hand_over_takes_the_time_of_its_bytes_on_the_link(checkpoint):
    bandwidth = 2 * page_bytes(read_config(checkpoint), CacheConfig(num_pages=20, page_size=16)) / 5.0
    apart = {"parallelism": Parallelism(replicas=2, prefill=1), "link_bandwidth": bandwidth}

    report = simulate(checkpoint, [request(5.0, 20, 4)], **apart)
    both = simulate(checkpoint, [request(5.0, 20, 4), request(5.0, 100, 4)], **apart)

    # It is prefilled until 15, its two pages arrive at 20, and three more tokens take a second each.
    assert (report.ttft["mean"], report.latency["mean"]) == (10.0, 10.0 + 5.0 + 3.0)
    # The second prompt takes three steps more, to 45; its seven pages arrive at 62.5, and no step of the first waits.
    assert both.latency["mean"] == pytest.approx((18.0 + 17.5 + 40.0 + 3.0) / 2)


def test_a_link_is_given_for_replicas_that_prefill_alone(checkpoint):
    for parallelism, bandwidth in ((None, 1.0), (Parallelism(replicas=2, prefill=1), None)):
        with pytest.raises(ValueError, match=f"link_bandwidth={bandwidth} does not fit Parallelism.prefill="):
            simulate(checkpoint, [], parallelism=parallelism, link_bandwidth=bandwidth)


def test_goodput_counts_those_who_met_both_targets(checkpoint):
    trace = [request(0.0, 20, 3), request(2.0, 20, 1)]

    assert simulate(checkpoint, trace, targets=Targets(ttft=10.0, tpot=5.0)).goodput == 0.0
    assert simulate(checkpoint, trace, targets=Targets(ttft=10.0, tpot=6.0)).goodput == pytest.approx(1 / 21)
    assert simulate(checkpoint, trace, targets=Targets(ttft=19.0)).goodput == pytest.approx(2 / 21)


def test_a_request_that_does_not_fit_is_refused_and_the_rest_goes_on(checkpoint):
    report = simulate(checkpoint, [request(0.0, 300, 3), request(0.0, 20, 3)])

    assert (report.num_refused, report.num_requests) == (1, 1)


def test_a_prompt_that_is_too_long_is_refused_before_it_is_made(checkpoint, monkeypatch):
    monkeypatch.setattr(driver, "make_prompt", lambda *_: pytest.fail("made"))

    assert simulate(checkpoint, [request(0.0, MAX_LEN, 1)]).num_refused == 1


def test_an_empty_trace_is_an_empty_report(checkpoint):
    report = simulate(checkpoint, [])

    assert (report.num_requests, report.num_steps, report.ttft) == (0, 0, {})


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 20, "max_num_batched_tokens": 128, "max_mixed_tokens": 40}])
def test_a_rehearsal_has_the_largest_prefill_and_every_size_of_decode_steps(checkpoint, limits):
    config, shapes = EngineConfig(**CONFIG | limits), set()
    times: Any = SimpleNamespace(seconds=lambda step, bucket: shapes.add(bucket) or 1.0)
    engine = load_simulated_engine(checkpoint, config, times)

    def generate(prompts, params, show_progress):
        for pair in zip(prompts, params, strict=True):
            engine.add(*pair)
        while engine._scheduler.num_unfinished:
            engine.step()

    model_config, metrics = engine._admission.model_config, engine._scheduler.metrics
    llm: Any = SimpleNamespace(engine_config=config, model_config=model_config, metrics=metrics, generate=generate)
    rehearse(llm)

    assert shapes >= {bucket for bucket in plan_buckets(config) if bucket.is_decode} | {plan_buckets(config)[-1]}


@pytest.mark.parametrize("seed", [0, 1])
def test_the_real_engine_takes_the_same_steps(checkpoint, seed):
    rng = np.random.default_rng(seed)
    trace = [request(0.0, *rng.integers(1, 100, 2).tolist(), int(rng.integers(0, 3))) for _ in range(30)]
    llm = small_engine(checkpoint, **CONFIG)
    real, steps = RealEngine(llm), measured_steps(llm)

    replayed = drive(trace, real)
    times = fit_step_times(steps)
    simulated = simulate(checkpoint, trace, times)

    assert real.num_preemptions > 0
    assert replayed.hit_rate > 0
    for name in ("num_requests", "num_refused", "num_steps", "num_preemptions", "hit_rate"):
        assert getattr(simulated, name) == getattr(replayed, name), name


def test_tiers_cannot_be_simulated(checkpoint):
    with pytest.raises(ValueError, match="host_cache_bytes=9999 .* not simulated.*leave them out"):
        load_simulated_engine(checkpoint, EngineConfig(**CONFIG, host_cache_bytes=9999), CONSTANT)


def test_decode_loops_cannot_be_simulated(checkpoint):
    with pytest.raises(ValueError, match="decode_loop_steps=4 is not simulated.*to 1"):
        load_simulated_engine(checkpoint, EngineConfig(**CONFIG, decode_loop_steps=4), CONSTANT)


def test_copies_of_pages_do_not_pile_up(checkpoint):
    engine = load_simulated_engine(checkpoint, EngineConfig(**CONFIG), CONSTANT)
    # Blocks have 512 tokens: of the second prompt the last page is begun by the first.
    drive([request(0.0, 40, 20, 1), request(100.0, 46, 2, 1)], engine)

    assert len(engine._scheduler.replicas[0].tables.copies.queue) == 0
    assert engine._scheduler.metrics().num_found_tokens > 32
