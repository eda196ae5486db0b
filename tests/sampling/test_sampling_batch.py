"""How sampling parameters become the arrays of a step."""

from __future__ import annotations

import gc
import weakref

import jax
import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.model.batch import PADDING_TOKEN
from jaxinfer.sampling.batch import make_sampling, with_masks
from jaxinfer.sampling_params import TotalLength


def as_lists(batch):
    return {name: np.asarray(value).tolist() for name, value in vars(batch).items() if name != "processors"}


def test_sampling_parameters_are_laid_out_by_row_and_padding_is_greedy():
    params = [
        SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**33 + 5, log_probs=2),
        SamplingParams(temperature=0, seed=3),
    ]

    sampling = make_sampling(params, num_rows=3)

    assert as_lists(sampling) == {
        "temperature": [0.5, 0, 0],
        "top_k": [7, 0, 0],
        "top_p": [0.25, 1, 1],
        "min_p": [0.125, 0, 0],
        "typical_p": [1, 1, 1],
        "seeds": [[2, 5], [0, 3], [0, 0]],
        "sample_index": [0, 0, 0],
        "num_log_probs": [2, 0, 0],
    }


def test_masks_are_entered_by_row():
    sampling = make_sampling([SamplingParams(seed=1), SamplingParams(seed=1, regex="a")], num_rows=3, vocab_size=40)

    masked = with_masks(sampling, {1: np.array([5, 6], np.int32)})

    assert sampling.processors.allowed_bits.tolist() == [[-1, -1]] * 3
    assert masked.processors.allowed_bits.tolist() == [[-1, -1], [5, 6], [-1, -1]]


NOTHING = PADDING_TOKEN


def test_processors_are_laid_out_by_row_with_padding_that_has_no_effect():
    params = SamplingParams(
        min_tokens=2,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        no_repeat_ngram_size=3,
        logit_bias={7: 2.0, 6: -1.0},
        bad_words=[[5, 6, 7], [8]],
        allowed_token_ids=[9, 4],
        logits_processors={"b": 0.5},
        seed=0,
    )

    sampling = make_sampling(
        [params], num_rows=2, prompt_lens=[11], stop_token_ids=[[3]], max_listed_tokens=5, custom=("a", "b")
    )

    assert as_lists(sampling.processors) == {
        "is_used": [True, False],
        "prompt_lens": [11, 0],
        "min_tokens": [2, 0],
        "repetition_penalty": [1.5, 1],
        "presence_penalty": [-0.5, 0],
        "frequency_penalty": [0.25, 0],
        "no_repeat_ngram_size": [3, 0],
        "biased_token_ids": [[6, 7, NOTHING, NOTHING, NOTHING], [NOTHING] * 5],
        "biases": [[-1, 2, 0, 0, 0], [0] * 5],
        "bad_word_tokens": [[5, 6, 7, 8, NOTHING], [NOTHING] * 5],
        "bad_word_distances": [[2, 1, 0, 0, 0], [0] * 5],
        "allowed_token_ids": [[9, 4, NOTHING, NOTHING, NOTHING], [NOTHING] * 5],
        "stop_token_ids": [[3, NOTHING, NOTHING, NOTHING, NOTHING], [NOTHING] * 5],
        "uses_custom": [[False, True], [False, False]],
        "custom_arguments": [[0, 0.5], [0, 0]],
        "allowed_bits": [[], []],
    }


def test_sampling_batches_of_any_rows_have_the_same_types():
    full = make_sampling([SamplingParams(seed=2**64 - 1, repetition_penalty=1.5, logit_bias={3: 1})] * 2, num_rows=2)

    empty = make_sampling([], num_rows=2)

    def types(sampling):
        return jax.tree.map(lambda array: (array.shape, array.dtype), sampling)

    assert types(full) == types(empty)
    assert [array.dtype.name for array in (full.temperature, full.top_k, full.seeds)] == [
        "float32",
        "int32",
        "uint32",
    ]


def test_a_total_length_is_laid_out_for_the_prompt_of_its_row():
    params = SamplingParams(temperature=0, max_tokens=TotalLength(40), min_tokens=TotalLength(20), stop_token_ids=[5])

    processors = make_sampling([params] * 3, num_rows=4, prompt_lens=[15, 20, 25]).processors

    assert processors.min_tokens.tolist() == [5, 0, 0, 0]
    with pytest.raises(ValueError, match="min_tokens need prompt_lens: pass them"):
        make_sampling([params], num_rows=1)


def test_seeds_given_beside_the_parameters_replace_theirs():
    sampling = make_sampling([SamplingParams(seed=1), SamplingParams()], num_rows=2, seeds=[8, 9])

    assert sampling.seeds.tolist() == [[0, 8], [0, 9]]


def test_a_row_that_draws_needs_a_seed():
    with pytest.raises(ValueError, match="temperature above 0 needs a seed"):
        make_sampling([SamplingParams(temperature=0.5)], num_rows=1)


def test_a_greedy_row_needs_no_seed():
    assert make_sampling([SamplingParams(temperature=0)], num_rows=1).temperature.tolist() == [0]


@pytest.mark.parametrize(("count", "seeds"), [(3, None), (2, [1]), (1, [1, 2])], ids=["rows", "few", "many"])
def test_rows_and_seeds_that_do_not_fit_are_refused(count, seeds):
    with pytest.raises(ValueError, match="num_rows|seeds"):
        make_sampling([SamplingParams(seed=1)] * count, num_rows=2, seeds=seeds)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"num_rows": 2, "max_listed_tokens": 2**21}, "num_rows=2 and max_listed_tokens=2097152"),
        ({"num_rows": 2, "num_masks": 2**24, "vocab_size": 33}, "num_masks=16777216 and vocab_size=33"),
        ({"num_rows": 2**10, "vocab_size": 2**20}, "num_rows=1024 and vocab_size=1048576"),
    ],
)
def test_tables_that_no_step_could_hold_are_refused_by_their_sizes(sizes, named):
    with pytest.raises(ValueError, match=f"{named} make tables of .* entries, more than 16,777,216"):
        make_sampling([], **sizes)


def test_no_sampling_batch_stays_in_memory():
    sampling = make_sampling([], num_rows=3)
    array = weakref.ref(sampling.processors.allowed_token_ids)

    del sampling
    gc.collect()

    assert array() is None
