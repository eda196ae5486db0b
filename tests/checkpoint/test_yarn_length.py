"""YaRN recipes for long texts: a model is as long as factor times its native length, and computes as transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxinfer.checkpoint import load_params, read_config
from jaxinfer.checkpoint.families import family_of
from jaxinfer.model.config import ModelConfig
from tests.checkpoint.renamed import edit_json
from tests.oracles import FAMILY_SIZES, SIZES, load_reference, reference_logits, save_random_checkpoint
from tests.replay import replay

NATIVE = 32
RECIPE: dict[str, Any] = {"factor": 3.0, "original_max_position_embeddings": NATIVE}
OLD = {"rope_scaling": {"type": "yarn", **RECIPE}}  # of transformers 4, as on the model cards
NEW = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **RECIPE}}
PARTLY = {
    "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, **RECIPE},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    }
}
RECIPES = {
    "qwen3, as its card writes it": ("qwen3", OLD),
    "qwen2, as transformers 5 writes it": ("qwen2", NEW),
    "olmo3, in some layers": ("olmo3", PARTLY),
    "deepseek_v3, with mscales": ("deepseek_v3", {"rope_scaling": {**OLD["rope_scaling"], "mscale_all_dim": 1.0}}),
    "llama, native length not repeated": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 3.0}}),
}


@pytest.mark.parametrize(("family", "keys"), RECIPES.values(), ids=RECIPES)
def test_logits_past_the_native_length_are_those_of_transformers(tmp_path, family, keys):
    path = save_random_checkpoint(tmp_path, family, max_position_embeddings=NATIVE)
    edit_json(path, rope_parameters=..., **keys) if "rope_scaling" in keys else edit_json(path, **keys)
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], 3 * NATIVE)

    config = read_config(path)
    params = load_params(path, config, "float32")
    (logits,) = replay(params, [tokens], [[(0, len(tokens))]], config=config, shape=(len(tokens), 1))

    assert config.max_position == 3 * NATIVE
    np.testing.assert_allclose(logits, reference_logits(load_reference(path), tokens), rtol=0, atol=1e-4)


def read(family: str, **keys: Any) -> ModelConfig:
    hf = {"model_type": family, **SIZES, **FAMILY_SIZES.get(family, {}), "max_position_embeddings": NATIVE}
    return family_of(hf).config_from_hf({**hf, **keys})


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        (OLD, 96),
        (NEW, 96),
        ({**OLD, "max_position_embeddings": 96}, 96),
        ({**OLD, "max_position_embeddings": 80}, 96),
        ({**OLD, "max_position_embeddings": 500}, 500),  # never less than config.json states
        ({"rope_scaling": {**OLD["rope_scaling"], "original_max_position_embeddings": 4}}, NATIVE),
        ({"rope_scaling": {"type": "yarn", "factor": 2.5}}, 80),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 16}}, NATIVE),  # factor 2
        ({"rope_scaling": {"type": "linear", "factor": 3.0}}, NATIVE),
        ({"rope_scaling": {"type": "dynamic", "factor": 3.0}}, NATIVE),
        ({}, NATIVE),
    ],
    ids=str,
)
def test_the_length_is_factor_times_the_native_one_and_never_less_than_stated(keys, length):
    config = read("qwen3", **keys)

    assert config.max_position == length
    assert {mixer.rope.max_position for mixer in config.mixers if mixer.rope is not None} == {length}


def test_every_rope_of_a_model_reaches_its_length():
    config = read("olmo3", **PARTLY)

    assert config.max_position == 96
    assert {mixer.rope.max_position for mixer in config.mixers if mixer.rope is not None} == {96}


def test_a_length_beyond_the_integers_of_the_device_is_refused():
    with pytest.raises(
        ValueError, match="factor=1e\\+20 times original_max_position_embeddings=32 tokens is no length"
    ):
        read("qwen3", rope_scaling={**OLD["rope_scaling"], "factor": 1e20})
