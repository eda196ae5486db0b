"""Several samples of one prompt: different, reproducible, and ranked where the best are asked for."""

from __future__ import annotations

import dataclasses

import pytest

from jaxinfer.config import SamplingParams
from tests.engine.engines import content_of, drain
from tests.engine.probe import is_idle

PROMPT = [7, 8, 9]
PARAMS = SamplingParams(n=4, seed=3, max_tokens=12, temperature=1.5, ignore_eos=True)
ONE = dataclasses.replace(PARAMS, n=1)


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture
def samples(llm):
    return llm.generate(PROMPT, PARAMS, show_progress=False)


def test_samples_are_different_and_in_the_order_of_their_index(samples):
    assert [c.sample_index for c in samples] == [0, 1, 2, 3]
    assert len(set(tokens_of(samples))) == 4
    assert len({(c.request_id, c.seed) for c in samples}) == 1


def test_samples_are_the_same_again_and_the_first_is_that_of_a_request_for_one(llm, samples):
    again = llm.generate(PROMPT, PARAMS, show_progress=False)
    one = llm.generate(PROMPT, ONE, show_progress=False)
    fewer = llm.generate([[5], PROMPT], [ONE, dataclasses.replace(PARAMS, n=2)], show_progress=False)

    assert tokens_of(again) == tokens_of(samples)
    assert tokens_of(one) == tokens_of(samples[:1])
    assert tokens_of(fewer[1:]) == tokens_of(samples[:2])


def test_without_a_seed_all_samples_share_the_one_that_repeats_them(llm):
    first = llm.generate(PROMPT, dataclasses.replace(PARAMS, seed=None), show_progress=False)

    second = llm.generate(PROMPT, dataclasses.replace(PARAMS, seed=first[0].seed), show_progress=False)

    assert tokens_of(second) == tokens_of(first)


@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_each_sample_goes_on_from_its_first_tokens_by_its_index(llm, samples, num_tokens):
    prompts = [[*PROMPT, *sample.token_ids[:num_tokens]] for sample in samples]
    params = [
        dataclasses.replace(ONE, sample_index=sample.sample_index, max_tokens=ONE.max_tokens - num_tokens)
        for sample in samples
    ]

    rest = llm.generate(prompts, params, show_progress=False)

    assert tokens_of(rest) == [sample.token_ids[num_tokens:] for sample in samples]
    assert [c.sample_index for c in rest] == [0, 1, 2, 3]


def test_the_samples_of_a_request_count_on_from_the_first_index(llm, samples):
    last = llm.generate(PROMPT, dataclasses.replace(PARAMS, n=2, sample_index=2), show_progress=False)

    assert [c.sample_index for c in last] == [2, 3]
    assert tokens_of(last) == tokens_of(samples[2:])


def test_a_fork_is_the_sample_after_those_of_its_request(llm, samples):
    request_id = llm.add(PROMPT, dataclasses.replace(ONE, sample_index=2))
    llm.step()
    llm.fork(request_id)

    completions = [delta.completion for delta in drain(llm) if delta.completion is not None]

    assert sorted(c.sample_index for c in completions) == [2, 3]


@pytest.mark.parametrize("fields", [{"sample_index": -1}, {"sample_index": 2**31 - 2, "n": 4}, {"sample_index": 1.5}])
def test_an_index_that_no_sample_can_have_is_refused(fields):
    with pytest.raises(ValueError, match=r"sample_index="):
        SamplingParams(**fields)


def test_best_of_gives_the_most_probable_first(llm, samples):
    best = llm.generate(PROMPT, dataclasses.replace(PARAMS, n=2, best_of=4), show_progress=False)

    expected = sorted(samples, key=lambda c: -sum(c.log_probs))[:2]
    assert tokens_of(best) == tokens_of(expected)
    assert [c.sample_index for c in best] == [c.sample_index for c in expected]


def test_the_deltas_of_all_samples_come_under_one_id(llm, samples):
    request_id = llm.add(PROMPT, PARAMS)

    deltas = drain(llm)

    assert {delta.request_id for delta in deltas} == {request_id}
    for i, sample in enumerate(samples):
        mine = [delta for delta in deltas if delta.sample_index == i]
        assert tuple(token for delta in mine for token in delta.token_ids) == sample.token_ids
        assert "".join(delta.text for delta in mine) == sample.text
        completion = mine[-1].completion
        assert completion is not None
        assert content_of(completion) == content_of(sample)


def test_a_stream_ends_with_the_last_sample(llm, samples):
    completions = [delta.completion for delta in llm.stream(PROMPT, PARAMS) if delta.completion is not None]

    assert sorted(tokens_of(completions)) == sorted(tokens_of(samples))


@pytest.mark.parametrize("fields", [{}, {"best_of": 5, "n": 3}], ids=["n", "best_of"])
def test_abort_ends_all_samples(llm, fields):
    params = dataclasses.replace(PARAMS, **fields)
    request_id = llm.add(PROMPT, params)
    llm.step()

    llm.abort(request_id)

    completions = [delta.completion for delta in drain(llm)]
    assert [c.finish_reason for c in completions if c] == ["abort"] * params.n
    assert is_idle(llm)


def test_a_stream_that_is_closed_leaves_nothing_behind(llm):
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)

    stream.close()

    assert not llm.has_unfinished
    assert is_idle(llm)
