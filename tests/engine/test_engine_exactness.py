"""What a request yields is a function of the request: not of its neighbours, chunks or pages.

On CPU that holds for every bit of every log-probability, so nothing here has a tolerance.
"""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from tests.engine.engines import (
    content_of,
    forget_prefixes,
    num_preemptions,
    poison_cache,
    random_prompts,
    run_with_arrivals,
    small_engine,
)

# Other buckets, chunks and batches than those of the shared engine (4 requests, 32 tokens, all pages).
# The page size is the same: it is a constant of an engine, and may change the order in which attention adds up.
ENGINES = {
    "larger steps": {"max_num_seqs": 9, "max_num_batched_tokens": 80},
    "tiny chunks, few pages": {"max_num_seqs": 3, "max_num_batched_tokens": 5, "num_pages": 7},
}
KINDS = [
    {"temperature": 0},
    {"temperature": 0, "log_probs": 3},
    {"temperature": 0.8},
    {"temperature": 1.5, "top_k": 20, "log_probs": 1},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
]
PROMPTS = random_prompts(18, max_len=50, seed=1)
PARAMS = [
    SamplingParams(**{"max_tokens": 3 + 2 * i, "seed": 1000 + i, "ignore_eos": i % 2 == 0, **KINDS[i % 6]})
    for i in range(18)
]


@pytest.fixture(scope="module")
def alone(shared_llm):
    """What each request yields when nothing else is computed and nothing was before."""
    return [content_of(generate_alone(shared_llm, *pair)) for pair in zip(PROMPTS, PARAMS, strict=True)]


def generate_alone(llm, prompt, params):
    forget_prefixes(llm)
    completion = llm.generate(prompt, params, show_progress=False)[0]
    assert completion.num_cached_tokens == 0
    return completion


@pytest.fixture(scope="module", params=list(ENGINES))
def other_llm(request, checkpoint):
    return small_engine(checkpoint, **ENGINES[request.param])


@pytest.mark.parametrize("arrivals_seed", [0, 1, 2])
def test_no_arrival_order_changes_a_bit(llm, alone, arrivals_seed):
    completions = run_with_arrivals(llm, PROMPTS, PARAMS, seed=arrivals_seed, mean_arrivals=0.7 + arrivals_seed)

    assert [content_of(c) for c in completions] == alone


def test_no_chunk_size_or_batch_size_changes_a_bit(other_llm, alone):
    poison_cache(other_llm)
    forget_prefixes(other_llm)

    completions = run_with_arrivals(other_llm, PROMPTS, PARAMS, mean_arrivals=2.0)

    assert [content_of(c) for c in completions] == alone


def test_no_chunk_size_changes_a_bit_of_a_request_alone(other_llm, alone):
    completions = [
        other_llm.generate(prompt, params, show_progress=False)[0]
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]

    assert [content_of(c) for c in completions] == alone


@pytest.mark.parametrize("other_llm", ["tiny chunks, few pages"], indirect=True)
def test_no_preemption_changes_a_bit(other_llm, alone):
    before = num_preemptions(other_llm)

    completions = run_with_arrivals(other_llm, PROMPTS, PARAMS, mean_arrivals=9.0)

    assert num_preemptions(other_llm) > before
    assert [content_of(c) for c in completions] == alone


def test_no_prefix_found_in_the_cache_changes_a_bit(llm, alone):
    completions = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        generate_alone(llm, prompt, params)
        completions += llm.generate(prompt, params, show_progress=False)

    assert [content_of(c) for c in completions] == alone
    assert [c.num_cached_tokens for c in completions] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


def test_no_output_found_in_the_cache_changes_a_bit_of_the_next_turn(llm):
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    turn = llm.generate(PROMPTS[0], params, show_progress=False)[0]
    prompt = [*turn.prompt_token_ids, *turn.token_ids, 5, 6]

    found = llm.generate(prompt, params, show_progress=False)[0]

    assert found.num_cached_tokens > len(PROMPTS[0])
    assert content_of(found) == content_of(generate_alone(llm, prompt, params))


def test_no_shared_beginning_of_requests_side_by_side_changes_a_bit(other_llm, llm):
    prompts = [[*PROMPTS[3][:33], 40 + i] for i in range(6)]
    expected = [content_of(generate_alone(llm, *pair)) for pair in zip(prompts, PARAMS[:6], strict=True)]
    poison_cache(other_llm)
    forget_prefixes(other_llm)

    completions = run_with_arrivals(other_llm, prompts, PARAMS[:6], mean_arrivals=2.0)

    assert [content_of(c) for c in completions] == expected
    assert sum(c.num_cached_tokens for c in completions) > 0


def test_no_companion_in_the_same_step_changes_a_bit(llm, alone):
    rng = np.random.default_rng(7)
    pairs = [rng.choice(18, size=rng.integers(2, 6), replace=False).tolist() for _ in range(5)]

    for members in pairs:
        completions = llm.generate([PROMPTS[i] for i in members], [PARAMS[i] for i in members], show_progress=False)
        assert [content_of(c) for c in completions] == [alone[i] for i in members]


def test_the_seed_alone_tells_two_equal_requests_apart(llm):
    params = [SamplingParams(max_tokens=12, seed=seed, temperature=1.5) for seed in (4, 4, 5)]

    first, same, other = llm.generate([PROMPTS[0]] * 3, params, show_progress=False)

    assert content_of(first) == content_of(same)
    assert first.token_ids != other.token_ids


def test_a_longer_output_begins_with_the_shorter_one(llm):
    params = [SamplingParams(max_tokens=n, seed=4, ignore_eos=True) for n in (5, 20)]

    short, long = llm.generate([PROMPTS[0]] * 2, params, show_progress=False)

    assert long.token_ids[:5] == short.token_ids


def test_asking_for_alternatives_changes_no_token(llm):
    params = [SamplingParams(max_tokens=9, seed=4, log_probs=n) for n in (0, 1, 4)]

    completions = llm.generate([PROMPTS[0]] * 3, params, show_progress=False)

    assert len({(c.token_ids, c.log_probs) for c in completions}) == 1
