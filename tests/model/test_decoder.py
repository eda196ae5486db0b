"""The paged decoder: its bits for any groups of layers, and both ends of its embedding."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import CacheConfig
from jaxinfer.model.batch import StepTokens, make_batch
from jaxinfer.model.cache import abstract_cache
from jaxinfer.model.config import uniform_decoder
from jaxinfer.model.decoder import forward, unembed
from jaxinfer.model.params import Params, abstract_params
from tests.replay import LENGTHS, SHAPE, SPLITS, lively_params, replay

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

    logits = jax.jit(unembed)(params, hidden, StepTokens(jnp.int32(2)))

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
