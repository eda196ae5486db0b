"""Kimi-K2 and the text model of Kimi-K2.5, with the settings and the names of published checkpoints."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from jaxinfer.checkpoint import load_params, read_config
from jaxinfer.checkpoint.families import family_of
from jaxinfer.checkpoint.published import published_config
from jaxinfer.model.components.latent_attention import LatentAttention
from tests.checkpoint.renamed import edit_json, rewrite
from tests.oracles import FAMILY_SIZES, SIZES, randomize, reference_logits
from tests.replay import replay

TEXT = {**SIZES, **FAMILY_SIZES["kimi_k2"]}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    config = transformers.Kimi_K25Config(
        text_config={**TEXT, "model_type": "kimi_k2"},
        vision_config=VISION,
        projection_hidden_size=16,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Kimi_K25ForConditionalGeneration(config).float().eval()
    randomize(model)
    return model


def save_as_transformers_names_it(model: transformers.PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path, save_original_format=False)

    def by_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stacked = {name: tensor for name, tensor in tensors.items() if ".experts." in name and ".shared" not in name}
        own = {name: tensor for name, tensor in tensors.items() if name not in stacked}
        for name, tensor in stacked.items():
            prefix, _, part = name.rpartition(".")
            parts = {"down_proj": tensor}
            if part == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
            own |= {f"{prefix}.{i}.{key}.weight": one for key, all_ in parts.items() for i, one in enumerate(all_)}
        return own

    return rewrite(path, by_expert)


def save_as_published(model: transformers.PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path)
    # transformers writes names of layers that it takes for those of the image encoder.
    rewrite(path, lambda tensors: {name.replace("model.blocks.", "model.layers."): x for name, x in tensors.items()})
    text = json.loads((path / "config.json").read_text())["text_config"]
    return edit_json(
        path,
        architectures=["KimiK25ForConditionalGeneration"],
        text_config={**text, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]},
    )


@pytest.mark.parametrize("save", [save_as_published, save_as_transformers_names_it])
def test_the_text_model_computes_what_transformers_computes_without_the_images(model, save, tmp_path, caplog):
    path = save(model, tmp_path)
    config = read_config(path)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 40)

    with caplog.at_level(logging.WARNING, logger="jaxinfer"):
        params = load_params(path, config, "float32")

    (logits,) = replay(params, [tokens], [[(0, 40)]], config=config, shape=(40, 1))
    np.testing.assert_allclose(logits, reference_logits(model, tokens), atol=1e-4)
    (record,) = caplog.records
    assert "mm_projector, vision_tower" in record.getMessage()


def read(**keys: Any) -> Any:
    hf = {"model_type": "kimi_k25", "text_config": {**TEXT, "model_type": "kimi_k2"}, **keys}
    return family_of(hf).config_from_hf(hf)


def test_ties_are_those_of_the_whole_model():
    assert read().has_tied_embeddings  # the default of transformers' Kimi_K25Config
    assert not read(tie_word_embeddings=False).has_tied_embeddings


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"text_config": [1]}, "text_config=[1] is not an object"),
        ({"text_config": {**TEXT, "model_type": "kimi_k3"}}, "model_type='kimi_k3' of text_config"),
        ({"architectures": ["KimiVLForConditionalGeneration"]}, "KimiVLForConditionalGeneration"),
        ({"text_config": {**TEXT, "model_type": "kimi_k2", "scoring_func": "softmax"}}, "scoring_func='softmax'"),
    ],
)
def test_another_model_under_this_name_is_refused(keys, named):
    with pytest.raises(ValueError, match=r"; (use|download)") as refusal:
        read(**keys)

    assert named in str(refusal.value)


def test_the_published_kimi_k2_has_yarn_without_a_ramp():
    config = published_config("Kimi-K2")

    mixer = config.layers[0].mixer
    assert isinstance(mixer, LatentAttention)
    assert mixer.rope.scaling is not None
    assert mixer.rope.scaling.beta_fast == mixer.rope.scaling.beta_slow == 1.0
    assert config.max_position == 131_072
