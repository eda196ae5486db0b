"""What is done with an endless request beside computing it: found again, set back, branched, saved, refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxinfer.config import SamplingParams
from tests.engine.endless_engines import endless
from tests.engine.engines import completions_of, content_of, drain, forget_prefixes, poison_cache
from tests.engine.exactness.test_endless import GREEDY, LONGEST, NUM_PAGES, S
from tests.engine.probe import admission_of, scheduler_of

READING: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 0.5},
    {"no_repeat_ngram_size": 2},
    {"bad_words": ((5, 6),)},
    {"logits_processors": {"turns": 1.0}},
]


@pytest.fixture
def llm(llm):
    with endless(llm):
        poison_cache(llm)
        yield llm


@pytest.fixture
def crowded(crowded_llm):
    with endless(crowded_llm):
        yield crowded_llm


def generate_anew(llm, prompt):
    forget_prefixes(llm)
    return llm.generate(prompt, GREEDY, show_progress=False)[0]


def begin(llm, num_tokens: int) -> int:
    """A request that has so many tokens of output."""
    request_id = llm.add(LONGEST, GREEDY)
    while scheduler_of(llm).find(request_id).num_output_tokens < num_tokens:
        llm.step()
    return request_id


def test_a_prefix_is_found_by_its_sinks_and_its_last_pages(llm):
    first = llm.generate(LONGEST, GREEDY, show_progress=False)[0]
    before = llm.metrics().num_prefill_tokens

    turn = [*LONGEST, *first.token_ids]
    found = llm.generate([*turn, 7], GREEDY, show_progress=False)[0]

    assert llm.metrics().num_prefill_tokens - before == len(turn) + 1 - (len(turn) - 1) // S * S
    assert content_of(found) == content_of(generate_anew(llm, [*turn, 7]))


def test_a_request_that_is_set_back_yields_the_same(crowded, llm):
    request_id = begin(crowded, 155)

    crowded.rewind(request_id, 30)

    assert content_of(completions_of(drain(crowded))[request_id]) == content_of(generate_anew(llm, LONGEST))


def test_a_branch_shares_what_its_origin_sees_and_yields_what_it_does(llm):
    request_id = begin(llm, 90)
    before = llm.metrics().num_prefill_tokens

    branch_id = llm.fork(request_id)

    completions = completions_of(drain(llm))
    assert llm.metrics().num_prefill_tokens == before
    assert completions[branch_id].token_ids == completions[request_id].token_ids
    assert completions[branch_id].log_probs == completions[request_id].log_probs


def test_a_saved_request_takes_only_what_it_sees_along(llm, looping_llm, tmp_path):
    request_id = begin(llm, 100)
    llm.save(request_id, tmp_path / "request")
    expected = content_of(completions_of(drain(llm))[request_id])
    forget_prefixes(looping_llm)
    before = looping_llm.metrics().num_prefill_tokens

    request_id = looping_llm.restore(tmp_path / "request")
    num_saved = len(scheduler_of(looping_llm).find(request_id).table.saved[0])

    assert content_of(completions_of(drain(looping_llm))[request_id]) == expected
    assert looping_llm.metrics().num_prefill_tokens == before
    assert num_saved <= NUM_PAGES - 1


def test_a_saved_request_goes_on_only_where_as_much_is_seen(llm, crowded_llm, tmp_path):
    request_id = llm.add([5, 6], GREEDY)
    llm.save(request_id, tmp_path / "request")
    llm.abort(request_id)
    drain(llm)

    with pytest.raises(ValueError, match="saved with pages seen='5, 1 of them sinks', here it is 'all'"):
        crowded_llm.restore(tmp_path / "request")


def test_samples_and_beams_are_the_same_in_few_pages(llm, looping_llm):
    params = SamplingParams(n=2, best_of=3, max_tokens=20, seed=5, ignore_eos=True)
    beams: dict[str, Any] = {"num_beams": 2, "max_tokens": 4, "ignore_eos": True}

    many, few = (
        [*x.generate(LONGEST, params, show_progress=False), *x.beam_search(LONGEST, **beams)]
        for x in (llm, looping_llm)
    )

    assert [(c.token_ids, c.log_probs) for c in few] == [(c.token_ids, c.log_probs) for c in many]
    assert len(few) == 4


@pytest.mark.parametrize("parameter", READING, ids=str)
def test_what_reads_all_tokens_is_refused_for_a_request_that_may_not_see_them(llm, parameter):
    with pytest.raises(
        ValueError, match=r"more than max_model_len=80, but penalties.*read them all; leave these out or"
    ):
        llm.add([5] * 30, SamplingParams(max_tokens=51, **parameter))

    llm.abort(llm.add([5] * 30, SamplingParams(max_tokens=50, **parameter)))
    drain(llm)


def test_a_request_that_will_not_fit_the_pool_with_its_sinks_is_refused(llm):
    too_few = dataclasses.replace(admission_of(llm).cache_config, num_pages=5)
    admission = dataclasses.replace(admission_of(llm), cache_config=too_few)

    with pytest.raises(ValueError, match=r"max_tokens=70 may need 96 slots of the cache, which has 80"):
        admission.admit(iter([0]), [5] * 11, SamplingParams(max_tokens=70))

    assert admission.admit(iter([0]), [5] * 10, SamplingParams(max_tokens=70))


def test_positions_are_counted_in_32_bits(llm):
    request = scheduler_of(llm).find(llm.add([5, 6], SamplingParams(max_tokens=2**31 - 1)))

    assert request.max_len == 2**31 - 1
    llm.abort(request.request_id)
    drain(llm)
