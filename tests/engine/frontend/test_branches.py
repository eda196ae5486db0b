"""A request that is forked or set back yields what it would have yielded, bit for bit.

What a branch yields is that of a request whose prompt is all that the branch began with: a draw depends on the seed,
the sample index, the position and the tokens before.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.kv_cache.page_transfers import CopyPage
from tests.allocations import memory_stays
from tests.engine.branching import BY_KIND, GREEDY, PROMPT, SEEDED, alone, begin, continuation, run_for
from tests.engine.engines import (
    completions_of,
    content_of,
    drain,
    poison_cache,
)
from tests.engine.probe import runner_of, scheduler_of

HAS_LLGUIDANCE = importlib.util.find_spec("llguidance") is not None


@pytest.fixture
def llm(llm):
    """The shared engine with nothing in its cache that could be found or used by mistake."""
    poison_cache(llm)
    return llm


# 19 + n tokens: within the page at hand, to the beginning of one, into a full one, and all the way back.
@pytest.mark.parametrize(("num_tokens", "num_back"), [(20, 1), (20, 6), (20, 7), (20, 8), (9, 9), (31, 15)])
@BY_KIND
def test_a_request_that_is_set_back_draws_the_same_again(llm, params, num_tokens, num_back):
    expected = alone(llm, params)
    request_id = begin(llm, params, num_tokens)

    llm.rewind(request_id, num_back)

    assert scheduler_of(llm).find(request_id).token_ids == [*PROMPT, *expected.token_ids[: num_tokens - num_back]]
    assert content_of(completions_of(drain(llm))[request_id]) == content_of(expected)


def test_a_request_that_is_set_back_with_another_seed_draws_others(llm):
    request_id = begin(llm, SEEDED, 20)

    llm.rewind(request_id, 6, seed=12)

    completion = completions_of(drain(llm))[request_id]
    expected = continuation(llm, completion, 14, dataclasses.replace(SEEDED, seed=12))
    assert completion.seed == 12
    assert completion.token_ids[14:] == expected.token_ids != alone(llm, SEEDED).token_ids[14:]
    assert completion.log_probs[14:] == expected.log_probs


def test_only_what_is_not_in_full_pages_is_computed_again(llm):
    request_id = begin(llm, SEEDED, 20)  # 38 of 39 tokens are computed
    before = llm.metrics()

    llm.rewind(request_id, 8)  # to 31 tokens, of which 30 are computed: in the middle of a full page
    llm.step()

    assert llm.metrics().num_prefill_tokens == before.num_prefill_tokens
    assert llm.metrics().num_output_tokens == before.num_output_tokens + 1
    llm.abort(request_id)
    llm.step()


@BY_KIND
def test_a_branch_and_its_origin_draw_what_they_would_alone(llm, params):
    expected = alone(llm, params)
    request_id = begin(llm, params, 20)

    branch_id = llm.fork(request_id)

    completions = completions_of(drain(llm))
    branch = completions[branch_id]
    assert content_of(completions[request_id]) == content_of(expected)
    assert branch.token_ids[:20] == expected.token_ids[:20]
    assert (branch.seed, branch.sample_index) == (11, 1)
    several = params if params is GREEDY else dataclasses.replace(params, n=2)
    sample = continuation(llm, expected, 20, several)  # the last of them
    assert (branch.token_ids[20:], branch.log_probs[20:]) == (sample.token_ids, sample.log_probs)
    assert branch.top_log_probs[20:] == sample.top_log_probs
    assert (branch.token_ids == expected.token_ids) == (params is GREEDY)


def test_a_branch_shares_full_pages_and_copies_the_last(llm):
    request_id = begin(llm, SEEDED, 20)
    before = llm.metrics().num_prefill_tokens

    branch_id = llm.fork(request_id)
    for _ in range(2):  # the first was on its way
        llm.step()

    origin, branch = (scheduler_of(llm).find(i) for i in (request_id, branch_id))
    assert origin.table.pages[:2] == branch.table.pages[:2]
    assert origin.table.pages[2] != branch.table.pages[2]
    assert (branch.num_output_tokens, llm.metrics().num_prefill_tokens) == (21, before)
    for i in (request_id, branch_id):
        llm.abort(i)
    llm.step()


def test_every_branch_is_a_sample_of_its_own(llm):
    request_id = begin(llm, SEEDED, 5)
    first = llm.fork(request_id)
    run_for(llm, first, 9)
    second = llm.fork(first)
    third = llm.fork(request_id, seed=99)

    completions = completions_of(drain(llm))

    indices = [(completions[i].seed, completions[i].sample_index) for i in (request_id, first, second, third)]
    assert indices == [(11, 0), (11, 1), (11, 2), (99, 3)]
    assert len({completions[i].token_ids for i in (request_id, first, second, third)}) == 4


def test_a_branch_that_waits_is_not_led_astray_by_its_origin(llm):
    request_id = begin(llm, dataclasses.replace(SEEDED, max_tokens=60), 20)
    fillers = [llm.add([40 + i], dataclasses.replace(GREEDY, max_tokens=60)) for i in range(3)]
    llm.step()
    tokens = scheduler_of(llm).find(request_id).token_ids[len(PROMPT) :]

    branch_id = llm.fork(request_id)
    llm.rewind(request_id, 5, seed=77)
    run_for(llm, request_id, 24)  # it has drawn others in the page that the branch wants a copy of
    llm.abort(fillers[0])

    completions = completions_of(drain(llm))
    assert completions[branch_id].token_ids[:21] == tuple(tokens)
    assert completions[request_id].token_ids[:21] != tuple(tokens)
    sample = continuation(llm, completions[branch_id], 21, dataclasses.replace(SEEDED, max_tokens=60, n=2))
    assert completions[branch_id].log_probs[21:] == sample.log_probs


def test_a_branch_of_a_request_that_ends_before_it_can_run_is_complete(llm):
    expected = alone(llm, GREEDY)
    request_id = begin(llm, GREEDY, 20)
    branch_id = llm.fork(request_id)

    llm.abort(request_id)

    assert completions_of(drain(llm))[branch_id].token_ids == expected.token_ids


TEXTS = {
    "tokens": SEEDED,
    "text": SamplingParams(stop=["never met", "zz"], ignore_eos=True, max_tokens=40, log_probs=2),
    "grammar": SamplingParams(regex="([a-c]{3}-){20}", max_tokens=40),
}


@pytest.mark.parametrize("name", [name for name in TEXTS if HAS_LLGUIDANCE or name != "grammar"])
def test_forks_and_aborts_of_the_parents_leave_memory_where_it_was(llm, name):
    request_id = begin(llm, TEXTS[name], 10)

    def replace_running(request_id):
        branch_id = llm.fork(request_id)
        run_for(llm, branch_id, 11)  # with a copy of its parent's last page
        llm.abort(request_id)
        llm.rewind(branch_id, 1)
        return branch_id

    def replace_waiting(request_id):
        branch_id = llm.fork(request_id)
        llm.abort(request_id)
        return branch_id

    for _ in range(20):
        request_id = replace_running(request_id)
    with memory_stays(max_blocks=2_000):  # JAX's own vary by some hundreds; a request with 30 tokens has 60 or more
        for _ in range(4_750):
            request_id = replace_waiting(request_id)
        for _ in range(250):
            request_id = replace_running(request_id)

    llm.abort(request_id)
    drain(llm)


# ---- what cannot be done is refused for that request alone


REFUSED = {
    "unknown": (lambda llm, i: llm.fork(i + 1000), "request 1... is unknown or has finished"),
    "of many digits": (lambda llm, i: llm.fork(10**5000), "request <int, .* is unknown or has finished"),
    "too far": (lambda llm, i: llm.rewind(i, 6), "num_tokens=6 is more than the 5 tokens of output that request"),
    "not at all": (lambda llm, i: llm.rewind(i, 0), "num_tokens=0 is not allowed"),
    "seed of a branch": (lambda llm, i: llm.fork(i, seed=-1), "seed=-1 is not allowed"),
    "seed": (lambda llm, i: llm.rewind(i, 1, seed="7"), "seed='7' is not allowed"),
}


@pytest.mark.parametrize(("do", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused_and_the_request_goes_on(llm, do, message):
    expected = alone(llm, SEEDED)
    request_id = begin(llm, SEEDED, 5)

    with pytest.raises(ValueError, match=message.replace("1...", r"\d+")):
        do(llm, request_id)

    assert content_of(completions_of(drain(llm))[request_id]) == content_of(expected)


@pytest.mark.parametrize("do", ["fork", "save", "rewind"])
def test_several_samples_are_not_taken_apart(llm, tmp_path, do):
    request_id = llm.add(PROMPT, dataclasses.replace(SEEDED, n=2))

    with pytest.raises(ValueError, match=f"request {request_id} has 2 samples.*add it with n=1"):
        getattr(llm, do)(request_id, *{"save": [tmp_path / "x"], "rewind": [1], "fork": []}[do])

    llm.abort(request_id)
    llm.step()


# ---- the gate itself: a fault in one copy shows


@pytest.mark.parametrize("fault", [None, "no copy", "another page"])
def test_one_wrong_copy_shows(llm, tmp_path, monkeypatch, fault):
    expected = alone(llm, SEEDED)
    copy = runner_of(llm)._copy

    def copy_with_fault(copies):
        if fault == "another page":
            (one,) = copies
            change = {"source": one.source + 1} if isinstance(one, CopyPage) else {"page": one.page + 1}
            copies = [dataclasses.replace(one, **change)]
        if fault != "no copy":
            copy(copies)

    request_id = begin(llm, SEEDED, 20)
    with monkeypatch.context() as patch:
        patch.setattr(runner_of(llm), "_copy", copy_with_fault)
        llm.rewind(request_id, 8)
        completion = completions_of(drain(llm))[request_id]
    poison_cache(llm)

    assert (content_of(completion) == content_of(expected)) == (fault is None)
