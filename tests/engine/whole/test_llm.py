"""Text or tokens in, completions out, in order and ended where they should be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from tests.engine.engines import (
    EOS,
    GREEDY,
    random_prompts,
    spelled,
)

PROMPTS = random_prompts(6, max_len=40, seed=3)


def generate(llm, prompts, params: Any = GREEDY):
    return llm.generate(prompts, params, show_progress=False)


def token_ids_of(completions):
    return [completion.token_ids for completion in completions]


def drawn(**options) -> SamplingParams:
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
def test_the_progress_bar_shows_only_where_it_is_wanted(llm, lines_at_once, capsys, show_progress):
    llm.generate(PROMPTS[:2], GREEDY, show_progress=show_progress)

    assert ("2 of 2" in capsys.readouterr().err) == show_progress


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
    params = [drawn(seed=seed, temperature=20.0, ignore_eos=True) for seed in range(12)]
    endless = next(c for c in generate(llm, [PROMPTS[0]] * 12, params) if EOS in c.token_ids)

    completion = generate(llm, PROMPTS[0], drawn(seed=endless.seed, temperature=20.0))[0]

    assert completion.finish_reason == "stop"
    assert completion.token_ids == endless.token_ids[: endless.token_ids.index(EOS) + 1]


def test_a_stop_token_ends_the_output(llm):
    free = generate(llm, PROMPTS[0], drawn(ignore_eos=True))[0].token_ids
    stop = free[7]

    completion = generate(llm, PROMPTS[0], drawn(ignore_eos=True, stop_token_ids=[stop]))[0]

    assert completion.finish_reason == "stop"
    assert completion.token_ids == free[: free.index(stop) + 1]


def test_a_stop_string_ends_the_text_before_it(llm):
    free = generate(llm, PROMPTS[0], drawn(ignore_eos=True))[0].text
    stop = free[7:10]

    completion = generate(llm, PROMPTS[0], drawn(ignore_eos=True, stop=[stop]))[0]

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
    completions = generate(llm, [PROMPTS[0]] * 5, [drawn(seed=seed) for seed in range(5)])

    assert len({c.text for c in completions}) == 5


# ---- without a tokenizer


def test_an_llm_without_a_tokenizer_completes_token_ids(mute_llm, llm):
    prompt = PROMPTS[0][:20]

    completion = generate(mute_llm, prompt)[0]

    assert (completion.text, completion.token_ids) == ("", generate(llm, prompt)[0].token_ids)
