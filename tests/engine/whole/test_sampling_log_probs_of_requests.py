"""Each token comes with its log-probability in the distribution that it was drawn from, under every schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxinfer import SamplingParams, load_checkpoint, log_probs, make_sampling
from tests.engine.engines import (
    ScriptedDrafter,
    ScriptedTrees,
    completions_of,
    crowded_engine,
    drafts_from,
    drain,
    favour_turns,
    forget_prefixes,
    generate,
    num_preemptions,
    recorded_steps,
    require_idle,
    small_engine,
)

PROMPT = [*range(20, 32)]
LONG = [[5 + i] * 40 for i in range(3)]  # of requests that want all pages
BASE = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8)
SAMPLED = [
    replace(BASE, seed=1, temperature=1.0),
    replace(BASE, seed=2, top_k=9, top_p=0.9, min_p=0.02),
    replace(BASE, seed=3, typical_p=0.8, repetition_penalty=1.3, frequency_penalty=0.4),
    replace(BASE, seed=4, min_tokens=4, stop_token_ids=[30, 31], logit_bias={40: 2.0}, bad_words=[[41], [42, 43]]),
    replace(BASE, seed=5, no_repeat_ngram_size=2, logits_processors={"turns": 2.0}),
    replace(BASE, temperature=0.0, repetition_penalty=1.3),
]
PLAIN = [*SAMPLED[:2], replace(BASE, temperature=0.0)]  # such rows run in decode loops


@pytest.fixture(scope="module")
def crowded(checkpoint):
    """Chunks of 5 tokens, too few pages, and drafts, in trees as well."""
    llm = crowded_engine(checkpoint, sampling_log_probs=True, draft_trees=True, max_log_probs=96)
    yield llm
    require_idle(llm)
    llm.close()


@pytest.fixture(scope="module")
def looping(checkpoint):
    llm = small_engine(checkpoint, sampling_log_probs=True, decode_loop_steps=4)
    yield llm
    require_idle(llm)
    llm.close()


@pytest.fixture(scope="module")
def by_training(checkpoint):
    """Returns the log-probabilities of completions of PROMPT by the differentiable function, f32[n, T]."""
    params, config = load_checkpoint(checkpoint, "float32")

    def compute(completions, sampling):
        tokens = np.ones((len(completions), len(PROMPT) + BASE.max_tokens), np.int32)
        for row, completion in zip(tokens, completions, strict=True):
            text = completion.prompt_token_ids + completion.token_ids
            row[: len(text)] = text
        lens: Any = {"prompt_lens": [len(PROMPT)] * len(tokens), "seeds": [c.seed for c in completions]}
        rows = make_sampling(sampling, num_rows=len(tokens), custom=("turns",), **lens)
        values = log_probs(params, tokens, rows, config=config, page_size=16, custom=(favour_turns,))
        output = np.asarray(values)[:, len(PROMPT) - 1 :].tolist()
        return [row[: len(completion.token_ids)] for row, completion in zip(output, completions, strict=True)]

    return compute


def values_of(completions):
    return [np.array(completion.sampling_log_probs, np.float32).tolist() for completion in completions]


@pytest.fixture(scope="module")
def alone(crowded):
    completions = []
    for params in SAMPLED:
        forget_prefixes(crowded)
        completions += generate(crowded, [PROMPT], params)
    return completions


def test_values_are_those_that_training_differentiates_to_the_bit(alone, by_training):
    assert values_of(alone) == by_training(alone, SAMPLED)
    assert set(alone[-1].sampling_log_probs) == {0.0}
    assert all(c.sampling_log_probs != c.log_probs for c in alone)


def test_no_chunk_neighbour_or_preemption_changes_a_bit(crowded, alone):
    before = num_preemptions(crowded)
    forget_prefixes(crowded)

    together = generate(crowded, [*LONG, *[PROMPT] * len(SAMPLED)], [*[BASE] * len(LONG), *SAMPLED])

    assert num_preemptions(crowded) > before
    assert values_of(together[len(LONG) :]) == values_of(alone)


@pytest.mark.parametrize("drafter", [ScriptedDrafter, ScriptedTrees])
def test_no_draft_changes_a_bit(crowded, alone, drafter):
    # Drafts are known by the prompt: of requests that share one, each runs by itself.
    for params, expected in zip(SAMPLED, alone, strict=True):
        with drafts_from(crowded, drafter(0.8, [expected])):
            before = crowded.metrics().num_accepted_tokens
            [verified] = generate(crowded, [PROMPT], params)
        assert crowded.metrics().num_accepted_tokens > before
        assert values_of([verified]) == values_of([expected])


def test_no_loop_changes_a_bit(looping, crowded):
    expected = [generate(crowded, [PROMPT], params)[0] for params in PLAIN]

    with recorded_steps(looping) as steps:
        looped = generate(looping, [PROMPT] * len(PLAIN), PLAIN)

    assert any(step.is_loop for step in steps)
    assert [c.token_ids for c in looped] == [c.token_ids for c in expected]
    assert values_of(looped) == values_of(expected)


def test_in_a_structure_it_is_the_distribution_of_the_allowed_tokens(crowded):
    """By NumPy, from the log-probabilities of all tokens under the model."""
    params = SamplingParams(regex="[a-d]{5}", temperature=0.7, seed=6, log_probs=96, max_tokens=8)
    allowed = [ord(c) - 31 for c in "abcd"]

    [completion] = generate(crowded, [PROMPT], params)

    assert len(completion.sampling_log_probs) == len(completion.token_ids)
    for token, value, tops in zip(
        completion.token_ids[:5], completion.sampling_log_probs, completion.top_log_probs, strict=False
    ):
        scaled = {i: np.float64(tops[i]) / 0.7 for i in allowed}
        expected = scaled[token] - np.log(sum(np.exp(x) for x in scaled.values()))
        assert value == pytest.approx(expected, abs=1e-5)


def test_deltas_branches_and_files_carry_them_on(crowded, alone, tmp_path):
    params, expected = SAMPLED[1], values_of(alone)[1]
    request_id = crowded.add(PROMPT, params)
    deltas = []
    while sum(len(delta.token_ids) for delta in deltas) < 6:
        deltas += crowded.step()
    crowded.rewind(request_id, 2)
    branch_id = crowded.fork(request_id, seed=9)
    crowded.save(request_id, tmp_path / "request")
    done = completions_of(drain(crowded))
    restored_id = crowded.restore(tmp_path / "request")
    done |= completions_of(drain(crowded))

    streamed = [value for delta in deltas for value in delta.sampling_log_probs]
    assert np.array(streamed, np.float32).tolist() == expected[: len(streamed)]
    assert values_of([done[request_id], done[restored_id]]) == [expected] * 2
    branch = np.array(done[branch_id].sampling_log_probs, np.float32).tolist()
    assert (branch[:4], len(branch)) == (expected[:4], len(expected))


def test_the_best_samples_carry_them(crowded):
    params = replace(SAMPLED[1], n=2, best_of=3)

    deltas = [*crowded.stream(PROMPT, params)]

    assert [len(delta.sampling_log_probs) for delta in deltas] == [12, 12]
    assert [delta.sampling_log_probs for delta in deltas] == [
        delta.completion.sampling_log_probs for delta in deltas if delta.completion
    ]


def test_an_engine_that_was_not_asked_gives_none_and_restores_no_request_that_has_them(crowded, llm, tmp_path):
    [completion] = generate(llm, [PROMPT], SAMPLED[0])
    request_id = crowded.add(PROMPT, SAMPLED[0])
    while not any(delta.token_ids for delta in crowded.step()):
        pass
    crowded.save(request_id, tmp_path / "request")
    crowded.abort(request_id)
    drain(crowded)

    assert completion.sampling_log_probs == ()
    with pytest.raises(ValueError, match="was saved with sampling_log_probs=True, here it is False"):
        llm.restore(tmp_path / "request")
