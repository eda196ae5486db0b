"""The forms that count and rule out the tokens of a row, against NumPy: CPUs and GPUs scatter, TPUs multiply."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.model.batch import PADDING_TOKEN
from jaxinfer.sampling import token_counts

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


@few_examples
@given(seed=seeds)
def test_the_listed_tokens_are_ruled_out_and_no_others(seed):
    ids, V = draw_token_ids(seed, 1187), 1187
    logits = np.random.default_rng(seed).standard_normal((B, V)).astype(np.float32)
    is_listed = count(ids, V) > 0

    np.testing.assert_array_equal(token_counts.lists_tokens(jnp.asarray(ids), V), is_listed)
    expected = np.where(is_listed, -np.inf, logits)
    np.testing.assert_array_equal(token_counts.rule_out(jnp.asarray(logits), jnp.asarray(ids)), expected)
