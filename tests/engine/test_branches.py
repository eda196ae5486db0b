"""A request that is forked, set back, or saved and restored yields what it would have yielded, bit for bit.

What a branch yields is that of a request whose prompt is all that the branch began with: a draw depends on the seed,
the sample index, the position and the tokens before.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.page_copies import CopyWithin
from tests.engine.engines import (
    ScriptedDrafter,
    completions_of,
    content_of,
    drafts_from,
    drain,
    forget_prefixes,
    poison_cache,
)

PROMPT = [7, 30, 31, 45, 9, 60, 61, 62, 63, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59]  # 19 tokens, pages of 16
SEEDED = SamplingParams(max_tokens=40, seed=11, temperature=0.9, log_probs=2, ignore_eos=True)
GREEDY = dataclasses.replace(SEEDED, temperature=0)
KINDS = {"greedy": GREEDY, "seeded": SEEDED}
BY_KIND = pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)


@pytest.fixture
def llm(llm):
    """The shared engine with nothing in its cache that could be found or used by mistake."""
    poison_cache(llm)
    return llm


def run_for(llm, request_id: int, num_tokens: int) -> None:
    """Steps until the request has so many tokens of output."""
    while llm._scheduler.find(request_id).num_output_tokens < num_tokens:
        llm.step()


def begin(llm, params: SamplingParams, num_tokens: int) -> int:
    request_id = llm.add(PROMPT, params)
    run_for(llm, request_id, num_tokens)
    return request_id


def alone(llm, params: SamplingParams, prompt=PROMPT):
    forget_prefixes(llm)
    completions = llm.generate(prompt, params, show_progress=False, cache_salt="alone")
    forget_prefixes(llm)
    return completions[-1]


def continuation(llm, completion, num_kept: int, params: SamplingParams):
    """What a request draws after the first tokens of a completion, as a prompt of its own."""
    prompt = [*PROMPT, *completion.token_ids[:num_kept]]
    return alone(llm, dataclasses.replace(params, max_tokens=params.max_tokens - num_kept), prompt)


# 19 + n tokens: within the page at hand, to the beginning of one, into a full one, and all the way back.
@pytest.mark.parametrize(("num_tokens", "num_back"), [(20, 1), (20, 6), (20, 7), (20, 8), (9, 9), (31, 15)])
@BY_KIND
def test_a_request_that_is_set_back_draws_the_same_again(llm, params, num_tokens, num_back):
    expected = alone(llm, params)
    request_id = begin(llm, params, num_tokens)

    llm.rewind(request_id, num_back)

    assert llm._scheduler.find(request_id).token_ids == [*PROMPT, *expected.token_ids[: num_tokens - num_back]]
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

    origin, branch = (llm._scheduler.find(i) for i in (request_id, branch_id))
    assert origin.pages[:2] == branch.pages[:2]
    assert origin.pages[2] != branch.pages[2]
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
    tokens = llm._scheduler.find(request_id).token_ids[len(PROMPT) :]

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


@BY_KIND
def test_a_request_from_a_file_goes_on_where_it_was(llm, params, tmp_path):
    expected = alone(llm, params)
    request_id = begin(llm, params, 20)
    llm.save(request_id, tmp_path / "request")
    assert content_of(completions_of(drain(llm))[request_id]) == content_of(expected), "saving changes nothing"
    poison_cache(llm)
    before = llm.metrics()

    restored_id = llm.restore(tmp_path / "request")

    assert content_of(completions_of(drain(llm))[restored_id]) == content_of(expected)
    after = llm.metrics()
    assert (after.num_prefill_tokens, after.num_output_tokens) == (
        before.num_prefill_tokens,
        before.num_output_tokens + 20,
    )


@BY_KIND
def test_another_engine_goes_on_with_the_request_from_a_file(llm, crowded_llm, params, tmp_path):
    expected = alone(llm, params)
    request_id = begin(llm, params, 20)
    llm.save(request_id, tmp_path / "request")
    llm.abort(request_id)
    llm.step()

    with drafts_from(crowded_llm, ScriptedDrafter(0.7, [expected])):
        restored = crowded_llm.restore(tmp_path / "request")
        run_for(crowded_llm, restored, 25)
        crowded_llm.rewind(restored, 8)
        branch = crowded_llm.fork(restored)
        completions = completions_of(drain(crowded_llm))

    assert content_of(completions[restored]) == content_of(expected)
    assert completions[branch].token_ids[:17] == expected.token_ids[:17]
    assert crowded_llm.metrics().num_owned_pages == 0


def test_a_request_that_was_not_computed_yet_is_saved_as_well(llm, tmp_path):
    request_id = llm.add(PROMPT, SEEDED)
    llm.save(request_id, tmp_path / "request")
    llm.abort(request_id)

    restored_id = llm.restore(tmp_path / "request")

    assert content_of(completions_of(drain(llm))[restored_id]) == content_of(alone(llm, SEEDED))


def test_a_restored_request_is_saved_forked_and_set_back_before_it_runs(llm, tmp_path):
    expected = alone(llm, SEEDED)
    request_id = begin(llm, SEEDED, 20)
    llm.save(request_id, tmp_path / "first")
    llm.abort(request_id)
    poison_cache(llm)

    first = llm.restore(tmp_path / "first")
    llm.save(first, tmp_path / "second")
    second = llm.restore(tmp_path / "second")
    llm.rewind(second, 7)
    branch = llm.fork(first)

    completions = completions_of(drain(llm))
    assert content_of(completions[first]) == content_of(completions[second]) == content_of(expected)
    assert completions[branch].token_ids[:20] == expected.token_ids[:20]


TEXTS = {
    "stop": {"stop": ["never met", "zz"], "max_tokens": 30},
    "regex": {"regex": "([a-c]{3}-){4}[0-9]", "max_tokens": 30},
    "json_schema": {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 9}, "max_tokens": 30},
}
HAS_LLGUIDANCE = importlib.util.find_spec("llguidance") is not None
TESTED = [name for name in TEXTS if HAS_LLGUIDANCE or name == "stop"]


@pytest.mark.parametrize("name", TESTED)
def test_text_and_structure_go_on_from_where_they_were(llm, tmp_path, name):
    params = SamplingParams(**TEXTS[name], seed=3)
    expected = alone(llm, params)
    request_id = begin(llm, params, 7)
    llm.save(request_id, tmp_path / "request")
    branch_id = llm.fork(request_id, seed=3)
    llm.rewind(request_id, 4)
    restored_id = llm.restore(tmp_path / "request")

    completions = completions_of(drain(llm))

    assert content_of(completions[request_id]) == content_of(completions[restored_id]) == content_of(expected)
    branch = completions[branch_id]
    assert branch.text == llm.tokenizer.decode(branch.token_ids)
    assert name == "stop" or re.match(r"([a-c]{3}-)+|\[\s*-?\d", branch.text)


def test_terms_and_parameters_survive_a_file(llm, tmp_path):
    params = SamplingParams(
        max_tokens=9, logit_bias={5: 1.5}, bad_words=[[1, 2]], stop=["q"], logits_processors={"turns": 2.0}, top_p=0.9
    )
    request_id = llm.add(PROMPT, params, priority="batch", tenant="t", deadline=1000.0, cache_salt="s")
    llm.save(request_id, tmp_path / "request")

    restored = llm._scheduler.find(llm.restore(tmp_path / "request"))

    request = llm._scheduler.find(request_id)
    assert restored.sampling == params
    for name in ("seed", "sample_index", "max_tokens", "stop_token_ids", "priority", "tenant", "cache_salt"):
        assert getattr(restored, name) == getattr(request, name)
    assert 900 < restored.time_limit <= 1000
    assert restored.keys.key(0, PROMPT) == request.keys.key(0, PROMPT)
    for i in (request_id, restored.request_id):
        llm.abort(i)
    llm.step()


# ---- what cannot be done is refused for that request alone


REFUSED = {
    "unknown": (lambda llm, i: llm.fork(i + 1000), "request 1... is unknown or has finished"),
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


def flip_a_bit(file, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(bytes(content))


DAMAGES = {
    "digest": lambda file: flip_a_bit(file, 0),
    "head": lambda file: flip_a_bit(file, 50),
    "page": lambda file: flip_a_bit(file, -1),
    "cut off": lambda file: os.truncate(file, 1000),
    "empty": lambda file: os.truncate(file, 0),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused_and_everything_else_goes_on(llm, tmp_path, damage):
    expected = alone(llm, SEEDED)
    request_id = begin(llm, SEEDED, 5)
    llm.save(request_id, tmp_path / "request")
    damage(tmp_path / "request")

    with pytest.raises(ValueError, match="request is cut off or changed"):
        llm.restore(tmp_path / "request")

    assert list(completions_of(drain(llm))) == [request_id]
    assert content_of(alone(llm, SEEDED)) == content_of(expected)


@pytest.mark.parametrize("aspect", ["weights", "model", "dtype", "page_size", "platform", "versions"])
def test_a_request_of_another_engine_is_refused_by_what_is_different(llm, tmp_path, monkeypatch, aspect):
    request_id = begin(llm, SEEDED, 5)
    llm.save(request_id, tmp_path / "request")
    llm.abort(request_id)
    llm.step()
    monkeypatch.setitem(llm._branches._identity, aspect, "other")

    with pytest.raises(ValueError, match=f"was saved with {aspect}=.*here it is 'other'.*restore it with an LLM like"):
        llm.restore(tmp_path / "request")


def test_a_file_that_cannot_be_written_leaves_the_one_before(llm, tmp_path):
    request_id = begin(llm, SEEDED, 5)
    with pytest.raises(FileNotFoundError):
        llm.save(request_id, tmp_path / "no folder" / "request")

    assert completions_of(drain(llm))[request_id].finish_reason == "length"


# ---- the gate itself: a fault in one copy shows


@pytest.mark.parametrize("fault", [None, "no copy", "another page"])
def test_one_wrong_copy_shows(llm, tmp_path, monkeypatch, fault):
    expected = alone(llm, SEEDED)
    copy = llm._runner._copy

    def copy_with_fault(copies):
        if fault == "another page":
            (one,) = copies
            change = {"source": one.source + 1} if isinstance(one, CopyWithin) else {"page": one.page + 1}
            copies = [dataclasses.replace(one, **change)]
        if fault != "no copy":
            copy(copies)

    request_id = begin(llm, SEEDED, 20)
    with monkeypatch.context() as patch:
        patch.setattr(llm._runner, "_copy", copy_with_fault)
        llm.rewind(request_id, 8)
        completion = completions_of(drain(llm))[request_id]
    poison_cache(llm)

    assert (content_of(completion) == content_of(expected)) == (fault is None)
