"""Log-probabilities in the distribution of a draw: NumPy's formula, the frequencies of draws, and their gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxinfer.config import SamplingParams
from jaxinfer.sampling.batch import make_sampling, with_masks
from jaxinfer.sampling.sample import sample, sample_with_log_probs
from jaxinfer.steps.log_probs import sampling_log_probs
from tests.sampling.test_sample import draw_logits

V, L = 48, 7
TOKENS = np.array([[3, 4, 5, 4, 4, 0, 0]], np.int32)
LEN, PROMPT_LEN = 5, 2  # so 5 and two 4s are output
CASES: dict[str, dict[str, Any]] = {
    "as they are": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all filters": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "a bias": {"logit_bias": {7: 3.0}, "temperature": 0.6},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.25, "top_k": 9},
    "allowed tokens": {"allowed_token_ids": [3, 4, 9], "top_p": 0.9},
    "greedy": {"temperature": 0.0},
}


def by_formula(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The log-probabilities f64[V] of the token after TOKENS, from logits f32[V], by sorting."""
    x = logits.astype(np.float64)
    seen, output = TOKENS[0, :LEN], TOKENS[0, PROMPT_LEN:LEN]
    for token, bias in dict(params.logit_bias).items():
        x[token] += bias
    for token in set(seen.tolist()):
        x[token] *= params.repetition_penalty if x[token] < 0 else 1 / params.repetition_penalty
    counts = np.bincount(output, minlength=V)
    x -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    if params.allowed_token_ids is not None:
        x[~np.isin(np.arange(V), params.allowed_token_ids)] = -np.inf
    if params.temperature == 0:
        return np.where(np.arange(V) == x.argmax(), 0.0, -np.inf)
    x /= params.temperature
    if params.top_k:
        x[x < np.sort(x)[-params.top_k]] = -np.inf
    order = np.argsort(-x)
    before = np.cumsum(softmax(x)[order]) - softmax(x)[order]
    x[order[before >= params.top_p]] = -np.inf
    x[softmax(x) < params.min_p * softmax(x).max()] = -np.inf
    with np.errstate(divide="ignore"):
        return np.log(softmax(x))


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def rows_of(params: SamplingParams, num_rows: int = 1, **more: Any) -> Any:
    lens = [PROMPT_LEN] * num_rows
    return make_sampling([params] * num_rows, num_rows=num_rows, seeds=range(num_rows), prompt_lens=lens, **more)


def log_probs_of(logits: Any, sampling: Any) -> jax.Array:
    num_rows = logits.shape[0]
    tokens, lens = np.tile(TOKENS, (num_rows, 1)), np.full(num_rows, LEN, np.int32)
    return sampling_log_probs(jnp.asarray(logits), sampling, jnp.asarray(tokens), jnp.asarray(lens))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_values_are_those_of_the_formula(name, seed):
    params = SamplingParams(**CASES[name])
    (logits,) = draw_logits(seed, (1, V))

    (values,) = np.asarray(log_probs_of(logits[None], rows_of(params)))

    expected = by_formula(logits, params)
    assert np.isfinite(values).tolist() == np.isfinite(expected).tolist()
    # Rounding of sums of 48 terms in float32.
    np.testing.assert_allclose(values, expected, atol=1e-5)


def test_a_mask_of_a_structure_is_honoured():
    (logits,) = draw_logits(2, (1, V))
    mask = np.array([0b1011000, 0], np.uint32).view(np.int32)
    sampling = with_masks(rows_of(SamplingParams(regex="a", temperature=0.5), vocab_size=V), {0: mask})

    (values,) = np.asarray(log_probs_of(logits[None], sampling))

    expected = by_formula(logits, SamplingParams(allowed_token_ids=[3, 4, 6], temperature=0.5))
    np.testing.assert_allclose(values, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["temperature", "all filters", "top_k", "a bias"])
def test_the_gradient_is_that_of_the_softmax_over_the_kept_tokens(name):
    """Of log p(c) by logit i: ((i == c) - p(i)) / temperature among kept tokens, 0 elsewhere."""
    params = SamplingParams(**CASES[name])
    logits = draw_logits(3, (1, V))
    chosen = int(by_formula(logits[0], params).argsort()[-2])

    gradient = jax.grad(lambda x: log_probs_of(x, rows_of(params))[0, chosen])(jnp.asarray(logits))[0]

    expected = ((np.arange(V) == chosen) - np.exp(by_formula(logits[0], params))) / params.temperature
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("plain", ["as they are", "temperature", "greedy"]),
        ("filtered", ["all filters", "temperature", "greedy"]),
        ("full", ["all filters", "as they are", "greedy"]),
    ],
)
def test_a_draw_is_the_same_and_has_the_value_of_its_token_to_the_bit(form, names):
    params = [SamplingParams(**CASES[name]) for name in names for _ in range(8)]
    logits, positions = draw_logits(4, (len(params), V)), np.full(len(params), LEN, np.int32)
    sampling = make_sampling(params, num_rows=len(params), seeds=range(len(params)))

    draw = jax.jit(sample_with_log_probs, static_argnames="form")
    tokens, values = draw(logits, sampling, positions, form=form)

    np.testing.assert_array_equal(tokens, jax.jit(sample)(logits, sampling, positions))
    expected = np.take_along_axis(np.asarray(log_probs_of(logits, sampling)), np.asarray(tokens)[:, None], 1)[:, 0]
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("name", ["temperature", "all filters"])
def test_draws_are_as_frequent_as_their_values_say(name):
    params, num_draws = SamplingParams(**CASES[name]), 4096
    (logits,) = draw_logits(5, (1, V))
    sampling = rows_of(params, num_draws)

    tokens, values = jax.jit(sample_with_log_probs)(
        np.tile(logits, (num_draws, 1)), sampling, np.full(num_draws, LEN, np.int32)
    )

    expected = np.exp(np.asarray(log_probs_of(logits[None], rows_of(params))[0], np.float64)) * num_draws
    counts = np.bincount(tokens, minlength=V)
    assert not counts[expected == 0].any()
    often = expected > 5  # rarer tokens count as one, as the test demands
    rest = [(counts[~often].sum(), expected[~often].sum())] if expected[~often].sum() > 0 else []
    observed, wanted = np.array([*zip(counts[often], expected[often], strict=True), *rest]).T
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3
    np.testing.assert_allclose(np.exp(values), expected[np.asarray(tokens)] / num_draws, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": jnp.zeros(V)}, r"logits.* must be an array f32\[B, V\]"),
        ({"tokens": jnp.zeros((2, L), jnp.int32)}, "tokens.* with a row for each of the 1 of logits"),
        ({"lens": jnp.zeros(1)}, "lens.* must be an array of integers"),
        ({"sampling": rows_of(SamplingParams(), 2)}, r"sampling=.*temperature\[2\].* of num_rows=1"),
        ({"custom": (max,)}, "custom.* the 0 functions that make_sampling was given"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    own: dict[str, Any] = {
        "logits": jnp.zeros((1, V)),
        "sampling": rows_of(SamplingParams()),
        "tokens": jnp.asarray(TOKENS),
        "lens": jnp.full(1, LEN, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        sampling_log_probs(**{**own, **change})
