"""Tokens that come by way of drafts have the distribution of the target, over a vocabulary small enough to count."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxinfer.config import CacheConfig, SamplingParams
from jaxinfer.model.batch import Row, make_batch
from jaxinfer.model.config import uniform_decoder
from jaxinfer.sampling.batch import make_sampling
from jaxinfer.steps.medusa import MedusaHeads, chain_of, draft_from_states, parents_of_paths
from jaxinfer.steps.steps import StepOptions, decode_step, draft_step, verify_step
from tests.exhaustive import exhaustive_but
from tests.replay import SMALL_SIZES, all_logits, lively_params, nan_cache
from tests.steps.test_eagle import eagle_head

TINY_SIZES: dict[str, Any] = SMALL_SIZES | {"vocab_size": 8, "num_layers": 2, "layer_groups": (1, 1)}
TINY = uniform_decoder(**TINY_SIZES)
V, MANY, NUM_DRAFTS = TINY.vocab_size, 1024, 2
CONTEXT = [3]
CHAIN, TREE = chain_of(NUM_DRAFTS), ((0,), (1,), (0, 0), (1, 0))
FIXED = [7, 4]
KINDS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.2},
}
decode = jax.jit(functools.partial(decode_step, options=StepOptions(config=TINY)))
verify = jax.jit(verify_step, static_argnames="options")
from_heads = jax.jit(draft_from_states, static_argnames="paths")
FIRST_SIZES: dict[str, Any] = TINY_SIZES | {"num_layers": 1, "layer_groups": (1,)}
FIRST_LAYER = uniform_decoder(**FIRST_SIZES)
from_exit = jax.jit(functools.partial(draft_step, options=StepOptions(config=FIRST_LAYER, max_drafts=NUM_DRAFTS)))


@functools.cache
def params():
    return lively_params(TINY, seed=4)  # after any context, several tokens are likely


@functools.cache
def logits_after(context):
    """The logits of the token after a context, f64[V]."""
    batch = make_batch([Row(context, 0, [0])], page_size=16, num_tokens=8, num_rows=2, table_width=1)
    cache = nan_cache(TINY, CacheConfig(num_pages=1, page_size=16))
    return np.asarray(all_logits(params(), cache, batch, config=TINY)[0], np.float64)[len(context) - 1]


def probabilities(context, fields):
    """The distribution of the token after a context, by definition, f64[V]."""
    logits, output = logits_after(tuple(context)).copy(), context[len(CONTEXT) :]
    for token in set(context):
        logits[token] *= fields.get("repetition_penalty", 1) ** (-1 if logits[token] > 0 else 1)
    for token in set(output):
        times = output.count(token)
        logits[token] -= fields.get("presence_penalty", 0) + fields.get("frequency_penalty", 0) * times
    weights = np.exp((logits - logits.max()) / fields.get("temperature", 1.0))
    order = np.argsort(-weights)
    weights[order[fields.get("top_k", V) :]] = 0
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= fields.get("top_p", 1.0) * weights.sum()]] = 0
    weights[weights < fields.get("min_p", 0) * weights.max()] = 0
    return weights / weights.sum()


def fixed_drafts(output, cache, sampling):
    return np.tile(np.array(FIXED, np.int32), (MANY, 1))


def exit_drafts(output, cache, sampling):
    D = TINY.hidden_size
    lens = np.random.default_rng(1).standard_normal((D, D)).astype(np.float32) / D
    first = dataclasses.replace(params(), layers=params().layers[:1], lens=lens)
    rows = [Row([token], len(CONTEXT), [i]) for i, token in enumerate(output.tokens.tolist())]
    batch = make_batch(rows, page_size=16, num_tokens=MANY, num_rows=MANY, table_width=1)
    counts = np.full(MANY, NUM_DRAFTS, np.int32)
    return from_exit(first, dataclasses.replace(cache, pools=cache.pools[:1]), batch, sampling, counts)[0]


def drafts_of(heads, output, sampling, paths=CHAIN):
    windows = jnp.tile(output.hidden[:, None], (1, heads.window, 1))
    tokens = jnp.tile(output.tokens[:, None], (1, heads.window))
    positions = jnp.full((MANY,), len(CONTEXT) + 1, jnp.int32)
    rows, num_known = jnp.arange(MANY, dtype=jnp.int32), jnp.ones(MANY, jnp.int32)
    return from_heads(params(), heads, windows, rows, tokens, num_known, sampling, positions, paths=paths)


def medusa_drafts(output, cache, sampling, paths=CHAIN):
    D = TINY.hidden_size
    weights = np.random.default_rng(1).standard_normal((NUM_DRAFTS, D, 2 * D)).astype(np.float32) / 8
    return drafts_of(MedusaHeads(weights), output, sampling, paths)


def eagle_drafts(output, cache, sampling, paths=CHAIN):
    config = uniform_decoder(**dict(FIRST_SIZES, intermediate_size=24))
    return drafts_of(eagle_head(config), output, sampling, paths)


def fixed_trees(output, cache, sampling, paths):
    return np.tile(np.array([*FIXED, 2, 5], np.int32), (MANY, 1))


DRAFTERS = {
    "the same for all": fixed_drafts,
    "medusa heads": medusa_drafts,
    "eagle head": eagle_drafts,
    "early exit": exit_drafts,
}
TREE_DRAFTERS = {"the same tree": fixed_trees, "medusa tree": medusa_drafts, "eagle tree": eagle_drafts}


def cases_of(drafters: Iterable[str]) -> list[Any]:
    """Drafters with kinds of requests: in every run the first with all kinds, and the others with two of them.

    Verification knows a drafter by its probabilities alone.
    """
    first, *others = drafters
    chosen = [*((first, kind) for kind in KINDS), *((name, kind) for name in others for kind in ("top_p", "penalties"))]
    return exhaustive_but(itertools.product([first, *others], KINDS), chosen)


def draw_many(fields, drafter, paths=CHAIN, **tree):
    """For many seeds the token after CONTEXT, by decoding, and what verification of the drafts after it emits.

    Returns i32[MANY, 2 + drafts], of which each row has so many tokens: i32[MANY].
    """
    num_drafts = len(paths)
    options = {"prompt_lens": [len(CONTEXT)] * MANY, "seeds": range(MANY), "max_listed_tokens": 1}
    sampling = make_sampling([SamplingParams(**fields)] * MANY, num_rows=MANY, **options)
    cache = nan_cache(TINY, CacheConfig(num_pages=MANY, page_size=16))
    batch = functools.partial(make_batch, page_size=16, num_rows=MANY, table_width=1)
    rows = [Row(CONTEXT, 0, [i]) for i in range(MANY)]
    first, cache = decode(params(), cache, batch(rows, num_tokens=MANY), sampling)
    drafts = np.asarray(drafter(first, cache, sampling)).tolist()
    rows = [Row([token, *drafts[i]], len(CONTEXT), [i]) for i, token in enumerate(first.tokens.tolist())]
    tokens = batch(rows, num_tokens=(1 + num_drafts) * MANY)
    sampling = make_sampling([SamplingParams(**fields)] * MANY, num_rows=MANY, num_masks=len(tokens.tokens), **options)
    output, _ = verify(
        params(), cache, tokens, sampling, **tree, options=StepOptions(config=TINY, q_len=1 + num_drafts)
    )
    drawn, num_emitted = jax.device_get((output.tokens, output.num_emitted))
    return np.concatenate([np.asarray(first.tokens)[:, None], drawn], axis=1), 1 + num_emitted


def assert_drawn_from(cells, expected):
    """Asserts that cells i64[n] have the distribution `expected`, by chi-square."""
    counts = np.bincount(cells, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    likely = expected * len(cells) >= 5  # below, chi-square is no approximation
    counts, expected = (np.append(of[likely], of[~likely].sum()) for of in (counts, expected))
    used = expected > 0
    test: Any = stats.chisquare(counts[used], counts.sum() * expected[used] / expected.sum())
    assert test.pvalue > 1e-3  # seeds are fixed, so this does not flicker


def assert_emitted_by_the_target(tokens, counts, fields):
    """Asserts that the first three tokens of rows have the target's distribution, the last after the likeliest two."""
    pairs = [p * probabilities([*CONTEXT, i], fields) for i, p in enumerate(probabilities(CONTEXT, fields))]
    assert_drawn_from(tokens[:, 0] * V + tokens[:, 1], np.concatenate(pairs))
    third = tokens[counts > 2]  # whose first draft was right
    assert 0.02 * MANY < len(third) < 0.98 * MANY
    most = np.bincount(third[:, 0] * V + third[:, 1]).argmax()
    third = third[third[:, 0] * V + third[:, 1] == most]
    assert_drawn_from(third[:, 2], probabilities([*CONTEXT, most // V, most % V], fields))


@pytest.mark.parametrize(("drafter", "kind"), cases_of(DRAFTERS))
def test_emitted_tokens_have_the_distribution_of_the_target(drafter, kind):
    assert_emitted_by_the_target(*draw_many(KINDS[kind], DRAFTERS[drafter]), KINDS[kind])


@pytest.mark.parametrize(("drafter", "kind"), cases_of(TREE_DRAFTERS))
def test_what_trees_emit_has_the_distribution_of_the_target(drafter, kind):
    make = functools.partial(TREE_DRAFTERS[drafter], paths=TREE)
    parents = np.tile(np.array([-1, *(1 + parent for parent in parents_of_paths(TREE))], np.int32), MANY)

    tokens, counts = draw_many(KINDS[kind], make, TREE, parents=parents)

    assert set(counts.tolist()) >= {2, 3, 4}
    assert_emitted_by_the_target(tokens, counts, KINDS[kind])
