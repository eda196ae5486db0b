"""Text or tokens in, completions out: in order, piece by piece, interrupted, aborted."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from tests.engine.engines import (
    EOS,
    GREEDY,
    completions_of,
    drain,
    num_owned_pages,
    random_prompts,
    small_engine,
    spelled,
)

PROMPTS = random_prompts(6, max_len=40, seed=3)


def generate(llm, prompts, params: Any = GREEDY):
    return llm.generate(prompts, params, show_progress=False)


def token_ids_of(completions):
    return [completion.token_ids for completion in completions]


def unfilterable(**options) -> SamplingParams:
    """Sampling so hot that random weights meet stop conditions soon."""
    return SamplingParams(**{"temperature": 2.0, "seed": 5, "max_tokens": 60, **options})


# ---- generate: what goes in


def test_one_prompt_gives_one_completion(llm):
    assert len(generate(llm, "one prompt")) == 1


def test_many_prompts_give_their_completions_in_order(llm):
    completions = generate(llm, PROMPTS)

    assert [list(c.prompt_token_ids) for c in completions] == PROMPTS


def test_no_prompts_give_no_completions(llm):
    assert generate(llm, []) == []


def test_text_is_the_token_ids_it_is_encoded_to(llm):
    text, token_ids = generate(llm, ["a b", llm.tokenizer.encode("a b")])

    assert (text.prompt_token_ids, text.token_ids) == (token_ids.prompt_token_ids, token_ids.token_ids)


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7],
        (5, 6, 7),
        range(5, 8),
        np.array([5, 6, 7]),
        np.array([5, 6, 7], np.uint8),
        [np.int32(5), 6, 7],
    ],
    ids=["list", "tuple", "range", "int64 array", "uint8 array", "numpy scalar"],
)
def test_token_ids_may_come_in_any_sequence(llm, prompt):
    assert generate(llm, prompt)[0].token_ids == generate(llm, [[5, 6, 7]])[0].token_ids


def test_text_and_token_ids_and_arrays_may_be_mixed(llm):
    completions = generate(llm, ["ab", [5, 6], np.array([7, 8])])

    assert [c.prompt_token_ids for c in completions] == [(66, 67), (5, 6), (7, 8)]


def test_a_two_dimensional_array_is_one_prompt_per_row(llm):
    completions = generate(llm, np.array([[5, 6], [7, 8]]))

    assert [c.prompt_token_ids for c in completions] == [(5, 6), (7, 8)]


def test_the_token_ids_of_a_completion_are_plain_integers(llm):
    completion = generate(llm, np.array([5, 6, 7]))[0]

    assert {type(i) for i in completion.prompt_token_ids + completion.token_ids} == {int}


def test_prompts_may_come_from_a_generator(llm):
    assert token_ids_of(generate(llm, (p for p in PROMPTS))) == token_ids_of(generate(llm, PROMPTS))


def test_each_prompt_may_have_its_own_sampling_params(llm):
    completions = generate(llm, PROMPTS[:3], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 1, 2)])

    assert [len(c.token_ids) for c in completions] == [3, 1, 2]


def test_without_sampling_params_the_defaults_are_used(llm):
    completion = llm.generate(PROMPTS[0], show_progress=False)[0]

    assert completion.finish_reason == "stop" or len(completion.token_ids) > 8


@pytest.mark.parametrize("show_progress", [True, False])
def test_the_progress_bar_shows_only_where_it_is_wanted(llm, capsys, show_progress):
    llm.generate(PROMPTS[:2], GREEDY, show_progress=show_progress)

    assert ("2/2" in capsys.readouterr().err) == show_progress


# ---- what comes out


def test_the_text_is_that_of_the_tokens(llm):
    for completion in generate(llm, PROMPTS):
        assert completion.text == spelled(completion.token_ids)


def test_max_tokens_bound_the_output(llm):
    completion = generate(llm, PROMPTS[0], SamplingParams(max_tokens=5, ignore_eos=True))[0]

    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")


def test_the_output_ends_at_the_models_length(llm):
    prompt = [5] * 90

    completion = generate(llm, prompt, SamplingParams(max_tokens=50, ignore_eos=True))[0]

    assert (len(completion.token_ids), completion.finish_reason) == (6, "length")


def test_the_end_token_ends_the_text(llm):
    # Near-uniform draws: 12 requests of 60 out of 96 tokens all miss the end token once in 2,000 models.
    params = [unfilterable(seed=seed, temperature=20.0, ignore_eos=True) for seed in range(12)]
    endless = next(c for c in generate(llm, [PROMPTS[0]] * 12, params) if EOS in c.token_ids)

    completion = generate(llm, PROMPTS[0], unfilterable(seed=endless.seed, temperature=20.0))[0]

    assert completion.finish_reason == "stop"
    assert completion.token_ids == endless.token_ids[: endless.token_ids.index(EOS) + 1]


def test_a_stop_token_ends_the_output(llm):
    free = generate(llm, PROMPTS[0], unfilterable(ignore_eos=True))[0].token_ids
    stop = free[7]

    completion = generate(llm, PROMPTS[0], unfilterable(ignore_eos=True, stop_token_ids=[stop]))[0]

    assert completion.finish_reason == "stop"
    assert completion.token_ids == free[: free.index(stop) + 1]


def test_a_stop_string_ends_the_text_before_it(llm):
    free = generate(llm, PROMPTS[0], unfilterable(ignore_eos=True))[0].text
    stop = free[7:10]

    completion = generate(llm, PROMPTS[0], unfilterable(ignore_eos=True, stop=[stop]))[0]

    assert (completion.finish_reason, completion.text) == ("stop", free[: free.index(stop)])


def test_alternatives_are_the_most_probable_tokens_first(llm):
    completion = generate(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=3, log_probs=4))[0]

    for token_id, log_prob, top in zip(
        completion.token_ids, completion.log_probs, completion.top_log_probs, strict=True
    ):
        assert len(top) == 4
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert next(iter(top.items())) == (token_id, log_prob)


# ---- seeds


def test_requests_without_a_seed_report_different_ones(llm):
    completions = generate(llm, [PROMPTS[0]] * 2, SamplingParams(max_tokens=2))

    assert completions[0].seed != completions[1].seed


def test_the_reported_seed_repeats_the_text(llm):
    first = generate(llm, PROMPTS[0], SamplingParams(max_tokens=20))[0]

    again = generate(llm, PROMPTS[0], SamplingParams(max_tokens=20, seed=first.seed))[0]

    assert (again.text, again.token_ids, again.seed) == (first.text, first.token_ids, first.seed)


def test_different_seeds_give_different_texts(llm):
    completions = generate(llm, [PROMPTS[0]] * 5, [unfilterable(seed=seed) for seed in range(5)])

    assert len({c.text for c in completions}) == 5


# ---- interruption


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_generate_leaves_the_llm_usable_and_all_pages_free(llm, monkeypatch, error):
    expected = token_ids_of(generate(llm, PROMPTS))
    run, calls = llm._runner.run, itertools.count()

    def interrupted_run(step):
        if next(calls) == 4:
            raise error("stop it")
        return run(step)

    with monkeypatch.context() as patch:
        patch.setattr(llm._runner, "run", interrupted_run)
        with pytest.raises(error):
            generate(llm, PROMPTS)

    assert (llm.has_unfinished, num_owned_pages(llm)) == (False, 0)
    assert token_ids_of(generate(llm, PROMPTS)) == expected


def test_an_interrupted_generate_leaves_the_requests_of_others_alone(llm, monkeypatch):
    expected = generate(llm, PROMPTS[0])[0].token_ids
    request_id = llm.add(PROMPTS[0], GREEDY)
    llm.step()

    def interrupted_run(step):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._runner, "run", interrupted_run)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, PROMPTS[1])

    assert completions_of(drain(llm))[request_id].token_ids == expected


# ---- stream


def test_a_stream_joined_is_the_completion(llm):
    deltas = list(llm.stream(PROMPTS[0], unfilterable()))

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
    alone = [list(llm.stream(prompt, unfilterable(max_tokens=9))) for prompt in PROMPTS[:2]]

    streams = [llm.stream(prompt, unfilterable(max_tokens=9)) for prompt in PROMPTS[:2]]
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


# ---- without a tokenizer


def test_an_llm_without_a_tokenizer_completes_token_ids(checkpoint, llm, tmp_path):
    for file in checkpoint.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    mute = small_engine(tmp_path)

    completion = generate(mute, PROMPTS[0])[0]

    assert (completion.text, completion.token_ids) == ("", generate(llm, PROMPTS[0])[0].token_ids)
