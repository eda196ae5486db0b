"""The compiled steps: what they give, that the cache is aliased and not copied, and when they are traced again."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import CacheConfig, SamplingParams
from jaxinfer.model.batch import Row, last_tokens, make_batch
from jaxinfer.model.cache import abstract_cache, init_cache
from jaxinfer.model.params import abstract_params
from jaxinfer.sampling.batch import make_sampling, with_masks
from jaxinfer.sampling.sample import sample
from jaxinfer.steps.steps import StepOptions, decode_step, draw_step, prefill_step
from tests.replay import SMALL_MODEL, all_logits, lively_params, nan_cache

CONFIG = SMALL_MODEL
CACHE = CacheConfig(num_pages=2048, page_size=16)  # 24 MiB, far larger than anything else in a step
B = 4
PROMPTS = (list(range(5, 25)), list(range(40, 52)), [3])
PAGES = ([4, 2], [0], [7])


def layout(rows, num_tokens):
    return make_batch(rows, page_size=16, num_tokens=num_tokens, num_rows=B, table_width=2)


def sampling_for(**fields):
    return make_sampling([SamplingParams(seed=i, **fields) for i in range(len(PROMPTS))], num_rows=B)


@functools.cache
def params():
    return lively_params(CONFIG)


NUM_LOG_PROBS = 3
OPTIONS = StepOptions(config=CONFIG, max_log_probs=NUM_LOG_PROBS)


def decode(*arguments, **options):
    return decode_step(*arguments, options=dataclasses.replace(OPTIONS, **options))


def prefill(prompts, sampling, cache=None, **options):
    """Computes whole prompts in a step of 40 tokens."""
    rows = [Row(prompt, 0, pages) for prompt, pages in zip(prompts, PAGES, strict=True)]
    cache = nan_cache(CONFIG, CACHE) if cache is None else cache
    return prefill_step(params(), cache, layout(rows, 40), sampling, options=dataclasses.replace(OPTIONS, **options))


def decode_rows():
    """The last token of each prompt, the others being in the cache."""
    return [Row(p[-1:], len(p) - 1, pages) for p, pages in zip(PROMPTS, PAGES, strict=True)]


def prefilled_without_the_last_token():
    _, cache = prefill([prompt[:-1] or prompt for prompt in PROMPTS], sampling_for())
    return cache


def as_arrays(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@functools.cache
def last_logits():
    """The logits after each prompt."""
    batch = layout([Row(p, 0, pages) for p, pages in zip(PROMPTS, PAGES, strict=True)], 40)
    logits, _ = all_logits(params(), nan_cache(CONFIG, CACHE), batch, config=CONFIG)
    return np.asarray(logits)[np.cumsum([len(p) for p in PROMPTS]) - 1]


def test_a_prefill_step_gives_the_most_probable_next_token_of_each_row():
    output, _ = prefill(PROMPTS, sampling_for(temperature=0))

    last = last_logits().astype(np.float64)
    log_probs = last - np.log(np.exp(last).sum(-1, keepdims=True))
    assert output.tokens[:3].tolist() == last.argmax(-1).tolist()
    # float32 logits of order 1 and a sum of 61 terms.
    np.testing.assert_allclose(output.log_probs[:3], log_probs.max(-1), rtol=0, atol=2e-6)


def test_a_token_is_drawn_for_the_position_at_which_it_will_stand():
    sampling = sampling_for(temperature=2.0)
    output, _ = prefill(PROMPTS, sampling)

    positions = np.array([*map(len, PROMPTS), 0], np.int32)
    expected = jax.jit(sample)(np.pad(last_logits(), ((0, 1), (0, 0))), sampling, positions)

    assert output.tokens[:3].tolist() == expected[:3].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_decode_step_is_the_prefill_step_of_one_token_chunks_bit_for_bit(temperature):
    sampling = sampling_for(temperature=temperature)
    batch = layout(decode_rows(), B)

    decoded = decode(params(), prefilled_without_the_last_token(), batch, sampling)
    prefilled = prefill_step(params(), prefilled_without_the_last_token(), batch, sampling, options=OPTIONS)

    for ours, theirs in zip(as_arrays(decoded), as_arrays(prefilled), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_token_drawn_after_decoding_is_the_one_drawn_after_prefill():
    sampling = sampling_for(temperature=1.0)
    whole, _ = prefill(PROMPTS, sampling)

    batch = layout(decode_rows(), B)
    decoded, _ = decode(params(), prefilled_without_the_last_token(), batch, sampling)

    assert decoded.tokens[:3].tolist() == whole.tokens[:3].tolist()
    assert decoded.log_probs[:3].tolist() == whole.log_probs[:3].tolist()


def test_consecutive_draws_of_one_request_use_other_noise():
    # The same logits at every position: a model whose embedding is constant.
    flat = dataclasses.replace(params(), embedding=jnp.ones_like(params().embedding))
    cache, drawn = nan_cache(CONFIG, CACHE), []
    for position in range(12):
        batch = layout([Row([1], position, [0])], B)
        output, cache = decode(flat, cache, batch, sampling_for(temperature=2.0))
        drawn.append(output.tokens[0].item())

    assert len(set(drawn)) > 4


def masked_sampling():
    """Three rows that read what they had so far, the last two with a structure; and its masks: every third token."""
    params = [
        SamplingParams(seed=i, repetition_penalty=1.3, top_k=20, log_probs=2, regex="a" if i else None)
        for i in range(len(PROMPTS))
    ]
    words = np.packbits(np.arange(64) % 3 == 0, bitorder="little").view(np.int32)
    return with_masks(make_sampling(params, num_rows=B, vocab_size=CONFIG.vocab_size), {1: words, 2: words})


def run_step(kind, sampling, **options):
    """Returns the batch of a step of the three prompts, its output and the cache."""
    if kind == "prefill":
        batch = layout([Row(p, 0, pages) for p, pages in zip(PROMPTS, PAGES, strict=True)], 40)
        return batch, *prefill(PROMPTS, sampling, **options)
    batch = layout(decode_rows(), B)
    return batch, *decode(params(), prefilled_without_the_last_token(), batch, sampling, **options)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_what_a_plain_step_leaves_to_be_drawn_is_drawn_later_to_the_same_bits(kind):
    sampling = masked_sampling()
    _, expected, _ = run_step(kind, sampling)
    batch, plain, cache = run_step(kind, sampling, form="plain", max_log_probs=0)

    drawn = draw_step(cache, last_tokens(batch), sampling, plain.logits, options=OPTIONS)

    assert (np.asarray(expected.tokens[1:3]) % 3 == 0).all()
    for ours, theirs in zip(as_arrays(drawn), as_arrays(dataclasses.replace(expected, hidden=None)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("form", ["plain", "filtered"])
def test_a_lesser_form_draws_what_the_full_form_draws(kind, form):
    filters = {"top_k": 5, "top_p": 0.8, "min_p": 0.01} if form == "filtered" else {}
    params = [SamplingParams(seed=i, temperature=0.7 * i, **filters) for i in range(len(PROMPTS))]
    sampling = make_sampling(params, num_rows=B)

    drawn, _ = run_step(kind, sampling, form=form, max_log_probs=0)[1:]

    _, full, _ = run_step(kind, sampling)
    np.testing.assert_array_equal(drawn.tokens, full.tokens)
    np.testing.assert_array_equal(drawn.log_probs, full.log_probs)


def test_a_plain_step_refuses_what_it_does_not_draw():
    with pytest.raises(ValueError, match="form='plain' leaves no place for max_log_probs=3.*draw_step"):
        prefill(PROMPTS, sampling_for(), form="plain", max_log_probs=3)


def test_alternatives_are_as_many_as_the_step_was_built_for():
    output, _ = prefill(PROMPTS, sampling_for(log_probs=1))

    assert output.top_tokens.shape == output.top_log_probs.shape == (B, NUM_LOG_PROBS)
    assert (np.diff(output.top_log_probs, axis=-1) <= 0).all()


def test_more_alternatives_than_tokens_are_refused():
    with pytest.raises(ValueError, match=r"62|vocab"):
        prefill(PROMPTS, sampling_for(), max_log_probs=62)


@functools.cache
def compiled(step):
    cache = abstract_cache(CONFIG, CACHE)
    num_bytes = sum(leaf.size * 4 for leaf in jax.tree.leaves(cache))
    batch = layout([], B if step is decode_step else 40)
    arguments = (abstract_params(CONFIG, jnp.float32), cache, batch, make_sampling([], num_rows=B))
    return step.lower(*arguments, options=OPTIONS).compile(), num_bytes


@pytest.mark.parametrize("step", [prefill_step, decode_step], ids=["prefill", "decode"])
def test_the_cache_is_aliased_and_never_copied(step):
    executable, cache_bytes = compiled(step)

    memory = executable.memory_analysis()

    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 50


@pytest.mark.parametrize("step", [prefill_step, decode_step], ids=["prefill", "decode"])
def test_every_pool_of_the_cache_has_its_own_alias(step):
    executable, _ = compiled(step)

    header = executable.as_text().splitlines()[0]

    # Keys and values of two groups, and token ids.
    assert header.count("may-alias") + header.count("must-alias") == 5


def test_a_step_takes_the_cache_and_returns_its_successor():
    cache = init_cache(CONFIG, CACHE)

    _, successor = prefill(PROMPTS, sampling_for(), cache)

    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(successor))


def test_equal_shapes_are_not_traced_again():
    _, cache = prefill(PROMPTS, sampling_for())
    step: Any = prefill_step
    num_traces = step._cache_size()

    for fields in ({"temperature": 0.0}, {"top_k": 3, "top_p": 0.5, "log_probs": 2}, {"min_p": 0.2}):
        _, cache = prefill([p[: len(p) // 2 + 1] for p in PROMPTS], sampling_for(**fields), cache)
    assert step._cache_size() == num_traces
