"""Requests whose deltas somebody reads as they come, side by side, broken off, and beside others."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from dataclasses import replace

import pytest

from jaxinfer.config import SamplingParams
from tests.engine.engines import GREEDY, completions_of, drain, generate, num_owned_pages, random_prompts, token_ids_of
from tests.engine.probe import runner_of, scheduler_of

PROMPTS = random_prompts(6, max_len=40, seed=3)
DRAWN = SamplingParams(temperature=2.0, seed=5, max_tokens=9, ignore_eos=True)


# ---- interruption


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_generate_leaves_the_llm_usable_and_all_pages_free(llm, monkeypatch, error):
    expected = token_ids_of(generate(llm, PROMPTS))
    launch, calls = runner_of(llm).launch, itertools.count()

    def interrupted_launch(step):
        if next(calls) == 4:
            raise error("stop it")
        return launch(step)

    with monkeypatch.context() as patch:
        patch.setattr(runner_of(llm), "launch", interrupted_launch)
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
        patch.setattr(runner_of(llm), "launch", interrupted_launch)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, PROMPTS[1])

    assert completions_of(drain(llm))[request_id].token_ids == expected


# ---- stream


@pytest.mark.parametrize("log_probs", [0, 2])
def test_a_stream_joined_is_the_completion(llm, log_probs):
    deltas = list(llm.stream(PROMPTS[0], replace(DRAWN, log_probs=log_probs)))

    completion = deltas[-1].completion
    assert completion is not None
    assert completion.text == "".join(delta.text for delta in deltas)
    assert completion.token_ids == sum((delta.token_ids for delta in deltas), ())
    assert completion.log_probs == sum((delta.log_probs for delta in deltas), ())
    assert completion.top_log_probs == sum((delta.top_log_probs for delta in deltas), ())
    assert len(completion.top_log_probs) == (len(completion.token_ids) if log_probs else 0)


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


def test_a_stream_that_another_thread_closes_during_a_step_ends_before_the_next(llm):
    expected = token_ids_of(generate(llm, PROMPTS[1]))
    stream = llm.stream(PROMPTS[0], GREEDY)
    request_id, unfinished = next(stream).request_id, []

    def close_elsewhere(*_):
        if not unfinished:
            thread = threading.Thread(target=stream.close)
            thread.start()
            thread.join()
        unfinished.append(scheduler_of(llm).find(request_id) is not None)

    llm.on_step = close_elsewhere
    completions = generate(llm, PROMPTS[1])
    llm.on_step = None

    assert unfinished[0]
    assert len(unfinished) > 7
    assert not any(unfinished[1:])
    assert token_ids_of(completions) == expected
    assert num_owned_pages(llm) == 0


def test_a_request_that_another_thread_drops_during_a_step_ends_before_the_next(llm):
    request_id, unfinished = llm.add(PROMPTS[0], GREEDY), []

    def drop_elsewhere(*_):
        thread = threading.Thread(target=llm.drop, args=[request_id])
        thread.start()
        thread.join()
        unfinished.append(scheduler_of(llm).find(request_id) is not None)

    llm.on_step = drop_elsewhere
    generate(llm, PROMPTS[1])
    llm.on_step = None
    deltas = drain(llm)

    assert unfinished[0]
    assert not any(unfinished[1:])
    assert all(delta.completion is None for delta in deltas)
    assert num_owned_pages(llm) == 0


def test_a_stream_that_the_collector_closes_in_the_middle_of_scheduling_does_not_end_there(llm, monkeypatch):
    expected = token_ids_of(generate(llm, PROMPTS[1]))
    stream = llm.stream(PROMPTS[0], GREEDY)
    request_id, unfinished = next(stream).request_id, []
    scheduler, admit = scheduler_of(llm), scheduler_of(llm)._admit

    def admit_and_collect(*args):
        stream.close()
        unfinished.append(scheduler_of(llm).find(request_id) is not None)
        admit(*args)

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "_admit", admit_and_collect)
        completions = generate(llm, PROMPTS[1])

    assert unfinished[0]
    assert not any(unfinished[2:])  # the next step may be scheduled in the same turn of the loop
    assert token_ids_of(completions) == expected
    assert num_owned_pages(llm) == 0


def test_streams_that_other_threads_close_all_the_time_disturb_no_request(llm):
    expected = token_ids_of(generate(llm, PROMPTS))
    is_done, refusals = threading.Event(), []

    def open_and_close():
        while not is_done.is_set():
            stream = llm.stream(PROMPTS[0], GREEDY)
            try:
                next(stream)
            except RuntimeError as error:
                refusals.append(str(error))
            stream.close()

    threads = [threading.Thread(target=open_and_close) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        completions = []
        while len(completions) < 5:
            with contextlib.suppress(RuntimeError):  # refused, because another thread has its turn
                completions.append(token_ids_of(generate(llm, PROMPTS)))
    finally:
        is_done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)

    assert completions == [expected] * 5
    assert all("another thread is using this LLM" in refusal for refusal in refusals)
    assert (llm.has_unfinished, num_owned_pages(llm)) == (False, 0)


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
