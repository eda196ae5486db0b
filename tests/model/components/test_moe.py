"""A token chooses the same experts, with the same weights, among few tokens and among many."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import SCORINGS, MoE, Router, declare_moe, route

D = 32


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="bits are promised on CPU")
@pytest.mark.parametrize("num_experts", [6, 8, 128])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_no_number_of_tokens_changes_a_bit_of_the_weights(scoring, num_experts):
    config = MoE(
        num_experts=num_experts, expert=MLP(intermediate_size=48), router=Router(num_chosen=2, scoring=scoring)
    )
    rng = np.random.default_rng(0)
    params = declare_moe(config, D, lambda sizes, *_, **__: rng.standard_normal(sizes, np.float32))
    # So many that all scores pass the 4,096 numbers from which XLA calls a library.
    x = rng.standard_normal((1024, D), np.float32)
    choose = jax.jit(functools.partial(route, config=config))

    experts, weights = choose(params, x, StepTokens(jnp.int32(len(x))))
    few = [choose(params, part, StepTokens(jnp.int32(len(part)))) for part in np.split(x, 128)]

    np.testing.assert_array_equal(experts, np.concatenate([experts for experts, _ in few]))
    np.testing.assert_array_equal(weights, np.concatenate([weights for _, weights in few]))
