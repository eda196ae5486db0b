"""A request may be longer than what it sees, and yields what StreamingLLM would, bit for bit under every schedule."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.kv_cache.page_transfers import RotatePages
from tests.engine.endless_engines import SIGHT, endless
from tests.engine.endless_oracle import streaming_logits
from tests.engine.engines import (
    ScriptedDrafter,
    content_of,
    drafts_from,
    forget_prefixes,
    num_preemptions,
    plain_steps,
    poison_cache,
    random_prompts,
    run_with_arrivals,
)
from tests.engine.fake_device import Engine, expected_tokens
from tests.engine.probe import runner_of, scheduler_of
from tests.engine.sights import seen_before
from tests.oracles import load_reference

S = 16
NUM_PAGES = 6  # of the crowded engines: as many as one request sees, and one for its sinks as they are
LONGEST = [5 + i * i % 89 for i in range(130)]
PROMPTS = [LONGEST, LONGEST[:100], *random_prompts(5, max_len=60, seed=4)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "log_probs": 2, "prompt_log_probs": 1},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_p": 0.9, "logit_bias": {5: 3.0, 9: -2.0}},
    {"temperature": 0.8, "min_tokens": 90, "stop_token_ids": range(1, 60), "max_tokens": 130},
    {"temperature": 0, "max_tokens": 9},
    {"temperature": 1.0, "max_tokens": 110},
    {"temperature": 0.7, "max_tokens": 70},
]
if importlib.util.find_spec("llguidance") is not None:
    KINDS[-1] |= {"regex": "[a-c]{60,90}"}
PARAMS = [SamplingParams(**{"max_tokens": 60, "seed": 70 + i, "ignore_eos": True, **k}) for i, k in enumerate(KINDS)]
GREEDY = SamplingParams(max_tokens=170, temperature=0, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(shared_llm):
    """What each request yields when nothing else is computed and nothing was before."""
    completions = []
    with endless(shared_llm), plain_steps(shared_llm, overlap=False):
        for pair in zip(PROMPTS, PARAMS, strict=True):
            forget_prefixes(shared_llm)
            completions += shared_llm.generate(*pair, show_progress=False)
    return completions


@pytest.fixture
def llm(llm):
    with endless(llm):
        poison_cache(llm)
        yield llm


@pytest.fixture
def crowded(crowded_llm):
    with endless(crowded_llm):
        poison_cache(crowded_llm)
        yield crowded_llm
    assert crowded_llm.metrics().num_owned_pages == 0


def contents(completions) -> list[dict]:
    return [content_of(completion) for completion in completions]


def test_a_request_of_four_times_what_it_sees_yields_what_streaming_llm_does(llm, checkpoint):
    completion = llm.generate(LONGEST, dataclasses.replace(GREEDY, prompt_log_probs=0), show_progress=False)[0]

    tokens = [*LONGEST, *completion.token_ids]
    logits = streaming_logits(load_reference(checkpoint), tokens, seen_before(len(tokens), *SIGHT))[:-1]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ours = [*completion.prompt_log_probs[1:], *completion.log_probs]
    # float32 through two layers, keys rounded a second time where they are turned.
    np.testing.assert_allclose(ours, log_probs[np.arange(len(tokens) - 1), tokens[1:]], rtol=0, atol=5e-5)
    assert log_probs[129:].argmax(-1).tolist() == list(completion.token_ids)


def test_no_chunk_no_neighbour_no_preemption_and_no_overlap_changes_a_bit(crowded, alone):
    before = num_preemptions(crowded)

    with plain_steps(crowded, overlap=True):
        completions = run_with_arrivals(crowded, PROMPTS, PARAMS, mean_arrivals=2.0)

    assert num_preemptions(crowded) > before
    assert contents(completions) == contents(alone)


def test_no_draft_changes_a_bit(crowded, alone):
    before = crowded.metrics()

    with drafts_from(crowded, ScriptedDrafter(0.7, alone)):
        completions = run_with_arrivals(crowded, PROMPTS, PARAMS, mean_arrivals=0.3)

    assert crowded.metrics().num_accepted_tokens > before.num_accepted_tokens
    assert contents(completions) == contents(alone)


def test_no_decode_loop_changes_a_bit_and_pages_are_bounded_all_the_time(looping_llm, alone):
    owned = []
    running = scheduler_of(looping_llm).replicas[0].running
    looping_llm.on_step = lambda *_: owned.append(max(map(num_pages_of, running), default=0))

    completions = run_with_arrivals(looping_llm, PROMPTS, PARAMS, mean_arrivals=0.2)

    looping_llm.on_step = None
    assert contents(completions) == contents(alone)
    assert max(owned) == NUM_PAGES
    assert looping_llm.metrics().num_owned_pages == 0


def num_pages_of(request) -> int:
    return len(set(request.table.first.owned_pages))


def turn_nothing(copy):
    return None


def turn_what_was_turned(copy):
    return dataclasses.replace(copy, sources=copy.pages)


@pytest.mark.parametrize("fault", [None, turn_nothing, turn_what_was_turned])
def test_one_wrong_turn_shows(llm, alone, monkeypatch, fault):
    copy, turns = runner_of(llm)._copy, []

    def copy_with_fault(copies):
        if isinstance(copies[0], RotatePages):
            turns.append(copies[0])
            if fault is not None and len(turns) == 2:
                copies = [changed for one in copies if (changed := fault(one)) is not None]
        if copies:
            copy(copies)

    monkeypatch.setattr(runner_of(llm), "_copy", copy_with_fault)
    completion = llm.generate(LONGEST, PARAMS[0], show_progress=False)[0]

    assert len(turns) == 7
    assert (content_of(completion) == content_of(alone[0])) == (fault is None)


def test_requests_that_share_all_they_see_leave_each_other_as_they_are(llm, alone):
    params = [dataclasses.replace(PARAMS[1], max_tokens=30 * i) for i in (4, 1, 2, 3)]
    first = llm.generate(LONGEST, params[0], show_progress=False)[0]

    completions = llm.generate([LONGEST] * 4, params, show_progress=False)

    for completion in completions:
        assert completion.num_cached_tokens == (len(LONGEST) - 1) // S * S
        count = len(completion.token_ids)
        assert completion.token_ids == first.token_ids[:count]
        assert completion.log_probs == first.log_probs[:count]


def test_the_noise_of_a_draw_is_that_of_its_position_in_the_text(looping_llm):
    params = SamplingParams(temperature=1e8, seed=2**40 + 3, max_tokens=120, ignore_eos=True)

    completion = looping_llm.generate([5, 6], params, show_progress=False)[0]

    assert list(completion.token_ids) == greatest_noise(2**40 + 3, range(2, 122))


def greatest_noise(seed: int, positions: range) -> list[int]:
    """What is drawn at each position where all tokens are equally probable, by the definition of `draw_keys`."""
    first = jax.random.wrap_key_data(jnp.array(divmod(seed, 2**32), jnp.uint32), impl="threefry2x32")

    @jax.jit
    @jax.vmap
    def draw(position):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(first, 0), position), 0)
        return jax.random.gumbel(key, (96,)).argmax()

    return draw(jnp.array(positions)).tolist()


def test_no_stop_token_comes_before_min_tokens_though_most_are_out_of_sight(alone):
    token_ids = alone[3].token_ids

    assert alone[3].finish_reason == "stop"
    assert set(token_ids[:90]).isdisjoint(range(1, 60))
    assert len(token_ids) > 90


@pytest.mark.parametrize("decode_loop_steps", [1, 8])
def test_a_pool_of_what_one_request_sees_and_its_sinks_is_enough_for_any_length(decode_loop_steps):
    engine = Engine(window=SIGHT, max_num_batched_tokens=32, num_pages=NUM_PAGES, decode_loop_steps=decode_loop_steps)
    request = engine.add(0, prompt=300, max_tokens=300, cache_salt="")

    engine.run()

    assert engine.scheduler.metrics().num_preemptions == 0
    assert list(engine.completions[0].token_ids) == expected_tokens(request, 300, window=SIGHT)
