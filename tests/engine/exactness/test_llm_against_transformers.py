"""Greedy tokens and log-probabilities are those of transformers in float32, alone and under heavy traffic."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from jaxinfer.config import SamplingParams
from jaxinfer.engine.llm import LLM
from tests.engine.engines import (
    num_preemptions,
    poison_cache,
    random_prompts,
    run_with_arrivals,
    small_engine,
)
from tests.oracles import load_reference, reference_logits, save_random_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}


class Case(NamedTuple):
    family: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_tied_embeddings: bool
    rope: dict[str, Any] | None
    has_one_layer_group: bool  # as on GPU and TPU; on CPU every layer is its own group
    window: int | None = None


CASES = {
    "llama, groups of 4, heads of 64": Case("llama", 4, 1, 64, False, LLAMA3, False),
    "llama, groups of 2, heads of 80": Case("llama", 4, 2, 80, True, LINEAR, True),
    "qwen2, groups of 7, heads of 80": Case("qwen2", 7, 1, 80, False, YARN, False),
    "mistral, window of 20": Case("mistral", 4, 2, 64, False, None, False, 20),
    "qwen3, groups of 1, heads of 128": Case("qwen3", 2, 2, 128, True, None, True),
}
# At most 40 + 15 computed tokens in 4 pages: four such requests do not fit a pool of 7.
NUM_PAGES = 7
PROMPTS = random_prompts(40, max_len=40, seed=2)
MAX_TOKENS = np.random.default_rng(3).integers(1, 17, 40).tolist()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, log_probs=1)


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def models(request, tmp_path_factory) -> tuple[LLM, Any]:
    """One checkpoint in both frameworks; ours has a pool too small for its traffic, filled with NaN."""
    case: Case = request.param
    overrides: dict[str, Any] = {} if case.rope is None else {"rope_parameters": case.rope}
    overrides |= {} if case.window is None else {"sliding_window": case.window}
    path = save_random_checkpoint(
        tmp_path_factory.mktemp("model"),
        case.family,
        num_hidden_layers=2,
        num_attention_heads=case.num_heads,
        num_key_value_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        tie_word_embeddings=case.has_tied_embeddings,
        **overrides,
    )
    with pytest.MonkeyPatch.context() as patch:
        if case.has_one_layer_group:
            patch.setattr("jaxinfer.checkpoint.checkpoint.scans_layers", lambda: True)
        llm = small_engine(path, num_pages=NUM_PAGES, max_prompt_log_probs=3)
    poison_cache(llm)
    return llm, load_reference(path)


@pytest.fixture(scope="module")
def expected(models) -> list[list[int]]:
    """What transformers generates for each prompt."""
    _, reference = models
    reference.generation_config.eos_token_id = None
    with torch.no_grad():
        outputs = [
            reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            for prompt, max_tokens in zip(PROMPTS, MAX_TOKENS, strict=True)
        ]
    return [output[0, len(prompt) :].tolist() for output, prompt in zip(outputs, PROMPTS, strict=True)]


def reference_log_probs(reference, prompt, token_ids) -> np.ndarray:
    """log_softmax f32[tokens, V] at the positions from which `token_ids` were drawn."""
    logits = torch.tensor(reference_logits(reference, [*prompt, *token_ids])[len(prompt) - 1 : -1])
    return torch.log_softmax(logits, -1).numpy()


def test_one_request_alone_yields_the_tokens_of_transformers(models, expected):
    llm, _ = models

    completion = llm.generate(PROMPTS[0], greedy(MAX_TOKENS[0]), show_progress=False)[0]

    assert list(completion.token_ids) == expected[0]


def test_forty_requests_in_a_small_pool_yield_the_tokens_of_transformers(models, expected):
    llm, _ = models
    poison_cache(llm)
    before = num_preemptions(llm)

    completions = run_with_arrivals(llm, PROMPTS, [greedy(n) for n in MAX_TOKENS], mean_arrivals=1.5)

    assert num_preemptions(llm) > before
    assert [list(c.token_ids) for c in completions] == expected


def test_the_log_probs_are_those_of_transformers(models):
    llm, reference = models
    params = [greedy(n) for n in MAX_TOKENS[:12]]

    completions = llm.generate(PROMPTS[:12], params, show_progress=False)

    for prompt, completion in zip(PROMPTS, completions, strict=False):
        log_probs = reference_log_probs(reference, prompt, completion.token_ids)
        chosen = log_probs[range(len(completion.token_ids)), list(completion.token_ids)]
        # float32 has 24 bits; 2 layers of sums over up to 560 terms of order 1, in another order.
        np.testing.assert_allclose(completion.log_probs, chosen, atol=1e-4, rtol=0)


def test_the_log_probs_of_drawn_tokens_are_those_before_temperature_and_filters(models):
    llm, reference = models
    params = SamplingParams(temperature=0.5, top_k=5, seed=1, max_tokens=12, ignore_eos=True)

    completion = llm.generate(PROMPTS[0], params, show_progress=False)[0]

    log_probs = reference_log_probs(reference, PROMPTS[0], completion.token_ids)
    chosen = log_probs[range(12), list(completion.token_ids)]
    # As above.
    np.testing.assert_allclose(completion.log_probs, chosen, atol=1e-4, rtol=0)


def test_the_log_probs_of_a_prompt_and_its_alternatives_are_those_of_transformers(models):
    llm, reference = models
    prompt = list(range(90, 13, -1))  # three chunks
    params = SamplingParams(prompt_log_probs=3, max_tokens=1, temperature=0)

    completion = llm.generate(prompt, params, show_progress=False)[0]

    expected = reference_log_probs(reference, prompt[:1], prompt[1:])
    tops = completion.prompt_top_log_probs[1:]
    # As above.
    close = functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=0)
    close(completion.prompt_log_probs[1:], expected[range(76), prompt[1:]])
    close([list(top.values()) for top in tops], -np.sort(-expected)[:, :3])
    close([list(top.values()) for top in tops], [row[list(top)] for row, top in zip(expected, tops, strict=True)])
    assert (completion.prompt_log_probs[0], completion.prompt_top_log_probs[0]) == (None, {})


def test_a_prompt_of_many_chunks_yields_the_tokens_of_transformers(models):
    llm, reference = models
    prompt = random_prompts(40, max_len=85, seed=5)[7][:1] * 3 + list(range(1, 80))

    completion = llm.generate(prompt, greedy(1), show_progress=False)[0]

    assert completion.token_ids[0] == reference_logits(reference, prompt)[-1].argmax()
