"""Embeddings of prompts are the pooled states of transformers, and the same bits beside any requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from jaxinfer import QueueFullError, load_checkpoint
from tests.engine.engines import (
    GREEDY,
    SMALL,
    ScriptedTrees,
    completions_of,
    content_of,
    drain,
    forget_prefixes,
    generate,
    num_preemptions,
    random_prompts,
    recorded_steps,
    save_small_checkpoint,
    small_engine,
)
from tests.oracles import load_reference

POOLINGS = ("last", "mean")
LONG = [*range(1, 91)]  # of three chunks, and six pages
TEXTS = [[7], [5, 6], LONG, LONG[:60] + [9] * 8, *random_prompts(8, max_len=40, seed=6)]
SEEDED = replace(GREEDY, seed=0)


def embed(llm, prompts, pooling, **options):
    return llm.embed(prompts, pooling=pooling, show_progress=False, **options)


@pytest.fixture(scope="module")
def states(checkpoint):
    """The states of every text after the final norm, by transformers."""
    model = load_reference(checkpoint).model
    with torch.no_grad():
        return [model(torch.tensor([text]), use_cache=False).last_hidden_state[0].numpy() for text in TEXTS]


@pytest.fixture(scope="module")
def alone(shared_llm):
    """The embeddings of every text by itself, of tokens that were all computed."""
    alone = {}
    for pooling in POOLINGS:
        alone[pooling] = []
        for text in TEXTS:
            forget_prefixes(shared_llm)
            alone[pooling] += [embed(shared_llm, [text], pooling, normalize=False)[0]]
    return alone


@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings_are_the_pooled_states_of_transformers(llm, states, pooling):
    expected = np.array([own[-1] if pooling == "last" else own.mean(0) for own in states])

    embeddings = embed(llm, TEXTS, pooling, normalize=False)

    assert embeddings.dtype == np.float32
    # Rounding in float32, as in the tests of logits.
    assert np.abs(embeddings - expected).max() < 1e-4
    unit = expected / np.linalg.norm(expected, axis=-1, keepdims=True)
    assert np.abs(embed(llm, TEXTS, pooling) - unit).max() < 1e-4


@pytest.mark.parametrize("pooling", POOLINGS)
def test_no_neighbour_chunk_or_cached_page_changes_a_bit(llm, alone, pooling):
    for _ in range(2):  # the second time the prefix cache has the texts
        assert np.array_equal(embed(llm, TEXTS, pooling, normalize=False), alone[pooling])


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["crowded_llm", "looping_llm"])
def test_no_preemption_or_decode_loop_changes_a_bit(request, alone, name, pooling):
    llm = request.getfixturevalue(name)
    preemptions = num_preemptions(llm)
    # A longer prompt is an endless request for one of the engines, which sees less than all of its tokens.
    chosen = [i for i, text in enumerate(TEXTS) if len(text) < llm.engine_config.max_model_len]
    ids = {llm.add(prompt, replace(GREEDY, max_tokens=30)) for prompt in random_prompts(6, max_len=30, seed=1)}
    for _ in range(4):
        llm.step()

    with recorded_steps(llm) as steps:
        embeddings = embed(llm, [TEXTS[i] for i in chosen], pooling, normalize=False)

    assert np.array_equal(embeddings, [alone[pooling][i] for i in chosen])
    assert max(step.num_tokens for step in steps) <= 5
    assert completions_of(drain(llm)).keys() == ids
    assert num_preemptions(llm) > preemptions


def test_draft_trees_beside_a_prompt_change_no_bit(checkpoint, llm, alone):
    prompts, sampling = [[5, 6, 7], [8] * 20], replace(SEEDED, max_tokens=40)
    answers = generate(llm, prompts, sampling)
    trees = ScriptedTrees(0.5, answers)
    options = {"max_drafts": 3, "adaptive_drafts": False, "draft_trees": True, "speculation": trees}
    with small_engine(checkpoint, **options) as drafting:
        ids = [drafting.add(prompt, sampling) for prompt in prompts]
        drafting.step()
        drafting.step()
        with recorded_steps(drafting) as steps:
            embeddings = {pooling: embed(drafting, TEXTS[:1], pooling, normalize=False) for pooling in POOLINGS}
        completions = completions_of(drain(drafting))

    assert [step.is_verify for step in steps if step.pooled_chunks] == [True, True]
    assert all(np.array_equal(embeddings[pooling], alone[pooling][:1]) for pooling in POOLINGS)
    assert [content_of(completions[i]) for i in ids] == [content_of(answer) for answer in answers]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_unfinished_requests_go_on_as_if_nothing_were_embedded(llm, alone, pooling):
    prompts = random_prompts(6, max_len=30, seed=2)
    sampling = [replace(SEEDED, temperature=i % 2, max_tokens=40, log_probs=2) for i in range(len(prompts))]
    expected = generate(llm, prompts, sampling)
    forget_prefixes(llm)
    ids = [llm.add(*pair) for pair in zip(prompts, sampling, strict=True)]
    deltas = [delta for _ in range(4) for delta in llm.step()]

    with recorded_steps(llm) as steps:
        embeddings = embed(llm, TEXTS, pooling, normalize=False)

    completions = completions_of(deltas + drain(llm))
    assert np.array_equal(embeddings, alone[pooling])
    assert [content_of(completions[i]) for i in ids] == [content_of(completion) for completion in expected]
    assert max(step.num_tokens for step in steps) <= SMALL["max_num_batched_tokens"]


def test_parameters_replaced_meanwhile_are_those_of_every_state(checkpoint, tmp_path):
    with small_engine(save_small_checkpoint(tmp_path, seed=1)) as llm:
        expected = embed(llm, [LONG], "mean")
        params = load_checkpoint(checkpoint)[0], load_checkpoint(tmp_path)[0]

        llm.update_params(params[0])
        former, called = embed(llm, [LONG], "mean"), []

        def replace_once(*_):
            called.append(1)
            if len(called) == 2:
                llm.update_params(params[1])

        llm.on_step = replace_once
        embeddings = embed(llm, [LONG], "mean")

    assert len(called) > 3
    assert np.array_equal(embeddings, expected)
    assert np.abs(embeddings - former).max() > 0.01


def test_a_text_is_encoded_and_one_prompt_is_one_row(llm):
    token_ids = llm.tokenizer.encode("a b")

    assert np.array_equal(embed(llm, "a b", "last"), embed(llm, [token_ids], "last"))
    assert embed(llm, token_ids, "mean").shape == (1, llm.model_config.hidden_size)
    assert embed(llm, [], "mean").shape == (0, llm.model_config.hidden_size)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[5], []], {}, r"prompt 1: prompt \[\] is empty; give at least one token"),
        ([[5], ""], {}, "prompt 1: prompt '' is empty"),
        ([[5] * 96], {}, "prompt 0: prompt has 96 tokens but max_model_len is 96.*shorten it or raise"),
        ([[5], [96]], {}, r"prompt 1: prompt\[0\] is 96; token ids of this model are integers from 0 to 95"),
        ([[5], None], {}, "prompt 1: prompt None is a missing value"),
        ([[5, "a"]], {}, r"prompt 0: prompt\[1\] is 'a'; token ids"),
        (5, {}, "prompts 5 are neither text, nor token ids, nor several of these"),
        ([[5]], {"pooling": "max"}, "pooling='max' is not allowed: pooling must be last or mean"),
        ([[5]], {"normalize": 1}, "normalize=1 is not allowed: normalize must be True or False"),
        ([[5]], {"priority": "high"}, "priority='high' is not allowed: give one of interactive, batch"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_its_value(llm, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        llm.embed(prompts, show_progress=False, **options)


def test_an_unknown_argument_is_refused(llm):
    with pytest.raises(TypeError, match="unknown argument pool='mean'"):
        llm.embed([5], pool="mean")


def test_a_deadline_that_passes_is_an_error(llm):
    with pytest.raises(
        RuntimeError, match="prompt 0 has no embedding: its request ended with finish reason 'deadline'"
    ):
        embed(llm, [LONG], "last", deadline=1e-9)


def test_more_prompts_than_may_wait_are_refused(checkpoint):
    with small_engine(checkpoint, max_waiting=1, max_num_seqs=2) as llm:
        with pytest.raises(QueueFullError, match="4 requests more"):
            embed(llm, [[5]] * 4, "last")

        assert len(embed(llm, [[5]] * 3, "last")) == 3
