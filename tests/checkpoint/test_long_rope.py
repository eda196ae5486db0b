"""LongRoPE: short frequencies up to the original length, long ones in a model of more tokens, as in `transformers`."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer import EngineConfig, SamplingParams
from jaxinfer.checkpoint import load_params, read_config
from jaxinfer.engine.llm import LLM
from tests.checkpoint.renamed import edit_json
from tests.engine.engines import small_engine
from tests.oracles import SIZES, load_reference, reference_logits, save_random_checkpoint
from tests.replay import replay

ORIGINAL, LONGEST = 32, 128
HEAD_DIM = SIZES["hidden_size"] // SIZES["num_attention_heads"]
FACTORS = np.random.default_rng(0)
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": FACTORS.uniform(1, 2, HEAD_DIM // 2).tolist(),
    "long_factor": FACTORS.uniform(2, 8, HEAD_DIM // 2).tolist(),
}
FAMILIES = {"phi3": {"original_max_position_embeddings": ORIGINAL}, "llama": {"head_dim": HEAD_DIM}}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    sizes = {"max_position_embeddings": LONGEST, "eos_token_id": None, **FAMILIES[request.param]}
    path = save_random_checkpoint(tmp_path_factory.mktemp("long"), request.param, rope_parameters=ROPE, **sizes)
    return path, load_reference(path)


@pytest.mark.parametrize(("length", "max_position"), [(ORIGINAL, ORIGINAL), (60, LONGEST)])
def test_logits_are_those_of_transformers_for_a_text_of_that_length(checkpoint, length, max_position):
    path, reference = checkpoint
    config = read_config(path).for_length(length)
    assert config.max_position == max_position
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, length)

    (logits,) = replay(
        load_params(path, config, "float32"), [tokens], [[(0, 20)], [(0, length - 20)]], config=config, shape=(64, 1)
    )

    np.testing.assert_allclose(logits, reference_logits(reference, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["su", "yarn"])
@pytest.mark.parametrize(("key", "name"), [("rope_scaling", "type"), ("rope_parameters", "rope_type")])
def test_the_older_names_of_phi_3_mean_the_same(tmp_path, kind, key, name):
    sizes = {"max_position_embeddings": LONGEST, **FAMILIES["phi3"]}
    path = save_random_checkpoint(tmp_path, "phi3", rope_parameters=ROPE, **sizes)
    expected = read_config(path)
    parameters = {name: kind, **{key: value for key, value in ROPE.items() if key != "rope_type"}}
    edit_json(path, **{"rope_parameters": ..., key: parameters})
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], 20)

    config = read_config(path)

    assert config == expected
    (logits,) = replay(load_params(path, config, "float32"), [tokens], [[(0, 20)]], config=config, shape=(64, 1))
    np.testing.assert_allclose(logits, reference_logits(load_reference(path), tokens), rtol=0, atol=1e-4)


def test_yarn_without_lists_of_factors_stays_yarn_in_phi_3(tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    path = edit_json(save_random_checkpoint(tmp_path, "phi3", **FAMILIES["phi3"]), rope_parameters=yarn)

    assert read_config(path).max_position == 256


def test_an_engine_of_more_tokens_than_the_original_length_has_the_long_frequencies(checkpoint):
    path, reference = checkpoint
    prompt = np.random.default_rng(2).integers(0, SIZES["vocab_size"], 40).tolist()
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    with small_engine(path, max_num_seqs=2, max_model_len=96) as llm:
        (completion,) = llm.generate([prompt], greedy, show_progress=False)

    tokens = list(completion.token_ids)
    logits = reference_logits(reference, [*prompt, *tokens])[len(prompt) - 1 : -1]
    assert (logits.max(-1) - logits[range(len(tokens)), tokens]).max() < 1e-4


def test_the_length_is_the_original_one_unless_more_is_asked_for(checkpoint):
    path, _ = checkpoint
    prompt = [1] * (ORIGINAL + 1)

    too_long = pytest.raises(ValueError, match=f"max_model_len is {ORIGINAL}.*up to the model's {LONGEST}")
    with small_engine(path, max_num_seqs=1, max_model_len=None) as llm, too_long:
        llm.generate([prompt], show_progress=False)
    with pytest.raises(ValueError, match=f"max_model_len={LONGEST + 1} is more than the model's {LONGEST} positions"):
        LLM(path, dtype="float32", config=EngineConfig(max_model_len=LONGEST + 1))
