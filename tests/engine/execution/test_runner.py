"""The runner compiles everything beforehand, updates the cache in place, and reads only what it wrote."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.kv_cache.page_transfers import CopyPage, PageTransfers
from jaxinfer.plan.step_shapes import plan_buckets, plan_draws
from tests.engine.engines import GREEDY, forget_prefixes, poison_cache, random_prompts, run_with_arrivals
from tests.engine.probe import runner_of

MIXED = [
    GREEDY,
    SamplingParams(max_tokens=6, seed=1, temperature=0.7, top_p=0.9),
    SamplingParams(max_tokens=3, seed=2, top_k=5, min_p=0.1, log_probs=4),
    SamplingParams(max_tokens=9, temperature=0, log_probs=1),
]


@contextlib.contextmanager
def recorded_compilations():
    """Lists what jax traces, lowers or compiles meanwhile, from the compilation cache or not."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith("/jax/core/compile"):
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_the_record_of_compilations_sees_one():
    with recorded_compilations() as names:
        jax.jit(lambda x: x * 3 + 1)(np.float32(1))

    assert names


def test_nothing_is_compiled_after_construction(llm):
    prompts = random_prompts(12, max_len=60)

    with recorded_compilations() as names:
        run_with_arrivals(llm, prompts, MIXED * 3)

    assert names == []


def test_every_executable_aliases_the_whole_cache(llm):
    cache_bytes = sum(pool.nbytes for pool in jax.tree.leaves(runner_of(llm)._cache))

    steps = runner_of(llm).compiled_steps.compiled

    aliased = {bucket: step.memory_analysis().alias_size_in_bytes for bucket, step in steps.items()}

    # Who only draws reads it, and leaves it to the step that may be launched already.
    draws = plan_draws(plan_buckets(llm.engine_config))
    expected = dict.fromkeys(plan_buckets(llm.engine_config), cache_bytes) | dict.fromkeys(draws, 0)
    assert aliased == expected


def test_the_cache_stays_where_it_is_in_memory(llm):
    def addresses():
        return [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(runner_of(llm)._cache)]

    before = addresses()

    llm.generate([[5, 6, 7], list(range(1, 40))], GREEDY, show_progress=False)

    assert addresses() == before


def test_the_cache_a_step_was_given_is_given_up(llm):
    pools = jax.tree.leaves(runner_of(llm)._cache)

    llm.generate([5, 6, 7], GREEDY, show_progress=False)

    assert all(pool.is_deleted() for pool in pools)


@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17, 33, 70])
def test_slots_that_were_not_written_are_not_read(llm, num_prompt_tokens):
    prompt = random_prompts(1, max_len=1)[0] * num_prompt_tokens
    expected = llm.generate(prompt, MIXED[3], show_progress=False)[0]

    poison_cache(llm)

    got = llm.generate(prompt, MIXED[3], show_progress=False)[0]
    assert (got.token_ids, got.log_probs) == (expected.token_ids, expected.log_probs)


def test_who_borrows_the_cache_finds_every_copy_made(llm):
    llm.generate(list(range(5, 45)), GREEDY, show_progress=False)
    tokens = np.asarray(runner_of(llm)._cache.tokens)
    source = int(np.flatnonzero((tokens != tokens[0]).any(axis=1))[0])  # a page unlike the first
    forget_prefixes(llm)  # nobody needs what is on either
    copies = PageTransfers()
    copies.append(CopyPage(source, 0))

    borrowed = runner_of(llm).lend_cache(copies, lambda cache: (np.array(cache.tokens), cache))

    np.testing.assert_array_equal(borrowed[0], tokens[source])
    assert len(copies.queue) == 0
