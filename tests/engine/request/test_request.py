"""What a request counts, when it ends, and what of it is handed out."""

from __future__ import annotations

from typing import ClassVar

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.request.completion import Delta
from jaxinfer.engine.request.request import Request


class Letters:
    """Spells token i as the i-th letter, one letter late, and ends before the letter `stop`."""

    texts: ClassVar[dict[int, str]] = {}  # every token has to be pushed

    def __init__(self, stop: str = ""):
        self.stop, self.held, self.is_stopped = stop, "", False

    def push(self, token_id) -> str:
        letters = self.held + chr(ord("a") + token_id)
        if self.stop and self.stop in letters:
            self.is_stopped, self.held = True, ""
            return letters[: letters.index(self.stop)]
        self.held = letters[-1:]
        return letters[:-1]

    def flush(self) -> str:
        return self.held


def make_request(*, max_tokens=10, stop_token_ids=(), detokenizer=None, prompt=(5, 6, 7), log_probs=0) -> Request:
    return Request(
        42,
        prompt,
        SamplingParams(log_probs=log_probs),
        seed=11,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        detokenizer=detokenizer,
    )


def append_all(request: Request, token_ids) -> list[Delta]:
    """Appends until the request ends; the log-probability of token i is -i."""
    deltas = []
    for token_id in token_ids:
        deltas.append(request.append(token_id, -float(token_id), {token_id: -float(token_id)}))
        if request.finish_reason is not None:
            break
    return deltas


def finished(deltas: list[Delta]):
    assert all(delta.completion is None for delta in deltas[:-1])
    assert deltas[-1].completion is not None
    return deltas[-1].completion


def test_a_new_request_has_its_whole_prompt_to_compute():
    request = make_request()

    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_uncomputed) == (3, 0, 3)


def test_a_drawn_token_is_one_more_to_compute():
    request = make_request()
    request.num_computed = 3

    append_all(request, [1])

    assert (request.num_output_tokens, request.num_uncomputed, request.token_ids) == (1, 1, [5, 6, 7, 1])


def test_the_prompt_given_is_not_changed():
    prompt = [5, 6, 7]

    append_all(make_request(prompt=prompt), [1])

    assert prompt == [5, 6, 7]


def test_a_stop_token_ends_the_request_and_is_its_last_token():
    completion = finished(append_all(make_request(stop_token_ids={3, 4}), [1, 2, 4, 1]))

    assert (completion.finish_reason, completion.token_ids) == ("stop", (1, 2, 4))


def test_max_tokens_end_the_request():
    completion = finished(append_all(make_request(max_tokens=3), [1, 1, 1, 1]))

    assert (completion.finish_reason, completion.token_ids) == ("length", (1, 1, 1))


def test_a_stop_token_at_max_tokens_is_a_stop():
    completion = finished(append_all(make_request(max_tokens=2, stop_token_ids={4}), [1, 4]))

    assert completion.finish_reason == "stop"


def test_a_met_stop_string_ends_the_request_and_its_text():
    completion = finished(append_all(make_request(detokenizer=Letters("d")), [0, 1, 2, 3, 4]))

    assert (completion.finish_reason, completion.text, completion.token_ids) == ("stop", "abc", (0, 1, 2, 3))


def test_text_held_back_comes_with_the_last_delta():
    deltas = append_all(make_request(max_tokens=3, detokenizer=Letters()), [0, 1, 2])

    assert [delta.text for delta in deltas] == ["", "a", "bc"]


def test_an_aborted_request_keeps_what_it_has():
    request = make_request(detokenizer=Letters())
    append_all(request, [0, 1])

    completion = request.finish("abort").completion

    assert completion is not None
    assert (completion.finish_reason, completion.text, completion.token_ids) == ("abort", "ab", (0, 1))


def test_a_request_aborted_before_its_first_token_has_an_empty_completion():
    completion = make_request().finish("abort").completion

    assert completion is not None
    assert (completion.text, completion.token_ids, completion.log_probs) == ("", (), ())


@pytest.mark.parametrize("detokenizer", [None, Letters(), Letters("e")])
@pytest.mark.parametrize("end", [{"max_tokens": 4}, {"stop_token_ids": {4}}])
def test_the_deltas_joined_are_the_completion(detokenizer, end):
    deltas = append_all(make_request(detokenizer=detokenizer, **end), [0, 1, 2, 3, 4])

    completion = finished(deltas)

    assert completion.text == "".join(delta.text for delta in deltas)
    assert completion.token_ids == sum((delta.token_ids for delta in deltas), ())
    assert completion.log_probs == sum((delta.log_probs for delta in deltas), ())


def test_a_completion_says_what_was_asked_and_how_to_repeat_it():
    completion = finished(append_all(make_request(max_tokens=1), [1]))

    assert (completion.request_id, completion.prompt_token_ids, completion.seed) == (42, (5, 6, 7), 11)


@pytest.mark.parametrize(("log_probs", "expected"), [(0, ()), (1, ({1: -1.0}, {2: -2.0}))])
def test_alternatives_are_reported_per_token_if_asked_for(log_probs, expected):
    completion = finished(append_all(make_request(max_tokens=2, log_probs=log_probs), [1, 2]))

    assert completion.top_log_probs == expected
