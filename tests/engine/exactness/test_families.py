"""Every family through the whole engine: whatever happens to a request, it yields what it yields alone, to the bit.

`scripts/measure/family_table.py` runs these tests and writes what they show to docs/families.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import load_checkpoint, log_probs
from jaxinfer.config import SamplingParams
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request.completion import Completion
from tests.engine.engines import (
    EOS,
    SMALL,
    ScriptedDrafter,
    ScriptedTrees,
    completions_of,
    content_of,
    crowded_engine,
    drafts_from,
    drain,
    forget_prefixes,
    generate,
    random_prompts,
    run_with_arrivals,
    small_engine,
)
from tests.engine.probe import runner_of
from tests.exhaustive import exhaustive_but
from tests.oracles import CONFIGS, load_reference, reference_logits, save_random_checkpoint

# Families that differ most in what an engine keeps for a request. `scripts/check.sh` runs them, `-m exhaustive` the
# others. `tests/checkpoint/test_logits.py` compares the logits of all, in chunks too, with transformers.
IN_EVERY_RUN = {
    "deepseek_v3": "latent attention, a sigmoid router with groups and biases, a shared expert",
    "falcon_h1": "attention and a state space side by side",
    "gemma4_text": "layers that read the pages of earlier ones, embeddings of tokens for each layer",
    "gpt_oss": "sinks, windows in every other layer, experts with biases",
    "qwen3_next": "gated delta nets and gated attention, experts and a gated shared one",
}
# The tests that compile most, for the families whose caches differ most. Every run also has drafts of deepseek_v3 in
# `test_draft_layers.py`, and drafts beside windows and sinks in the kernel's `test_exact_bits.py`.
OF_SOME = {
    "test_a_loop_of_decode_steps_yields_the_same": ("gemma4_text", "qwen3_next"),
    "test_no_draft_changes_a_bit": ("falcon_h1", "gemma4_text", "qwen3_next"),
}
# Those that have steps compiled as for users in every run too: sinks, windows, experts, gated delta nets.
OF_BITS = ("gpt_oss", "qwen3_next")
RECURRENT = (
    *("falcon_h1", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
# Heads and experts that meshes of tests/parallel share.
OVERRIDES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 2},
    "gemma3_text": {"num_attention_heads": 8, **MIXED},
    "glm4_moe": {"n_group": 4, "topk_group": 2},
    "gpt_oss": {"num_hidden_layers": 2, "num_local_experts": 8},
    "granitemoehybrid": {"num_local_experts": 8},
    "llama": {"num_attention_heads": 8},
    "mistral": {"sliding_window": 11},
    "olmo3": MIXED,
    "qwen2": WINDOW,
    "qwen3_next": {"num_experts": 8},
}
FEWER_LAYERS: dict[str, dict[str, Any]] = {
    "falcon_h1": {"num_hidden_layers": 1},  # all are alike
    "llama": {"num_hidden_layers": 2},
    "qwen3_next": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}
# Layers that two stages can share, of one family for each kind of mixer, some with others before or behind them.
STAGED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 3},
    "gemma3_text": {
        "num_hidden_layers": 5,
        "layer_types": ["full_attention", *["sliding_attention", "full_attention"] * 2],
    },
    "gpt_oss": {"num_hidden_layers": 4},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "llama": {"num_hidden_layers": 2},
    "qwen3_next": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
}
SHARED = random_prompts(1, max_len=1, seed=5)[0] + list(range(20, 54))
PROMPTS = [*random_prompts(12, max_len=40, seed=2), *(SHARED + tail for tail in random_prompts(8, max_len=9, seed=3))]
MAX_TOKENS = np.random.default_rng(4).integers(4, 17, len(PROMPTS)).tolist()
# Half of the requests draw, half take the best; all report log-probabilities, whose bits are compared.
PARAMS = [
    SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=MAX_TOKENS[i], ignore_eos=True, log_probs=2)
    for i in range(len(PROMPTS))
]


def test_the_families_of_every_run_are_known():
    assert IN_EVERY_RUN.keys() <= CONFIGS.keys()
    for name, families in OF_SOME.items():
        assert callable(globals()[name])
        assert set(families) <= IN_EVERY_RUN.keys()


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        chosen = OF_SOME.get(metafunc.function.__name__, IN_EVERY_RUN)
        families = [
            pytest.param(*case.values, marks=[*case.marks, *([pytest.mark.bits] if case.values[0] in OF_BITS else [])])
            for case in exhaustive_but(CONFIGS, chosen)
        ]
        metafunc.parametrize("family", families, indirect=True, scope="module")


@pytest.fixture(scope="module")
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family, tmp_path_factory):
    return save_small_family(tmp_path_factory.mktemp(family), family)


def save_small_family(path: Path, family: str) -> Path:
    mesh = SMALL.get("parallelism")
    changed = FEWER_LAYERS if mesh is None or mesh.stages == 1 else STAGED
    sizes = {**OVERRIDES.get(family, {}), **changed.get(family, {})}
    return save_random_checkpoint(path, family, eos_token_id=EOS, **sizes)


@pytest.fixture(scope="module")
def alone(checkpoint) -> list[Completion]:
    """Each request computed by itself, without any cached page."""
    with small_engine(checkpoint, prefix_cache=False) as llm:
        assert (llm.engine_config.parallelism is not None) == (jax.device_count() > 1)  # with --mesh
        return [generate(llm, [prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(scope="module")
def crowded(family, checkpoint) -> LLM:
    """Chunks of 5 tokens, too few pages, a host tier to swap to, and drafts, in trees where layers can see them."""
    return crowded_engine(checkpoint, host_cache_bytes=2**20, draft_trees=family not in RECURRENT)


def contents(completions: list[Completion]) -> list[dict]:
    return [content_of(completion) for completion in completions]


@pytest.mark.shows("greedy")
def test_a_request_alone_takes_the_best_tokens_of_transformers(checkpoint, alone):
    reference = load_reference(checkpoint)

    for prompt, completion, params in zip(PROMPTS, alone, PARAMS, strict=True):
        token_ids = list(completion.token_ids)
        if params.temperature == 0:
            logits = reference_logits(reference, [*prompt, *token_ids])[len(prompt) - 1 : -1]
            # No other token is better by more than rounding in float32.
            assert (logits.max(-1) - logits[range(len(token_ids)), token_ids]).max() < 1e-4


def test_the_log_probabilities_of_a_text_are_those_that_were_reported(checkpoint, alone):
    params, config = load_checkpoint(checkpoint, "float32")
    texts = [[*prompt, *completion.token_ids] for prompt, completion in zip(PROMPTS, alone, strict=True)]
    width = max(map(len, texts))
    tokens = np.array([[*text, *[1] * (width - len(text))] for text in texts], np.int32)

    computed = np.asarray(log_probs(params, tokens, config=config, page_size=16))

    for row, prompt, text, completion in zip(computed, PROMPTS, texts, alone, strict=True):
        assert row[len(prompt) - 1 : len(text) - 1].tolist() == np.array(completion.log_probs, np.float32).tolist()


@pytest.mark.exhaustive  # a gradient compiles for 20 s; `test_agreement.py` has it of one family in every run
def test_the_same_log_probabilities_are_differentiated(crowded, alone):
    assert crowded.agreement(alone, show_progress=False).max_ulps == 0


@pytest.mark.parametrize(
    "preemption",
    [
        pytest.param("swap", marks=pytest.mark.shows("chunks", "prefix", "swap")),
        pytest.param("recompute", marks=pytest.mark.shows("recompute")),
    ],
)
def test_no_chunk_neighbour_prefix_hit_or_preemption_changes_a_bit(crowded, alone, preemption):
    runner_of(crowded)._tiers.seconds_per_copy = {"swap": 0.0, "recompute": 1e9}[preemption]
    forget_prefixes(crowded)
    before = crowded.metrics()

    completions = run_with_arrivals(crowded, PROMPTS, PARAMS, mean_arrivals=1.5)

    after = crowded.metrics()
    assert after.num_preemptions > before.num_preemptions
    assert max(completion.num_cached_tokens for completion in completions) > 0
    assert (after.tiers[0].num_hits > before.tiers[0].num_hits) == (preemption == "swap")
    assert contents(completions) == contents(alone)


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(ScriptedDrafter, marks=pytest.mark.shows("drafts")),
        pytest.param(ScriptedTrees, marks=[pytest.mark.exhaustive, pytest.mark.shows("trees")]),
    ],
)
def test_no_draft_changes_a_bit(family, checkpoint, crowded, alone, drafter, record_property):
    config = crowded.engine_config
    if drafter is ScriptedTrees and not config.draft_trees:
        assert family in RECURRENT or config.cache_dtype == "int2"
        with pytest.raises(ValueError, match=re.escape("draft_trees=True")) as refusal:
            crowded_engine(checkpoint, draft_trees=True, cache_dtype=config.cache_dtype)
        record_property("refusal", str(refusal.value))
        return
    before = crowded.metrics()

    with drafts_from(crowded, drafter(0.7, alone)):
        completions = run_with_arrivals(crowded, PROMPTS, PARAMS, mean_arrivals=0.5)

    after = crowded.metrics()
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    assert 0 < num_accepted < after.num_drafted_tokens - before.num_drafted_tokens
    assert contents(completions) == contents(alone)


@pytest.mark.shows("rewind", "fork")
@pytest.mark.parametrize("index", [1, 2])
def test_a_rewound_and_a_forked_request_yield_what_they_would_have(crowded, alone, index):
    forget_prefixes(crowded)
    request_id = crowded.add(PROMPTS[index], PARAMS[index])
    deltas = []
    while sum(len(delta.token_ids) for delta in deltas) < 3:
        deltas += crowded.step()
    crowded.rewind(request_id, 1)
    fork_id = crowded.fork(request_id)

    done = completions_of(drain(crowded))

    assert content_of(done[request_id]) == content_of(alone[index])
    # A branch goes on alike at temperature 0. Above, it draws as another sample of the prompt.
    if PARAMS[index].temperature == 0:
        assert {**content_of(done[fork_id]), "sample_index": 0} == content_of(alone[index])
    else:
        assert done[fork_id].token_ids[:2] == alone[index].token_ids[:2] != done[fork_id].token_ids[2:]


@pytest.mark.shows("save")
def test_a_saved_request_goes_on_as_if_it_had_never_stopped(crowded, alone, tmp_path):
    index, path = 14, tmp_path / "request"
    runner_of(crowded)._tiers.seconds_per_copy = 0.0
    forget_prefixes(crowded)
    request_id = crowded.add(PROMPTS[index], PARAMS[index])
    while not any(len(delta.token_ids) for delta in crowded.step()):
        pass
    crowded.save(request_id, path)
    crowded.abort(request_id)
    drain(crowded)
    forget_prefixes(crowded)
    before = crowded.metrics().num_found_tokens

    request_id = crowded.restore(path)
    done = completions_of(drain(crowded))

    assert content_of(done[request_id]) == content_of(alone[index])
    assert crowded.metrics().num_found_tokens > before


@pytest.mark.shows("loop")
def test_a_loop_of_decode_steps_yields_the_same(checkpoint, alone):
    with small_engine(checkpoint, decode_loop_steps=4) as llm:
        completions = run_with_arrivals(llm, PROMPTS, PARAMS, mean_arrivals=1.5)

    assert contents(completions) == contents(alone)
