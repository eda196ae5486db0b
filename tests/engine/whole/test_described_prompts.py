"""The log-probabilities of a prompt are those of the prompt alone, whoever has computed it and in whatever pieces.

That they are the right ones show `test_llm_against_transformers` and `test_prompt_log_probs`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from tests.engine.engines import completions_of, content_of, drain, forget_prefixes, recorded_steps
from tests.engine.probe import runner_of

PROMPT = [*range(2, 82)]  # three chunks of the shared engine, five pages
ASKING = SamplingParams(max_tokens=10, seed=3, prompt_log_probs=2, ignore_eos=True)


@pytest.fixture
def alone(llm):
    """What the request yields in an engine that has nothing in its cache, which it has not afterwards either."""
    forget_prefixes(llm)
    completion = llm.generate(PROMPT, ASKING, show_progress=False)[0]
    forget_prefixes(llm)
    return completion


def run(llm, prompt=PROMPT, params=ASKING):
    return llm.generate(prompt, params, show_progress=False)


def test_every_token_of_the_prompt_but_the_first_has_one(alone):
    assert len(alone.prompt_log_probs) == len(alone.prompt_top_log_probs) == len(PROMPT)
    assert (alone.prompt_log_probs[0], alone.prompt_top_log_probs[0]) == (None, {})
    assert all(value < 0 for value in alone.prompt_log_probs[1:])
    assert all(len(top) == 2 for top in alone.prompt_top_log_probs[1:])


def test_without_alternatives_there_are_those_of_the_tokens_alone(llm, alone):
    completion = run(llm, params=dataclasses.replace(ASKING, prompt_log_probs=0))[0]

    assert completion.prompt_log_probs == alone.prompt_log_probs
    assert completion.prompt_top_log_probs == ({},) * len(PROMPT)


def test_who_does_not_ask_is_told_nothing_and_draws_the_same(llm, alone):
    completion = run(llm, params=dataclasses.replace(ASKING, prompt_log_probs=None))[0]

    assert (completion.prompt_log_probs, completion.prompt_top_log_probs) == ((), ())
    assert (completion.token_ids, completion.log_probs) == (alone.token_ids, alone.log_probs)


def test_a_prompt_of_one_token_follows_nothing(llm):
    completion = run(llm, [5])[0]

    assert (completion.prompt_log_probs, completion.prompt_top_log_probs) == ((None,), ({},))


def test_what_is_cached_is_computed_again_and_kept_once(llm, alone):
    run(llm, params=dataclasses.replace(ASKING, prompt_log_probs=None))
    num_cached = llm.metrics().num_cached_pages

    completion = run(llm)[0]

    assert completion.num_cached_tokens == 0
    assert content_of(completion) == content_of(alone)
    assert llm.metrics().num_cached_pages == num_cached


def test_the_prompt_is_computed_once_for_all_samples(llm, alone):
    before = llm.metrics().num_prefill_tokens

    completions = run(llm, params=dataclasses.replace(ASKING, n=4))

    assert {(c.prompt_log_probs, len(c.token_ids)) for c in completions} == {(alone.prompt_log_probs, 10)}
    assert len({c.token_ids for c in completions}) == 4
    # Steps are launched before the last is read, so that the second sample begins before it is told.
    assert llm.metrics().num_prefill_tokens - before < 2.5 * len(PROMPT)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_branch_has_those_of_its_prompt(llm, alone, num_steps):
    request_id = llm.add(PROMPT, ASKING)
    for _ in range(num_steps):
        llm.step()

    branch_id = llm.fork(request_id, seed=3)

    completions = completions_of(drain(llm))
    for completion in (completions[request_id], completions[branch_id]):
        assert completion.prompt_log_probs == alone.prompt_log_probs
        assert completion.prompt_top_log_probs == alone.prompt_top_log_probs


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_a_request_that_is_saved_keeps_what_is_known_and_finds_the_rest(llm, alone, tmp_path, num_steps):
    request_id = llm.add(PROMPT, ASKING)
    for _ in range(num_steps):
        llm.step()
    llm.save(request_id, tmp_path / "request")
    llm.abort(request_id)
    llm.step()
    forget_prefixes(llm)

    restored_id = llm.restore(tmp_path / "request")
    with recorded_steps(llm) as steps:
        completion = completions_of(drain(llm))[restored_id]

    assert content_of(completion) == content_of(alone)
    assert any(step.prompt_log_prob_chunks for step in steps) == (num_steps < 3)


def test_a_request_that_ends_early_has_them_as_far_as_it_came(llm, alone):
    request_id = llm.add(PROMPT, ASKING)
    llm.step()
    llm.abort(request_id)

    completion = completions_of(drain(llm))[request_id]

    assert completion.prompt_log_probs == alone.prompt_log_probs[:33]


def test_one_that_is_attributed_to_the_token_beside_shows(llm, alone, monkeypatch):
    launch = runner_of(llm).launch

    def launch_and_shift(step):
        output = launch(step)
        if not step.prompt_log_prob_chunks:
            return output
        return output.replace(prompt=output.prompt.replace(log_probs=np.roll(output.prompt.log_probs, 1)))

    monkeypatch.setattr(runner_of(llm), "launch", launch_and_shift)
    assert run(llm)[0].prompt_log_probs[:20] != alone.prompt_log_probs[:20]
    monkeypatch.undo()
    forget_prefixes(llm)
