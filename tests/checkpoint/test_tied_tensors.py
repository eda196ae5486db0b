"""Tied tensors are read under the name that is stored; two that differ are both used, as in transformers."""

from __future__ import annotations

import logging
import shutil

import jax
import numpy as np
import pytest
import torch

from jaxinfer.checkpoint import abstract_checkpoint, load_checkpoint, load_params, read_config
from jaxinfer.model.params import Params
from tests.checkpoint.renamed import embedding_of, read_tensors, rewrite, unembedding_of
from tests.oracles import CONFIGS, load_reference, reference_logits, save_random_checkpoint
from tests.replay import replay

# The class of Nemotron-H in transformers ties nothing, whatever config.json says.
TYING = [family for family in CONFIGS if family != "nemotron_h"]


@pytest.fixture(scope="module", params=TYING)
def tied(request, tmp_path_factory):
    """Returns a tied checkpoint of each family, with its parameters."""
    folder = tmp_path_factory.mktemp("checkpoint")
    path = save_random_checkpoint(folder, request.param, tie_word_embeddings=True)
    return path, load_params(path, read_config(path), "float32")


def assert_same(params: Params, others: Params) -> None:
    assert jax.tree.structure(params) == jax.tree.structure(others)
    jax.tree.map(np.testing.assert_array_equal, params, others)


def under_the_other_name(tensors):
    name = embedding_of(tensors)
    return {"lm_head.weight" if key == name else key: tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize("num_files", [1, 3])
def test_the_unembedding_alone_is_both(tied, tmp_path, num_files):
    path, params = tied
    copy = rewrite(shutil.copytree(path, tmp_path / "copy"), under_the_other_name, num_files=num_files)

    assert_same(load_params(copy, read_config(copy), "float32"), params)


def test_both_are_one_if_they_are_equal(tied, tmp_path):
    path, params = tied
    copy = shutil.copytree(path, tmp_path / "copy")
    rewrite(copy, lambda tensors: {**tensors, **under_the_other_name(tensors)})

    assert read_config(copy).has_tied_embeddings
    assert_same(load_params(copy, read_config(copy), "float32"), params)


def test_in_bfloat16_the_unembedding_alone_is_both(tmp_path):
    path = save_random_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    rewrite(path, lambda tensors: {name: x.bfloat16() for name, x in under_the_other_name(tensors).items()})

    params, config = load_checkpoint(path, "bfloat16")

    stored = read_tensors(path)["lm_head.weight"]
    assert config.has_tied_embeddings
    assert params.unembedding is None
    np.testing.assert_array_equal(np.asarray(params.embedding, np.float32), stored.float().numpy())


def different(tensors):
    generator = torch.Generator().manual_seed(5)
    embedding = tensors[embedding_of(tensors)]
    both = {**tensors, **under_the_other_name(tensors)}
    both[unembedding_of(both)] = torch.randn(embedding.shape, generator=generator) / embedding.shape[1] ** 0.5
    return both


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "mamba2"])
def test_two_that_differ_are_both_used_as_in_transformers(tmp_path, caplog, family):
    path = rewrite(save_random_checkpoint(tmp_path, family, tie_word_embeddings=True), different, num_files=2)
    tokens = np.random.default_rng(0).integers(0, 96, 20)

    with caplog.at_level(logging.WARNING, logger="jaxinfer"):
        params, config = load_checkpoint(path, "float32")

    assert [record.getMessage() for record in caplog.records if "lm_head.weight differs from" in record.getMessage()]
    (logits,) = replay(params, [tokens], [[(0, 20)]], config=config, shape=(20, 1))
    np.testing.assert_allclose(logits, reference_logits(load_reference(path), tokens), rtol=0, atol=1e-4)
    # What is compiled before the weights are read has the same tensors.
    abstract, _ = abstract_checkpoint(path, "float32")
    assert jax.tree.map(np.shape, abstract) == jax.tree.map(np.shape, params)


def test_a_checkpoint_that_ties_nothing_needs_both(tmp_path):
    path = save_random_checkpoint(tmp_path, "llama")
    rewrite(path, lambda tensors: {name: x for name, x in tensors.items() if name != "model.embed_tokens.weight"})

    with pytest.raises(ValueError, match=r"missing: model\.embed_tokens\.weight \(96, 32\)"):
        load_params(path, read_config(path), "float32")


def test_a_tied_checkpoint_without_both_lacks_the_embedding(tmp_path):
    path = save_random_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    rewrite(path, lambda tensors: {name: x for name, x in tensors.items() if name != "model.embed_tokens.weight"})

    with pytest.raises(ValueError, match=r"1 tensors in .*\n  missing: model\.embed_tokens\.weight \(96, 32\)$"):
        load_params(path, read_config(path), "float32")
