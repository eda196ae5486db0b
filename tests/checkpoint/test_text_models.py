"""The text model of a checkpoint with images computes what transformers computes, without the other parts."""

from __future__ import annotations

import json
import logging
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from jaxinfer.checkpoint import Checkpoint, load_checkpoint, load_params, read_config
from jaxinfer.model.components.attention import Attention
from tests.checkpoint.packing import WRITERS
from tests.checkpoint.renamed import rewrite
from tests.oracles import FAMILY_SIZES, NO_IDS, SIZES, reference_logits
from tests.replay import replay

TEXT = {**SIZES, "head_dim": 12, **NO_IDS}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA = {
    "query_pre_attn_scalar": 20,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
MODELS = {
    "gemma3": lambda: transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config={**TEXT, **GEMMA}, vision_config=VISION, mm_tokens_per_image=4)
    ),
    "mistral3": lambda: transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(
            text_config={**TEXT, "model_type": "mistral", "sliding_window": 11},
            vision_config={**VISION, "model_type": "pixtral", "head_dim": 8},
            tie_word_embeddings=False,
        )
    ),
    "ministral3": lambda: transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(
            text_config={
                **TEXT,
                "model_type": "ministral3",
                "rope_parameters": FAMILY_SIZES["ministral3"]["rope_parameters"],
            },
            vision_config={**VISION, "model_type": "pixtral", "head_dim": 8},
            tie_word_embeddings=False,
        )
    ),
}
CASES = [(model_type, version) for model_type in MODELS for version in (4, 5)]


def in_transformers_5(name: str) -> str:
    """Returns the module's own name, which transformers 5 maps to that of transformers 4 when it saves."""
    name = name.replace("language_model.lm_head", "lm_head").replace("language_model.model.", "model.language_model.")
    is_other = name.startswith(("vision_tower", "multi_modal_projector"))
    return f"model.{name}" if is_other else name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns each model with its folder, by the name of its family and the version that the names are from."""
    made = {}
    for model_type, make in MODELS.items():
        torch.manual_seed(0)
        model = make().float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape)
                parameter.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else noise / parameter.shape[-1] ** 0.5)
        path = tmp_path_factory.mktemp(model_type)
        model.save_pretrained(path)
        made[model_type, 4] = model, path
        renamed = shutil.copytree(path, tmp_path_factory.mktemp(f"{model_type}-5") / "checkpoint")
        tensors = safetensors.numpy.load_file(path / "model.safetensors")
        tensors = {in_transformers_5(name): tensor for name, tensor in tensors.items()}
        safetensors.numpy.save_file(tensors, renamed / "model.safetensors")
        made[model_type, 5] = model, renamed
    return made


@pytest.fixture
def copied(saved, tmp_path):
    """A copy to damage, its tensors, and a function that writes them back."""
    path = shutil.copytree(saved["mistral3", 4][1], tmp_path / "copy")
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    return path, tensors, lambda: safetensors.numpy.save_file(tensors, path / "model.safetensors")


def text_config(path, **changes):
    """Changes config.json's text_config and returns what becomes of it."""
    content = json.loads((path / "config.json").read_text())
    content["text_config"] |= changes
    (path / "config.json").write_text(json.dumps(content))
    return read_config(path)


@pytest.mark.parametrize(("model_type", "version"), CASES)
def test_logits_of_text_agree_with_the_whole_model(saved, model_type, version):
    model, path = saved[model_type, version]
    config = read_config(path)
    tokens = np.random.default_rng(1).integers(11, config.vocab_size, 40)  # 10 stands for an image

    params = load_params(path, config, "float32")
    (logits,) = replay(params, [tokens], [[(0, 40)]], config=config, shape=(40, 1))

    np.testing.assert_allclose(logits, reference_logits(model, tokens), atol=1e-4)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(
    ("model_type", "writer"), [("mistral3", "compressed"), ("gemma3", "compressed"), ("gemma3", "gptq")]
)
def test_the_format_of_packed_weights_may_stand_among_the_settings_of_the_text_model(
    saved, tmp_path, model_type, writer, key
):
    path = WRITERS[writer](saved[model_type, 4][1], tmp_path / "both", size=16).path
    content = json.loads((path / "config.json").read_text())
    whole, config = load_checkpoint(path, "float32")
    content["text_config"][key] = content.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(content))

    params, own_config = load_checkpoint(path, "float32")

    assert own_config == config
    assert jax.tree.structure(params) == jax.tree.structure(whole)
    assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(whole)))


def test_a_format_that_is_not_read_is_named_among_the_settings_of_the_text_model(copied):
    with pytest.raises(ValueError, match="quantization_config={'quant_method': 'bitsandbytes'} is not supported"):
        text_config(copied[0], quantization_config={"quant_method": "bitsandbytes"})


@pytest.mark.parametrize(("model_type", "version"), CASES)
def test_the_parts_left_out_are_named_in_one_warning(saved, caplog, model_type, version):
    _, path = saved[model_type, version]

    with caplog.at_level(logging.INFO, logger="jaxinfer"):
        load_params(path, read_config(path), "float32")

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()
    assert "multi_modal_projector, vision_tower" in record.getMessage()


def test_every_other_misfit_is_reported_under_the_name_that_the_file_has(copied):
    path, tensors, write = copied
    config = read_config(path)
    del tensors["language_model.model.norm.weight"]
    tensors["language_model.model.layers.0.mlp.up_proj.weight"] = np.zeros((48, 31), np.float32)
    tensors["audio_tower.weight"] = np.zeros((2, 2), np.float32)
    tensors["model.language_model.norm.weight"] = np.zeros((32,), np.float32)
    write()

    with pytest.raises(ValueError, match=r"4 tensors in .* do not fit") as refusal:
        load_params(path, config, "float32")

    assert {line.strip() for line in str(refusal.value).splitlines()[1:]} == {
        "missing: language_model.model.norm.weight (32,)",
        "mis-shaped: language_model.model.layers.0.mlp.up_proj.weight expected (48, 32), found (48, 31)",
        "unexpected: audio_tower.weight (2, 2)",
        "unexpected: model.language_model.norm.weight (32,)",
    }


def test_a_tied_text_model_with_an_unembedding_of_its_own_uses_it(saved, copied, caplog):
    path, *_ = copied
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**content, "tie_word_embeddings": True}))
    model, _ = saved["mistral3", 4]
    tokens = np.random.default_rng(1).integers(11, SIZES["vocab_size"], 40)  # 10 stands for an image

    config = read_config(path)
    params = load_params(path, config, "float32")

    assert "language_model.lm_head.weight differs from" in caplog.text
    (logits,) = replay(params, [tokens], [[(0, 40)]], config=config, shape=(40, 1))
    np.testing.assert_allclose(logits, reference_logits(model, tokens), atol=1e-4)


def test_the_unembedding_of_a_tied_text_model_alone_is_both(saved, tmp_path):
    _, path = saved["gemma3", 4]
    config, path = read_config(path), shutil.copytree(path, tmp_path / "copy")
    expected = load_params(path, config, "float32")
    names = {"language_model.model.embed_tokens.weight": "language_model.lm_head.weight"}
    rewrite(path, lambda tensors: {names.get(name, name): tensor for name, tensor in tensors.items()})

    assert config.has_tied_embeddings
    np.testing.assert_array_equal(load_params(path, read_config(path), "float32").embedding, expected.embedding)


def test_sizes_that_published_gemma_3_checkpoints_leave_out_are_those_of_transformers(saved, tmp_path):
    path = shutil.copytree(saved["gemma3", 4][1], tmp_path / "copy")
    content = json.loads((path / "config.json").read_text())
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window")
    stated = {key: content["text_config"][key] for key in keys}
    content = {**content, "text_config": {"model_type": "gemma3_text", **stated}}
    content.pop("tie_word_embeddings")
    (path / "config.json").write_text(json.dumps(content))
    reference = transformers.Gemma3TextConfig(**stated)

    config = read_config(path)

    attention = config.layers[0].mixer
    assert isinstance(attention, Attention)
    assert config.vocab_size == reference.vocab_size
    assert attention.num_heads == reference.num_attention_heads
    assert attention.num_kv_heads == reference.num_key_value_heads
    assert attention.head_dim == reference.head_dim
    assert config.has_tied_embeddings


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"text_config": None}, "text_config=None is not an object"),
        ({"text_config": {"model_type": "llama"}}, "model_type='llama' of text_config"),
        ({"text_config": {"model_type": "mistral"}}, "text_config: vocab_size=None"),
        ({"architectures": ["MistralForCausalLM"]}, "architectures=['MistralForCausalLM']"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config="),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
    ],
)
def test_wrong_values_are_refused_by_file_key_and_value(copied, keys, named):
    path, *_ = copied
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | keys))

    with pytest.raises(ValueError, match=r"config\.json: .*; ") as refusal:
        read_config(path)

    assert named in str(refusal.value)


def test_a_setting_of_the_text_model_that_changes_the_function_is_refused(copied):
    with pytest.raises(ValueError, match=r"config\.json: text_config: hidden_act='gelu' is not supported; use"):
        text_config(copied[0], hidden_act="gelu")


def test_the_end_tokens_of_the_text_model_count(copied):
    path, *_ = copied
    (path / "generation_config.json").unlink()
    text_config(path, eos_token_id=[1, 7])

    assert Checkpoint(path).eos_token_ids == (1, 7)
