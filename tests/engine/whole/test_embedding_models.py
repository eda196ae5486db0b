"""An embedding model, a backbone without unembedding, embeds as in transformers; what needs logits is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxinfer import EngineConfig, SamplingParams
from jaxinfer.batch_job import run_batch
from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.cli.doctor import engine_products
from jaxinfer.engine.llm import LLM
from jaxinfer.plan.memory import num_bytes
from tests.checkpoint.renamed import Tensors, edit_json, rewrite
from tests.engine.engines import SIZES, SMALL, favour_turns, random_prompts
from tests.on_demand import steps_on_demand
from tests.oracles import load_reference, save_random_checkpoint

PROMPTS = [[5], *random_prompts(4, max_len=40, seed=6), [*range(1, 91)]]
NO_LOGITS = r"this checkpoint is an embedding model: it has no unembedding \(lm_head\).* call LLM\.embed"
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 20},
    "gemma3_text": {},
    "granitemoehybrid": {"tie_word_embeddings": False},
}


def save_backbone(path: Path, family: str, **overrides: Any) -> Path:
    """Writes the backbone of a random model, as its own class in transformers does, in several files."""
    whole = save_random_checkpoint(path / "whole", family, **overrides)
    model: Any = load_reference(whole)
    model.base_model.save_pretrained(path / "backbone", max_shard_size="60KB")
    return path / "backbone"


def engine(path: Path, **options: Any) -> LLM:
    config = EngineConfig(**{**SMALL, **options.pop("limits", {})})
    with steps_on_demand():
        return LLM(path, config=config, **options)


def embed(llm: LLM, pooling: str = "last") -> np.ndarray:
    return llm.embed(PROMPTS, pooling=pooling, normalize=False, show_progress=False)


def pooled_states(path: Path, pooling: str = "last") -> np.ndarray:
    """Returns the last states of `AutoModel`, which come after the final norm."""
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        states = [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
    return np.array([own[-1] if pooling == "last" else own.mean(0) for own in states])


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    sizes = {**SIZES, "head_dim": 24, "tie_word_embeddings": True}
    return save_backbone(tmp_path_factory.mktemp("embedding"), "qwen3", eos_token_id=0, **sizes)


@pytest.fixture(scope="module")
def embedding_llm(backbone):
    return engine(backbone)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_the_states_of_the_backbone(tmp_path, family):
    path = save_backbone(tmp_path, family, **FAMILIES[family])

    with engine(path) as llm:
        embeddings = {pooling: embed(llm, pooling) for pooling in ("last", "mean")}

    assert all(np.abs(own - pooled_states(path, pooling)).max() < 1e-4 for pooling, own in embeddings.items())


def without_prefix(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): x for name, x in tensors.items() if name != "lm_head.weight"}


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_checkpoint_published_under_the_class_of_its_language_model_embeds(tmp_path, is_tied):
    path = rewrite(save_random_checkpoint(tmp_path, "qwen3", tie_word_embeddings=is_tied), without_prefix)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    with engine(path) as llm:
        embeddings = embed(llm)
        if is_tied:  # the embedding serves as the unembedding, as in transformers
            tokens = list(llm.generate([PROMPTS[1]], greedy, show_progress=False)[0].token_ids)
        else:
            with pytest.raises(ValueError, match=NO_LOGITS):
                llm.generate([PROMPTS[1]], greedy, show_progress=False)

    assert np.abs(embeddings - pooled_states(path)).max() < 1e-4
    if is_tied:
        model, prompt = load_reference(path), torch.tensor([PROMPTS[1]])
        expected = model.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None)  # pyright: ignore
        assert tokens == expected[0, len(PROMPTS[1]) :].tolist()


CALLS = {
    "generate": lambda llm: llm.generate([[5, 6]], show_progress=False),
    "generate with parameters": lambda llm: llm.generate([[5]], SamplingParams(temperature=0, max_tokens=1)),
    "stream": lambda llm: llm.stream([5, 6]),
    "add": lambda llm: llm.add([5, 6]),
    "beam_search": lambda llm: llm.beam_search([5, 6], num_beams=2),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_that_samples_says_why_not(embedding_llm, call):
    with pytest.raises(ValueError, match=NO_LOGITS):
        call(embedding_llm)

    assert not embedding_llm.has_unfinished
    assert len(embed(embedding_llm)) == len(PROMPTS)


def test_each_line_of_a_job_gets_the_error(embedding_llm, tmp_path):
    lines = [{"custom_id": str(i), "prompt": [5, 6], "max_tokens": 2} for i in range(3)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    summary = run_batch(embedding_llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl", show_progress=False)

    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert summary.num_errors == len(records) == 3
    assert all("call LLM.embed" in record["error"] for record in records)


OPTIONS = {
    "speculation": ({"speculation": "ngram"}, "speculation='ngram' drafts tokens, and the checkpoint .* samples none"),
    "logits_processors": ({"logits_processors": {"a": favour_turns}}, r"logits_processors=\['a'\] needs logits"),
    "max_prompt_log_probs": ({"limits": {"max_prompt_log_probs": 0}}, "max_prompt_log_probs=0 needs logits"),
}


@pytest.mark.parametrize(("options", "message"), OPTIONS.values(), ids=OPTIONS)
def test_options_that_need_logits_are_refused(backbone, options, message):
    with pytest.raises(ValueError, match=message):
        engine(backbone, **options)


def test_an_embedding_model_is_no_draft_model(backbone, tmp_path):
    target = save_random_checkpoint(tmp_path, "llama")

    with pytest.raises(ValueError, match="the draft model is an embedding model, which samples no tokens; give a"):
        engine(target, speculation=backbone)


@pytest.mark.parametrize("limits", [{"decode_loop_steps": 4}, {"max_num_batched_tokens": 5}, {"prefix_cache": False}])
def test_other_schedules_embed_the_same(backbone, embedding_llm, limits):
    with engine(backbone, limits=limits) as llm:
        # Rounding in float32: sums of other shapes are in another order without optimisation.
        assert np.abs(embed(llm) - embed(embedding_llm)).max() < 1e-5


def test_nothing_is_loaded_compiled_or_planned_for_logits(backbone):
    params, config = load_checkpoint(backbone)
    V = config.vocab_size

    with LLM(backbone, config=EngineConfig(**{**SMALL, "max_num_seqs": 1})) as llm:
        ready = llm.warm_up()
        embeddings = embed(llm)

    assert params.unembedding is None
    assert ready.memory.resident_bytes == num_bytes(params)
    assert np.abs(embeddings - pooled_states(backbone)).max() < 1e-4
    products = engine_products(backbone, EngineConfig(**SMALL), "float32")
    assert products
    assert not any(shape.num_outputs == V for shape in products)


def test_states_that_are_not_finite_are_an_error(backbone):
    params, _ = load_checkpoint(backbone)
    with engine(backbone) as llm:
        llm.update_params(jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params))

        with pytest.raises(RuntimeError, match="prompt 0 has no embedding"):
            llm.embed([[5, 6]], show_progress=False)


def test_a_default_sampling_in_the_folder_changes_nothing(tmp_path):
    path = save_backbone(tmp_path, "qwen3")
    edit_json(path, "generation_config.json", suppress_tokens=[5, 6], max_length=3, do_sample=False)

    with engine(path) as llm:
        embeddings = embed(llm)

    assert np.abs(embeddings - pooled_states(path)).max() < 1e-4
