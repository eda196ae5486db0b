"""Traces are read line by line, refused with their line, and their prompts share what they should and no more."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from jaxinfer.simulation.trace import BLOCK_LEN, TracedRequest, make_prompt, random_trace, read_trace

GOOD = {"timestamp": 1500, "input_length": 6, "output_length": 2}


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_trace_is_read_in_seconds_and_tokens(tmp_path):
    path = write(tmp_path / "trace", GOOD, "", {**GOOD, "timestamp": 2000.5, "hash_ids": [4, 0]})

    assert list(read_trace(path)) == [
        TracedRequest(arrival=1.5, input_len=6, output_len=2),
        TracedRequest(arrival=2.0005, input_len=6, output_len=2, block_ids=(4, 0)),
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"timestamp": -1}, "timestamp=-1 is not a number of milliseconds"),
        ({"timestamp": float("nan")}, "timestamp=nan"),
        ({"timestamp": "5"}, "timestamp='5'"),
        ({"timestamp": None}, "timestamp=None"),
        ({"input_length": 0}, "input_length=0 is not a number of tokens from 1 to 16,777,216"),
        ({"output_length": 1.5}, "output_length=1.5"),
        ({"output_length": True}, "output_length=True"),
        ({"hash_ids": 3}, "hash_ids=3 is not a list"),
        ({"hash_ids": [1, -1]}, r"hash_ids=\[1, -1\]"),
        ({"timestamp": 1499}, "timestamp 1499 lies before the line above"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path, fields, message):
    path = write(tmp_path / "trace", GOOD, {**GOOD, **fields})

    with pytest.raises(ValueError, match=rf"trace, line 2: {message}"):
        list(read_trace(path))


@pytest.mark.parametrize("line", ["{", "[1]", "null"])
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    with pytest.raises(ValueError, match=re.escape("trace, line 1: ")):
        list(read_trace(write(tmp_path / "trace", line)))


def prompt(index, input_len, *block_ids, vocab_size=300):
    request = TracedRequest(arrival=0, input_len=input_len, output_len=1, block_ids=block_ids)
    return make_prompt(request, index, vocab_size)


def common(a, b):
    """How many tokens two prompts begin with alike."""
    return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))


def test_prompts_have_their_length_and_tokens_of_the_vocabulary():
    for input_len in (1, 5, 511, 512, 513, 1300):
        tokens = prompt(10**9, input_len, 7, 10**12)
        assert len(tokens) == input_len
        assert all(0 <= token < 300 for token in tokens)


def test_prompts_begin_alike_in_the_blocks_they_share():
    first, second = prompt(0, 1400, 1, 2), prompt(1, 1400, 1, 3)

    assert BLOCK_LEN <= common(first, second) < BLOCK_LEN + 8


def test_what_no_block_covers_belongs_to_one_request():
    assert BLOCK_LEN <= common(prompt(0, 1400, 5), prompt(1, 1400, 5)) < BLOCK_LEN + 8
    assert common(prompt(2**40, 900), prompt(2**40 + 300**4, 900)) < 8
    assert common(prompt(3, 900), prompt(0, 900, 3)) < 8


def test_blocks_past_the_length_are_cut():
    assert common(prompt(0, 700, 1, 2), prompt(1, 900, 1, 2)) == 700


def test_an_id_that_the_vocabulary_cannot_spell_is_refused():
    with pytest.raises(ValueError, match="does not fit 7 token ids of a vocabulary of 3"):
        prompt(0, 600, 3**7, vocab_size=3)


def test_a_random_trace_has_the_rate_and_the_lengths_it_was_told():
    trace = list(random_trace(10_000, input_lens=(3, 5), output_lens=(7, 7), rate=20.0, seed=1))

    gaps = np.diff([request.arrival for request in trace])
    assert {request.input_len for request in trace} == {3, 4, 5}
    assert {request.output_len for request in trace} == {7}
    # The mean of 10,000 exponential gaps deviates by 1 % in one standard deviation; theirs is as large as the mean.
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.1)


def test_at_an_infinite_rate_all_arrive_at_once_and_a_seed_fixes_the_rest():
    options = {"input_lens": (1, 1000), "output_lens": (1, 1000), "rate": float("inf")}
    first, again, other = (list(random_trace(9, **options, seed=seed)) for seed in (1, 1, 2))

    assert first == again != other
    assert {request.arrival for request in first} == {0.0}
