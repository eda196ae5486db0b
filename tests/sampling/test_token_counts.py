"""The forms that count and rule out the tokens of a row, against NumPy: CPUs and GPUs scatter, TPUs multiply."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.model.batch import PADDING_TOKEN
from jaxinfer.sampling import processors, sample, token_counts

few_examples = settings(max_examples=20, derandomize=True, deadline=None)
seeds = st.integers(0, 2**32)
# Less than a row of the table of a product, one row, some, and rows of which the last is not full.
VOCABULARIES = (7, 512, 1024, 1187)
B, N = 3, 40
FORMS = {"scatter": token_counts.count_tokens, "product": token_counts.count_by_product}
forms = {name: jax.jit(form, static_argnames="vocab_size") for name, form in FORMS.items()}


def draw_token_ids(seed, vocab_size):
    """Token ids i32[B, N], of few tokens so that they repeat, the last of the vocabulary among them, with padding."""
    rng = np.random.default_rng(seed)
    ids = rng.choice([0, vocab_size - 1, *rng.integers(0, vocab_size, 6)], (B, N)).astype(np.int32)
    ids[rng.random((B, N)) < 0.3] = PADDING_TOKEN
    ids[rng.random((B, N)) < 0.1] = vocab_size
    ids[0] = PADDING_TOKEN
    return ids


def count(token_ids, vocab_size):
    return np.stack([np.bincount(row[row < vocab_size], minlength=vocab_size) for row in token_ids])


@pytest.mark.parametrize("form", forms)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@few_examples
@given(seed=seeds)
def test_each_form_counts_as_numpy_does(form, vocab_size, seed):
    ids = draw_token_ids(seed, vocab_size)

    np.testing.assert_array_equal(forms[form](ids, vocab_size=vocab_size), count(ids, vocab_size))


@pytest.mark.parametrize("form", forms)
def test_counts_of_the_longest_contexts_are_exact(form):
    ids = np.full((1, 2**18 + 1), 3, np.int32)

    assert forms[form](ids, vocab_size=5)[0].tolist() == [0, 0, 0, 2**18 + 1, 0]


@pytest.fixture
def as_on_tpu(monkeypatch):
    """Every choice by device is that of a TPU."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **forms: forms.get("tpu", default)(*args))


@pytest.mark.usefixtures("as_on_tpu")
def test_the_forms_of_a_tpu_list_and_rule_out_the_same():
    ids, V = draw_token_ids(5, 1187), 1187
    is_listed = count(ids, V) > 0

    np.testing.assert_array_equal(token_counts.lists_tokens(jnp.asarray(ids), V), is_listed)
    np.testing.assert_array_equal(
        token_counts.rule_out(jnp.zeros((B, V)), jnp.asarray(ids)), np.where(is_listed, -np.inf, 0.0)
    )


def test_the_form_of_a_tpu_rules_out_the_same_ngrams():
    rng = np.random.default_rng(3)
    tokens = jnp.asarray(rng.integers(0, 4, (B, N)), jnp.int32)
    n, lens = jnp.array([[0], [2], [3]], jnp.int32), jnp.array([[40], [25], [1]], jnp.int32)
    longest = jnp.int32(3)

    whole = processors._ends_of_repeats(tokens, lens, n, longest=longest)
    rows = [
        processors._ends_of_repeats(tokens[i : i + 1], lens[i : i + 1], n[i : i + 1], longest=longest) for i in range(B)
    ]

    np.testing.assert_array_equal(whole, np.concatenate(rows))
    assert (np.asarray(whole) != PADDING_TOKEN).any()


@pytest.mark.parametrize("wanted", [0.0, 0.3, 0.9, 2.0])
def test_every_form_of_the_search_finds_the_same_threshold(wanted):
    rng = np.random.default_rng(7)
    keys = jnp.asarray(rng.integers(0, 2**32, (B, 97), dtype=np.uint32))
    weights = jnp.asarray(rng.random((B, 97), dtype=np.float32) / 97)
    wanted = jnp.full(B, wanted, jnp.float32)

    one, four = (sample._highest_enough(keys, weights, wanted, num_bits=bits) for bits in (1, 4))
    unrolled = sample._highest_enough_unrolled(keys, weights, wanted, num_bits=4)

    np.testing.assert_array_equal(one, four)
    np.testing.assert_array_equal(four, unrolled)


@few_examples
@given(seed=seeds)
def test_the_listed_tokens_are_ruled_out_and_no_others(seed):
    ids, V = draw_token_ids(seed, 1187), 1187
    logits = np.random.default_rng(seed).standard_normal((B, V)).astype(np.float32)
    is_listed = count(ids, V) > 0

    np.testing.assert_array_equal(token_counts.lists_tokens(jnp.asarray(ids), V), is_listed)
    expected = np.where(is_listed, -np.inf, logits)
    np.testing.assert_array_equal(token_counts.rule_out(jnp.asarray(logits), jnp.asarray(ids)), expected)
