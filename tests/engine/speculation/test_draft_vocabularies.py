"""Draft models whose vocabulary has other padding than the target's: drafts change no token, and are as often right."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import torch

from jaxinfer import EngineConfig, SamplingParams, load_checkpoint
from jaxinfer.checkpoint import Checkpoint
from jaxinfer.engine.drafters.draft_model import MAX_PADDING
from jaxinfer.engine.speculation.load import plan_speculation
from tests.checkpoint.renamed import edit_json, rewrite
from tests.engine.engines import (
    content_of,
    drafts_from,
    forget_prefixes,
    random_prompts,
    save_small_checkpoint,
    small_engine,
)
from tests.engine.probe import runner_of
from tests.engine.speculation.test_speculation import draft_model_for

PROMPTS = random_prompts(3, max_len=30, seed=5)
CHANGES = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3, "logits_processors": {"turns": 2.0}}
BASE = SamplingParams(max_tokens=24, seed=9, ignore_eos=True)
PARAMS = [replace(BASE, temperature=0), replace(BASE, temperature=1.3, **CHANGES), replace(BASE, n=2, top_p=0.9)]
PADDING = 5
DRAFTING = {"adaptive_drafts": False, "max_drafts": 3, "max_prompt_log_probs": 3}


def contents(completions):
    return [content_of(completion) for completion in completions]


def padded(tensors):
    """Adds random rows to embedding and unembedding, as large as the others: their tokens are sampled too."""
    generator = torch.Generator().manual_seed(1)

    def more(tensor):
        return torch.cat([tensor, torch.randn((PADDING, tensor.shape[1]), generator=generator) * tensor.std()])

    tables = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: more(tensor) if name in tables else tensor for name, tensor in tensors.items()}


def save_padded(path, folder):
    rewrite(shutil.copytree(path, folder), padded)
    return edit_json(folder, vocab_size=96 + PADDING)


@pytest.fixture(scope="module")
def padded_path(checkpoint, tmp_path_factory):
    """The small checkpoint with rows of padding."""
    return save_padded(checkpoint, tmp_path_factory.mktemp("padded") / "checkpoint")


@pytest.fixture(scope="module")
def padded_llm(padded_path):
    return small_engine(padded_path, max_prompt_log_probs=3)


def test_the_target_with_more_padding_drafts_for_itself_and_is_always_right(crowded_llm, shared_llm):
    plain = shared_llm.generate(PROMPTS, PARAMS, show_progress=False)
    params, config = runner_of(crowded_llm).params, crowded_llm.model_config
    noise = jax.random.normal(jax.random.key(0), (PADDING, config.hidden_size))
    larger = replace(
        params,
        embedding=jnp.concatenate([params.embedding, noise]),
        unembedding=jnp.concatenate([params.unembedding, 9 * noise]),  # often the most probable
    )
    model = draft_model_for(crowded_llm, larger, replace(config, vocab_size=config.vocab_size + PADDING))
    forget_prefixes(crowded_llm)
    before = crowded_llm.metrics()

    with drafts_from(crowded_llm, model):
        completions = crowded_llm.generate(PROMPTS, PARAMS, show_progress=False)

    after = crowded_llm.metrics()
    num_drafted = after.num_drafted_tokens - before.num_drafted_tokens
    assert contents(completions) == contents(plain)
    assert num_drafted > 20
    assert after.num_accepted_tokens - before.num_accepted_tokens == num_drafted


@pytest.fixture(scope="module")
def speculating_llm(padded_path, checkpoint):
    """The padded target with the small checkpoint, which is the same model without padding, as draft model."""
    return small_engine(padded_path, speculation=str(checkpoint), **DRAFTING)


def test_the_target_with_less_padding_is_right_until_padding_is_sampled(speculating_llm, padded_llm):
    no_padding = [replace(params, bad_words=[[96 + i] for i in range(PADDING)]) for params in PARAMS]
    plain = padded_llm.generate(PROMPTS, no_padding, show_progress=False)
    before = speculating_llm.metrics()

    completions = speculating_llm.generate(PROMPTS, no_padding, show_progress=False)

    after = speculating_llm.metrics()
    num_drafted = after.num_drafted_tokens - before.num_drafted_tokens
    assert contents(completions) == contents(plain)
    assert num_drafted > 20
    assert after.num_accepted_tokens - before.num_accepted_tokens == num_drafted


@pytest.mark.parametrize("params", [replace(BASE, temperature=2.0), replace(BASE, allowed_token_ids=[97, 99, 100])])
def test_tokens_that_the_draft_model_does_not_have_are_sampled_as_without_it(speculating_llm, padded_llm, params):
    plain = padded_llm.generate(PROMPTS, params, show_progress=False)

    completions = speculating_llm.generate(PROMPTS, params, show_progress=False)

    assert contents(completions) == contents(plain)
    assert any(token >= 96 for completion in completions for token in completion.token_ids)


def test_a_vocabulary_of_another_size_is_refused(crowded_llm):
    config = crowded_llm.model_config
    size = config.vocab_size + MAX_PADDING + 1

    with pytest.raises(ValueError, match=f"vocabulary of {size} tokens, the target one of 96, more than 1024 rows"):
        draft_model_for(crowded_llm, None, replace(config, vocab_size=size))


def swapped(path):
    """Exchanges two tokens of the tokenizer."""
    content = json.loads((path / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["b"], vocab["c"] = vocab["c"], vocab["b"]
    (path / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize("save", [shutil.copytree, save_padded], ids=["the same size", "more padding"])
def test_a_draft_model_of_another_tokenizer_is_refused(checkpoint, tmp_path, save):
    swapped(draft := save(checkpoint, tmp_path / "draft"))

    with pytest.raises(ValueError, match=f"{draft} has another tokenizer than the target: the id of 'b' is 68 there"):
        plan_speculation(draft, EngineConfig(), "float32", target=Checkpoint(checkpoint))


@pytest.mark.parametrize("change", ["no tokenizer", "an added token"])
def test_a_draft_model_of_the_same_ordinary_tokens_is_accepted(checkpoint, tmp_path, change):
    draft = save_padded(checkpoint, tmp_path / "draft")
    if change == "no tokenizer":
        (draft / "tokenizer.json").unlink()
    else:
        content = json.loads((draft / "tokenizer.json").read_text())
        content["added_tokens"].append({**content["added_tokens"][0], "id": 96, "content": "<pad>"})
        (draft / "tokenizer.json").write_text(json.dumps(content))

    assert plan_speculation(draft, EngineConfig(), "float32", target=Checkpoint(checkpoint)) is not None


def test_a_bfloat16_draft_model_of_another_family_changes_no_token(speculating_llm, padded_llm, tmp_path):
    path = save_small_checkpoint(tmp_path, family="qwen2", with_tokenizer=False, num_hidden_layers=1)
    rewrite(path, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    model = draft_model_for(speculating_llm, *load_checkpoint(path, "float32"))
    plain = padded_llm.generate(PROMPTS, PARAMS, show_progress=False)
    before = speculating_llm.metrics()

    with drafts_from(speculating_llm, model):
        completions = speculating_llm.generate(PROMPTS, PARAMS, show_progress=False)

    assert contents(completions) == contents(plain)
    assert speculating_llm.metrics().num_drafted_tokens > before.num_drafted_tokens
