"""The paged decoder against `transformers` on small random checkpoints, for any split of the work."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint import load_params, read_config
from jaxinfer.config import CacheConfig
from jaxinfer.model.batch import make_batch
from jaxinfer.model.cache import abstract_cache
from jaxinfer.model.config import uniform_decoder
from jaxinfer.model.decoder import forward, unembed
from jaxinfer.model.params import Params, abstract_params
from tests.oracles import load_reference, reference_logits, save_random_checkpoint
from tests.replay import lively_params, replay

LENGTHS = (40, 23, 5)
SHAPE = (72, 4)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {
    "llama, G=4, llama3 rope": (
        "llama",
        {
            "num_attention_heads": 8,
            "head_dim": 8,
            "rope_parameters": {**LLAMA3, "rope_theta": 1e4, "original_max_position_embeddings": 16},
        },
    ),
    "llama, G=1, H=64, tied, linear rope": (
        "llama",
        {
            "num_attention_heads": 2,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4},
        },
    ),
    "llama, G=2, H=80, biases": ("llama", {"head_dim": 80, "attention_bias": True, "mlp_bias": True}),
    "mistral, window of 11": ("mistral", {"sliding_window": 11}),
    "qwen2, G=7, tied, window of 17": (
        "qwen2",
        {
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "hidden_size": 56,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 17,
            "max_window_layers": 0,
        },
    ),
    "qwen3, G=4, H=128, yarn rope": (
        "qwen3",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e6,
                "original_max_position_embeddings": 16,
            },
        },
    ),
}
# (sequence, tokens) of each row of each step.
SPLITS = {
    "whole prompts": [[(0, 40), (1, 23), (2, 5)]],
    "chunks": [[(0, 17), (1, 16)], [(1, 7), (0, 16)], [(2, 5), (0, 7)]],
    "token by token": [[(2, 1), (0, 1), (1, 1)]] * 5 + [[(0, 1), (1, 1)]] * 18 + [[(0, 1)]] * 17,
    "decoding beside prefill": [[(0, 30), (2, 4)], [(0, 1), (1, 20), (2, 1)], [(1, 1), (0, 9)], [(1, 2)]],
}


GROUPED: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position": 64,
}


def regroup(params: Params, groups: tuple[int, ...]) -> Params:
    """The same parameters with their layers stacked in other groups."""
    layers = jax.tree.map(lambda *parts: jnp.concatenate(parts), *params.layers)
    ends = np.cumsum(groups)
    parts = [jax.tree.map(lambda leaf, a=a, b=b: leaf[a:b], layers) for a, b in zip(ends - groups, ends, strict=True)]
    return dataclasses.replace(params, layers=tuple(parts))


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A random checkpoint: its parameters and configuration, three sequences, and their logits in transformers."""
    family, overrides = CASES[request.param]
    path = save_random_checkpoint(tmp_path_factory.mktemp(family), family, num_hidden_layers=2, **overrides)
    config = read_config(path)
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, config.vocab_size, length) for length in LENGTHS]
    reference = load_reference(path)
    expected = [reference_logits(reference, sequence) for sequence in sequences]
    return load_params(path, config, "float32"), config, sequences, expected


@pytest.mark.parametrize("split", SPLITS)
def test_logits_are_those_of_transformers_for_any_split(case, split):
    params, config, sequences, expected = case

    logits = replay(params, sequences, SPLITS[split], config=config, shape=SHAPE, is_exact=False)

    for ours, theirs in zip(logits, expected, strict=True):
        # Logits of order 1 after some thousand float32 operations, added in another order.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("groups", [(1, 1, 1), (1, 2)], ids=str)
def test_logits_are_the_same_bits_for_any_layer_groups(groups):
    config = uniform_decoder(**GROUPED)
    params = lively_params(config)
    sequences = [np.arange(length) for length in LENGTHS]
    expected = replay(params, sequences, SPLITS["chunks"], config=config, shape=SHAPE)

    regrouped = config.regrouped(groups)
    logits = replay(regroup(params, groups), sequences, SPLITS["chunks"], config=regrouped, shape=SHAPE)

    np.testing.assert_array_equal(np.concatenate(logits), np.concatenate(expected))


def test_a_tied_embedding_serves_for_both_ends():
    config = uniform_decoder(**GROUPED, has_tied_embeddings=True)
    params, hidden = lively_params(config), jnp.asarray(np.eye(2, GROUPED["hidden_size"], dtype=np.float32))

    logits = jax.jit(unembed)(params, hidden, 2)

    np.testing.assert_array_equal(logits, params.embedding[:, :2].T)


def test_a_kernel_named_in_vain_is_refused():
    config = uniform_decoder(**GROUPED)
    cache = abstract_cache(config, CacheConfig(num_pages=1, page_size=16))
    batch = make_batch([], page_size=16, num_tokens=2, num_rows=2, table_width=1)

    with pytest.raises(ValueError, match="implementation='none such' is unknown"):
        jax.eval_shape(
            functools.partial(forward, config=config, implementation="none such"),
            abstract_params(config, jnp.float32),
            cache,
            batch,
        )
