"""With a sliding window pages are given back while a request runs, and no bit of it changes, whatever else happens."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.engine.assembly import plan_window
from jaxinfer.engine.frontend.branches import fork, rewind
from jaxinfer.engine.kv_cache.attention_window import sliding_attention_window
from jaxinfer.model.config import uniform_decoder
from jaxinfer.plan.cache import MemoryQuestion
from tests.engine.engines import (
    ScriptedDrafter,
    completions_of,
    content_of,
    drafts_from,
    drain,
    forget_prefixes,
    num_preemptions,
    plain_steps,
    poison_cache,
    random_prompts,
    run_with_arrivals,
    save_small_checkpoint,
    small_engine,
)
from tests.engine.exactness.test_tier_exactness import evict_all, set_tiers
from tests.engine.fake_device import Engine, expected_tokens
from tests.engine.probe import runner_of, scheduler_of
from tests.engine.scheduling.test_scheduler_invariants import ADMISSION
from tests.replay import SMALL_SIZES

WINDOW, S = 20, 16
# 2 full pages behind that of the last token, that one, and one more that a step of 5 tokens may write.
NUM_PAGES = 4
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "log_probs": 2},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_p": 0.9, "logit_bias": {5: 3.0, 9: -2.0}},
    {"temperature": 0.8, "min_tokens": 9, "allowed_token_ids": tuple(range(60)), "ignore_eos": False},
    {"temperature": 0, "prompt_log_probs": 1},
]
# What reads the tokens of the whole context keeps all pages.
READING: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.5},
    {"temperature": 0.7, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0, "no_repeat_ngram_size": 2},
    {"temperature": 0.7, "bad_words": ((5, 6), (7,))},
    {"temperature": 0, "logits_processors": {"turns": 1.0}},
]
# Up to six windows and a half; those of the last five fit into the pool with all of their tokens.
LONGEST = [5 + i * i % 89 for i in range(130)]
PROMPTS = [LONGEST, *random_prompts(9, max_len=130, seed=4), *random_prompts(5, max_len=44, seed=6)]
GREEDY = SamplingParams(max_tokens=25, temperature=0, seed=1, ignore_eos=True)
PARAMS = [
    SamplingParams(**{"max_tokens": 9 + 4 * (i % 3), "seed": 70 + i, "ignore_eos": True, **kind})
    for i, kind in enumerate([*KINDS, *KINDS, *READING])
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_small_checkpoint(tmp_path_factory.mktemp("windowed"), family="mistral", sliding_window=WINDOW)


@pytest.fixture(scope="module")
def roomy_llm(checkpoint):
    """One request at a time with pages enough, chunks of 32 and up to 4 decode steps in a dispatch."""
    llm = small_engine(checkpoint, max_num_seqs=1, max_model_len=160, max_prompt_log_probs=1, decode_loop_steps=4)
    poison_cache(llm)
    return llm


@pytest.fixture(scope="module")
def crowded_llm(checkpoint):
    """Pages for the window of one request, chunks of 5, a tier for what is evicted, drafts where a test has some."""
    limits: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 5, "num_pages": NUM_PAGES, "max_drafts": 3}
    limits |= {"max_model_len": 160, "max_prompt_log_probs": 1, "host_cache_bytes": 2**22}
    llm = small_engine(checkpoint, **limits, adaptive_drafts=False, speculation=ScriptedDrafter(0))
    poison_cache(llm)
    return llm


@pytest.fixture(scope="module")
def alone(roomy_llm):
    completions = []
    for pair in zip(PROMPTS, PARAMS, strict=True):
        forget_prefixes(roomy_llm)
        completions += roomy_llm.generate(*pair, show_progress=False)
    return completions


@pytest.fixture
def llm(crowded_llm, tmp_path):
    """The crowded engine, poisoned, with empty tiers, and copying always pays, whatever this machine is doing now."""
    evict_all(crowded_llm)
    set_tiers(crowded_llm, host_pages=100, folder=tmp_path / "disk")
    poison_cache(crowded_llm)
    yield crowded_llm
    assert crowded_llm.metrics().num_owned_pages == 0


def contents(completions) -> list[dict]:
    return [content_of(completion) for completion in completions]


@pytest.mark.parametrize("overlap", [False, True])
def test_no_chunk_no_neighbour_and_no_preemption_changes_a_bit(llm, alone, overlap):
    before = num_preemptions(llm)

    with plain_steps(llm, overlap=overlap):
        completions = run_with_arrivals(llm, PROMPTS, PARAMS, mean_arrivals=2.0)

    assert num_preemptions(llm) > before
    assert llm.metrics().tiers[0].num_hits > 0
    assert contents(completions) == contents(alone)


def test_no_preemption_by_recomputation_changes_a_bit(llm, alone):
    runner_of(llm)._tiers.seconds_per_copy = 1e9
    before = llm.metrics()

    completions = run_with_arrivals(llm, PROMPTS, PARAMS, mean_arrivals=2.0)

    after = llm.metrics()
    assert after.num_preemptions > before.num_preemptions
    assert after.tiers[0].num_hits == before.tiers[0].num_hits
    assert contents(completions) == contents(alone)


@pytest.mark.parametrize("acceptance", [0.5, 1.0])
def test_no_draft_changes_a_bit(llm, alone, acceptance):
    before = llm.metrics()

    with drafts_from(llm, ScriptedDrafter(acceptance, alone)):
        completions = run_with_arrivals(llm, PROMPTS, PARAMS, mean_arrivals=0.3)

    after = llm.metrics()
    assert after.num_accepted_tokens > before.num_accepted_tokens
    num_rejected = after.num_drafted_tokens - after.num_accepted_tokens
    assert (num_rejected > before.num_drafted_tokens - before.num_accepted_tokens) == (acceptance < 1)
    assert contents(completions) == contents(alone)


def test_no_chunk_size_changes_a_bit_of_a_request_alone(llm, alone):
    completions = [llm.generate(*pair, show_progress=False)[0] for pair in zip(PROMPTS, PARAMS, strict=True)]

    assert contents(completions) == contents(alone)


def test_samples_and_beams_are_the_same_in_the_pages_of_a_window(llm, roomy_llm):
    params = SamplingParams(n=2, best_of=3, max_tokens=9, seed=5, ignore_eos=True)
    beams: dict[str, Any] = {"num_beams": 2, "max_tokens": 6, "ignore_eos": True}

    few, many = (
        [*x.generate(LONGEST, params, show_progress=False), *x.beam_search(LONGEST, **beams)] for x in (llm, roomy_llm)
    )

    assert [(c.token_ids, c.log_probs) for c in few] == [(c.token_ids, c.log_probs) for c in many]
    assert len(few) == 4


def test_a_long_request_runs_in_the_pages_of_its_window(llm, alone):
    before, owned = num_preemptions(llm), []
    llm.on_step = lambda *_: owned.append(llm.metrics().num_owned_pages)

    completion = llm.generate(LONGEST, GREEDY, show_progress=False)[0]

    llm.on_step = None
    assert len(completion.prompt_token_ids) + 25 > 7 * WINDOW
    assert (max(owned), num_preemptions(llm)) == (NUM_PAGES, before)


def test_a_prefix_is_found_by_its_last_pages(roomy_llm):
    forget_prefixes(roomy_llm)
    first = roomy_llm.generate(LONGEST, GREEDY, show_progress=False)[0]
    num_full = (len(LONGEST) - 1) // S
    num_later = (len(LONGEST) + 24) // S - num_full
    pages = scheduler_of(roomy_llm).replicas[0].tables.pages
    pages.evict(pages.num_cached - num_later - 2)  # all but two before the last of the prompt

    found = roomy_llm.generate(LONGEST, GREEDY, show_progress=False)[0]

    assert found.num_cached_tokens // S == num_full
    assert content_of(found) == content_of(first)


def begin(llm, num_tokens: int) -> int:
    """A request that has so many tokens of output."""
    request_id = llm.add(LONGEST, GREEDY)
    while scheduler_of(llm).find(request_id).num_output_tokens < num_tokens:
        llm.step()
    return request_id


@pytest.fixture(scope="module")
def expected(roomy_llm):
    forget_prefixes(roomy_llm)
    return content_of(roomy_llm.generate(LONGEST, GREEDY, show_progress=False)[0])


@pytest.mark.parametrize("num_back", [1, 20])
def test_a_request_that_is_set_back_behind_what_was_freed_yields_the_same(llm, expected, num_back):
    request_id = begin(llm, 20)

    llm.rewind(request_id, num_back)

    assert content_of(completions_of(drain(llm))[request_id]) == expected


def test_a_branch_yields_what_its_origin_does(llm, expected):
    request_id = begin(llm, 20)

    branch_id = llm.fork(request_id)

    completions = completions_of(drain(llm))
    assert content_of(completions[request_id]) == expected
    assert completions[branch_id].token_ids == expected["token_ids"]
    assert completions[branch_id].log_probs == expected["log_probs"]


def test_a_saved_request_takes_only_the_pages_of_its_window_along(llm, roomy_llm, expected, tmp_path):
    llm.save(begin(llm, 20), tmp_path / "request")
    forget_prefixes(roomy_llm)
    before = roomy_llm.metrics().num_prefill_tokens

    request_id = roomy_llm.restore(tmp_path / "request")
    restored = scheduler_of(roomy_llm).find(request_id)
    num_saved = len(restored.table.saved[0])

    assert content_of(completions_of(drain(roomy_llm))[request_id]) == expected
    assert roomy_llm.metrics().num_prefill_tokens == before
    assert num_saved <= NUM_PAGES
    drain(llm)


def test_what_never_fits_is_refused_and_what_fits_a_page_at_a_time_is_not(llm):
    longest = SamplingParams(max_tokens=160 - len(LONGEST), repetition_penalty=1.1)
    with pytest.raises(ValueError, match="may need 159 slots of the cache, which has 64"):
        llm.add(LONGEST, longest)

    llm.abort(llm.add(LONGEST, SamplingParams(max_tokens=160 - len(LONGEST))))
    drain(llm)


# ---- without a device


def test_pages_behind_the_window_are_cached_if_they_have_a_key_and_free_if_not():
    for cache_salt, states in ((None, (0, 13)), ("", (10, 3))):
        engine = Engine(window=WINDOW, max_num_batched_tokens=16, num_pages=16)
        engine.add(0, prompt=200, max_tokens=9, cache_salt=cache_salt)
        for _ in range(13):
            engine.step()
        counts = engine.scheduler.replicas[0].tables.pages.counts()
        assert (counts["num_cached_pages"], counts["num_free_pages"]) == states


def test_a_page_that_another_request_sees_stays_with_it():
    engine = Engine(window=WINDOW, max_num_seqs=2, max_num_batched_tokens=40)
    prompt = list(range(100))
    first = engine.add(0, prompt=prompt[:40], max_tokens=30, cache_salt="")
    engine.step()
    second = engine.add(1, prompt=[*prompt[:40], *range(200, 230)], max_tokens=30, cache_salt="")
    engine.step()
    assert first.table.pages[:2] == second.table.pages[:2]

    engine.run()

    for request in (first, second):
        assert list(engine.completions[request.request_id].token_ids) == expected_tokens(request, 30, window=WINDOW)


def test_a_branch_that_is_set_back_takes_no_page_that_its_origin_gave_back():
    engine = Engine(window=WINDOW, max_num_seqs=2, num_pages=24)
    origin = engine.add(0, prompt=150, max_tokens=40)
    while origin.num_output_tokens < 30:
        engine.step()
    branch = fork(origin, 1, ADMISSION, time_limit=math.inf)
    rewind(branch, 20, ADMISSION)
    engine.scheduler.add(branch)

    engine.run()

    assert list(engine.completions[1].token_ids) == expected_tokens(
        branch, 40, list(origin.token_ids[:160]), window=WINDOW
    )


@pytest.mark.parametrize("decode_loop_steps", [1, 8])
def test_a_pool_of_one_window_is_enough_for_any_length(decode_loop_steps):
    engine = Engine(window=WINDOW, max_num_batched_tokens=32, num_pages=5, decode_loop_steps=decode_loop_steps)
    assert engine.window is not None
    assert engine.window.most == 5
    request = engine.add(0, prompt=500, max_tokens=300)

    engine.run()

    assert engine.scheduler.metrics().num_preemptions == 0
    assert list(engine.completions[0].token_ids) == expected_tokens(request, 300, window=WINDOW)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 18, 32, 33])
def test_the_most_pages_are_those_of_the_window_of_a_step_and_one_more(window):
    for num_tokens in (1, 16, 17, 40):
        most = sliding_attention_window(window, S, num_tokens).most
        # A token at c sees from c - window + 1 on, and a request may lose its last one; a step fills pages to its end.
        seen = [(c + num_tokens - 1) // S - max(c - window, 0) // S + 1 for c in range(200)]
        assert max(seen) <= most <= -(-window // S) + -(-num_tokens // S) + 1


def test_where_a_draft_model_reads_the_same_pages_none_is_given_back():
    config = uniform_decoder(**SMALL_SIZES, sliding_window=WINDOW)
    question = MemoryQuestion(model=config, config=EngineConfig(), dtype="float32")

    def planned(bytes_per_page: int):
        drafter: Any = SimpleNamespace(page_bytes=lambda _: bytes_per_page)
        return plan_window(replace(question, drafter=drafter))

    assert planned(100) is None
    assert planned(0) == plan_window(question) is not None
