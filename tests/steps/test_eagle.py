"""What a head that goes on from state to state drafts, by NumPy."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.model.components.attention import AttentionParams
from jaxinfer.model.components.mlp import MLPParams
from jaxinfer.model.config import ModelConfig, uniform_decoder
from jaxinfer.model.params import LayerParams
from jaxinfer.sampling.batch import make_sampling
from jaxinfer.steps.eagle import EagleHead
from jaxinfer.steps.medusa import draft_from_states
from tests.replay import SMALL_MODEL, lively_params

W, DEPTH = 4, 3
PATHS = ((0,), (1,), (0, 0), (0, 0, 0), (0, 1), (2,))
draft = jax.jit(functools.partial(draft_from_states, paths=PATHS))
H, THETA, EPSILON = 6, 10_000.0, 1e-3
CONFIG = uniform_decoder(
    vocab_size=SMALL_MODEL.vocab_size,
    hidden_size=SMALL_MODEL.hidden_size,
    intermediate_size=24,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=H,
    max_position=16,
    rope_theta=THETA,
    norm_epsilon=EPSILON,
)


def eagle_head(config: ModelConfig, seed: int = 0) -> EagleHead:
    """Random parameters in which every norm differs from 1."""
    (layer,), random = lively_params(config, seed).layers, np.random.default_rng(seed)
    D = config.hidden_size
    norms = (jnp.asarray(1 + 0.3 * random.standard_normal(D), jnp.float32) for _ in range(3))
    names = ("embedding_norm", "hidden_norm", "final_norm")
    return EagleHead(
        input=jnp.asarray(random.standard_normal((D, 2 * D)) / D**0.5, jnp.float32),
        layer=jax.tree.map(lambda tensor: tensor[0], layer),
        config=config,
        window=W,
        **dict(zip(names, norms, strict=True)),
    )


def normed(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight


def rotated(x, position):
    """x [heads, H] turned as pairs (i, i + H / 2)."""
    angles = position * THETA ** (-np.arange(0, H, 2) / H)
    rotated = (x[:, : H // 2] + 1j * x[:, H // 2 :]) * np.exp(1j * angles)
    return np.concatenate([rotated.real, rotated.imag], -1)


def next_state(head, inputs):
    """The state after the last of inputs [n, 2 D], by definition."""
    layer: LayerParams = head.layer
    attention, mlp = layer.mixer, layer.feed_forward
    assert isinstance(attention, AttentionParams)
    assert isinstance(mlp, MLPParams)
    x = inputs @ head.input.T
    h = normed(x, layer.mixer_norm)
    keys = np.stack([rotated(np.einsum("khd,d->kh", attention.k, row), i) for i, row in enumerate(h)])
    values = np.einsum("khd,nd->nkh", attention.v, h)
    query = rotated(np.einsum("nhd,d->nh", attention.q, h[-1]), len(h) - 1)
    attended = []
    for i, q in enumerate(query):
        scores = np.exp(keys[:, i // 2] @ q / H**0.5)
        attended.append(scores / scores.sum() @ values[:, i // 2])
    x = x[-1] + attention.o @ np.concatenate(attended)
    h = normed(x, layer.feed_forward_norm)
    gate = mlp.gate @ h
    return normed(x + mlp.down @ (gate / (1 + np.exp(-gate)) * (mlp.up @ h)), head.final_norm)


def drafts_by_definition(params, head, hidden, tokens):
    """The drafts for each place after states [n, D], most probable first, told the token i64[n] drawn from each."""
    states, told, drafts = list(hidden), list(tokens), []
    for _ in range(DEPTH):
        pairs = zip(told, states, strict=True)
        told_states = [
            [normed(params.embedding[t], head.embedding_norm), normed(s, head.hidden_norm)] for t, s in pairs
        ]
        states.append(next_state(head, np.array(told_states).reshape(len(states), -1)))
        drafts.append(np.argsort(-(params.embedding @ states[-1])).tolist())
        told.append(drafts[-1][0])
    return drafts


@pytest.fixture(scope="module")
def case():
    params = dataclasses.replace(lively_params(SMALL_MODEL), unembedding=None)
    random = np.random.default_rng(1)
    windows = random.standard_normal((5, W, CONFIG.hidden_size)).astype(np.float32)
    return params, eagle_head(CONFIG), windows, random.integers(0, 61, (3, W)).astype(np.int32)


def test_each_draft_follows_from_the_states_and_tokens_before_it(case):
    params, head, windows, tokens = case
    rows, num_known = np.array([3, 1, 0], np.int32), np.array([4, 2, 0], np.int32)
    sampling = make_sampling([SamplingParams(temperature=0)] * 2, num_rows=3)

    drafts = draft(*case[:3], rows, tokens, num_known, sampling, rows)

    params, head = jax.tree.map(lambda tensor: np.asarray(tensor, np.float64), (params, head))
    for i, n in enumerate([4, 2]):
        best = drafts_by_definition(params, head, windows[rows[i], W - n :], tokens[i, W - n :])
        assert drafts[i].tolist() == [best[len(path) - 1][path[-1]] for path in PATHS]
