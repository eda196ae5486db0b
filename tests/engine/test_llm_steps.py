"""Requests that advance step by step: interrupted, streamed, aborted, side by side."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.request import QueueFullError
from tests.engine.engines import GREEDY, completions_of, drain, num_owned_pages, random_prompts, small_engine

PROMPTS = random_prompts(6, max_len=40, seed=3)
DRAWN = SamplingParams(temperature=2.0, seed=5, max_tokens=9, ignore_eos=True)


def generate(llm, prompts, params: Any = GREEDY):
    return llm.generate(prompts, params, show_progress=False)


def token_ids_of(completions):
    return [completion.token_ids for completion in completions]


# ---- interruption


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_generate_leaves_the_llm_usable_and_all_pages_free(llm, monkeypatch, error):
    expected = token_ids_of(generate(llm, PROMPTS))
    launch, calls = llm._runner.launch, itertools.count()

    def interrupted_launch(step):
        if next(calls) == 4:
            raise error("stop it")
        return launch(step)

    with monkeypatch.context() as patch:
        patch.setattr(llm._runner, "launch", interrupted_launch)
        with pytest.raises(error):
            generate(llm, PROMPTS)

    assert (llm.has_unfinished, num_owned_pages(llm)) == (False, 0)
    assert token_ids_of(generate(llm, PROMPTS)) == expected


def test_an_interrupted_generate_leaves_the_requests_of_others_alone(llm, monkeypatch):
    expected = generate(llm, PROMPTS[0])[0].token_ids
    request_id = llm.add(PROMPTS[0], GREEDY)
    llm.step()

    def interrupted_launch(step):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._runner, "launch", interrupted_launch)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, PROMPTS[1])

    assert completions_of(drain(llm))[request_id].token_ids == expected


# ---- stream


def test_a_stream_joined_is_the_completion(llm):
    deltas = list(llm.stream(PROMPTS[0], DRAWN))

    completion = deltas[-1].completion
    assert completion is not None
    assert completion.text == "".join(delta.text for delta in deltas)
    assert completion.token_ids == sum((delta.token_ids for delta in deltas), ())
    assert completion.log_probs == sum((delta.log_probs for delta in deltas), ())


def test_only_the_last_delta_of_a_stream_carries_the_completion(llm):
    deltas = list(llm.stream(PROMPTS[0], GREEDY))

    assert [delta.completion is not None for delta in deltas] == [False] * 7 + [True]


def test_a_stream_yields_while_the_request_runs(llm):
    stream = llm.stream(PROMPTS[0], GREEDY)

    next(stream)

    assert llm.has_unfinished
    stream.close()


@pytest.mark.parametrize("num_deltas", [0, 1, 3])
def test_closing_a_stream_aborts_its_request(llm, num_deltas):
    stream = llm.stream(PROMPTS[0], GREEDY)
    for _ in range(num_deltas):
        next(stream)

    stream.close()

    assert (llm.has_unfinished, num_owned_pages(llm)) == (False, 0)


def test_a_stream_that_nobody_keeps_does_not_run_on(llm):
    llm.stream(PROMPTS[0], GREEDY)

    assert not llm.has_unfinished


def test_two_interleaved_streams_yield_what_each_yields_alone(llm):
    alone = [list(llm.stream(prompt, DRAWN)) for prompt in PROMPTS[:2]]

    streams = [llm.stream(prompt, DRAWN) for prompt in PROMPTS[:2]]
    together = [[], []]
    for pair in itertools.zip_longest(*streams):
        for deltas, delta in zip(together, pair, strict=True):
            deltas += [] if delta is None else [delta]

    assert [[d.token_ids for d in deltas] for deltas in together] == [[d.token_ids for d in deltas] for deltas in alone]


def test_a_stream_goes_on_beside_generate(llm):
    expected = [delta.token_ids for delta in llm.stream(PROMPTS[0], GREEDY)]
    stream = llm.stream(PROMPTS[0], GREEDY)
    first = next(stream)

    generate(llm, PROMPTS[1:3])

    assert [first.token_ids, *(delta.token_ids for delta in stream)] == expected


def test_aborting_the_request_of_a_stream_ends_the_stream(llm):
    stream = llm.stream(PROMPTS[0], GREEDY)
    request_id = next(stream).request_id

    llm.abort(request_id)

    assert [d.completion and d.completion.finish_reason for d in stream] == ["abort"]


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
    monkeypatch.setattr(llm._scheduler, "clock", lambda: float(next(now)))

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

    assert llm._scheduler.num_unfinished >= 4
    assert sorted(completions_of(deltas + drain(llm))) == batch


@pytest.fixture
def with_max_waiting_of_two(llm, monkeypatch):
    monkeypatch.setattr(llm._scheduler, "_max_waiting", 2)  # beside the 4 that can run
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
    assert llm._delivery.mailroom.is_idle
