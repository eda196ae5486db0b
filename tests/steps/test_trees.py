"""A tree of drafts yields the tokens of plain decoding, to the bit, and leaves the cache as decoding would."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.model.batch import Row, make_batch
from jaxinfer.steps import steps
from jaxinfer.steps.trees import accepted_paths, make_trees, stand_in_trees
from kernels_pallas.paged_attention import gather_tokens
from tests.steps.test_verify import (
    CONFIG,
    KINDS,
    OPTIONS,
    PAGES,
    PROMPTS,
    decode_step,
    decoded,
    params,
    prefilled,
    sampling_for,
)

B, Q = 4, 7
verify_step = functools.partial(steps.verify_step, params(), options=replace(OPTIONS, q_len=Q))
make_rows = functools.partial(make_batch, page_size=16, num_tokens=B * Q, num_rows=B, table_width=2)


def parents_of(trees):
    """The parents of rows of trees as a step takes them: -1 for a row's first token, and on padding."""
    flat = [parent for parents in trees for parent in [-1, *parents]]
    return np.array(flat + [-1] * (B * Q - len(flat)), np.int32)


@jax.jit
def walk(batch, parents, drawn):
    trees = make_trees(batch, parents, Q)
    return *accepted_paths(drawn, batch, trees), stand_in_trees(batch, trees).positions


# The parents of the drafts of a row: 0 is its last token, i its i-th draft.
shapes = st.integers(0, Q - 1).flatmap(lambda n: st.tuples(*(st.integers(0, i) for i in range(n))))


def longest_path(tokens, parents, drawn):
    """The places of the longest path from the first token on whose every draft is what was drawn before it."""
    paths = [[0]]
    for place, parent in enumerate(parents, 1):
        paths += [[*path, place] for path in paths if path[-1] == parent and drawn[parent] == tokens[place]]
    return max(paths, key=len)


@settings(max_examples=100)
@given(st.lists(shapes, min_size=1, max_size=B), st.randoms(use_true_random=False))
def test_the_path_goes_where_the_draws_go(trees, random):
    tokens = [[random.randrange(3) for _ in range(1 + len(parents))] for parents in trees]
    drawn = [[random.randrange(3) for _ in row] for row in tokens]
    flat = np.array([token for row in drawn for token in row] + [0] * B * Q, np.int32)[: B * Q]
    batch = make_rows([Row(row, 3, [0, 1]) for row in tokens])

    places, counts, positions = jax.device_get(walk(batch, parents_of(trees), flat))

    assert counts[len(trees) :].sum() == 0
    for i, parents in enumerate(trees):
        first, kept = batch.cu_q_lens[i], places[i, : counts[i]] - batch.cu_q_lens[i]
        expected = longest_path(tokens[i], parents, drawn[i])
        assert [drawn[i][place] for place in kept] == [drawn[i][place] for place in expected]
        assert all(b > a and (0, *parents)[b] == a for a, b in itertools.pairwise(kept))
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        assert (positions[first : first + len(depths)] - 3).tolist() == depths


# The parents of six drafts, and which of them are right: each the token that decoding draws after its path.
TREES = {
    "a chain": ((0, 1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6)),
    "the last of three": ((0, 0, 0, 1, 3, 5), (3, 5, 6)),
    "a path between wrong ones": ((0, 0, 2, 2, 1, 4), (2, 4, 6)),
    "all wrong": ((0, 0, 0, 1, 2, 2), ()),
}


def drafts_for(row, parents, right):
    """Drafts whose right ones are the row's tokens by plain decoding. Wrong ones are tokens that decoding draws later:
    were they taken for context, what may not come twice would not come.
    """
    depths, drafts = [0], []
    for place, parent in enumerate(parents, 1):
        depths.append(depths[parent] + 1)
        here = row[depths[-1] - 1]
        later = next((token for token in row[depths[-1] :] if token != here), (here + 1) % 61)
        drafts.append(int(here if place in right else later))
    return drafts


def verify(name, kind):
    """Verifies one tree in three rows; returns the output, the cache, and how many tokens each row emits."""
    parents, right = TREES[name]
    rows = [
        Row([prompt[-1], *drafts_for(tokens, parents, right)], len(prompt) - 1, pages)
        for prompt, tokens, pages in zip(PROMPTS, decoded(kind)[0], PAGES, strict=False)
    ]
    sampling = sampling_for(kind, num_masks=B * Q)
    output, cache = verify_step(prefilled(), make_rows(rows), sampling, parents_of([parents] * len(rows)))
    return output, cache, 1 + len(right)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TREES)
def test_a_tree_emits_what_decoding_draws_to_the_bit(kind, name):
    tokens, log_probs = decoded(kind)

    output, _, count = verify(name, kind)

    count = min(count, tokens.shape[1])
    assert output.num_emitted.tolist() == [1 + len(TREES[name][1])] * 3 + [0]
    np.testing.assert_array_equal(output.tokens[:3, :count], tokens[:3, :count])
    np.testing.assert_array_equal(output.log_probs[:3, :count], log_probs[:3, :count])


@functools.cache
def decoded_cache(kind, num_steps):
    """The cache after so many steps of plain decoding."""
    cache, contexts = prefilled(), [list(prompt) for prompt in PROMPTS]
    for step in range(num_steps):
        rows = [Row(c[-1:], len(c) - 1, pages) for c, pages in zip(contexts, PAGES, strict=True)]
        batch = make_batch(rows, page_size=16, num_tokens=B, num_rows=B, table_width=2)
        _, cache = decode_step(params(), cache, batch, sampling_for(kind), options=OPTIONS)
        for context, token in zip(contexts, decoded(kind)[0][:, step].tolist(), strict=False):
            context.append(token)
    return cache


@pytest.mark.parametrize("name", ["the last of three", "a path between wrong ones", "all wrong"])
def test_the_cache_is_left_as_decoding_leaves_it(name):
    _, cache, count = verify(name, "as drawn")
    expected = decoded_cache("as drawn", count)

    for prompt, pages in zip(PROMPTS, PAGES, strict=True):
        positions = np.arange(len(prompt) - 1 + count)
        slots = np.array(pages)[positions // 16] * 16 + positions % 16
        np.testing.assert_array_equal(cache.tokens.reshape(-1)[slots], expected.tokens.reshape(-1)[slots])
        for layers, pool, other in zip(CONFIG.layer_groups, cache.pools, expected.pools, strict=True):
            for layer in range(layers):
                at = slots + layer * cache.tokens.size
                for x, y in zip(gather_tokens(pool, at), gather_tokens(other, at), strict=True):
                    np.testing.assert_array_equal(x, y)


def test_the_states_are_those_of_the_path_in_its_order():
    output, _, count = verify("the last of three", "greedy")
    chain = [[prompt[-1], *tokens[: count - 1]] for prompt, tokens in zip(PROMPTS, decoded("greedy")[0], strict=False)]
    rows = [Row(row, len(prompt) - 1, pages) for row, prompt, pages in zip(chain, PROMPTS, PAGES, strict=True)]
    sampling = sampling_for("greedy", num_masks=B * Q)

    expected, _ = verify_step(prefilled(), make_rows(rows), sampling, parents_of([range(count - 1)] * 3))

    for i in range(3):
        np.testing.assert_array_equal(
            output.hidden[i * Q : i * Q + count], expected.hidden[i * count : (i + 1) * count]
        )
    assert jnp.isfinite(output.hidden[: 3 * Q]).all()


def test_a_row_that_does_not_see_its_first_page_has_trees_as_well():
    context, pages, cache, sampling = list(PROMPTS[0]), PAGES[0][1:], prefilled(), sampling_for("no token twice")
    for _ in range(4):
        row = Row(context[-1:], len(context) - 1, pages, num_evicted_tokens=16)
        batch = make_batch([row], page_size=16, num_tokens=B, num_rows=B, table_width=2)
        output, cache = decode_step(params(), cache, batch, sampling, options=OPTIONS)
        context.append(int(output.tokens[0]))
    *first, second, third, _ = context[len(PROMPTS[0]) - 1 :]
    row = Row([*first, third, second, third], len(PROMPTS[0]) - 1, pages, num_evicted_tokens=16)
    sampling = sampling_for("no token twice", num_masks=B * Q)

    output, _ = verify_step(prefilled(), make_rows([row]), sampling, parents_of([(0, 1, 1, 3)]))

    assert output.num_emitted.tolist() == [4, 0, 0, 0]
    assert output.tokens[0, :4].tolist() == context[len(PROMPTS[0]) :]
