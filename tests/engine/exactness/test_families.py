"""Families with windows in some layers, sinks, experts and norms of their own, through the whole engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request.completion import Completion
from tests.engine.engines import (
    EOS,
    ScriptedDrafter,
    content_of,
    crowded_engine,
    forget_prefixes,
    generate,
    num_preemptions,
    random_prompts,
    run_with_arrivals,
    small_engine,
)
from tests.oracles import load_reference, reference_logits, save_random_checkpoint

# One family for each component that the equal layers of Llama do not have.
FAMILIES = {
    "gemma3_text": "windows in five of six layers, two ropes, norms before and after, norms of queries and keys",
    "glm4_moe": "sigmoid router with biases and groups, a shared expert, a dense first layer, half of a head rotated",
    "gpt_oss": "sinks, windows in every other layer, experts with biases",
    "granitemoeshared": "multipliers, fused experts, a shared expert",
    "mamba2": "state spaces alone: a state in place of keys and values",
    "nemotron_h": "a state space, attention, an MLP and experts, each a layer of its own",
    "olmo3": "norms after only, norms over all heads, windows in three of four layers",
    "phi3": "fused weights",
    "qwen3_next": "gated delta nets and gated attention, experts and a gated shared one",
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "glm4_moe": {"n_group": 4, "topk_group": 2},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}
SHARED = random_prompts(1, max_len=1, seed=5)[0] + list(range(20, 54))
PROMPTS = [*random_prompts(12, max_len=40, seed=2), *(SHARED + tail for tail in random_prompts(8, max_len=9, seed=3))]
MAX_TOKENS = np.random.default_rng(4).integers(4, 17, len(PROMPTS)).tolist()


def sampled(index: int) -> SamplingParams:
    """Half of the requests draw, half take the best; all report log-probabilities, whose bits are compared."""
    temperature = index % 2 * 0.8
    return SamplingParams(
        temperature=temperature, seed=index, max_tokens=MAX_TOKENS[index], ignore_eos=True, log_probs=2
    )


PARAMS = [sampled(index) for index in range(len(PROMPTS))]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    family = request.param
    path = tmp_path_factory.mktemp(family)
    return save_random_checkpoint(path, family, **{"eos_token_id": EOS, **OVERRIDES.get(family, {})})


@pytest.fixture(scope="module")
def completions_alone(checkpoint) -> list[Completion]:
    """Each request computed by itself, without any cached page."""
    with small_engine(checkpoint, prefix_cache=False) as llm:
        return [generate(llm, [prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(scope="module")
def alone(completions_alone) -> tuple[list[dict], list[list[int]]]:
    """The content and the tokens of each request computed by itself."""
    return [content_of(completion) for completion in completions_alone], [list(c.token_ids) for c in completions_alone]


def test_a_request_alone_takes_the_best_tokens_of_transformers(checkpoint, alone):
    reference = load_reference(checkpoint)

    for prompt, token_ids, params in zip(PROMPTS, alone[1], PARAMS, strict=True):
        if params.temperature == 0:
            logits = reference_logits(reference, [*prompt, *token_ids])[len(prompt) - 1 : -1]
            # No other token is better by more than rounding in float32.
            assert (logits.max(-1) - logits[range(len(token_ids)), token_ids]).max() < 1e-4


@pytest.fixture(scope="module")
def crowded(checkpoint, completions_alone) -> LLM:
    """Chunks of 5 tokens, too few pages, a host tier to swap to, and up to 3 drafts a row, of which most are right."""
    drafter = ScriptedDrafter(0.7, completions_alone)
    return crowded_engine(checkpoint, host_cache_bytes=2**20, speculation=drafter)


def test_no_chunk_neighbour_preemption_swap_prefix_hit_or_draft_changes_a_bit(crowded, alone):
    before = num_preemptions(crowded)

    completions = run_with_arrivals(crowded, PROMPTS, PARAMS, mean_arrivals=1.5)

    metrics = crowded.metrics()
    assert num_preemptions(crowded) > before
    assert 0 < metrics.num_accepted_tokens < metrics.num_drafted_tokens
    assert max(completion.num_cached_tokens for completion in completions) > 0
    assert [content_of(completion) for completion in completions] == alone[0]


def test_a_rewound_and_a_forked_request_yield_what_they_would_have(crowded, alone):
    index = 1
    request_id = crowded.add(PROMPTS[index], PARAMS[index])
    while crowded.has_unfinished and not any(len(delta.token_ids) for delta in crowded.step()):
        pass
    for _ in range(2):
        crowded.step()
    crowded.rewind(request_id, 1)
    forgotten = crowded.metrics().num_cached_pages
    fork_id = crowded.fork(request_id)

    deltas = []
    while crowded.has_unfinished:
        deltas += crowded.step()
    done = {delta.request_id: delta.completion for delta in deltas if delta.completion is not None}

    assert forgotten >= 0
    assert list(done[request_id].token_ids) == alone[1][index]
    assert fork_id in done


def test_a_saved_request_goes_on_as_if_it_had_never_stopped(crowded, alone, tmp_path):
    index, path = 14, tmp_path / "request"
    forget_prefixes(crowded)
    request_id = crowded.add(PROMPTS[index], PARAMS[index])
    while not any(len(delta.token_ids) for delta in crowded.step()):
        pass
    crowded.save(request_id, path)
    crowded.abort(request_id)
    while crowded.has_unfinished:
        crowded.step()
    forget_prefixes(crowded)

    request_id = crowded.restore(path)
    deltas = []
    while crowded.has_unfinished:
        deltas += crowded.step()

    (completion,) = [delta.completion for delta in deltas if delta.completion is not None]
    assert content_of(completion) == alone[0][index]
    assert crowded.metrics().num_found_tokens > 0


def test_a_loop_of_decode_steps_yields_the_same(checkpoint, alone):
    with small_engine(checkpoint, decode_loop_steps=4) as llm:
        completions = run_with_arrivals(llm, PROMPTS, PARAMS, mean_arrivals=1.5)
        forget_prefixes(llm)

    assert [content_of(completion) for completion in completions] == alone[0]
