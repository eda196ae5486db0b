"""Checkpoints of Qwen3.5 as they are published: text models beside a tower for images, their settings and tensors."""

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
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE
from jaxinfer.model.components.recurrent.gated_delta_net import GatedDeltaNet
from jaxinfer.model.config import ModelConfig
from tests.checkpoint.test_every_family import num_rounded
from tests.checkpoint.test_logits import CASES
from tests.oracles import FAMILY_SIZES, SIZES, random_config, randomize, reference_logits, stack_experts
from tests.replay import replay

TEXT_OF = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
CLASSES = {
    "qwen3_5": (transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (transformers.Qwen3_5MoeConfig, transformers.Qwen3_5MoeForConditionalGeneration),
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": SIZES["hidden_size"],
    "num_position_embeddings": 16,
    "patch_size": 4,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000_000,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}
# Settings of all published text models that change nothing.
HARMLESS = {
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "initializer_range": 0.02,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "use_cache": True,
}
OF_ANY = {
    **HARMLESS,
    "attention_bias": False,
    "eos_token_id": 248_044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-06,
    "rope_parameters": ROPE,
    "vocab_size": 248_320,
}
# What Qwen publishes as text_config, but the list of layers, which is that of the interval.
PUBLISHED: dict[str, dict[str, Any]] = {
    "0.8B": {
        **OF_ANY,
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "linear_num_value_heads": 16,
        "mlp_only_layers": [],
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "27B": {
        **OF_ANY,
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "linear_num_value_heads": 48,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
    },
    "397B-A17B": {
        **OF_ANY,
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 4096,
        "linear_num_value_heads": 64,
        "mlp_only_layers": [],
        "moe_intermediate_size": 1024,
        "num_attention_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 60,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 1024,
        "tie_word_embeddings": False,
    },
}


def read(hf: dict[str, Any]) -> ModelConfig:
    return family_of(hf).config_from_hf(hf)


def whole_config(text: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a whole model with this text model."""
    model_type = text["model_type"].removesuffix("_text")
    (architecture,) = (model.__name__ for name, (_, model) in CLASSES.items() if name == model_type)
    return {
        "architectures": [architecture],
        "image_token_id": 248_056,
        "model_type": model_type,
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": {"depth": 12, "hidden_size": 768, "model_type": model_type},
    }


# ---- config.json


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_model_that_transformers_makes_of_it(name):
    hf = whole_config(PUBLISHED[name])
    complete = CLASSES[hf["model_type"]][0](**json.loads(json.dumps(hf)))

    config = read(hf)

    assert config == read(json.loads(complete.to_json_string(use_diff=False)))
    assert config == read(PUBLISHED[name])
    are_recurrent = [isinstance(mixer, GatedDeltaNet) for mixer in config.mixers]
    assert are_recurrent == [True, True, True, False] * (config.num_layers // 4)
    delta_net, attention = config.layers[0].mixer, config.layers[3].mixer
    assert isinstance(delta_net, GatedDeltaNet)
    assert isinstance(attention, Attention)
    assert attention.rope is not None
    assert attention.has_gate
    assert (attention.rope.dim, attention.rope.theta, attention.rope.scaling) == (64, 1e7, None)
    assert config.norm.adds_one
    assert config.norm.epsilon == 1e-6


def test_the_sizes_of_published_configs_are_those_of_the_layers():
    small, large = (read(whole_config(PUBLISHED[name])) for name in ("0.8B", "397B-A17B"))

    experts, delta_net = large.layers[0].feed_forward, large.layers[0].mixer
    assert isinstance(experts, MoE)
    assert isinstance(delta_net, GatedDeltaNet)
    assert (experts.num_experts, experts.router.num_chosen, experts.router.normalizes) == (512, 10, True)
    assert experts.expert.intermediate_size == 1024
    assert experts.shared == MLP(intermediate_size=1024)
    assert experts.has_shared_gate
    assert (delta_net.num_key_heads, delta_net.num_value_heads) == (16, 64)
    assert small.layers[0].feed_forward == MLP(intermediate_size=3584)
    assert (small.has_tied_embeddings, large.has_tied_embeddings) == (True, False)


@pytest.mark.parametrize("family", TEXT_OF.values())
def test_a_config_of_sizes_alone_is_the_one_that_transformers_completes(family):
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    sizes = {"model_type": family, **{key: PUBLISHED["27B"][key] for key in keys}}
    complete = type(random_config(family))(**sizes)

    assert read(sizes) == read(json.loads(complete.to_json_string(use_diff=False)))


NEUTRAL: list[dict[str, Any]] = [
    dict.fromkeys(("attn_output_gate", "output_gate_type", "partial_rotary_factor", "layer_types")),
    {"mamba_ssm_dtype": "bfloat16", "output_gate_type": "silu", "hidden_act": "swish"},
    {"mtp_num_hidden_layers": 0, "mtp_use_dedicated_embeddings": True},
    {"output_router_logits": True, "router_aux_loss_coef": 0.5, "norm_topk_prob": True, "decoder_sparse_step": 1},
    # The positions of a text are equal, so it does not matter which of them turns a pair.
    {"rope_parameters": {**ROPE, "mrope_interleaved": False, "mrope_section": [32, 0, 0]}},
    {"rope_parameters": {key: ROPE[key] for key in ("rope_type", "rope_theta")}},
]


@pytest.mark.parametrize("settings", NEUTRAL, ids=str)
@pytest.mark.parametrize("name", ["27B", "397B-A17B"])
def test_settings_that_change_no_logit_are_accepted(name, settings):
    text = PUBLISHED[name]

    assert read(whole_config({**text, **settings})) == read(whole_config(text))


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"architectures": ["Qwen3_5ForTokenClassification"]}, {}, "architectures=.* only Qwen3_5MoeForConditional"),
    ({"text_config": None}, {}, "text_config=None is not an object"),
    ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config="),
    ({}, {"model_type": "qwen3_5_text"}, "model_type='qwen3_5_text' of text_config"),
    ({}, {"attn_output_gate": False}, "text_config: attn_output_gate=False"),
    ({}, {"output_gate_type": "sigmoid"}, "text_config: output_gate_type='sigmoid'"),
    ({}, {"norm_topk_prob": False}, "text_config: norm_topk_prob=False"),
    ({}, {"mlp_only_layers": [3]}, r"text_config: mlp_only_layers=\[3\]"),
    ({}, {"rope_parameters": {**ROPE, "rope_type": "axial"}}, "text_config: rope_type='axial'"),
    ({}, {"rope_parameters": {**ROPE, "partial_rotary_factor": 2}}, "text_config: partial_rotary_factor=2"),
    ({}, {"layer_types": ["full_attention"] * 59}, "text_config: layer_types="),
]


@pytest.mark.parametrize(("whole", "text", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_a_setting_that_changes_the_function_is_refused_by_its_name(whole, text, message):
    hf = whole_config(PUBLISHED["397B-A17B"])
    hf = {**hf, "text_config": {**hf["text_config"], **text}, **whole}

    with pytest.raises(ValueError, match=f"{message}.*; use|{message}.*; download"):
        read(hf)


# ---- tensors


def save_whole(path: Path, model_type: str, case: dict[str, Any], seed: int = 0) -> Any:
    """Saves a random model with a tower for images, and a layer that drafts, as Qwen does. Returns the model."""
    config_class, model_class = CLASSES[model_type]
    text = {**SIZES, **FAMILY_SIZES[TEXT_OF[model_type]], **case}
    is_tied = text.get("tie_word_embeddings", False)
    torch.manual_seed(seed)
    model = (
        model_class(config_class(text_config=text, vision_config=VISION, tie_word_embeddings=is_tied)).float().eval()
    )
    randomize(model)
    model.save_pretrained(path)
    hf = json.loads((path / "config.json").read_text())
    hf["text_config"] |= HARMLESS
    (path / "config.json").write_text(json.dumps(hf))
    tensors = stack_experts(load_file(path / "model.safetensors"))
    tensors["mtp.fc.weight"] = np.zeros((2, 3), np.float32)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return model


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> dict[str, Path]:
    folders = {model_type: tmp_path_factory.mktemp(model_type) for model_type in CLASSES}
    for model_type, path in folders.items():
        save_whole(path, model_type, {})
    return folders


# The first case of each family in every run: text models alone have been through all of them.
WHOLE = [
    pytest.param(model_type, name, marks=[pytest.mark.exhaustive] * (i > 0), id=f"{model_type}, {name}")
    for model_type, text in TEXT_OF.items()
    for i, name in enumerate(CASES[text])
]


@pytest.mark.parametrize(("model_type", "name"), WHOLE)
def test_logits_of_text_agree_with_the_whole_model(tmp_path, model_type, name):
    model = save_whole(tmp_path, model_type, CASES[TEXT_OF[model_type]][name])
    config = read_config(tmp_path)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 40)

    params = load_params(tmp_path, config, "float32")
    (logits,) = replay(params, [tokens], [[(0, 40)]], config=config, shape=(40, 1))

    np.testing.assert_allclose(logits, reference_logits(model, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", CLASSES)
def test_the_tower_for_images_is_named_in_one_warning(published, caplog, model_type):
    with caplog.at_level(logging.INFO, logger="jaxinfer"):
        load_checkpoint(published[model_type])

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "loads the text model alone, without 21 tensors of visual" in record.getMessage()


def test_a_text_model_may_keep_the_names_that_it_had_beside_a_tower(published, tmp_path):
    """As transformers saves a text model that it has loaded from a whole one."""
    expected, _ = load_checkpoint(published["qwen3_5_moe"], "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(published["qwen3_5_moe"], dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3_5_moe_text"
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.language_model.norm.weight" in tensors

    params, _ = load_checkpoint(tmp_path, "float32")

    jax.tree.map(np.testing.assert_array_equal, params, expected)
    renamed = {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path, "float32")[0], expected)


def test_experts_that_are_stacked_in_a_part_of_the_layers_are_reported(published, tmp_path):
    tensors = load_file(published["qwen3_5_moe"] / "model.safetensors")
    prefix = "model.language_model.layers.0.mlp.experts."
    tensors[f"{prefix}5.up_proj.weight"] = tensors.pop(f"{prefix}gate_up_proj")[5]
    (tmp_path / "config.json").write_text((published["qwen3_5_moe"] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(ValueError, match="2 tensors in .* do not fit") as refusal:
        load_checkpoint(tmp_path)

    assert {line.strip() for line in str(refusal.value).splitlines()[1:]} == {
        f"missing: {prefix}gate_up_proj (6, 40, 32)",
        f"unexpected: {prefix}5.up_proj.weight (40, 32)",
    }


def test_the_weights_of_all_products_are_quantized(published):
    params, config = load_checkpoint(published["qwen3_5_moe"], "float32")

    loaded, _ = load_checkpoint(published["qwen3_5_moe"], "float32", quantization="int8")

    # Of a delta net 7 products, of gated attention 5; of experts, the shared one included, 6.
    products = [(7 if isinstance(stack.layer.mixer, GatedDeltaNet) else 5) + 6 for stack in config.stacks]
    assert num_rounded(loaded, params) == sum(products) + 1
