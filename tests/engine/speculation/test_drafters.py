"""What is guessed, by definition; that guesses are forgotten; and who is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from jaxinfer.checkpoint import Checkpoint
from jaxinfer.config import EngineConfig
from jaxinfer.engine.drafters.draft_model import DraftModel
from jaxinfer.engine.drafters.drafters import NGRAM_SIZES, NgramDrafter, SuffixDrafter, make_drafter
from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.engine.request.request import LoadedAdapter
from jaxinfer.engine.speculation.load import plan_speculation
from tests.engine.fake_device import make_request
from tests.oracles import save_random_checkpoint

IDS = itertools.count()


def request_of(tokens, num_output_tokens=0, adapter=None, **terms):
    request = make_request(next(IDS), list(tokens), 99, **terms)
    request.adapter = adapter
    request.num_prompt_tokens -= num_output_tokens
    return request


def draft(drafter, tokens, count=4):
    return drafter.draft([request_of(tokens)], [count])[0]


def by_definition(tokens, count):
    """The tokens after the last earlier occurrence of the longest run that the text ends with, one at a time."""
    for size in NGRAM_SIZES:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


TEXTS = {
    "a line again": [9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3],
    "the later of two": [1, 2, 7, 1, 2, 8, 1, 2],
    "the longer of two": [1, 2, 3, 7, 5, 2, 3, 8, 1, 2, 3],
    "a period": [4, 5, 6, 4, 5, 6, 4, 5],
    "one token over and over": [3, 3, 3],
    "nothing twice": [1, 2, 3, 4, 5],
    "one token": [1],
}


@pytest.mark.parametrize("tokens", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("drafter", [NgramDrafter, SuffixDrafter])
def test_what_followed_the_last_tokens_before_is_guessed(tokens, drafter):
    assert draft(drafter(), tokens) == by_definition(tokens, 4)


def test_a_text_may_grow_between_drafts():
    drafter, request = NgramDrafter(), request_of([1, 2, 3])
    for token in [1, 2, 9, 1, 2, 3, 1, 2, 3, 9]:
        request.token_ids.append(token)

        assert drafter.draft([request], [3]) == [by_definition(request.token_ids, 3)]


def test_no_more_is_guessed_than_was_asked_for():
    requests = [request_of([1, 2, 3, 4, 1, 2]), request_of([5, 6, 7, 5, 6])]

    assert NgramDrafter().draft(requests, [1, 0]) == [[3], []]


def test_the_output_of_a_finished_request_is_guessed_from():
    drafter = SuffixDrafter()
    drafter.forget(request_of([1, 2, 50, 51, 52, 53], num_output_tokens=4))

    assert draft(drafter, [8, 9, 50, 51]) == [52, 53, 52, 53]
    assert draft(drafter, [8, 9, 1, 2]) == [50, 51, 52, 53]  # its first tokens, after the end of its prompt
    assert draft(NgramDrafter(), [8, 9, 50, 51]) == []


@pytest.mark.parametrize("drafter", [NgramDrafter, SuffixDrafter])
def test_the_prediction_of_a_request_is_guessed_from_by_that_request_alone(drafter):
    drafter, request = drafter(), request_of([1, 2])
    request.prediction = [50, 51, 52, 53]

    assert drafter.draft([request], [3]) == [[50, 51, 52]]  # its first tokens, after the end of the prompt
    request.token_ids += [9, 51, 52]
    assert drafter.draft([request, request_of([51, 52])], [1, 1]) == [[53], []]


def test_nothing_is_guessed_from_outputs_of_another_salt():
    drafter = SuffixDrafter()
    drafter.forget(request_of([50, 51, 52], num_output_tokens=3, cache_salt="mine"))

    guesses = [drafter.draft([request_of([50, 51], cache_salt=salt)], [1])[0] for salt in ("mine", "yours", None)]

    assert guesses == [[52], [], []]


def test_the_oldest_outputs_make_room_for_new_ones():
    drafter = SuffixDrafter(max_tokens=8)
    for first in (10, 20, 30):
        drafter.forget(request_of([first, first + 1, first + 2, first + 3], num_output_tokens=4, cache_salt=str(first)))

    guesses = [drafter.draft([request_of([f, f + 1], cache_salt=str(f))], [1])[0] for f in (10, 20, 30)]

    assert guesses == [[], [22], [32]]
    assert set(drafter._indices) == {("20", ""), ("30", "")}


def test_outputs_of_one_adapter_are_no_drafts_for_another():
    drafter = SuffixDrafter()
    adapters = [LoadedAdapter("a", 1, "x"), LoadedAdapter("b", 2, "y"), LoadedAdapter("renamed", 3, "x")]
    drafter.forget(request_of([50, 51, 52], num_output_tokens=3, adapter=adapters[0]))

    guesses = [drafter.draft([request_of([50, 51], adapter=adapter)], [1])[0] for adapter in (*adapters, None)]

    assert guesses == [[52], [], [52], []]


def test_outputs_too_short_to_guess_from_are_forgotten_in_their_turn():
    drafter = SuffixDrafter(max_tokens=3)
    for _ in range(9):
        drafter.forget(request_of([1, 2], num_output_tokens=1))

    assert drafter._num_tokens == 2


def test_a_draft_model_may_lie_in_a_folder_whose_name_has_no_slash(tmp_path, monkeypatch):
    save_random_checkpoint(tmp_path / "mydraft", "llama", num_hidden_layers=1)
    monkeypatch.chdir(tmp_path)

    planned = plan_speculation("mydraft", EngineConfig(), "float32", target=Checkpoint(BUNDLED_MODEL))

    assert planned is not None
    assert isinstance(planned.proposer.drafter, DraftModel)


@pytest.mark.parametrize("speculation", ["eagle", 3, object()], ids=["name", "number", "object"])
def test_a_drafter_that_does_not_exist_is_refused(speculation: Any):
    with pytest.raises(ValueError, match=r"speculation=.* is not allowed: give one of 'ngram', 'suffix', 'mtp'"):
        make_drafter(speculation)
