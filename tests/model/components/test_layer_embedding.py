"""Embeddings for each layer against their formulas in NumPy float64."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.layer_embedding import (
    LayerEmbedding,
    add_layer_embedding,
    declare_embedding_tables,
    declare_layer_embedding,
    embed_for_layers,
)
from jaxinfer.model.components.layers import Norm

CONFIG = LayerEmbedding(vocab_size=11, size=6, activation="gelu_tanh")
NORM = Norm(epsilon=1e-3)
L, D, T = 3, 10, 5
GENERATOR = np.random.default_rng(0)


def normal(*shape):
    return GENERATOR.standard_normal(shape).astype(np.float32)


def rms_normed(x, weight):
    return x / np.sqrt((x.astype(float) ** 2).mean(-1, keepdims=True) + 1e-3) * weight


def test_the_numbers_of_a_layer_are_those_of_the_token_and_of_its_state():
    params = jax.tree.map(lambda spec: normal(*spec.shape), declare_embedding_tables(CONFIG, L, D))
    tokens, x = np.array([3, 0, 10, 3, 7]), normal(T, D)

    numbers = jax.jit(embed_for_layers, static_argnums=4)(params, tokens, x, StepTokens(jnp.int32(T)), NORM)

    assert numbers.shape == (L, T, 6)
    for layer in range(L):
        of_states = rms_normed(x @ params.projection[layer].T / math.sqrt(D), params.norm)
        of_tokens = params.table[tokens, layer] * math.sqrt(6)
        np.testing.assert_allclose(numbers[layer], (of_states + of_tokens) / math.sqrt(2), rtol=0, atol=5e-6)


def test_a_layer_adds_what_a_gate_lets_through():
    params = declare_layer_embedding(CONFIG, D, lambda sizes, *_, **__: GENERATOR.standard_normal(sizes, np.float32))
    x, numbers = normal(T, D), normal(T, 6)

    out = jax.jit(add_layer_embedding, static_argnames=("config", "norm"))(
        params, x, numbers, StepTokens(jnp.int32(T)), config=CONFIG, norm=NORM
    )

    gate = (x @ params.gate.T).astype(float)
    gelu = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    expected = x + rms_normed((gelu * numbers) @ params.up.T, params.norm)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
