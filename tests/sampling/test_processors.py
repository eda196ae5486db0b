"""Each logits processor against that of `transformers`, and the penalties of OpenAI's API against their formula."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from jaxinfer.config import SamplingParams
from jaxinfer.model.batch import PADDING_TOKEN
from jaxinfer.sampling.batch import make_sampling, with_masks
from jaxinfer.sampling.processors import Context, process_logits
from jaxinfer.sampling.sample import sample
from jaxinfer.sampling_params import NO_TOKEN

B, V, L, N = 4, 24, 32, 16
PROMPT_LEN = 3
jit_process = jax.jit(lambda logits, sampling, context: process_logits(logits, sampling.processors, lambda: context))
jit_sample = jax.jit(sample)
# The compiler multiplies by a reciprocal, which rounds twice.
DIVISION = 2.5e-7
few_examples = settings(max_examples=40, derandomize=True)
seeds = st.integers(0, 2**32)


def draw_rows(seed, vocabulary=V):
    """Logits, and contexts of at least the prompt and at most all positions, of few tokens so that they repeat."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, vocabulary, rng.integers(PROMPT_LEN, L + 1)) for _ in range(B)]
    return (3 * rng.standard_normal((B, V))).astype(np.float32), rows


def process(logits, rows, params, stop_token_ids=None):
    """What becomes of logits [B, V] after `rows`, of which the first PROMPT_LEN tokens are the prompt."""
    tokens = np.full((B, L), PADDING_TOKEN, np.int32)
    for out, row in zip(tokens, rows, strict=True):
        out[: len(row)] = row
    layout: dict[str, Any] = {"prompt_lens": [PROMPT_LEN] * B, "seeds": [0] * B, "max_listed_tokens": N}
    sampling = make_sampling(params, num_rows=B, stop_token_ids=stop_token_ids, **layout)
    lens = np.array([len(row) for row in rows], np.int32)
    context = Context(
        tokens=jnp.asarray(tokens), lens=jnp.asarray(lens), num_evicted_tokens=jnp.zeros(len(lens), jnp.int32)
    )
    return np.asarray(jit_process(logits, sampling, context))


def by_transformers(processor, logits, rows):
    """The same by a processor of transformers, one row at a time."""
    processed = [processor(torch.tensor(r)[None], torch.tensor(x)[None]) for x, r in zip(logits, rows, strict=True)]
    return np.concatenate([x.numpy() for x in processed])


@few_examples
@given(seed=seeds, penalty=st.floats(0.05, 20))
def test_the_repetition_penalty_is_that_of_transformers(seed, penalty):
    logits, rows = draw_rows(seed)
    penalty = float(np.float32(penalty))

    ours = process(logits, rows, [SamplingParams(repetition_penalty=penalty)] * B)

    expected = by_transformers(hf.RepetitionPenaltyLogitsProcessor(penalty), logits, rows)
    np.testing.assert_allclose(ours, expected, rtol=DIVISION)


@few_examples
@given(seed=seeds, presence=st.floats(-2, 2, width=32), frequency=st.floats(-2, 2, width=32))
def test_presence_and_frequency_penalties_count_the_output(seed, presence, frequency):
    logits, rows = draw_rows(seed, vocabulary=6)
    expected = logits.astype(np.float64)
    for row, x in zip(rows, expected, strict=True):
        for token, count in Counter(row[PROMPT_LEN:].tolist()).items():
            x[token] -= count * frequency + presence

    ours = process(logits, rows, [SamplingParams(presence_penalty=presence, frequency_penalty=frequency)] * B)

    # float32 numbers below 100, subtracted twice.
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-5)


@few_examples
@given(seed=seeds, n=st.integers(1, 6), vocabulary=st.integers(1, 4))
def test_no_repeat_ngram_rules_out_what_transformers_does(seed, n, vocabulary):
    logits, rows = draw_rows(seed, vocabulary)

    ours = process(logits, rows, [SamplingParams(no_repeat_ngram_size=n)] * B)

    np.testing.assert_array_equal(ours, by_transformers(hf.NoRepeatNGramLogitsProcessor(n), logits, rows))


@pytest.mark.parametrize("n", [L, L + 1, 2**31 - 1])
def test_an_ngram_longer_than_the_row_rules_nothing_out(n):
    logits, rows = draw_rows(0)

    ours = process(logits, [row[: L - 1] for row in rows], [SamplingParams(no_repeat_ngram_size=n)] * B)

    np.testing.assert_array_equal(ours, logits)


words = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=4)


@few_examples
@given(seed=seeds, words=words)
def test_bad_words_are_ruled_out_where_transformers_does(seed, words):
    logits, rows = draw_rows(seed, vocabulary=3)

    ours = process(logits, rows, [SamplingParams(bad_words=words)] * B)

    np.testing.assert_array_equal(ours, by_transformers(hf.NoBadWordsLogitsProcessor(words), logits, rows))


def test_a_bad_word_longer_than_the_row_rules_nothing_out():
    logits, rows = draw_rows(0, vocabulary=1)
    word = [0] * (PROMPT_LEN + 2)

    ours = process(logits, [row[:PROMPT_LEN] for row in rows], [SamplingParams(bad_words=[word])] * B)

    np.testing.assert_array_equal(ours, logits)


@few_examples
@given(
    seed=seeds, biases=st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100, width=32), min_size=1, max_size=N)
)
def test_logit_bias_is_the_sequence_bias_of_transformers(seed, biases):
    logits, rows = draw_rows(seed)
    processor = hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])

    ours = process(logits, rows, [SamplingParams(logit_bias=biases)] * B)

    np.testing.assert_array_equal(ours, by_transformers(processor, logits, rows))


@few_examples
@given(seed=seeds, allowed=st.sets(st.integers(0, V - 1), min_size=1, max_size=N))
def test_only_allowed_tokens_are_left_as_with_the_prefix_function_of_transformers(seed, allowed):
    logits, rows = draw_rows(seed)
    processor = hf.PrefixConstrainedLogitsProcessor(lambda batch_id, tokens: sorted(allowed), 1)

    ours = process(logits, rows, [SamplingParams(allowed_token_ids=sorted(allowed))] * B)

    np.testing.assert_array_equal(ours, by_transformers(processor, logits, rows))


@few_examples
@given(seed=seeds, minimum=st.integers(1, L), stops=st.sets(st.integers(0, V - 1), min_size=1, max_size=N))
def test_min_tokens_rules_out_stop_tokens_as_transformers_does(seed, minimum, stops):
    logits, rows = draw_rows(seed)
    processor = hf.MinNewTokensLengthLogitsProcessor(PROMPT_LEN, minimum, sorted(stops))

    ours = process(logits, rows, [SamplingParams(min_tokens=minimum)] * B, [stops] * B)

    np.testing.assert_array_equal(ours, by_transformers(processor, logits, rows))


@few_examples
@given(seed=seeds)
def test_a_mask_of_bits_leaves_the_tokens_whose_bit_is_set(seed):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((2, 70)).astype(np.float32)
    allowed = rng.random((2, 96)) < 0.5
    bits = np.packbits(allowed, axis=-1, bitorder="little").view(np.int32)
    params = SamplingParams(regex="a", temperature=0)
    sampling = with_masks(make_sampling([params] * 2, num_rows=2, vocab_size=70), {0: bits[0]})
    ones = jnp.ones(2, jnp.int32)
    context = Context(tokens=jnp.zeros((2, 1), jnp.int32), lens=ones, num_evicted_tokens=ones * 0)

    ours = np.asarray(jit_process(logits, sampling, context))

    np.testing.assert_array_equal(ours[0], np.where(allowed[0, :70], logits[0], -np.inf))
    np.testing.assert_array_equal(ours[1], logits[1])


ALL: dict[str, Any] = {
    "logit_bias": {0: 1.5, 1: -2.0},
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "no_repeat_ngram_size": 2,
    "bad_words": [[3, 4], [5]],
    "min_tokens": L,
    "allowed_token_ids": [0, 1, 3, 4, 5, 6, 7, 8],
}


@few_examples
@given(seed=seeds)
def test_processors_apply_in_the_order_of_transformers(seed):
    logits, rows = draw_rows(seed, vocabulary=6)
    orders: Any = [
        hf.SequenceBiasLogitsProcessor([[[0], 1.5], [[1], -2.0]]),
        hf.RepetitionPenaltyLogitsProcessor(1.5),
        hf.NoRepeatNGramLogitsProcessor(2),
        hf.NoBadWordsLogitsProcessor([[3, 4], [5]]),
        hf.MinNewTokensLengthLogitsProcessor(PROMPT_LEN, L, [6]),
        hf.PrefixConstrainedLogitsProcessor(lambda batch_id, tokens: ALL["allowed_token_ids"], 1),
    ]
    expected = logits
    for processor in orders:
        expected = by_transformers(processor, expected, rows)
    without_counts = {**ALL, "presence_penalty": 0.0, "frequency_penalty": 0.0}

    ours = process(logits, rows, [SamplingParams(**without_counts)] * B, [[6]] * B)

    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(expected))
    np.testing.assert_allclose(ours, expected, rtol=DIVISION)


@pytest.mark.parametrize("name", ALL)
def test_each_parameter_has_an_effect_in_its_own_row_only(name):
    logits, rows = draw_rows(0, vocabulary=6)
    mine = SamplingParams(**{name: ALL[name]})

    ours = process(logits, rows, [SamplingParams(), mine, SamplingParams(), SamplingParams()], [[6]] * B)

    assert (ours != logits).any(-1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("name", ALL)
def test_a_row_is_processed_to_the_same_bits_beside_any_others(name):
    logits, rows = draw_rows(1, vocabulary=6)
    mine = SamplingParams(**{name: ALL[name]})
    alone = process(logits, rows, [mine, *[SamplingParams()] * (B - 1)], [[6]] * B)

    ours = process(logits, rows, [mine, *[SamplingParams(**ALL)] * (B - 1)], [[6]] * B)

    np.testing.assert_array_equal(ours[0], alone[0])


def test_a_row_without_parameters_keeps_its_bits_beside_rows_with_all_of_them():
    logits, rows = draw_rows(2, vocabulary=6)

    ours = process(logits, rows, [SamplingParams(), *[SamplingParams(**ALL)] * (B - 1)], [[6]] * B)

    np.testing.assert_array_equal(ours[0], logits[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_every_token_is_ruled_out_there_is_none(temperature):
    logits, rows = draw_rows(0, vocabulary=1)
    params = SamplingParams(temperature=temperature, allowed_token_ids=[0, 1], no_repeat_ngram_size=1)
    other = dataclasses.replace(params, no_repeat_ngram_size=0)
    processed = process(logits, rows, [dataclasses.replace(params, bad_words=[[1]]), params, other, SamplingParams()])

    sampling = make_sampling([params] * B, num_rows=B, seeds=[0] * B)
    tokens = jit_sample(processed, sampling, np.arange(B, dtype=np.int32)).tolist()

    assert tokens[:2] == [NO_TOKEN, 1]
    assert tokens[2] in (0, 1)


def test_penalties_on_the_output_need_to_know_the_prompt():
    cases: list[dict[str, Any]] = [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"min_tokens": 1}]
    for fields in cases:
        with pytest.raises(ValueError, match="prompt_lens"):
            make_sampling([SamplingParams(temperature=0, **fields)], num_rows=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": dict.fromkeys(range(5), 1.0)},
        {"bad_words": [[1, 2, 3], [4, 5]]},
        {"allowed_token_ids": range(5)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_more_listed_tokens_than_the_batch_was_made_for_are_refused(fields):
    with pytest.raises(ValueError, match=f"{next(iter(fields))} of 5 tokens.*max_listed_tokens=4"):
        make_sampling([SamplingParams(temperature=0, **fields)], num_rows=1, max_listed_tokens=4)


def test_a_mask_allows_no_padding_of_the_vocabulary():
    V, num_padding = 32, 3  # a mask has no bits past its words
    sampling = make_sampling([SamplingParams(seed=0)], num_rows=1, vocab_size=V, prompt_lens=[PROMPT_LEN])
    sampling = with_masks(sampling, {0: np.array([0b101], np.int32)})
    processors = dataclasses.replace(sampling.processors, is_used=np.ones(1, np.bool_))
    context = Context(*(jnp.zeros(shape, jnp.int32) for shape in ((1, L), (1,), (1,))))

    processed = process_logits(jnp.zeros((1, V + num_padding)), processors, lambda: context, (), num_padding)

    assert np.flatnonzero(np.isfinite(processed[0])).tolist() == [0, 2]
