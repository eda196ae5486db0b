"""Verification emits the tokens of plain decoding, to the bit, whatever was drafted."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import CacheConfig, SamplingParams
from jaxinfer.model.batch import Row, make_batch
from jaxinfer.sampling.batch import make_sampling, with_masks
from jaxinfer.steps.steps import StepOptions, decode_step, verify_step
from jaxinfer.steps.verify import NO_DRAFT, accept_drafts
from tests.replay import SMALL_MODEL, all_logits, lively_params, nan_cache

CONFIG = SMALL_MODEL
OPTIONS = StepOptions(config=CONFIG, max_log_probs=2)
CACHE = CacheConfig(num_pages=8, page_size=16)
B, Q = 4, 4
PROMPTS = (list(range(5, 25)), list(range(40, 52)), [3])
PAGES = ([4, 2], [0, 1], [7, 5])
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "as drawn": {"temperature": 1.0},
    "filtered": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9},
    "penalised": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "no token twice": {"no_repeat_ngram_size": 1},
    "pairs ruled out": {"bad_words": [[i, j] for i in range(0, 8) for j in range(50, 58)], "temperature": 3.0},
    "no end yet": {"min_tokens": 3, "stop_token_ids": range(0, 40), "temperature": 2.0},
}


def test_a_row_emits_its_drafts_as_far_as_they_are_right_and_one_token_more():
    cases = jnp.array(list(itertools.product(range(2), repeat=Q + Q - 1)))
    drawn, drafts = cases[:, :Q], cases[:, Q:]

    emitted = accept_drafts(drawn, drafts).tolist()

    for i, count in enumerate(emitted):
        first_wrong = next((j for j in range(Q - 1) if drawn[i, j] != drafts[i, j]), Q - 1)
        assert count == first_wrong + 1


def test_where_nothing_is_drafted_nothing_is_accepted():
    drawn = jnp.array([[-1, -1, -1], [4, 5, 6]])

    emitted = accept_drafts(drawn, jnp.array([[NO_DRAFT, NO_DRAFT], [4, NO_DRAFT]]))

    assert emitted.tolist() == [1, 2]


@functools.cache
def params():
    return lively_params(CONFIG)


def sampling_for(kind, num_masks=B):
    fields = [SamplingParams(seed=i, **KINDS[kind]) for i in range(len(PROMPTS))]
    lens = [len(prompt) for prompt in PROMPTS]
    return make_sampling(fields, num_rows=B, prompt_lens=lens, vocab_size=61, num_masks=num_masks)


def prefilled():
    """A cache with all but the last token of each prompt."""
    rows = [Row(prompt[:-1] or prompt, 0, pages) for prompt, pages in zip(PROMPTS, PAGES, strict=True)]
    batch = make_batch(rows, page_size=16, num_tokens=40, num_rows=B, table_width=2)
    return all_logits(params(), nan_cache(CONFIG, CACHE), batch, config=CONFIG)[1]


@functools.cache
def decoded(kind, num_steps=Q + 2):
    """Each prompt's next tokens and their log-probabilities by plain decoding, i32 and f32 [B, num_steps]."""
    cache, contexts, outputs = prefilled(), [list(prompt) for prompt in PROMPTS], []
    for _ in range(num_steps):
        rows = [Row(c[-1:], len(c) - 1, pages) for c, pages in zip(contexts, PAGES, strict=True)]
        batch = make_batch(rows, page_size=16, num_tokens=B, num_rows=B, table_width=2)
        output, cache = decode_step(params(), cache, batch, sampling_for(kind), options=OPTIONS)
        outputs.append(output)
        for context, token in zip(contexts, output.tokens.tolist(), strict=False):
            context.append(token)
    return tuple(np.stack([getattr(o, name) for o in outputs], 1) for name in ("tokens", "log_probs"))


def verify(cache, contexts, drafts, kind):
    rows = [
        Row([*context[-1:], *drafted], len(context) - 1, pages)
        for context, drafted, pages in zip(contexts, drafts, PAGES, strict=True)
    ]
    batch = make_batch(rows, page_size=16, num_tokens=B * Q, num_rows=B, table_width=2)
    return verify_batch(cache, batch, sampling_for(kind, num_masks=B * Q))


verify_batch = functools.partial(verify_step, params(), options=replace(OPTIONS, q_len=Q))


# How many right drafts each row gets, and how many wrong ones after them.
DRAFTS = {
    "all right": [(3, 0), (3, 0), (3, 0)],
    "of any length": [(0, 0), (2, 1), (1, 0)],
    "wrong from the start": [(0, 3), (0, 1), (0, 2)],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DRAFTS)
def test_a_verify_step_emits_what_decoding_draws_to_the_bit(kind, name):
    tokens, log_probs = decoded(kind)
    drafts = [
        [*tokens[i, :right].tolist(), *[(tokens[i, right] + 1) % 61] * wrong]
        for i, (right, wrong) in enumerate(DRAFTS[name])
    ]

    output, _ = verify(prefilled(), PROMPTS, drafts, kind)

    assert output.num_emitted.tolist() == [right + 1 for right, _ in DRAFTS[name]] + [0]
    for i, count in enumerate(output.num_emitted.tolist()):
        np.testing.assert_array_equal(output.tokens[i, :count], tokens[i, :count])
        np.testing.assert_array_equal(output.log_probs[i, :count], log_probs[i, :count])


def test_what_a_rejected_draft_left_in_the_cache_is_overwritten():
    tokens, log_probs = decoded("penalised")
    wrong = [[*row[:1].tolist(), (row[1] + 1) % 61, 9] for row in tokens[:3]]
    output, cache = verify(prefilled(), PROMPTS, wrong, "penalised")
    assert output.num_emitted.tolist() == [2, 2, 2, 0]
    contexts = [[*prompt, *row[:2].tolist()] for prompt, row in zip(PROMPTS, tokens, strict=False)]

    output, _ = verify(cache, contexts, [row[2:5].tolist() for row in tokens[:3]], "penalised")

    np.testing.assert_array_equal(output.tokens[:3], tokens[:3, 2:6])
    np.testing.assert_array_equal(output.log_probs[:3], log_probs[:3, 2:6])


def test_every_position_of_a_row_has_its_own_mask():
    masks = {0: np.array([1 << 7, 0]), 1: np.array([1 << 9, 0]), 2: np.array([0, 1 << 2])}  # token 7, then 9, then 34
    fields = SamplingParams(choices=["x"], temperature=0)
    sampling = with_masks(make_sampling([fields], num_rows=B, num_masks=B * Q, vocab_size=61), masks)
    batch = make_batch([Row([5, 7, 9], 0, [0])], page_size=16, num_tokens=B * Q, num_rows=B, table_width=2)

    output, _ = verify_batch(nan_cache(CONFIG, CACHE), batch, sampling)

    assert output.tokens[0, :3].tolist() == [7, 9, 34]
    assert output.num_emitted.tolist() == [3, 0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_verified_beside_rows_that_prefill_to_the_same_bits(kind):
    tokens, log_probs = decoded(kind)
    first, second, third = PROMPTS
    right, wrong = tokens[0, :2].tolist(), [(tokens[2, 0] + 1) % 61]
    # The middle row has only the first tokens of its prompt in the cache, or none at all.
    rows = [Row([*first[-1:], *right], 19, PAGES[0]), Row(second, 0, PAGES[1]), Row([*third, *wrong], 0, PAGES[2])]
    batch = make_batch(rows, page_size=16, num_tokens=40, num_rows=B, table_width=2)

    output, _ = verify_batch(
        prefilled(), batch, sampling_for(kind, num_masks=B * Q), None, np.array([2, 0, 1, 0], np.int32)
    )

    assert output.num_emitted.tolist() == [3, 1, 1, 0]
    for i, count in enumerate(output.num_emitted.tolist()[:3]):
        np.testing.assert_array_equal(output.tokens[i, :count], tokens[i, :count])
        np.testing.assert_array_equal(output.log_probs[i, :count], log_probs[i, :count])


def test_masks_of_a_mixed_step_belong_to_the_sampled_tokens():
    # The first row prefills: its only mask is that of its last token. The second has one mask after each of its tokens.
    masks = {0: np.array([1 << 7, 0]), 1: np.array([1 << 9, 0]), 2: np.array([0, 1 << 2])}
    fields = [SamplingParams(choices=["x"], temperature=0)] * 2
    sampling = with_masks(make_sampling(fields, num_rows=B, num_masks=B * Q, vocab_size=61), masks)
    rows = [Row([5, 6, 7, 8, 9, 10], 0, [0]), Row([5, 9], 0, [1])]
    batch = make_batch(rows, page_size=16, num_tokens=40, num_rows=B, table_width=2)

    output, _ = verify_batch(nan_cache(CONFIG, CACHE), batch, sampling, None, np.array([0, 1, 0, 0], np.int32))

    assert output.tokens[0, 0] == 7
    assert output.tokens[1, :2].tolist() == [9, 34]
    assert output.num_emitted.tolist() == [1, 2, 0, 0]
