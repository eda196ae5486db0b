"""Requests that advance step by step: added, aborted, on terms, side by side."""

from __future__ import annotations

import itertools

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.request.request import QueueFullError
from tests.engine.engines import GREEDY, completions_of, drain, generate, random_prompts, small_engine, token_ids_of
from tests.engine.probe import is_idle, scheduler_of

PROMPTS = random_prompts(6, max_len=40, seed=3)
DRAWN = SamplingParams(temperature=2.0, seed=5, max_tokens=9, ignore_eos=True)


# ---- add, step, abort


def test_the_metrics_and_timings_of_an_llm_are_those_of_its_requests(llm):
    before = llm.metrics()

    completions = generate(llm, PROMPTS)

    after = llm.metrics()
    assert after.num_output_tokens - before.num_output_tokens == 8 * len(PROMPTS)
    assert after.num_finished - before.num_finished == len(PROMPTS)
    assert (after.num_running, after.num_waiting, after.num_owned_pages) == (0, 0, 0)
    for completion in completions:
        queue, ttft = completion.timings.queue, completion.timings.ttft
        assert queue is not None
        assert ttft is not None
        assert 0 <= queue < ttft < after.busy_seconds - before.busy_seconds + queue
        assert len(completion.timings.itl) == 7


def test_a_new_llm_has_nothing_unfinished(llm):
    assert not llm.has_unfinished


def test_a_step_without_requests_returns_nothing(llm):
    assert llm.step() == []


def test_an_added_request_is_unfinished_until_its_completion_is_out(llm):
    request_id = llm.add(PROMPTS[0], GREEDY)
    assert llm.has_unfinished

    deltas = drain(llm)

    assert list(completions_of(deltas)) == [request_id]


def test_adding_steps_and_generating_give_the_same_tokens(llm):
    expected = token_ids_of(generate(llm, PROMPTS))

    ids = [llm.add(prompt, GREEDY) for prompt in PROMPTS]
    done = completions_of(drain(llm))

    assert [done[request_id].token_ids for request_id in ids] == expected


def test_request_ids_are_never_used_again(llm):
    first = llm.add(PROMPTS[0], GREEDY)
    drain(llm)

    second = llm.add(PROMPTS[0], GREEDY)
    drain(llm)

    assert second != first


@pytest.mark.parametrize("num_steps", [0, 2, 4])
def test_an_aborted_request_comes_out_with_what_it_has(llm, num_steps):
    expected = generate(llm, PROMPTS[0])[0].token_ids
    request_id = llm.add(PROMPTS[0], GREEDY)
    deltas = [delta for _ in range(num_steps) for delta in llm.step()]
    num_tokens = sum(len(delta.token_ids) for delta in deltas)

    llm.abort(request_id)

    completion = completions_of(llm.step())[request_id]
    assert (completion.finish_reason, completion.token_ids) == ("abort", expected[:num_tokens])


def test_the_completion_of_an_aborted_request_is_something_unfinished(llm):
    llm.abort(llm.add(PROMPTS[0], GREEDY))

    deltas = drain(llm)  # what a caller does who steps while has_unfinished

    leftover = llm.step()
    assert (len(deltas), leftover) == (1, [])


def test_an_abort_does_not_change_the_others(llm):
    expected = generate(llm, PROMPTS[1])[0].token_ids
    first, second = llm.add(PROMPTS[0], GREEDY), llm.add(PROMPTS[1], GREEDY)
    deltas = llm.step() + llm.step()

    llm.abort(first)

    assert completions_of(deltas + drain(llm))[second].token_ids == expected
    llm.step()


def test_aborting_a_finished_request_changes_nothing(llm):
    request_id = llm.add(PROMPTS[0], GREEDY)
    drain(llm)

    llm.abort(request_id)

    assert llm.step() == []


def test_requests_of_add_go_on_while_others_generate(llm):
    request_id = llm.add(PROMPTS[0], GREEDY)

    generate(llm, PROMPTS[1:3])

    assert completions_of(llm.step())[request_id].token_ids == generate(llm, PROMPTS[0])[0].token_ids


# ---- the prefix cache


def cached_tokens_of(llm, prompt, **options) -> int:
    return llm.generate(prompt, GREEDY, show_progress=False, **options)[0].num_cached_tokens


def test_a_cache_salt_keeps_prefixes_to_those_who_know_it(llm):
    prompt = random_prompts(1, max_len=60, seed=8)[0]
    assert len(prompt) > 16
    assert cached_tokens_of(llm, prompt, cache_salt="mine") == 0

    assert cached_tokens_of(llm, prompt) == 0
    assert cached_tokens_of(llm, prompt, cache_salt="yours") == 0
    assert cached_tokens_of(llm, prompt, cache_salt="mine") > 0


@pytest.mark.parametrize("method", ["add", "stream"])
def test_every_way_in_takes_a_cache_salt(llm, method):
    prompt = random_prompts(1, max_len=60, seed=9)[0]
    cached_tokens_of(llm, prompt)

    if method == "add":
        llm.add(prompt, GREEDY, cache_salt="by add")
        deltas = drain(llm)
    else:
        deltas = list(llm.stream(prompt, GREEDY, cache_salt="by stream"))

    assert [c.num_cached_tokens for c in completions_of(deltas).values()] == [0]
    assert cached_tokens_of(llm, prompt) > 0


def test_without_the_prefix_cache_nothing_is_shared(checkpoint, llm):
    prompt = random_prompts(1, max_len=60, seed=8)[0]
    expected = generate(llm, prompt)[0].token_ids
    other = small_engine(checkpoint, prefix_cache=False, max_prompt_log_probs=3)

    completions = [generate(other, prompt)[0] for _ in range(2)]

    assert [(c.num_cached_tokens, c.token_ids) for c in completions] == [(0, expected)] * 2


# ---- terms


@pytest.mark.parametrize("method", ["add", "generate", "stream"])
def test_a_deadline_ends_a_request_with_what_it_has(llm, monkeypatch, method):
    expected = generate(llm, PROMPTS[0])[0].token_ids
    now = itertools.count()  # one second per look at the clock
    monkeypatch.setattr(scheduler_of(llm), "clock", lambda: float(next(now)))

    if method == "generate":
        completion = llm.generate(PROMPTS[0], GREEDY, deadline=9.0, show_progress=False)[0]
    elif method == "stream":
        *_, last = llm.stream(PROMPTS[0], GREEDY, deadline=9.0)
        completion = last.completion
    else:
        request_id = llm.add(PROMPTS[0], GREEDY, deadline=9.0)
        completion = completions_of(drain(llm))[request_id]

    assert completion is not None
    assert completion.finish_reason == "deadline"
    assert 0 < len(completion.token_ids) < len(expected)
    assert completion.token_ids == expected[: len(completion.token_ids)]


def test_an_interactive_request_overtakes_batch_work(llm):
    batch = [llm.add(prompt, GREEDY, priority="batch") for prompt in (PROMPTS * 2)[:8]]  # twice as many as rows
    deltas = llm.step() + llm.step()

    generate(llm, PROMPTS[1])

    assert scheduler_of(llm).num_unfinished >= 4
    assert sorted(completions_of(deltas + drain(llm))) == batch


@pytest.fixture
def with_max_waiting_of_two(llm, monkeypatch):
    monkeypatch.setattr(scheduler_of(llm), "_max_waiting", 2)  # beside the 4 that can run
    return llm


def test_too_many_prompts_are_refused_together(with_max_waiting_of_two):
    with pytest.raises(QueueFullError, match="7 requests more than the 0 unfinished ones"):
        generate(with_max_waiting_of_two, [PROMPTS[0]] * 7)

    assert not with_max_waiting_of_two.has_unfinished
    assert len(generate(with_max_waiting_of_two, [PROMPTS[0]] * 6)) == 6


def test_a_full_queue_refuses_one_more_and_goes_on(with_max_waiting_of_two):
    llm = with_max_waiting_of_two
    ids = [llm.add(PROMPTS[0], GREEDY) for _ in range(6)]

    with pytest.raises(QueueFullError, match="raise EngineConfig.max_waiting"):
        llm.add(PROMPTS[0], GREEDY)
    with pytest.raises(QueueFullError, match="raise EngineConfig.max_waiting"):
        next(llm.stream(PROMPTS[0], GREEDY))

    assert sorted(completions_of(drain(llm))) == ids
    assert is_idle(llm)
