"""Draws against their distribution, and what a draw depends on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from scipy import stats

from jaxinfer.config import SamplingParams
from jaxinfer.sampling.batch import make_sampling
from jaxinfer.sampling.sample import sample

V = 48
jit_sample = jax.jit(sample)


def draw_logits(seed, shape):
    return (3 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def batch_of(*params, num_rows):
    return make_sampling(params, num_rows=num_rows, seeds=[p.seed or 0 for p in params])


MANY = 4096
SMALL_LOGITS = np.log(np.array([0.4, 0.2, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01], np.float32))
DISTRIBUTIONS = {
    "as they are": (SamplingParams(), [0.4, 0.2, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01]),
    "temperature 0.5": (
        SamplingParams(temperature=0.5),
        np.square([0.4, 0.2, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01]),
    ),
    "temperature 2": (
        SamplingParams(temperature=2.0),
        np.sqrt([0.4, 0.2, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01]),
    ),
    "top_k 3": (SamplingParams(top_k=3), [0.4, 0.2, 0.15]),
    "top_p 0.7": (SamplingParams(top_p=0.7), [0.4, 0.2, 0.15]),
    "min_p 0.24": (SamplingParams(min_p=0.24), [0.4, 0.2, 0.15, 0.1]),
    "temperature before filters": (SamplingParams(temperature=0.5, top_p=0.7), [0.16, 0.04]),
}


def draw_many(params, seeds, positions):
    sampling = make_sampling([params] * MANY, num_rows=MANY, seeds=seeds)
    return np.asarray(jit_sample(np.tile(SMALL_LOGITS, (MANY, 1)), sampling, np.asarray(positions, np.int32)))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_draws_have_the_distribution_of_the_filtered_softmax(name, over):
    params, weights = DISTRIBUTIONS[name]
    expected = np.zeros(8)
    expected[: len(weights)] = np.array(weights) / np.sum(weights)
    seeds, positions = (range(MANY), [5] * MANY) if over == "seeds" else ([5] * MANY, range(MANY))

    counts = np.bincount(draw_many(params, seeds, positions), minlength=8)

    assert counts[expected == 0].sum() == 0
    support = expected > 0
    # Seeds are fixed, so this does not flicker; a wrong temperature or set gives values below 1e-30.
    test: Any = stats.chisquare(counts[support], MANY * expected[support])
    assert test.pvalue > 1e-3


@pytest.mark.parametrize("step", [1, 2**31], ids=["next position", "seed + 2**31"])
def test_draws_of_neighbouring_keys_are_independent(step):
    first = draw_many(SamplingParams(), range(MANY), [5] * MANY)
    if step == 1:
        second = draw_many(SamplingParams(), range(MANY), [6] * MANY)
    else:
        second = draw_many(SamplingParams(), range(step, step + MANY), [5] * MANY)

    table = np.histogram2d(first.clip(max=4), second.clip(max=4), bins=5)[0]
    test: Any = stats.chi2_contingency(table)
    assert test.pvalue > 1e-3


@pytest.mark.parametrize("num_rows", [1, 4, 7])
@pytest.mark.parametrize("neighbour", [SamplingParams(temperature=0), SamplingParams(top_k=3, top_p=0.5, min_p=0.1)])
def test_a_draw_is_the_same_in_any_batch_size_row_and_company(num_rows, neighbour):
    row = draw_logits(0, (1, V))
    mine = SamplingParams(temperature=0.9, top_p=0.95, seed=2**40 + 3)
    expected = [int(jit_sample(row, batch_of(mine, num_rows=1), np.array([i]))[0]) for i in range(8)]

    logits = draw_logits(1, (num_rows, V))
    logits[-1] = row[0]
    sampling = batch_of(*[neighbour] * (num_rows - 1), mine, num_rows=num_rows)
    drawn = [int(jit_sample(logits, sampling, np.full(num_rows, i))[-1]) for i in range(8)]

    assert drawn == expected


BASE = SamplingParams(temperature=1.0, seed=1)
CHANGES = {
    "temperature": SamplingParams(temperature=3.0, seed=1),
    "top_k": SamplingParams(top_k=2, seed=1),
    "top_p": SamplingParams(top_p=0.2, seed=1),
    "min_p": SamplingParams(min_p=0.9, seed=1),
    "low word of the seed": SamplingParams(seed=2),
    "high word of the seed": SamplingParams(seed=2**32 + 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_parameter_changes_the_draws(name):
    before = draw_many(BASE, [BASE.seed] * MANY, range(MANY))

    after = draw_many(CHANGES[name], [CHANGES[name].seed] * MANY, range(MANY))

    assert (before != after).mean() > 0.1


def test_the_sample_index_and_the_position_change_the_draws():
    sampling = make_sampling([BASE] * MANY, num_rows=MANY)
    logits, same = np.tile(SMALL_LOGITS, (MANY, 1)), np.full(MANY, 9, np.int32)

    fixed = jit_sample(logits, sampling, same)
    by_index = jit_sample(logits, dataclasses.replace(sampling, sample_index=np.arange(MANY, dtype=np.int32)), same)
    by_position = jit_sample(logits, sampling, np.arange(MANY, dtype=np.int32))

    assert len(set(fixed.tolist())) == 1
    assert len(set(by_index.tolist())) == len(set(by_position.tolist())) == 8
    assert (by_index != by_position).any()
