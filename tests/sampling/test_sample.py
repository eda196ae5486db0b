"""Filters against the warpers of `transformers`, and reported log-probabilities against the softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from jaxinfer.config import SamplingParams
from jaxinfer.sampling.batch import make_sampling
from jaxinfer.sampling.sample import _filter_always, _highest_enough, describe, filter_logits, sample

B, V = 4, 48
# A token whose cumulated probability is nearer to the bound than float32 can tell may fall on either side.
ROUNDING = 2e-6

jit_filter = jax.jit(filter_logits)
jit_filter_always = jax.jit(_filter_always)
jit_highest = jax.jit(_highest_enough, static_argnames="num_bits")
jit_sample = jax.jit(sample)
jit_describe = jax.jit(describe, static_argnames="max_log_probs")
few_examples = settings(max_examples=50, derandomize=True)


def draw_logits(seed, shape=(B, V), scale=3.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def batch_of(*params, num_rows=B):
    """The parameters in the first rows; without a seed of their own, rows have seed 0."""
    return make_sampling(params, num_rows=num_rows, seeds=[p.seed or 0 for p in params])


def kept(logits, *params):
    return np.isfinite(jit_filter(logits, batch_of(*params)))


def warp(warper: Any, logits: np.ndarray) -> np.ndarray:
    return warper(None, torch.tensor(logits)).numpy()


def softmax(logits):
    wide = logits.astype(np.float64)
    weights = np.exp(wide - wide.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def is_decided(logits, bound):
    """Whether no cumulated probability, from the least probable up, is at the bound within float32 rounding."""
    cumulated = np.cumsum(np.sort(softmax(logits)), -1)
    return np.abs(cumulated - bound).min() > ROUNDING


@few_examples
@given(seed=st.integers(0, 2**32), k=st.integers(1, 2 * V), step=st.sampled_from([0.0, 0.5]))
def test_top_k_keeps_what_transformers_keeps(seed, k, step):
    logits = draw_logits(seed)
    logits = np.round(logits / step).astype(np.float32) * np.float32(step) if step else logits  # with ties

    ours = kept(logits, *[SamplingParams(top_k=k)] * B)

    np.testing.assert_array_equal(ours, np.isfinite(warp(TopKLogitsWarper(min(k, V)), logits)))


@few_examples
@given(seed=st.integers(0, 2**32), p=st.floats(0.01, 0.999))
def test_top_p_keeps_what_transformers_keeps(seed, p):
    logits = draw_logits(seed)
    assume(is_decided(logits, 1 - p))

    ours = kept(logits, *[SamplingParams(top_p=p)] * B)

    np.testing.assert_array_equal(ours, np.isfinite(warp(TopPLogitsWarper(p), logits)))


@few_examples
@given(seed=st.integers(0, 2**32), p=st.floats(0.001, 1.0))
def test_min_p_keeps_what_transformers_keeps(seed, p):
    logits = draw_logits(seed)
    below_top = logits.max(-1, keepdims=True) - logits.astype(np.float64)
    assume(np.abs(below_top + np.log(p)).min() > ROUNDING or p == 1)

    ours = kept(logits, *[SamplingParams(min_p=p)] * B)

    np.testing.assert_array_equal(ours, np.isfinite(warp(MinPLogitsWarper(p), logits)))


def surprise_gaps(logits):
    """How far each token's surprise is from the expected one, f64[B, V]."""
    likely = softmax(logits)
    surprise = -np.log(likely)
    return np.abs(surprise - (likely * surprise).sum(-1, keepdims=True))


def is_typicality_decided(logits, p):
    """Whether no cumulated probability is at p, and no two tokens are equally typical, within float32 rounding."""
    gaps = surprise_gaps(logits)
    cumulated = np.cumsum(np.take_along_axis(softmax(logits), gaps.argsort(-1), -1), -1)
    return np.abs(cumulated - p).min() > ROUNDING and np.diff(np.sort(gaps, -1)).min(initial=np.inf) > ROUNDING


@few_examples
@given(seed=st.integers(0, 2**32), p=st.floats(0.01, 0.999))
def test_typical_p_keeps_what_transformers_keeps(seed, p):
    logits = draw_logits(seed)
    assume(is_typicality_decided(logits, p))

    ours = kept(logits, *[SamplingParams(typical_p=p)] * B)

    np.testing.assert_array_equal(ours, np.isfinite(warp(TypicalLogitsWarper(p), logits)))


@few_examples
@given(seed=st.integers(0, 2**32), k=st.integers(2, V), p=st.floats(0.3, 0.99), min_p=st.floats(0.001, 0.5))
def test_filters_apply_in_the_order_top_k_top_p_min_p_typical_p(seed, k, p, min_p):
    logits = draw_logits(seed)
    after_k = warp(TopKLogitsWarper(k), logits)
    after_p = warp(TopPLogitsWarper(p), after_k)
    below_top = logits.max(-1, keepdims=True) - logits.astype(np.float64)
    after_min_p = warp(MinPLogitsWarper(min_p), after_p)
    assume(is_decided(after_k, 1 - p) and np.abs(below_top + np.log(min_p)).min() > ROUNDING)
    assume(all(is_typicality_decided(row[None, np.isfinite(row)], 0.7) for row in after_min_p))

    ours = kept(logits, *[SamplingParams(top_k=k, top_p=p, min_p=min_p, typical_p=0.7)] * B)

    np.testing.assert_array_equal(ours, np.isfinite(warp(TypicalLogitsWarper(0.7), after_min_p)))


@few_examples
@given(seed=st.integers(0, 2**32), p=st.floats(0.05, 0.95))
def test_equal_logits_stay_or_go_together_under_top_p(seed, p):
    logits = np.round(draw_logits(seed)).astype(np.float32)
    assume(is_decided(logits, 1 - p))
    probabilities = softmax(logits)
    expected = np.zeros_like(logits, bool)
    for row, likely, out in zip(logits, probabilities, expected, strict=True):
        # The smallest set of whole levels that reaches p.
        threshold = max(x for x in row if likely[row >= x].sum() >= p)
        out[:] = row >= threshold

    np.testing.assert_array_equal(kept(logits, *[SamplingParams(top_p=p)] * B), expected)


def test_kept_logits_are_unchanged_and_the_others_minus_infinity():
    logits = draw_logits(0)
    params = [SamplingParams(top_k=5), SamplingParams(top_p=0.5), SamplingParams(min_p=0.1), SamplingParams()]

    filtered = np.asarray(jit_filter(logits, batch_of(*params)))

    assert set(filtered[filtered != logits].tolist()) == {-np.inf}
    np.testing.assert_array_equal(filtered[3], logits[3])


@pytest.mark.parametrize(
    "strict",
    [SamplingParams(top_k=1), SamplingParams(top_p=1e-6), SamplingParams(min_p=1.0), SamplingParams(typical_p=1e-6)],
    ids=str,
)
def test_a_filter_holds_for_its_own_row_only(strict):
    num_kept = kept(draw_logits(0), SamplingParams(), strict, SamplingParams()).sum(-1)

    assert num_kept.tolist() == [V, 1, V, V]


@pytest.mark.parametrize("p", [1e-30, 1e-40, 1e-60])
def test_the_smallest_top_p_keeps_the_most_probable_token(p):
    logits = draw_logits(0)

    tokens = jit_sample(logits, batch_of(*[SamplingParams(top_p=p)] * B), np.arange(B))

    assert tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 2e-38, 1e-44, 1e-300])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_smallest_temperature_takes_the_most_probable_token(temperature, top_p):
    logits = 10 + draw_logits(0)

    tokens = jit_sample(logits, batch_of(*[SamplingParams(temperature=temperature, top_p=top_p)] * B), np.arange(B))

    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_temperature_zero_takes_the_most_probable_token_and_the_lowest_id_among_equals():
    logits = draw_logits(0)
    logits[1, [7, 30]] = logits.max() + 1
    params = [SamplingParams(temperature=0), SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.5)]

    greedy_only = jit_sample(logits, batch_of(*params), np.arange(B))
    beside_a_draw = jit_sample(logits, batch_of(*params, SamplingParams()), np.arange(B))

    assert greedy_only[:2].tolist() == beside_a_draw[:2].tolist() == [logits[0].argmax(), 7]


def test_log_probs_are_those_of_the_unfiltered_softmax():
    logits = draw_logits(0)
    tokens = np.array([3, 0, V - 1, 8], np.int32)
    strict = SamplingParams(temperature=0.1, top_k=2, log_probs=5)

    output = jit_describe(logits, tokens, batch_of(*[strict] * B), max_log_probs=5)

    log_probs = np.log(softmax(logits))
    best = np.argsort(-logits, axis=-1)[:, :5]
    # float32: logits of order 10 minus a logarithm of a sum of 48 terms.
    np.testing.assert_allclose(output.log_probs, log_probs[np.arange(B), tokens], atol=3e-6, rtol=0)
    np.testing.assert_array_equal(output.top_tokens, best)
    np.testing.assert_allclose(output.top_log_probs, np.take_along_axis(log_probs, best, -1), atol=3e-6, rtol=0)


@pytest.mark.parametrize("max_log_probs", [0, 3])
def test_alternatives_are_zeros_unless_some_row_wants_them(max_log_probs):
    output = jit_describe(
        draw_logits(0), np.zeros(B, np.int32), batch_of(SamplingParams()), max_log_probs=max_log_probs
    )

    assert output.top_tokens.tolist() == [[0] * max_log_probs] * B
    assert output.top_log_probs.tolist() == [[0.0] * max_log_probs] * B


def test_log_probs_of_a_row_are_the_same_bits_in_any_batch():
    logits = draw_logits(0, (7, V))
    tokens = jnp.arange(7)

    together = jit_describe(logits, tokens, batch_of(num_rows=7), max_log_probs=0).log_probs
    pairs = [
        jit_describe(logits[i : i + 2], tokens[i : i + 2], batch_of(num_rows=2), max_log_probs=0) for i in range(6)
    ]

    assert [pair.log_probs[0].item() for pair in pairs] == together[:6].tolist()


@few_examples
@given(
    seed=st.integers(0, 10**6),
    k=st.sampled_from([0, 1, 3, V]),
    p=st.sampled_from([0.05, 0.7, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
)
def test_filters_without_conditions_keep_what_the_others_keep(seed, k, p, min_p):
    logits = np.round(draw_logits(seed), 1)  # some are equal
    params = batch_of(SamplingParams(top_k=k, top_p=p, min_p=min_p), SamplingParams(), SamplingParams(top_p=p))

    always = jit_filter_always(logits, params)

    np.testing.assert_array_equal(always, jit_filter(logits, params))


@few_examples
@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.0, 1e-3, 0.3, 0.999, 2.0]))
def test_a_threshold_found_by_digits_is_that_found_bit_by_bit(seed, share):
    random = np.random.default_rng(seed)
    keys = random.integers(0, 2**32, (B, V), np.uint32)
    weights = random.random((B, V), np.float32)
    wanted = (share * weights.sum(-1)).astype(np.float32)

    by_digits, by_bits = (np.asarray(jit_highest(keys, weights, wanted, num_bits=bits)) for bits in (4, 1))

    np.testing.assert_array_equal(by_digits, by_bits)
