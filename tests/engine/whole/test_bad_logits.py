"""Logits with NaN or infinity end the request concerned, say why, and leave all others as they are."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.config import EngineConfig
from jaxinfer.engine.llm import LLM
from tests.engine.engines import (
    GREEDY,
    SMALL,
    ScriptedDrafter,
    ScriptedTrees,
    content_of,
    generate,
    num_owned_pages,
    save_small_checkpoint,
    small_engine,
)
from tests.on_demand import steps_on_demand

POISON = 95  # the token whose embedding is NaN
SEEDED = replace(GREEDY, seed=0)
PROMPTS = [[5, 6, 7], [8, POISON, 9], [9] * 40, [4] * 30 + [POISON] + [3] * 10]


@pytest.fixture(scope="module")
def poisoned_checkpoint(tmp_path_factory):
    path = save_small_checkpoint(tmp_path_factory.mktemp("poisoned"))
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.embed_tokens.weight"][POISON] = np.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


ENGINES = {
    "plain": {},
    "chunks of 5": {"max_num_batched_tokens": 5},
    "a decode loop": {"decode_loop_steps": 4},
    "drafts": {"max_drafts": 3, "adaptive_drafts": False, "speculation": ScriptedDrafter(0.5)},
    "trees": {"max_drafts": 3, "adaptive_drafts": False, "draft_trees": True, "speculation": ScriptedTrees(0.5)},
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_bad_logits_end_their_request_and_no_other(shared_llm, poisoned_checkpoint, options):
    sound, llm = shared_llm, small_engine(poisoned_checkpoint, **options)

    completions = generate(llm, PROMPTS, SEEDED)

    expected = generate(sound, PROMPTS, SEEDED)
    for index in (0, 2):
        assert content_of(completions[index]) == content_of(expected[index])
    for index in (1, 3):
        assert completions[index].finish_reason == "error"
        assert completions[index].token_ids == ()
        assert f"after {len(PROMPTS[index])} tokens have NaN or infinity" in str(completions[index].error)
    assert num_owned_pages(llm) == 0
    # The pages that held NaN are used again.
    assert [content_of(c) for c in generate(llm, [PROMPTS[0]] * 8, SEEDED)] == [content_of(expected[0])] * 8


def test_a_request_keeps_what_it_had_before_its_logits_were_bad(poisoned_checkpoint):
    llm = small_engine(poisoned_checkpoint)
    bias = replace(GREEDY, logit_bias={POISON: 100.0}, log_probs=2)

    (completion,) = generate(llm, [[5, 6, 7]], bias)

    assert completion.token_ids == (POISON,)
    assert (len(completion.log_probs), len(completion.top_log_probs)) == (1, 1)
    assert "after 4 tokens" in str(completion.error)


def spoil(logits, tokens, length, argument):
    """The argument is what the logits after five tokens become; 0 spoils those after four, where the last is high."""
    is_spoilt = jnp.where(argument == 0, (length == 4) & (tokens[3] >= 48), length == 5)
    return jnp.where(is_spoilt, jnp.where(argument == 0, jnp.nan, jnp.where(argument > 0, jnp.inf, jnp.nan)), logits)


@pytest.fixture(scope="module")
def spoilt_llm(checkpoint):
    with steps_on_demand():
        return LLM(checkpoint, config=EngineConfig(**SMALL), logits_processors={"spoil": spoil})


@pytest.mark.parametrize("argument", [-1.0, 1.0], ids=["NaN", "infinity"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_spoils_logits_is_named(spoilt_llm, argument, temperature):
    params = replace(SEEDED, temperature=temperature)
    custom = replace(params, logits_processors={"spoil": argument})

    spoilt, other = generate(spoilt_llm, [[5, 6, 7]] * 2, [custom, params])

    assert (spoilt.finish_reason, len(spoilt.token_ids)) == ("error", 2)
    assert "logits processor 'spoil'" in str(spoilt.error)
    assert (other.finish_reason, other.error) == ("length", None)
    assert spoilt.token_ids == other.token_ids[:2]


def test_samples_that_broke_off_come_last_of_the_best(spoilt_llm):
    params = replace(SEEDED, n=8, best_of=8, temperature=1.5, logits_processors={"spoil": 0.0})

    reasons = [completion.finish_reason for completion in generate(spoilt_llm, [5, 6, 7], params)]

    assert set(reasons) == {"length", "error"}
    assert reasons == sorted(reasons, reverse=True)


def test_a_draft_model_with_bad_logits_drafts_nothing(shared_llm, checkpoint, poisoned_checkpoint):
    drafting = small_engine(checkpoint, speculation=poisoned_checkpoint, adaptive_drafts=False)

    completions = generate(drafting, PROMPTS, SEEDED)

    assert list(map(content_of, completions)) == list(map(content_of, generate(shared_llm, PROMPTS, SEEDED)))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_prompt_with_bad_logits_has_no_embedding_and_leaves_nothing(poisoned_checkpoint, pooling):
    with small_engine(poisoned_checkpoint) as llm:
        with pytest.raises(RuntimeError, match="prompt 1 has no embedding: the logits after 3 tokens have NaN"):
            llm.embed(PROMPTS, pooling=pooling, show_progress=False)

        assert num_owned_pages(llm) == 0
        assert not llm.has_unfinished
        assert np.isfinite(llm.embed(PROMPTS[0], pooling=pooling, show_progress=False)).all()
