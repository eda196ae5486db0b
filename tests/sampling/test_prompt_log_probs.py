"""Log-probabilities of prompt tokens from hidden states, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.model.params import abstract_params
from jaxinfer.sampling.prompt_log_probs import MAX_ROWS, describe_prompt, make_prompt
from tests.replay import SMALL_MODEL, lively_params

T, V = MAX_ROWS + 36, SMALL_MODEL.vocab_size  # two pieces that overlap
jit_describe = jax.jit(describe_prompt, static_argnames="max_log_probs")


def hidden_states(num_tokens=T):
    return np.random.default_rng(0).normal(size=(num_tokens, SMALL_MODEL.hidden_size)).astype(np.float32)


def asked(count, seed=1):
    """Some places and tokens, in no order."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, T, count), rng.integers(0, V, count)


def log_softmax(params, hidden):
    table = np.asarray(params.embedding if params.unembedding is None else params.unembedding, np.float64)
    logits = hidden.astype(np.float64) @ table.T
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("count", [1, MAX_ROWS - 1, MAX_ROWS, MAX_ROWS + 1, T])
def test_they_are_the_log_softmax_of_the_logits_at_the_places_asked_for(count):
    params, hidden, (places, tokens) = lively_params(SMALL_MODEL), hidden_states(), asked(count)

    prompt = make_prompt(places, tokens, num_tokens=T, wants_top=True)
    output = jit_describe(params, hidden, prompt, max_log_probs=3)

    expected = log_softmax(params, hidden)[places]
    # float32 logits of order 10, and a sum of 61 terms.
    np.testing.assert_allclose(output.log_probs[:count], expected[range(count), tokens], rtol=0, atol=2e-5)
    np.testing.assert_allclose(output.top_log_probs[:count], -np.sort(-expected)[:, :3], rtol=0, atol=2e-5)
    chosen = np.take_along_axis(expected, np.asarray(output.top_tokens[:count]), -1)
    np.testing.assert_allclose(output.top_log_probs[:count], chosen, rtol=0, atol=2e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="bit-equality is promised on CPU")
def test_a_token_has_the_same_bits_wherever_it_stands_among_those_asked_for():
    params, hidden, (places, tokens) = lively_params(SMALL_MODEL), hidden_states(), asked(T)

    def describe(order):
        prompt = make_prompt(places[order], tokens[order], num_tokens=T, wants_top=True)
        return jax.tree.map(np.asarray, jit_describe(params, hidden, prompt, max_log_probs=3))

    whole, order = describe(np.arange(T)), np.random.default_rng(2).permutation(T)[:77]
    for one, other in zip(jax.tree.leaves(describe(order)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one[:77], other[order])


def test_alternatives_are_zeros_where_nobody_wants_them():
    places, tokens = asked(5)

    prompt = make_prompt(places, tokens, num_tokens=T)
    output = jit_describe(lively_params(SMALL_MODEL), hidden_states(), prompt, max_log_probs=3)

    assert not np.asarray(output.top_tokens).any()
    assert not np.asarray(output.top_log_probs).any()


def test_the_logits_of_all_tokens_never_exist_at_once():
    params, num_tokens = abstract_params(SMALL_MODEL, jnp.float32), 4096
    prompt = make_prompt([], [], num_tokens=num_tokens)

    compiled = jit_describe.lower(params, hidden_states(num_tokens), prompt, max_log_probs=0).compile()

    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < num_tokens * V * 4 / 4
