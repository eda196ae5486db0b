"""docs/families.md lists the layer features of every family, with facts that the families themselves state."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from jaxinfer.checkpoint.families import FAMILIES
from scripts.measure import family_layers
from tests.oracles import OWN_CLASSES

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
# Of families that read images the one of the whole model, which published checkpoints name.
ARCHITECTURES = {
    **{model_type: own_class.__name__ for model_type, own_class in OWN_CLASSES.items()},
    **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "kimi_k2": "DeepseekV3ForCausalLM",  # as published: transformers has no class of its own
}


@pytest.fixture(scope="module")
def facts():
    return {model_type: family_layers.facts_of(model_type, family) for model_type, family in FAMILIES.items()}


def test_the_page_has_the_section_that_the_code_writes():
    text = PAGE.read_text(encoding="utf-8")

    assert text[text.index(family_layers.HEADING) :] == family_layers.layers_section()


def test_a_family_has_the_architecture_that_transformers_names(facts):
    assert {name: each.architecture for name, each in facts.items()} == {name: ARCHITECTURES[name] for name in FAMILIES}


@pytest.mark.parametrize(
    ("model_type", "windows"),
    [
        ("llama", "-"),
        ("mistral", "all"),
        ("qwen3", "all or some"),
        ("qwen3_moe", "all"),
        ("gemma2", "all or some"),
        ("gemma3", "all or some"),
        ("gpt_oss", "all or some"),
        ("olmo2", "-"),
        ("phi3", "all"),
        ("dots1", "all or some"),
        ("minimax_m2", "-"),
    ],
)
def test_windows_are_those_that_the_family_gives_its_layers(facts, model_type, windows):
    assert facts[model_type].windows == windows


@pytest.mark.parametrize(
    ("model_type", "features"),
    [
        ("llama", {"attention biases", "MLP biases"}),
        ("mistral", set()),
        ("qwen2", {"qkv biases"}),
        ("gemma", {"gelu_tanh", "embedding multiplier", "attention biases"}),
        ("olmo2", {"norms of queries and keys over all heads", "norms after", "attention biases"}),
        ("gpt_oss", {"sinks", "attention biases", "experts"}),
        (
            "qwen2_moe",
            {"qkv biases", "experts", "gated shared expert", "dense layers among them"},
        ),
        ("smollm3", {"layers without positions", "attention biases", "MLP biases"}),
        ("exaone4", {"norms of queries and keys", "norms after", "layers without positions"}),
        ("olmoe", {"norms of queries and keys over all heads", "attention biases", "experts"}),
        ("seed_oss", {"qkv biases", "attention biases", "MLP biases"}),
        (
            "falcon_h1",
            {
                *("attention beside state spaces", "state spaces", "attention biases", "MLP biases"),
                *("score multiplier", "mixer multipliers", "MLP multipliers"),
                *("embedding multiplier", "logit multiplier"),
            },
        ),
        (
            "gemma4",
            {
                *("norms of queries and keys", "norms of values", "score multiplier", "rotation of a part of heads"),
                *("keys as values", "keys and values of earlier layers", "two rotary embeddings", "attention biases"),
                *("embeddings for each layer", "layer scales", "experts beside a dense network", "gelu_tanh"),
                *("norms before and after", "embedding multiplier", "bounded logits"),
            },
        ),
        (
            "dots1",
            {
                *("norms of queries and keys", "experts", "shared expert", "groups of experts"),
                *("dense layers among them", "attention biases"),
            },
        ),
        (
            "glm4_moe_lite",
            {"latent attention", "experts", "shared expert", "groups of experts", "dense layers among them"},
        ),
        ("mamba", {"selective scans", "layers of one half"}),
        (
            "minimax_m2",
            {"norms of queries and keys over all heads", "rotation of a part of heads", "experts"},
        ),
        ("solar_open", {"experts", "shared expert", "groups of experts", "qkv biases"}),
    ],
)
def test_features_are_those_of_the_layers(facts, model_type, features):
    assert set(facts[model_type].features) == features


def test_kinds_of_rotary_scaling_are_those_that_a_model_gets(facts):
    assert facts["llama"].ropes == ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


def test_the_list_follows_the_code(monkeypatch):
    llama = FAMILIES["llama"]

    def without_linear_scaling(hf):
        if hf.get("rope_scaling", {}).get("rope_type") == "linear":
            raise ValueError("rope_type='linear' is not supported")
        return llama.config_from_hf(hf)

    narrower = dataclasses.replace(llama, config_from_hf=without_linear_scaling)
    monkeypatch.setattr(family_layers, "FAMILIES", {"narrower": narrower})

    section = family_layers.layers_section()

    assert "| `narrower` |" in section
    assert "* default, dynamic, llama3, longrope, yarn: all." in section


def test_a_family_whose_sizes_have_other_keys_is_named(monkeypatch):
    acme = dataclasses.replace(FAMILIES["llama"], config_from_hf=lambda hf: hf["n_layers"])
    monkeypatch.setitem(FAMILIES, "acme", acme)

    with pytest.raises(RuntimeError, match=r"acme cannot be described \('n_layers'\); add its sizes to SIZES"):
        family_layers.layers_section()
