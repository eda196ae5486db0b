"""Checkpoints of a backbone alone, as embedding models are published: other names, and no unembedding."""

from __future__ import annotations

import json
import shutil
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

from jaxinfer import CacheConfig, Row, SamplingParams, StepOptions, init_cache, make_batch, make_sampling, prefill_step
from jaxinfer.checkpoint import abstract_checkpoint, load_checkpoint, load_params, read_config
from jaxinfer.checkpoint.orbax import restore_params, save_params
from jaxinfer.model.params import Params
from jaxinfer.plan.memory import num_bytes
from jaxinfer.sampling_params import NO_TOKEN
from jaxinfer.steps.log_probs import log_probs
from tests.checkpoint.renamed import edit_json, embedding_of, read_tensors, rewrite, unembedding_of
from tests.oracles import CONFIGS, load_reference, save_random_checkpoint


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request, tmp_path_factory):
    """Returns a checkpoint of each family, untied, with its parameters."""
    folder = tmp_path_factory.mktemp("checkpoint")
    path = save_random_checkpoint(folder, request.param, tie_word_embeddings=False)
    return path, load_params(path, read_config(path), "float32")


def assert_same_layers(params: Params, others: Params) -> None:
    for field in ("embedding", "layers", "final_norm"):
        mine, theirs = getattr(params, field), getattr(others, field)
        assert jax.tree.structure(mine) == jax.tree.structure(theirs)
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)


def save_backbone(path, folder, **options):
    """Writes the backbone of a checkpoint as its class in transformers does; returns its folder."""
    model: Any = load_reference(path)
    model.base_model.save_pretrained(folder, **options)
    return folder


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_the_backbone_that_transformers_writes_has_the_same_layers_and_no_unembedding(checkpoint, tmp_path, shard_size):
    path, params = checkpoint
    backbone = save_backbone(path, tmp_path / "backbone", max_shard_size=shard_size)
    assert json.loads((backbone / "config.json").read_text())["architectures"][0].endswith("Model")
    assert not any(name.startswith(("model.", "backbone.")) for name in read_tensors(backbone))

    config = read_config(backbone)
    own = load_params(backbone, config, "float32")

    assert not config.has_logits
    assert own.unembedding is None
    assert_same_layers(own, params)
    assert num_bytes(own) == num_bytes(params) - num_bytes(params.unembedding)


def test_names_with_and_without_the_prefix_may_be_mixed_as_in_transformers(checkpoint, tmp_path):
    path, params = checkpoint
    copy = shutil.copytree(path, tmp_path / "copy")

    def mixed(tensors):
        prefix = embedding_of(tensors).partition(".")[0] + "."
        bare = (f"{prefix}layers.1.", f"{prefix}norm")
        return {name.removeprefix(prefix) if name.startswith(bare) else name: x for name, x in tensors.items()}

    rewrite(copy, mixed)

    config = read_config(copy)
    assert config.has_logits
    assert_same_layers(load_params(copy, config, "float32"), params)
    expected, found = load_reference(path).state_dict(), load_reference(copy).state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_two_tensors_under_the_two_forms_of_a_name_are_refused(tmp_path):
    path = save_random_checkpoint(tmp_path, "llama")
    rewrite(path, lambda tensors: {**tensors, "norm.weight": tensors["model.norm.weight"] + 1})

    with pytest.raises(ValueError, match=r"1 tensors in .*\n  unexpected: norm\.weight \(32,\)$"):
        load_params(path, read_config(path), "float32")


def published(path, **changes):
    """Makes a checkpoint like the one of Qwen3-Embedding: names without prefix, no unembedding, any architecture."""

    def bare(tensors):
        unembedding = unembedding_of(tensors) if any(name.endswith("lm_head.weight") for name in tensors) else None
        return {name.removeprefix("model."): x for name, x in tensors.items() if name != unembedding}

    return edit_json(rewrite(path, bare), **changes)


@pytest.mark.parametrize(
    ("keys", "has_logits"),
    [
        ({"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}, False),
        ({"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}, True),
        ({"architectures": ["Qwen3Model"], "tie_word_embeddings": True}, False),
        ({"architectures": ["Qwen3Model"], "tie_word_embeddings": False}, False),
        ({"architectures": ..., "tie_word_embeddings": False}, False),
    ],
    ids=str,
)
def test_a_model_has_logits_if_its_class_has_a_head_and_a_tensor_for_it(tmp_path, keys, has_logits):
    tied = keys["tie_word_embeddings"]
    path = published(save_random_checkpoint(tmp_path, "qwen3", tie_word_embeddings=tied), **keys)

    params, config = load_checkpoint(path)

    assert config.has_logits == has_logits
    assert params.unembedding is None
    abstract, _ = abstract_checkpoint(path, "float32")
    assert jax.tree.structure(abstract) == jax.tree.structure(params)


def test_a_folder_of_sentence_transformers_needs_no_unembedding(tmp_path):
    path = save_random_checkpoint(tmp_path, "mistral")
    rewrite(path, lambda tensors: {name: x for name, x in tensors.items() if name != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        load_checkpoint(path)
    (path / "modules.json").write_text("[]")

    _, config = load_checkpoint(path)

    assert not config.has_logits


def test_the_unembedding_beside_a_backbone_is_not_read(tmp_path):
    path = edit_json(save_random_checkpoint(tmp_path, "llama"), architectures=["LlamaModel"])

    params, config = load_checkpoint(path)

    assert not config.has_logits
    assert params.unembedding is None


def test_config_json_alone_tells_a_backbone(tmp_path):
    path = edit_json(save_random_checkpoint(tmp_path, "llama"), architectures=["LlamaModel"])
    (path / "model.safetensors").unlink()

    params, config = abstract_checkpoint(path, "float32")

    assert not config.has_logits
    assert params.unembedding is None


@pytest.mark.parametrize("names", [["QwenModel"], ["LlamaModel", "LlamaForCausalLM"], ["LlamaBidirectionalModel"], []])
def test_backbones_of_other_classes_are_refused(tmp_path, names):
    path = edit_json(save_random_checkpoint(tmp_path, "llama"), architectures=names)

    if names:
        with pytest.raises(ValueError, match="only LlamaForCausalLM, its backbone and its classifier are; use a"):
            read_config(path)
    else:
        assert read_config(path).has_logits


def test_the_text_model_of_a_backbone_with_images_is_read(tmp_path):
    text = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 12}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 20, "sliding_window": 9}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    model = transformers.Gemma3Model(
        transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    )
    model.float().save_pretrained(tmp_path)

    config = read_config(tmp_path)
    params = load_params(tmp_path, config, "float32")

    assert not config.has_logits
    expected = model.language_model.embed_tokens.weight.detach().numpy()
    np.testing.assert_array_equal(params.embedding, expected)


def test_a_bfloat16_backbone_keeps_every_bit(tmp_path):
    path = save_random_checkpoint(tmp_path / "whole", "llama")
    model: Any = load_reference(path).bfloat16()
    model.base_model.save_pretrained(tmp_path / "backbone", max_shard_size="20KB")

    params, _ = load_checkpoint(tmp_path / "backbone", "bfloat16")

    expected = model.model.embed_tokens.weight.view(torch.int16).detach().numpy()
    np.testing.assert_array_equal(np.asarray(params.embedding).view(np.int16), expected)


@pytest.fixture(scope="module")
def bare_llama(tmp_path_factory):
    """The parameters and the configuration of a backbone of Llama."""
    path = save_random_checkpoint(tmp_path_factory.mktemp("bare"), "llama")
    return load_checkpoint(edit_json(path, architectures=["LlamaModel"]))


def test_parameters_without_logits_are_saved_and_restored(bare_llama, tmp_path):
    save_params(tmp_path / "saved", *bare_llama)

    params, config = restore_params(tmp_path / "saved")

    assert config == bare_llama[1]
    assert jax.tree.structure(params) == jax.tree.structure(bare_llama[0])


def test_a_step_samples_no_token_and_has_the_states(bare_llama):
    params, config = bare_llama
    cache = init_cache(config, CacheConfig(num_pages=1, page_size=16))
    shape = {"page_size": 16, "num_tokens": 4, "num_rows": 2, "table_width": 1}
    batch = make_batch([Row([5, 6, 7], 0, [0])], **shape)
    sampling = make_sampling([SamplingParams(temperature=0)], num_rows=2)

    output, _ = prefill_step(params, cache, batch, sampling, options=StepOptions(config=config, max_log_probs=2))

    assert output.tokens.tolist() == [NO_TOKEN, NO_TOKEN]
    assert output.top_tokens.shape == (2, 2)
    assert np.isfinite(output.hidden[:3]).all()


def test_log_probs_need_logits(bare_llama):
    params, config = bare_llama

    with pytest.raises(ValueError, match="those of an embedding model, which has no unembedding.*use the states of"):
        log_probs(params, jax.numpy.ones((1, 3), "int32"), config=config)
