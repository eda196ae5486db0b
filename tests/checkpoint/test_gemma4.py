"""Checkpoints of Gemma 4 as they are published: text models beside towers for images and audio."""

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
from jaxinfer.checkpoint.orbax import restore_params, save_params
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.dense_and_experts import DenseAndExperts
from jaxinfer.model.components.layer_embedding import LayerEmbedding
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.config import ModelConfig
from tests.checkpoint.test_logits import CASES
from tests.oracles import FAMILY_SIZES, SIZES, load_reference, randomize, reference_logits, save_random_checkpoint
from tests.replay import replay

FULL, SLIDING = "full_attention", "sliding_attention"
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "output_proj_dims": 16,
    "subsampling_conv_channels": [4, 4],
}
OF_ANY = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": False,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02,
    "max_position_embeddings": 262_144,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
        SLIDING: {"rope_theta": 10_000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": "vision",
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
}
# text_config in the keys of published checkpoints, at the sizes of three of them.
PUBLISHED: dict[str, dict[str, Any]] = {
    "E2B": {
        **OF_ANY,
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": [SLIDING, SLIDING, SLIDING, SLIDING, FULL] * 7,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "sliding_window": 512,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
    },
    "31B": {
        **OF_ANY,
        "attention_k_eq_v": True,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "layer_types": [SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, FULL] * 10,
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
    },
    "26B-A4B": {
        **OF_ANY,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "layer_types": [SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, FULL] * 5,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "top_k_experts": 8,
    },
}


def read(hf: dict[str, Any]) -> ModelConfig:
    return family_of(hf).config_from_hf(hf)


def whole_config(text: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a whole model with this text model."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "image_token_id": 258_880,
        "model_type": "gemma4",
        "text_config": text,
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "gemma4_vision", **VISION},
    }


def attention_of(config: ModelConfig, layer: int) -> Attention:
    mixer = config.layers[layer].mixer
    assert isinstance(mixer, Attention)
    return mixer


# ---- config.json


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_model_that_transformers_makes_of_it(name):
    hf = whole_config(PUBLISHED[name])
    complete = transformers.Gemma4Config(**json.loads(json.dumps(hf)))
    written = json.loads(complete.to_json_string(use_diff=False))
    assert "global_head_dim" not in written["text_config"]  # but `per_layer_config`

    config = read(hf)

    assert config == read(written)
    assert config == read(PUBLISHED[name])
    for index, (kind, layer) in enumerate(zip(PUBLISHED[name]["layer_types"], config.layers, strict=True)):
        attention = attention_of(config, index)
        assert attention.rope is not None
        size, window, theta, turned = {
            FULL: (512, None, 1e6, 64),
            SLIDING: (256, PUBLISHED[name]["sliding_window"], 1e4, None),
        }[kind]
        assert (attention.head_dim, attention.window) == (size, window)
        assert (attention.rope.dim, attention.rope.theta, attention.rope.num_turned) == (size, theta, turned)
        assert (attention.scale, attention.qk_norm) == (1.0, "head")
        assert (layer.has_pre_norms, layer.has_post_norms, layer.has_scale) == (True, True, True)
    assert not config.norm.adds_one
    assert config.logit_softcap == 30.0
    assert config.embedding_scale == PUBLISHED[name]["hidden_size"] ** 0.5


def test_the_last_layers_of_a_small_model_read_the_keys_and_values_of_the_last_of_their_kind():
    config = read(PUBLISHED["E2B"])

    sources = [attention_of(config, layer).source for layer in range(35)]

    assert sources == [None] * 15 + [13, 13, 13, 13, 14] * 4
    assert all(attention_of(config, layer).has_value_norm == (layer < 15) for layer in range(35))
    networks = [MLP(intermediate_size=size * 6144, activation="gelu_tanh") for size in (1, 2)]
    assert [layer.feed_forward for layer in config.layers] == [networks[0]] * 15 + [networks[1]] * 20
    assert config.layers[0].embedding == LayerEmbedding(vocab_size=262_144, size=256, activation="gelu_tanh")
    assert sum(stack.num_layers for stack in config.mixer_stacks) == 15  # no pages for the others


def test_layers_of_large_models_that_see_all_have_keys_as_values_and_heads_of_their_own():
    for name, local, of_all in (("31B", 16, 4), ("26B-A4B", 8, 2)):
        config = read(PUBLISHED[name])
        for index, kind in enumerate(PUBLISHED[name]["layer_types"]):
            attention = attention_of(config, index)
            assert attention.source is None
            assert attention.has_values == (kind == SLIDING)
            assert attention.num_kv_heads == (local if kind == SLIDING else of_all)
            assert config.layers[index].embedding is None

    experts = read(PUBLISHED["26B-A4B"]).layers[0].feed_forward
    assert isinstance(experts, DenseAndExperts)
    assert experts.dense == MLP(intermediate_size=2112, activation="gelu_tanh")
    assert experts.experts.expert == MLP(intermediate_size=704, activation="gelu_tanh")
    assert (experts.experts.num_experts, experts.experts.router.num_chosen) == (128, 8)
    assert experts.experts.router.normalizes


NEUTRAL: list[dict[str, Any]] = [
    dict.fromkeys(("hidden_activation", "rope_parameters", "attention_dropout", "num_global_key_value_heads")),
    {"use_bidirectional_attention": "vision", "use_cache": False, "num_experts": 4, "moe_intermediate_size": 3},
    {"layer_types": [SLIDING, SLIDING, SLIDING, SLIDING, FULL] * 6 + [SLIDING] * 5},  # the last one sees all
    {"num_global_key_value_heads": 2},  # of no layer without K = V
]


@pytest.mark.parametrize("settings", NEUTRAL, ids=str)
def test_settings_that_change_no_logit_are_accepted(settings):
    text = PUBLISHED["E2B"]

    assert read(whole_config({**text, **settings})) == read(whole_config(text))


ROPE = OF_ANY["rope_parameters"]
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"architectures": ["Gemma4ForTokenClassification"]}, {}, "architectures=.* only Gemma4ForConditional"),
    ({"text_config": None}, {}, "text_config=None is not an object"),
    ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config="),
    ({}, {"model_type": "gemma3_text"}, "model_type='gemma3_text' of text_config"),
    ({}, {"use_bidirectional_attention": "all"}, "text_config: use_bidirectional_attention='all'"),
    ({}, {"hidden_activation": "silu"}, "text_config: hidden_activation='silu'"),
    ({}, {"num_kv_shared_layers": 34}, "text_config: num_kv_shared_layers=34"),
    ({}, {"num_kv_shared_layers": 35}, "text_config: num_kv_shared_layers=35"),
    ({}, {"num_kv_shared_layers": 36}, "text_config: num_kv_shared_layers=36"),
    ({}, {"num_kv_shared_layers": -1}, "text_config: num_kv_shared_layers=-1"),
    ({}, {"global_head_dim": 511}, "text_config: global_head_dim=511 is odd"),
    ({}, {"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "not a multiple of num_global_key_value_heads=3"),
    ({}, {"hidden_size_per_layer_input": "256"}, "text_config: hidden_size_per_layer_input='256'"),
    ({}, {"vocab_size_per_layer_input": 262_143}, "text_config: vocab_size_per_layer_input=262143"),
    ({}, {"per_layer_config": {"4": {"window": 5}}}, "text_config: per_layer_config="),
    ({}, {"per_layer_config": {"35": {"head_dim": 8}}}, "text_config: per_layer_config="),
    ({}, {"per_layer_config": [512]}, "text_config: per_layer_config="),
    ({}, {"per_layer_config": {"33": {"head_dim": 512}}}, "text_config: per_layer_config="),  # layer 13 has others
    ({}, {"rope_parameters": {FULL: ROPE[FULL]}}, "text_config: rope_parameters="),
    ({}, {"rope_parameters": {**ROPE, FULL: {"rope_type": "axial"}}}, "text_config: rope_type='axial'"),
    ({}, {"rope_parameters": {**ROPE, SLIDING: {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor=0.5"),
    ({}, {"rope_parameters": {**ROPE, FULL: {**ROPE[FULL], "partial_rotary_factor": 2}}}, "partial_rotary_factor=2"),
    ({}, {"enable_moe_block": True}, "text_config: enable_moe_block=True: num_experts=None"),
    ({}, {**EXPERTS, "top_k_experts": 5}, "text_config: enable_moe_block=True: top_k_experts=5"),
    ({}, {**EXPERTS, "moe_intermediate_size": 0}, "text_config: enable_moe_block=True: moe_intermediate_size=0"),
    ({}, {"layer_types": [SLIDING] * 34}, "text_config: layer_types="),
]


@pytest.mark.parametrize(("whole", "text", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_a_setting_that_changes_the_function_is_refused_by_its_name(whole, text, message):
    hf = whole_config(PUBLISHED["E2B"])
    hf = {**hf, "text_config": {**hf["text_config"], **text}, **whole}

    with pytest.raises(ValueError, match=f"{message}.*; use|{message}.*; download"):
        read(hf)


# ---- tensors


def save_whole(path: Path, case: dict[str, Any], seed: int = 0) -> Any:
    """Saves a random model with towers for images and audio. Returns the model."""
    text = {**SIZES, **FAMILY_SIZES["gemma4_text"], **case}
    torch.manual_seed(seed)
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config=VISION,
        audio_config=AUDIO,
        tie_word_embeddings=text.get("tie_word_embeddings", True),
    )
    model = transformers.Gemma4ForConditionalGeneration(config).float().eval()
    randomize(model)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.exhaustive] * (i > 0)) for i, name in enumerate(CASES["gemma4_text"])],
)
def test_logits_of_text_agree_with_the_whole_model(tmp_path, caplog, name):
    model = save_whole(tmp_path, CASES["gemma4_text"][name])
    config = read_config(tmp_path)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 40)

    with caplog.at_level(logging.INFO, logger="jaxinfer"):
        params = load_params(tmp_path, config, "float32")
    (logits,) = replay(params, [tokens], [[(0, 40)]], config=config, shape=(40, 1))

    np.testing.assert_allclose(logits, reference_logits(model, tokens), rtol=0, atol=1e-4)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "without 86 tensors of audio_tower, embed_audio, embed_vision, vision_tower" in record.getMessage()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save_random_checkpoint(tmp_path_factory.mktemp("gemma4"), "gemma4_text")


def test_embeddings_for_each_layer_are_cut_into_layers(saved):
    params, config = load_checkpoint(saved, "float32")
    state = {name: tensor.numpy() for name, tensor in load_reference(saved).state_dict().items()}
    tables = params.layer_embedding
    assert tables is not None

    for layer in range(config.num_layers):
        own = slice(18 * layer, 18 * (layer + 1))
        np.testing.assert_array_equal(tables.table[:, layer], state["model.embed_tokens_per_layer.weight"][:, own])
        np.testing.assert_array_equal(tables.projection[layer], state["model.per_layer_model_projection.weight"][own])
    np.testing.assert_array_equal(tables.norm, state["model.per_layer_projection_norm.weight"])


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_keys_and_values_of_layers_that_read_those_of_others_are_left_out(saved, tmp_path, prefix):
    """Published checkpoints have them, for all layers."""
    tensors = load_file(saved / "model.safetensors")
    for layer, size in ((2, 12), (3, 20)):
        place = f"model.layers.{layer}.self_attn."
        assert f"{place}k_proj.weight" not in tensors
        tensors |= {f"{place}{name}_proj.weight": np.full((2 * size, 32), np.nan, np.float32) for name in "kv"}
        tensors |= {f"{place}k_norm.weight": np.full(size, np.nan, np.float32)}
    tensors = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    params, _ = load_checkpoint(tmp_path, "float32")

    jax.tree.map(np.testing.assert_array_equal, params, load_checkpoint(saved, "float32")[0])
    del tensors[f"{prefix}layers.1.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_checkpoint(tmp_path)


def test_values_of_layers_without_them_are_refused(tmp_path):
    path = save_random_checkpoint(tmp_path, "gemma4_text")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    assert name not in tensors
    save_file({**tensors, name: np.zeros((40, 32), np.float32)}, path / "model.safetensors", {"format": "pt"})

    with pytest.raises(ValueError, match=rf"unexpected: {name} \(40, 32\)"):
        load_checkpoint(path)


def test_parameters_and_config_are_saved_and_restored(saved, tmp_path):
    params, config = load_checkpoint(saved, "float32")

    save_params(tmp_path / "saved", params, config)
    restored, restored_config = restore_params(tmp_path / "saved")

    assert restored_config == config
    jax.tree.map(np.testing.assert_array_equal, restored, params)
