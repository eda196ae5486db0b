"""A dense network beside experts against the formula in NumPy float64."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.dense_and_experts import DenseAndExperts, declare_dense_and_experts, dense_and_experts
from jaxinfer.model.components.layers import Norm
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router

NORM = Norm(epsilon=1e-3)
CONFIG = DenseAndExperts(
    dense=MLP(intermediate_size=14),
    experts=MoE(
        num_experts=5,
        expert=MLP(intermediate_size=9),
        router=Router(num_chosen=2, has_expert_scales=True, norm=NORM),
    ),
)
D, T = 12, 7


def rms_normed(x, weight):
    return x / np.sqrt((x.astype(float) ** 2).mean(-1, keepdims=True) + 1e-3) * weight


def network(params, x):
    gate = x @ params.gate.T
    return (gate / (1 + np.exp(-gate)) * (x @ params.up.T)) @ params.down.T


def test_the_router_and_the_experts_get_the_state_by_norms_of_their_own():
    generator = np.random.default_rng(0)
    normal = functools.partial(generator.standard_normal, dtype=np.float32)
    params = declare_dense_and_experts(CONFIG, D, lambda sizes, *_, **__: normal(sizes))
    x, h = normal((T, D)), normal((T, D))

    out = jax.jit(dense_and_experts, static_argnames=("config", "norm"))(
        params, x, h, StepTokens(jnp.int32(T)), config=CONFIG, norm=NORM
    )

    routed, chosen = params.experts, rms_normed(x, params.experts_norm)
    scores = rms_normed(x, routed.router_norm) / math.sqrt(D) @ routed.router.T
    expected = np.zeros((T, D))
    for t in range(T):
        best = np.argsort(-scores[t])[:2]
        weights = np.exp(scores[t, best]) / np.exp(scores[t, best]).sum() * routed.expert_scales[best]
        for expert, weight in zip(best, weights, strict=True):
            own = jax.tree.map(lambda tensor, e=expert: tensor[e], routed.experts)
            expected[t] += weight * network(own, chosen[t])
    expected = rms_normed(expected, params.experts_post_norm)
    expected += rms_normed(network(params.dense, h), params.dense_post_norm)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
