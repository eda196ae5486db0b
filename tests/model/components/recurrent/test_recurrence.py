"""Recurrent layers: the same bits for any split of the work on CPU; in chunks, as accelerators compute them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.model.batch import Row, make_batch
from jaxinfer.model.components.recurrent import gated_delta_net, selective_scan, state_space
from jaxinfer.model.components.recurrent.recurrence import (
    CHUNK,
    Places,
    Tokens,
    _advance_in_chunks,
    _advance_in_turn,
    outputs_of_row,
)
from jaxinfer.model.components.recurrent.selective_scan import ChannelTokens
from jaxinfer.model.components.recurrent.states import state_slots
from tests.exhaustive import exhaustive_but
from tests.model.components.recurrent import test_gated_delta_net, test_selective_scan, test_state_space
from tests.model.components.recurrent.layers import Replay, S, T, model_of, splits

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="bit-equality is promised on CPU")
CASES = {
    **{f"state space, {name}": case for name, case in test_state_space.CASES.items()},
    **{f"selective scan, {name}": case for name, case in test_selective_scan.CASES.items()},
    **{f"gated delta net, {name}": case for name, case in test_gated_delta_net.CASES.items()},
}


@pytest.fixture(scope="module", params=exhaustive_but(CASES, (name for name in CASES if "odd sizes" in name)))
def replay(request):
    """A random model, and its hidden states and stored states after one step."""
    replay = Replay(model_of(*CASES[request.param]))
    return replay, replay.run([[(0, T)]], (T, 2))


@pytest.mark.bits
@on_cpu
@pytest.mark.parametrize("split", splits())
def test_hidden_and_stored_states_are_the_same_bits_for_any_split(replay, split):
    run, (expected, expected_states) = replay

    hidden, states = run.run(*splits()[split])

    np.testing.assert_array_equal(hidden, expected[: len(hidden)])
    last = None if len(hidden) == T else len(hidden) // S  # only the whole sequence has the last page's state
    for ours, whole in zip(states, expected_states, strict=True):
        np.testing.assert_array_equal(ours[:, :last], whole[:, :last])


@pytest.mark.bits
@on_cpu
@pytest.mark.parametrize("end", [16, 48])
def test_the_snapshot_at_a_pages_end_is_the_state_of_a_run_that_ends_there(replay, end):
    run, (_, expected) = replay

    _, states = run.run([[(0, end)]], (T, 2))

    for ours, whole in zip(states, expected, strict=True):
        np.testing.assert_array_equal(ours[:, end // S - 1], whole[:, end // S - 1])


# ---- in chunks

G, R, K, V = 2, 3, 13, 10
RULES = {"state space": state_space.RULE, "delta net": gated_delta_net.RULE, "selective scan": selective_scan.RULE}
# Rows of (tokens before the step, tokens in it), and the tokens of a page.
ROWS = {
    "one row, longer than two chunks": ([(0, 2 * CHUNK + 5)], 256),
    "rows that begin and end anywhere in pages": ([(0, 40), (33, 1), (16, 50), (15, 16), (0, 1)], 16),
    "single tokens": ([(5, 1), (63, 1), (0, 1)], 16),
    "no row": ([], 16),
}


def random_tokens(num_tokens: int, seed: int = 0, log_decay: np.ndarray | None = None) -> Tokens:
    """Keys of which some are the same in a row, which a chunk's corrections depend on most."""
    generator = np.random.default_rng(seed)
    keys = generator.standard_normal((num_tokens, G, K))
    keys[10:30] = keys[10:11]
    keys /= np.sqrt((keys**2).sum(-1, keepdims=True))
    log_decay = -generator.exponential(0.1, (num_tokens, G * R)) if log_decay is None else log_decay
    numbers: dict[str, Any] = {
        "decay": np.exp(log_decay),
        "log_decay": log_decay,
        "rates": generator.uniform(0, 1, (num_tokens, G * R)),
        "keys": keys,
        "queries": generator.standard_normal((num_tokens, G, K)),
        "values": generator.standard_normal((num_tokens, G * R, V)),
    }
    return Tokens(**{name: jnp.asarray(x, jnp.float32) for name, x in numbers.items()})


def random_operands(name: str, num_tokens: int) -> tuple[Any, Any, tuple[int, int, int]]:
    """Returns tokens of a rule, what they share, and the shape of a state."""
    if name != "selective scan":
        return random_tokens(num_tokens), None, (G * R, K, V)
    generator = np.random.default_rng(0)
    shapes = {"keys": (num_tokens, K), "queries": (num_tokens, K), "values": (num_tokens, 1, V)}
    numbers = {key: generator.standard_normal(shape) for key, shape in shapes.items()}
    numbers |= {"rates": generator.uniform(0, 1, (num_tokens, V))}
    tokens = ChannelTokens(**{key: jnp.asarray(x, jnp.float32) for key, x in numbers.items()})
    return tokens, jnp.asarray(-generator.exponential(1.0, (K, V)), jnp.float32), (1, K, V)


def arrays_of(lens, page_size, shape):
    """A step's places with padding, a pool of random states, NaN in those that are not read, and its tokens."""
    rows, first = [], 0
    for before, count in lens:
        num_pages = -(-(before + count) // page_size)
        rows.append(Row([0] * count, before, list(range(first, first + num_pages))))
        first += num_pages
    num_tokens = sum(count for _, count in lens)
    batch = make_batch(rows, page_size=page_size, num_tokens=num_tokens + 7, num_rows=len(rows) + 2, table_width=8)
    slots = state_slots(jax.tree.map(jnp.asarray, batch), page_size, 0)
    pool = np.full((first + 1, *shape), np.nan, np.float32)
    read = np.asarray(slots.reads)[np.asarray(slots.reads) < len(pool)]
    pool[read] = np.random.default_rng(1).standard_normal((len(read), *pool.shape[1:]))
    places = Places(slots, jnp.asarray(batch.cu_q_lens), jnp.asarray(batch.positions), jnp.asarray(num_tokens))
    return jnp.asarray(pool), places


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("rows", ROWS)
def test_chunks_give_the_outputs_and_the_stored_states_of_single_tokens(name, rows):
    rule, (lens, page_size) = RULES[name], ROWS[rows]
    num_tokens = sum(count for _, count in lens)
    tokens, shared, shape = random_operands(name, num_tokens + 7)
    operands = tokens, shared, *arrays_of(lens, page_size, shape)

    (expected, states), (actual, own_states) = (
        jax.jit(functools.partial(advance, rule))(*operands) for advance in (_advance_in_turn, _advance_in_chunks)
    )

    # float32 sums of about a hundred numbers of order 1, in another order.
    np.testing.assert_allclose(actual[:num_tokens], expected[:num_tokens], rtol=0, atol=2e-5)
    np.testing.assert_allclose(own_states, states, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", RULES)
def test_a_whole_row_in_chunks_gives_the_outputs_and_derivatives_of_single_tokens(name):
    rule, n = RULES[name], 150
    tokens, shared, shape = random_operands(name, n)
    weights = jnp.asarray(np.random.default_rng(2).standard_normal(tokens.values.shape), jnp.float32)

    def in_turn(tokens, shared):
        def advance(state, token):
            # Of heads, the derivative by their decays counts by log_decay alone.
            token = token._replace(decay=jnp.exp(token.log_decay)) if isinstance(token, Tokens) else token
            state, y = rule.step(state, jax.tree.map(lambda x: x[None], token), shared)
            return state, y[0]

        return jax.lax.scan(advance, jnp.zeros((1, *shape), jnp.float32), tokens)[1]

    def in_chunks(tokens, shared):
        return outputs_of_row(rule, tokens, shared, shape[1])

    (expected, wanted), (actual, own) = (
        jax.jit(lambda tokens, shared, run=run: (run(tokens, shared), gradient_of(run, weights)(tokens, shared)))(
            tokens, shared
        )
        for run in (in_turn, in_chunks)
    )

    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)
    for ours, theirs in zip(jax.tree.leaves(own), jax.tree.leaves(wanted), strict=True):
        # Sums of up to 150 such outputs.
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


def gradient_of(run, weights):
    return jax.grad(lambda tokens, shared: (run(tokens, shared) * weights).sum(), argnums=(0, 1))


def outputs_and_gradient(rule, tokens, shared):
    """The outputs of one row, and the derivative of their sum by its tokens."""

    def run(tokens):
        outputs = outputs_of_row(rule, tokens, shared, K)
        return outputs.sum(), outputs

    (_, outputs), gradient = jax.jit(jax.value_and_grad(run, has_aux=True))(tokens)
    return outputs, gradient


@pytest.mark.parametrize("name", ["state space", "delta net"])
def test_states_that_fade_within_a_token_give_no_overflow(name):
    tokens, rule = random_tokens(CHUNK, log_decay=np.full((CHUNK, G * R), -1e4)), RULES[name]

    outputs, gradient = outputs_and_gradient(rule, tokens, None)

    # Nothing is left of other tokens.
    own = (tokens.queries * tokens.keys).sum(-1)[:, jnp.arange(G * R) // R] * tokens.rates
    np.testing.assert_allclose(outputs, own[..., None] * tokens.values, rtol=0, atol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in gradient)


def test_channels_that_fade_within_a_token_give_no_overflow():
    tokens, decay_rates, _ = random_operands("selective scan", CHUNK)
    fast = decay_rates * 0 - 1e6

    outputs, gradient = outputs_and_gradient(selective_scan.RULE, tokens, fast)

    own = (tokens.queries * tokens.keys).sum(-1)[:, None] * tokens.rates * tokens.values[:, 0]
    np.testing.assert_allclose(outputs[:, 0], own, rtol=0, atol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in gradient)
