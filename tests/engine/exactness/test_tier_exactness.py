"""Pages that were in other memory, or in another process, change no bit of what a request yields.

The engine has few pages and tiny chunks, so that requests give way and prefixes are evicted all the time.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.kv_cache.disk_tier import DiskTier
from jaxinfer.engine.kv_cache.page_transfers import SwapIn
from jaxinfer.engine.kv_cache.tiers import HostTier
from tests.engine.endless_engines import endless
from tests.engine.engines import (
    completions_of,
    content_of,
    drain,
    forget_prefixes,
    num_preemptions,
    run_with_arrivals,
    small_engine,
)
from tests.engine.exactness.test_endless import LONGEST
from tests.engine.exactness.test_engine_exactness import PARAMS, PROMPTS, generate_alone
from tests.engine.execution.test_runner import recorded_compilations
from tests.engine.probe import runner_of, scheduler_of

FEW_PAGES = {"max_num_seqs": 3, "max_num_batched_tokens": 5, "num_pages": 6, "max_prompt_log_probs": 3}
LIMITS = {**FEW_PAGES, "host_cache_bytes": 10**7, "disk_cache_bytes": 10**7}


@pytest.fixture(scope="module")
def alone(shared_llm):
    return [content_of(generate_alone(shared_llm, *pair)) for pair in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(scope="module")
def tiered_llm(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    return small_engine(checkpoint, **LIMITS, disk_cache_path=str(folder))


@pytest.fixture
def llm(tiered_llm, tmp_path):
    """The engine with empty tiers, in which copying always pays, whatever this machine is doing now."""
    forget_prefixes(tiered_llm)
    copy_pages(tiered_llm)
    set_tiers(tiered_llm, host_pages=100, folder=tmp_path / "disk")
    return tiered_llm


def set_tiers(llm, *, host_pages: int, folder) -> None:
    tiers = runner_of(llm)._tiers
    tiers._tiers = (HostTier(host_pages, size_of=lambda _: 1), DiskTier(folder, 10**7))
    tiers.seconds_per_copy = 0.0


def flush_disk(llm) -> None:
    runner_of(llm)._tiers._tiers[1].flush()


def copy_pages(llm) -> None:
    """Makes the copies that are due, as the next step would."""
    for copies in scheduler_of(llm).replicas[0].tables.copies.batches(8):
        runner_of(llm)._copy(copies)


def evict_all(llm) -> None:
    forget_prefixes(llm)
    copy_pages(llm)


def hits(llm) -> list[int]:
    return [tier.num_hits for tier in llm.metrics().tiers]


def run_in_turn(llm) -> list[dict]:
    """Each request after the other, all pages being evicted between them."""
    contents = []
    for pair in zip(PROMPTS, PARAMS, strict=True):
        contents.append(content_of(llm.generate(*pair, show_progress=False)[0]))
        evict_all(llm)
    return contents


def test_no_preemption_by_swap_changes_a_bit(llm, alone):
    before = num_preemptions(llm)

    completions = run_with_arrivals(llm, PROMPTS, PARAMS, mean_arrivals=9.0)

    assert num_preemptions(llm) > before
    assert hits(llm)[0] > 0
    assert [content_of(c) for c in completions] == alone


def test_no_prefix_found_on_the_host_changes_a_bit(llm, alone):
    run_in_turn(llm)

    assert run_in_turn(llm) == alone
    assert hits(llm) == [sum((len(prompt) - 1) // 16 for prompt in PROMPTS), 0]


def test_no_prefix_found_on_the_disk_changes_a_bit(llm, alone, tmp_path):
    set_tiers(llm, host_pages=1, folder=tmp_path / "other")
    run_in_turn(llm)

    assert run_in_turn(llm) == alone
    assert hits(llm)[1] > sum(hits(llm)) / 2


def test_another_engine_on_the_same_disk_goes_on_where_this_one_ended(checkpoint, llm, alone, tmp_path):
    set_tiers(llm, host_pages=1, folder=tmp_path / "shared")
    run_in_turn(llm)
    flush_disk(llm)
    other = small_engine(checkpoint, **LIMITS, disk_cache_path=str(tmp_path / "shared"))

    assert run_in_turn(other) == alone
    assert hits(other)[1] > 0


@pytest.mark.parametrize("fault", ["lost", "damaged"])
def test_no_fault_of_the_disk_changes_a_bit_or_stops_anybody(llm, alone, tmp_path, fault):
    set_tiers(llm, host_pages=1, folder=tmp_path / "faulty")
    run_in_turn(llm)
    flush_disk(llm)
    if fault == "lost":
        shutil.rmtree(tmp_path / "faulty")
    else:
        for file in (tmp_path / "faulty").iterdir():
            file.write_bytes(file.read_bytes()[:-1] + b"!")

    completions = run_with_arrivals(llm, PROMPTS, PARAMS, mean_arrivals=2.0)

    assert [content_of(c) for c in completions] == alone
    assert llm.metrics().tiers[1].num_lost > 0
    assert llm.metrics().num_owned_pages == 0


def test_nothing_is_compiled_when_pages_are_copied(llm):
    llm.warm_up()

    with recorded_compilations() as names:
        run_in_turn(llm)
        run_in_turn(llm)

    assert names == []


def test_an_endless_request_that_gave_way_goes_on_where_it_was(llm):
    params = SamplingParams(max_tokens=60, seed=3, ignore_eos=True)
    with endless(llm):
        alone = llm.generate(LONGEST, params, cache_salt="alone", show_progress=False)[0]
        request_id = llm.add(LONGEST, params, priority="batch")
        while scheduler_of(llm).find(request_id).num_output_tokens < 40:
            llm.step()
        before = num_preemptions(llm), llm.metrics().num_prefill_tokens, sum(hits(llm))

        other_id = llm.add(LONGEST[7:90], params)
        completions = completions_of(drain(llm))

        after = num_preemptions(llm), llm.metrics().num_prefill_tokens, sum(hits(llm))
        evict_all(llm)
    # All that it sees comes from the host: the sink, three full pages and the last one. Nothing is computed again.
    assert (after[0] - before[0], after[1] - before[1]) == (1, 83)
    assert after[2] - before[2] == 5
    assert content_of(completions[request_id]) == content_of(alone)
    assert len(completions[other_id].token_ids) == 60


# ---- the gate itself: a fault in one copy of many shows


def skip_the_copy(copy):
    return None


def copy_to_the_wrong_page(copy):
    return SwapIn((copy.page + 1) % 7, copy.content)


def copy_the_wrong_bytes(copy):
    return SwapIn(copy.page, np.roll(copy.content, 4))


@pytest.mark.parametrize("fault", [None, skip_the_copy, copy_to_the_wrong_page, copy_the_wrong_bytes])
def test_one_wrong_copy_shows(llm, alone, monkeypatch, fault):
    run_in_turn(llm)
    faulty = {3, 8}  # requests of several pages
    copy = runner_of(llm)._copy

    def copy_with_fault(copies):
        if fault is not None and isinstance(copies[0], SwapIn):
            copies = [changed for one in copies if (changed := fault(one)) is not None]
        if copies:
            copy(copies)

    contents = {}
    with monkeypatch.context() as patch:
        patch.setattr(runner_of(llm), "_copy", copy_with_fault)
        for i in faulty:
            contents[i] = content_of(llm.generate(PROMPTS[i], PARAMS[i], show_progress=False)[0])
            forget_prefixes(llm)

    assert all(contents[i] == alone[i] for i in faulty) == (fault is None)
    assert fault is None or all(contents[i] != alone[i] for i in faulty)
