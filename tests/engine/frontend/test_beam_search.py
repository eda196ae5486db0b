"""Beam search finds what that of transformers finds."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import pytest
import torch

from jaxinfer.engine.frontend.beam_search import CutShortError, search
from jaxinfer.engine.request.completion import Completion
from tests.engine.engines import EOS, random_prompts
from tests.oracles import load_reference

PROMPTS = random_prompts(4, max_len=30, seed=8)
COMPLETION = Completion(
    request_id=0,
    prompt_token_ids=(5,),
    text="",
    token_ids=(),
    log_probs=(),
    top_log_probs=(),
    finish_reason="deadline",
    seed=0,
)


@contextlib.contextmanager
def slow_steps(llm, seconds):
    llm.on_step = lambda *_: time.sleep(seconds)
    yield
    llm.on_step = None


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("eos", [None, EOS], ids=["to full length", "with an end token"])
def test_the_beams_are_those_of_transformers(llm, checkpoint, length_penalty, eos):
    reference: Any = load_reference(checkpoint)
    reference.generation_config.eos_token_id = eos
    for prompt in PROMPTS:
        with torch.no_grad():
            expected = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                max_new_tokens=8,
                num_beams=2,
                num_return_sequences=2,
                length_penalty=length_penalty,
                early_stopping=False,
                do_sample=False,
                pad_token_id=95,
                return_dict_in_generate=True,
                output_scores=True,
            )

        beams = llm.beam_search(
            prompt, num_beams=2, max_tokens=8, length_penalty=length_penalty, ignore_eos=eos is None
        )

        for beam, sequence, score in zip(beams, expected.sequences, expected.sequences_scores, strict=True):
            length = len(beam.token_ids)
            assert list(beam.token_ids) == sequence[len(prompt) : len(prompt) + length].tolist()
            # float32 logits in another order of summation, 8 of them added up.
            np.testing.assert_allclose(sum(beam.log_probs) / length**length_penalty, score, atol=1e-4, rtol=1e-5)


def test_special_tokens_are_shown_in_beams_that_do_not_skip_them(llm):
    texts = []
    for skips in (True, False):
        beams = llm.beam_search([9], num_beams=2, max_tokens=40, length_penalty=-9.0, skip_special_tokens=skips)
        assert [beam.text for beam in beams] == [
            llm.tokenizer.decode(beam.token_ids, skip_special_tokens=skips) for beam in beams
        ]
        texts.append([beam.text for beam in beams if EOS in beam.token_ids])

    skipped, whole = texts
    assert whole == [f"{text}<end>" for text in skipped] != []


def likely(table):
    """Gives the next tokens' log-probabilities from those of whole prefixes."""
    return lambda beams: [table[beam.token_ids] for beam in beams]


def test_a_beam_that_is_less_probable_at_first_can_win():
    table = {(): {1: -0.5, 2: -0.9}, (1,): {3: -3.0, 4: -3.1}, (2,): {5: -0.1, 6: -4.0}}

    best = search(likely(table), num_beams=2, max_tokens=2, stop_token_ids=(), length_penalty=1.0)

    assert [beam.token_ids for beam in best] == [(2, 5), (1, 3)]


def test_an_end_token_beyond_the_first_beams_ends_nothing():
    table = {(): {1: -0.1, 0: -5.0, 2: -6.0}, (1,): {3: -0.1, 0: -0.2, 4: -0.3}}

    best = search(likely(table), num_beams=1, max_tokens=2, stop_token_ids=(0,), length_penalty=1.0)

    assert [beam.token_ids for beam in best] == [(1, 3)]


def test_a_search_that_is_cut_short_ranks_the_beams_that_it_has():
    table = {(): {1: -0.5, 0: -0.9, 2: -1.0}}

    def extend(beams):
        if beams[0].token_ids:
            raise CutShortError(COMPLETION)
        return likely(table)(beams)

    best = search(extend, num_beams=2, max_tokens=9, stop_token_ids=(0,), length_penalty=1.0)

    assert [beam.token_ids for beam in best] == [(1,), (0,)]


def test_the_deadline_is_that_of_the_whole_search(llm):
    (beam,) = llm.beam_search("def", num_beams=2, max_tokens=64, deadline=1e-6)

    assert (beam.token_ids, beam.finish_reason, beam.error) == ((), "deadline", None)
    # Time enough for every step, and not for all of them.
    began = time.monotonic()
    with slow_steps(llm, 0.05):
        beams = llm.beam_search("def", num_beams=2, max_tokens=64, deadline=0.5, ignore_eos=True)
    assert time.monotonic() - began < 2
    assert [beam.finish_reason for beam in beams] == ["deadline"] * 2
    assert 0 < len(beams[0].token_ids) < 64


REFUSED = {
    "no beams": ({"num_beams": 0}, "num_beams=0 is not allowed"),
    "more beams than samples": ({"num_beams": 129}, "num_beams=129 is more than max_samples=128.*raise"),
    "too many beams": ({"num_beams": 3}, "num_beams=3 needs log_probs=6, which is more than max_log_probs=4.*raise"),
    "penalty": ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty=nan is not allowed"),
    "tokens": ({"num_beams": 2, "max_tokens": 0}, "max_tokens=0 is not allowed"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_honoured_is_refused(llm, fields, message):
    with pytest.raises(ValueError, match=message):
        llm.beam_search([5], **fields)

    assert not llm.has_unfinished
