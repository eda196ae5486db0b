"""Many decode steps in one dispatch: what decoding step by step gives, bit for bit, for each row up to its limit."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import numpy as np

from jaxinfer.config import CacheConfig, SamplingParams
from jaxinfer.model.batch import Row, make_batch
from jaxinfer.model.config import uniform_decoder
from jaxinfer.sampling.batch import make_sampling
from jaxinfer.steps.steps import StepOptions, decode_loop, decode_step
from tests.replay import SMALL_SIZES, all_logits, lively_params, nan_cache

CONFIG = uniform_decoder(**SMALL_SIZES | {"num_layers": 2, "layer_groups": (1, 1)})
CACHE = CacheConfig(num_pages=10, page_size=16)
PROMPTS = (list(range(5, 25)), list(range(40, 54)), [3])
PAGES = ([4, 2], [0, 8], [7, 1])
B, STEPS = 4, 6


def layout(rows, num_tokens):
    return make_batch(rows, page_size=16, num_tokens=num_tokens, num_rows=B, table_width=2)


# Penalties read what the loop itself has drawn; the last row is the padding's.
FIELDS = {"frequency_penalty": 1.5, "repetition_penalty": 1.2, "log_probs": 2}
SAMPLING = make_sampling(
    [SamplingParams(seed=i, temperature=float(i > 0), **FIELDS) for i in range(3)],
    num_rows=B,
    prompt_lens=[len(prompt) for prompt in PROMPTS],
    stop_token_ids=[()] * 3,
)
OPTIONS = StepOptions(config=CONFIG, max_log_probs=2)
LOOP = replace(OPTIONS, num_steps=STEPS)


@functools.cache
def params():
    return lively_params(CONFIG)


def prefilled():
    """A cache of all tokens but the last of each prompt."""
    rows = [Row(prompt[:-1] or prompt, 0, pages) for prompt, pages in zip(PROMPTS, PAGES, strict=True)]
    return all_logits(params(), nan_cache(CONFIG, CACHE), layout(rows, 40), config=CONFIG)[1]


def decode_batch(contexts):
    rows = [Row(tokens[-1:], len(tokens) - 1, pages) for tokens, pages in zip(contexts, PAGES, strict=True)]
    return layout(rows, B)


@functools.cache
def step_by_step():
    """What decode steps give: outputs with a column per step, and the cache after them."""
    contexts, cache, columns = [list(prompt) for prompt in PROMPTS], prefilled(), []
    for _ in range(STEPS):
        output, cache = decode_step(params(), cache, decode_batch(contexts), SAMPLING, options=OPTIONS)
        columns.append(jax.device_get(output))
        for tokens, drawn in zip(contexts, output.tokens.tolist(), strict=False):
            tokens.append(drawn)
    return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *columns), jax.device_get(cache)


def run(max_tokens=(STEPS,) * 3, sampling=SAMPLING, options=LOOP):
    most = np.array([*max_tokens, 0], np.int32)
    return decode_loop(params(), prefilled(), decode_batch(PROMPTS), sampling, most, options=options)


def test_a_loop_gives_every_bit_that_its_steps_give():
    output, _ = run()

    expected, _ = step_by_step()
    assert output.num_emitted.tolist() == [STEPS] * 3 + [0]
    for name in ("tokens", "log_probs", "top_tokens", "top_log_probs"):
        np.testing.assert_array_equal(getattr(output, name)[:3], getattr(expected, name)[:3])


def test_the_cache_after_a_loop_is_that_after_its_steps():
    _, cache = run()

    for ours, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(step_by_step()[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_loop_that_draws_plainly_gives_the_tokens_of_the_full_form():
    sampling = make_sampling([SamplingParams(seed=i, temperature=float(i > 0)) for i in range(3)], num_rows=B)

    plain, _ = run(sampling=sampling, options=StepOptions(config=CONFIG, num_steps=STEPS, form="plain"))

    full, _ = run(sampling=sampling, options=StepOptions(config=CONFIG, num_steps=STEPS))
    np.testing.assert_array_equal(plain.tokens[:3], full.tokens[:3])
    np.testing.assert_array_equal(plain.log_probs[:3], full.log_probs[:3])


def test_the_number_of_turns_is_known_to_the_compiler():
    sampling, most = make_sampling([], num_rows=B), np.zeros(B, np.int32)
    options = StepOptions(config=CONFIG, num_steps=STEPS, form="plain")

    trace = decode_loop.trace(params(), nan_cache(CONFIG, CACHE), layout([], B), sampling, most, options=options)

    loops = [equation for equation in trace.jaxpr.eqns if equation.primitive.name in ("while", "scan")]
    assert [(loop.primitive.name, loop.params["length"]) for loop in loops] == [("scan", STEPS)]


def test_a_row_emits_no_more_than_it_may():
    assert run(max_tokens=[2, 5, 1])[0].num_emitted.tolist() == [2, 5, 1, 0]


def test_what_a_stopped_row_has_said_does_not_change_and_neither_do_its_neighbours():
    output, _ = run(max_tokens=[2, STEPS, 3])

    expected = step_by_step()[0].tokens
    assert output.tokens[0, :2].tolist() == expected[0, :2].tolist()
    assert output.tokens[1].tolist() == expected[1].tolist()
    assert output.tokens[2, :3].tolist() == expected[2, :3].tolist()


def test_a_loop_without_rows_does_nothing():
    cache = prefilled()
    before = jax.device_get(cache)
    nothing = np.zeros(B, np.int32)

    output, after = decode_loop(params(), cache, layout([], B), SAMPLING, nothing, options=LOOP)

    assert output.num_emitted.tolist() == [0] * B
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new, old)


def test_the_cache_of_a_loop_is_aliased_and_never_copied():
    most = np.full(B, STEPS, np.int32)
    cache = nan_cache(CONFIG, CACHE)
    lowered = decode_loop.lower(params(), cache, decode_batch(PROMPTS), SAMPLING, most, options=LOOP)

    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
