"""When decoding goes on by itself on the device, and when not; `test_parameters` shows that no bit changes."""

from __future__ import annotations

import pytest

from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.engine.engine import BUNDLED_MODEL
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
        plan_speculation("ngram", EngineConfig(decode_loop_steps=4), "float32", target=BUNDLED_MODEL)
