"""Recurrent layers: the same bits for any split of the work on CPU; in chunks, as accelerators compute them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.model.batch import Row, make_batch
from jaxinfer.model.components.recurrent import gated_delta_net, state_space
from jaxinfer.model.components.recurrent.recurrence import (
    CHUNK,
    Places,
    Tokens,
    _advance_in_chunks,
    _advance_in_turn,
    outputs_of_row,
)
from jaxinfer.model.components.recurrent.states import state_slots
from tests.exhaustive import exhaustive_but
from tests.model.components.recurrent import test_gated_delta_net, test_state_space
from tests.model.components.recurrent.layers import Replay, S, T, model_of, splits

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="bit-equality is promised on CPU")
CASES = {
    **{f"state space, {name}": case for name, case in test_state_space.CASES.items()},
    **{f"gated delta net, {name}": case for name, case in test_gated_delta_net.CASES.items()},
}


@pytest.fixture(scope="module", params=exhaustive_but(CASES, (name for name in CASES if "odd sizes" in name)))
def replay(request):
    """A random model, and its hidden states and stored states after one step."""
    replay = Replay(model_of(*CASES[request.param]))
    return replay, replay.run([[(0, T)]], (T, 2))


@on_cpu
@pytest.mark.parametrize("split", splits())
def test_hidden_and_stored_states_are_the_same_bits_for_any_split(replay, split):
    run, (expected, expected_states) = replay

    hidden, states = run.run(*splits()[split])

    np.testing.assert_array_equal(hidden, expected[: len(hidden)])
    last = None if len(hidden) == T else len(hidden) // S  # only the whole sequence has the last page's state
    for ours, whole in zip(states, expected_states, strict=True):
        np.testing.assert_array_equal(ours[:, :last], whole[:, :last])


@on_cpu
@pytest.mark.parametrize("end", [16, 48])
def test_the_snapshot_at_a_pages_end_is_the_state_of_a_run_that_ends_there(replay, end):
    run, (_, expected) = replay

    _, states = run.run([[(0, end)]], (T, 2))

    for ours, whole in zip(states, expected, strict=True):
        np.testing.assert_array_equal(ours[:, end // S - 1], whole[:, end // S - 1])


# ---- in chunks

G, R, K, V = 2, 3, 13, 10
STEPS = {"state space": (state_space._advance, False), "delta net": (gated_delta_net._advance, True)}
# Rows of (tokens before the step, tokens in it), and the tokens of a page.
ROWS = {
    "one row, longer than two chunks": ([(0, 2 * CHUNK + 5)], 256),
    "rows that begin and end anywhere in pages": ([(0, 40), (33, 1), (16, 50), (15, 16), (0, 1)], 16),
    "single tokens": ([(5, 1), (63, 1), (0, 1)], 16),
    "no row": ([], 16),
}


def random_tokens(num_tokens: int, seed: int = 0) -> Tokens:
    """Keys of which some are the same in a row, which a chunk's corrections depend on most."""
    generator = np.random.default_rng(seed)
    keys = generator.standard_normal((num_tokens, G, K))
    keys[10:30] = keys[10:11]
    keys /= np.sqrt((keys**2).sum(-1, keepdims=True))
    numbers: dict[str, Any] = {
        "log_decay": -generator.exponential(0.1, (num_tokens, G * R)),
        "rates": generator.uniform(0, 1, (num_tokens, G * R)),
        "keys": keys,
        "queries": generator.standard_normal((num_tokens, G, K)),
        "values": generator.standard_normal((num_tokens, G * R, V)),
    }
    return Tokens(**{name: jnp.asarray(x, jnp.float32) for name, x in numbers.items()})


def arrays_of(lens, page_size):
    """A step's places with padding, a pool of random states, NaN in those that are not read, and its tokens."""
    rows, first = [], 0
    for before, count in lens:
        num_pages = -(-(before + count) // page_size)
        rows.append(Row([0] * count, before, list(range(first, first + num_pages))))
        first += num_pages
    num_tokens = sum(count for _, count in lens)
    batch = make_batch(rows, page_size=page_size, num_tokens=num_tokens + 7, num_rows=len(rows) + 2, table_width=8)
    slots = state_slots(jax.tree.map(jnp.asarray, batch), page_size)
    pool = np.full((first + 1, G * R, K, V), np.nan, np.float32)
    read = np.asarray(slots.reads)[np.asarray(slots.reads) < len(pool)]
    pool[read] = np.random.default_rng(1).standard_normal((len(read), *pool.shape[1:]))
    places = Places(slots, jnp.asarray(batch.cu_q_lens), jnp.asarray(batch.positions), jnp.asarray(num_tokens))
    return places, jnp.asarray(pool), num_tokens


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("rows", ROWS)
def test_chunks_give_the_outputs_and_the_stored_states_of_single_tokens(name, rows):
    step, corrects = STEPS[name]
    places, pool, num_tokens = arrays_of(*ROWS[rows])
    operands = random_tokens(num_tokens + 7), pool, places

    expected, states = jax.jit(functools.partial(_advance_in_turn, step))(*operands)
    actual, own_states = jax.jit(functools.partial(_advance_in_chunks, step, corrects=corrects))(*operands)

    # float32 sums of about a hundred numbers of order 1, in another order.
    np.testing.assert_allclose(actual[:num_tokens], expected[:num_tokens], rtol=0, atol=2e-5)
    np.testing.assert_allclose(own_states, states, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", STEPS)
def test_a_whole_row_in_chunks_gives_the_outputs_of_single_tokens(name):
    step, corrects = STEPS[name]
    places, pool, num_tokens = arrays_of([(0, 150)], 64)
    tokens = random_tokens(num_tokens + 7)

    expected, _ = _advance_in_turn(step, tokens, pool, places)

    actual = outputs_of_row(jax.tree.map(lambda x: x[:num_tokens], tokens), corrects=corrects)
    np.testing.assert_allclose(actual, expected[:num_tokens], rtol=0, atol=2e-5)


@pytest.mark.parametrize("corrects", [False, True])
def test_states_that_fade_within_a_token_give_no_overflow(corrects):
    tokens = random_tokens(CHUNK)._replace(log_decay=jnp.full((CHUNK, G * R), -1e4))

    outputs = outputs_of_row(tokens, corrects=corrects)
    gradient = jax.grad(lambda tokens: outputs_of_row(tokens, corrects=corrects).sum())(tokens)

    # Nothing is left of other tokens.
    own = (tokens.queries * tokens.keys).sum(-1)[:, jnp.arange(G * R) // R] * tokens.rates
    np.testing.assert_allclose(outputs, own[..., None] * tokens.values, rtol=0, atol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in gradient)
