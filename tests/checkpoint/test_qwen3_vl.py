"""Checkpoints of Qwen3-VL as they are published: text models beside a tower for images, their settings and tensors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint import load_checkpoint, load_params, read_config
from jaxinfer.checkpoint.families import family_of
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.moe import MoE
from jaxinfer.model.config import ModelConfig
from tests.checkpoint.test_logits import CASES
from tests.checkpoint.test_qwen3_5 import VISION as TOWER
from tests.oracles import FAMILY_SIZES, SIZES, random_config, randomize, reference_logits
from tests.replay import replay

TEXT_OF = {"qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text"}
CLASSES = {
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (transformers.Qwen3VLMoeConfig, transformers.Qwen3VLMoeForConditionalGeneration),
}
VISION = {**TOWER, "deepstack_visual_indexes": [0]}
OF_ANY = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151_643,
    "dtype": "bfloat16",
    "eos_token_id": 151_645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "rope_theta": 5_000_000,
    "use_cache": True,
    "vocab_size": 151_936,
}
# What Qwen publishes as text_config, and the ties of the whole model.
PUBLISHED: dict[str, tuple[dict[str, Any], bool]] = {
    "4B": (
        {
            **OF_ANY,
            "model_type": "qwen3_vl_text",
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        True,
    ),
    "30B-A3B": (
        {
            **OF_ANY,
            "model_type": "qwen3_vl_moe_text",
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
        },
        False,
    ),
}


def read(hf: dict[str, Any]) -> ModelConfig:
    return family_of(hf).config_from_hf(hf)


def whole_config(name: str) -> dict[str, Any]:
    """Returns the config.json of a published model."""
    text, is_tied = PUBLISHED[name]
    model_type = text["model_type"].removesuffix("_text")
    return {
        "architectures": [CLASSES[model_type][1].__name__],
        "image_token_id": 151_655,
        "model_type": model_type,
        "text_config": text,
        "tie_word_embeddings": is_tied,
        "vision_config": {"depth": 24, "hidden_size": 1024, "model_type": model_type},
    }


# ---- config.json


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_model_that_transformers_makes_of_it(name):
    hf = whole_config(name)
    complete = CLASSES[hf["model_type"]][0](**json.loads(json.dumps(hf)))

    config = read(hf)

    assert config == read(json.loads(complete.to_json_string(use_diff=False)))
    attention = config.layers[0].mixer
    assert isinstance(attention, Attention)
    assert attention.rope is not None
    assert (attention.rope.dim, attention.rope.theta, attention.rope.scaling) == (128, 5e6, None)
    assert attention.qk_norm == "head"
    assert config.max_position == 262_144
    assert config.has_tied_embeddings == (name == "4B")


@pytest.mark.parametrize(("family", "kin"), [("qwen3_vl_text", "qwen3"), ("qwen3_vl_moe_text", "qwen3_moe")])
def test_the_model_is_that_of_qwen3(family, kin):
    settings = random_config(family).to_dict()

    assert read(settings) == read({**settings, "model_type": kin, "norm_topk_prob": True})


def test_the_experts_of_a_published_config_are_in_every_layer():
    config = read(whole_config("30B-A3B"))

    (experts,) = {layer.feed_forward for layer in config.layers}
    assert isinstance(experts, MoE)
    assert (experts.num_experts, experts.router.num_chosen, experts.router.normalizes) == (128, 8, True)
    assert experts.expert.intermediate_size == 768


def test_a_whole_mixture_is_untied_unless_it_says_so():
    hf = whole_config("30B-A3B")
    stated = {key: value for key, value in hf.items() if key != "tie_word_embeddings"}

    assert not read(stated).has_tied_embeddings
    assert read({**hf, "tie_word_embeddings": True}).has_tied_embeddings
    assert read(hf["text_config"]).has_tied_embeddings  # as transformers' class of the text model alone


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"architectures": ["Qwen3VLForCausalLM"]}, {}, "architectures=.* only Qwen3VLMoeForConditional"),
    ({"text_config": None}, {}, "text_config=None is not an object"),
    ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config="),
    ({}, {"model_type": "qwen3_vl_text"}, "model_type='qwen3_vl_text' of text_config"),
    ({}, {"norm_topk_prob": False}, "text_config: norm_topk_prob=False"),
    ({}, {"mlp_only_layers": "3"}, "text_config: mlp_only_layers='3'"),
    ({}, {"rope_scaling": {"rope_type": "axial"}}, "text_config: rope_type='axial'"),
    ({}, {"num_experts_per_tok": 129}, "text_config: num_experts_per_tok=129"),
]


@pytest.mark.parametrize(("whole", "text", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_a_setting_that_changes_the_function_is_refused_by_its_name(whole, text, message):
    hf = whole_config("30B-A3B")
    hf = {**hf, "text_config": {**hf["text_config"], **text}, **whole}

    with pytest.raises(ValueError, match=f"{message}.*; use|{message}.*; download"):
        read(hf)


# ---- tensors


def save_whole(path: Path, model_type: str, case: dict[str, Any]) -> Any:
    """Saves a random model with a tower for images, and returns it."""
    config_class, model_class = CLASSES[model_type]
    text = {**SIZES, **FAMILY_SIZES[TEXT_OF[model_type]], **case}
    is_tied = text.get("tie_word_embeddings", False)
    torch.manual_seed(0)
    config = config_class(text_config=text, vision_config=VISION, tie_word_embeddings=is_tied)
    model = model_class(config).float().eval()
    randomize(model)
    model.save_pretrained(path)
    return model


def turn_experts(path: Path, parts: tuple[str, ...] = ("gate_up_proj", "down_proj"), layers: str = "012") -> None:
    """Writes experts with inputs before outputs, as Qwen publishes them; transformers saves them in the other order."""
    tensors = load_file(path / "model.safetensors")
    ends = tuple(f"layers.{layer}.mlp.experts.{part}" for layer in layers for part in parts)
    turned = {
        name: np.ascontiguousarray(tensor.swapaxes(1, 2)) if name.endswith(ends) else tensor
        for name, tensor in tensors.items()
    }
    save_file(turned, path / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> dict[str, tuple[Path, Any]]:
    folders = {model_type: tmp_path_factory.mktemp(model_type) for model_type in CLASSES}
    models = {model_type: save_whole(path, model_type, {}) for model_type, path in folders.items()}
    turn_experts(folders["qwen3_vl_moe"])
    return {model_type: (path, models[model_type]) for model_type, path in folders.items()}


def assert_logits_agree(path: Path, model: Any) -> None:
    config = read_config(path)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 40)

    params = load_params(path, config, "float32")
    (logits,) = replay(params, [tokens], [[(0, 40)]], config=config, shape=(40, 1))

    np.testing.assert_allclose(logits, reference_logits(model, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", CLASSES)
def test_logits_of_text_agree_with_the_whole_model(published, model_type):
    assert_logits_agree(*published[model_type])


# The first case of each family is that of the test before.
OTHERS = [(model_type, name) for model_type, text in TEXT_OF.items() for name in list(CASES[text])[1:]]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model_type", "name"), OTHERS, ids=map(", ".join, OTHERS))
def test_logits_of_text_agree_with_any_whole_model(tmp_path, model_type, name):
    assert_logits_agree(tmp_path, save_whole(tmp_path, model_type, CASES[TEXT_OF[model_type]][name]))


def test_experts_in_either_order_are_the_same(published, tmp_path):
    expected, _ = load_checkpoint(published["qwen3_vl_moe"][0], "float32")
    model = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(published["qwen3_vl_moe"][0])
    model.save_pretrained(tmp_path)
    shapes = {name: x.shape for name, x in load_file(tmp_path / "model.safetensors").items() if "experts" in name}
    assert {*shapes.values()} == {(6, 40, 32), (6, 32, 20)}  # as transformers 5 has them

    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path, "float32")[0], expected)
    turn_experts(tmp_path, ("down_proj",))
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path, "float32")[0], expected)


def test_experts_of_two_orders_in_the_layers_of_a_stack_are_reported(published, tmp_path):
    path, _ = published["qwen3_vl_moe"]
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    turn_experts(tmp_path, layers="2")

    with pytest.raises(ValueError, match="2 tensors in .* do not fit") as refusal:
        load_checkpoint(tmp_path)

    prefix = "mis-shaped: model.language_model.layers.2.mlp.experts."
    assert {line.strip() for line in str(refusal.value).splitlines()[1:]} == {
        f"{prefix}gate_up_proj expected (6, 32, 40), found (6, 40, 32)",
        f"{prefix}down_proj expected (6, 20, 32), found (6, 32, 20)",
    }


def test_experts_of_any_other_shape_are_reported_as_transformers_has_them(published, tmp_path):
    path, _ = published["qwen3_vl_moe"]
    tensors = load_file(path / "model.safetensors")
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    save_file({**tensors, name: tensors[name][:, :-1]}, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(
        ValueError, match=r"mis-shaped: .*layers.0.*down_proj expected \(6, 32, 20\), found \(6, 19, 32\)"
    ):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("model_type", CLASSES)
def test_the_tower_for_images_is_named_in_one_warning(published, caplog, model_type):
    with caplog.at_level(logging.INFO, logger="jaxinfer"):
        load_checkpoint(published[model_type][0])

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "loads the text model alone, without 27 tensors of visual" in record.getMessage()


@pytest.mark.parametrize("model_type", CLASSES)
def test_the_backbone_of_the_whole_model_has_the_same_layers_and_no_unembedding(published, tmp_path, model_type):
    """As embedding models of Qwen3-VL are published."""
    path, model = published[model_type]
    expected, _ = load_checkpoint(path, "float32")
    model.model.save_pretrained(tmp_path)

    params, config = load_checkpoint(tmp_path, "float32")

    assert not config.has_logits
    assert params.unembedding is None
    jax.tree.map(np.testing.assert_array_equal, params.layers, expected.layers)
    np.testing.assert_array_equal(params.embedding, expected.embedding)
