"""Lines of a job's input and output."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import io
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer import json_lines
from jaxinfer.batch_job.input import numbered_lines
from jaxinfer.batch_job.records import (
    InvalidLine,
    JobRequest,
    Record,
    completion_line,
    custom_id_of,
    digest_of,
    error_line,
    parse_record,
    parse_request,
    read_requests,
)
from jaxinfer.config import SamplingParams
from jaxinfer.engine.frontend.admission import RequestOptions
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request.completion import Completion

COMPLETION = Completion(
    request_id=5,
    prompt_token_ids=(1, 2, 3),
    text="a\n中\u2028",
    token_ids=(7, 8),
    log_probs=(-0.5, float("-inf")),
    top_log_probs=({7: -0.5, 9: -1.0}, {8: float("-inf")}),
    prompt_log_probs=(None, -2.0, float("-inf")),
    prompt_top_log_probs=({}, {5: -1.0}, {6: float("-inf")}),
    finish_reason="stop",
    seed=11,
)


IDENTITY = {"model": "m", "dtype": "float32"}


def numbered(content: bytes) -> Iterator[tuple[int, bytes]]:
    return numbered_lines(json_lines.lines_of(io.BytesIO(content)))


def request(line: int = 4, **fields: Any) -> JobRequest:
    entry = parse_request(json.dumps({"custom_id": "a", "prompt": "p"} | fields).encode(), line)
    assert isinstance(entry, JobRequest)
    return entry


PARAMETERS = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_k": 2,
    "top_p": 0.25,
    "min_p": 0.125,
    "n": 2,
    "sample_index": 3,
    "best_of": 3,
    "typical_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "no_repeat_ngram_size": 2,
    "logit_bias": {"7": -1, "5": 2.5},
    "bad_words": [[6, 7], [8]],
    "allowed_token_ids": [9, 5],
    "min_tokens": 2,
    "logits_processors": {"a": 1.5},
    "json_schema": {"type": "null"},
    "regex": "[0-9]+",
    "choices": ["yes", "no"],
    "grammar": 'start: "a"',
    "seed": 2**64 - 1,
    "log_probs": 4,
    "prompt_log_probs": 3,
    "stop": ["x"],
    "stop_token_ids": [6],
    "ignore_eos": True,
    "thinking_token_budget": 4,
    "skip_special_tokens": False,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_parameter_of_a_line_reaches_the_request(name):
    parameters: dict[str, Any] = {"seed": request().sampling_params.seed} | {name: PARAMETERS[name]}
    if name == "logit_bias":
        parameters[name] = {7: -1.0, 5: 2.5}
    expected = SamplingParams(**parameters)
    assert request(**{name: PARAMETERS[name]}).sampling_params == expected


def test_no_parameter_is_left_out_of_the_test_above():
    assert set(PARAMETERS) == set(SamplingParams.__dataclass_fields__)


def test_a_prompt_is_text_or_token_ids():
    assert (request(prompt="").prompt, request(prompt=[3, 1]).prompt) == ("", (3, 1))


CHAT = {
    "tools": [{"name": "f"}],
    "tool_choice": "f",
    "parallel_tool_calls": False,
    "answer_style": "hermes",
    "documents": [{"title": "t", "text": "d"}],
    "chat_template": "{{ messages }}",
    "add_generation_prompt": False,
    "continue_final_message": True,
}
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
PLAIN = {"messages": [MESSAGES], "chat_template_kwargs": {}}
OPTIONS = {
    "priority": "interactive",
    "tenant": "a",
    "deadline": 2.5,
    "cache_salt": "b",
    "prediction": "c",
    "adapter": "d",
}


def chat(**fields: Any) -> Any:
    entry = parse_request(json.dumps({"custom_id": "a", "messages": MESSAGES} | fields).encode(), 4)
    assert isinstance(entry, JobRequest), entry
    return entry.chat


@pytest.mark.parametrize("name", CHAT)
def test_each_argument_of_a_conversation_reaches_its_rendering(name):
    assert chat(**{name: CHAT[name]}) == PLAIN | {name: CHAT[name]}
    assert chat(**{name: None}) == PLAIN


def test_all_arguments_of_a_conversation_and_variables_go_together():
    given = CHAT | {"chat_template_kwargs": {"mood": "calm"}}
    assert chat(**given) == PLAIN | CHAT | {"chat_template_kwargs": {"mood": "calm"}}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_of_a_line_reaches_the_request(name):
    assert request(**{name: OPTIONS[name]}).options == {name: OPTIONS[name]}
    assert request().options == {}


def test_a_line_has_each_argument_of_chat():
    of_chat = set(inspect.signature(LLM.chat).parameters) - {"self", "sampling_params", "show_progress", "options"}
    assert of_chat == {"messages", *CHAT, "chat_template_kwargs"}
    assert set(OPTIONS) == set(RequestOptions.__annotations__)


INVALID = {
    b'{"custom_id": "a", "prompt": "p", "continue_final_message": true}': "continue_final_message'. without messages",
    b'{"custom_id": "a", "messages": [], "chat_template_kwargs": {"chat_template": "x"}}': "give them beside messages",
    b'{"custom_id": "a", "prompt": "p", "show_progress": true}': r"\['show_progress'\] are unknown",
    b"{": "not JSON",
    b"\xff": "not JSON",
    b"[]": "is a list",
    b"[" * 100_000: "nested too deeply",
    b"7": "is a number",
    b"{}": "prompt is missing",
    b'{"custom_id": null, "prompt": "p"}': "custom_id is missing or null",
    b'{"custom_id": 1}': "prompt is missing",
    b'{"custom_id": true, "prompt": "p"}': "custom_id is a truth value",
    b'{"custom_id": "a", "prompt": "p", "tempature": 1}': r"\['tempature'\] are unknown; did you mean temperature",
    b'{"custom_id": "a", "prompt": "p", "max_new_tokens": 1}': "max_new_tokens is max_tokens here",
    b'{"custom_id": "a"}': "prompt is missing",
    b'{"custom_id": "a", "prompt": {}}': "prompt is an object",
    b'{"custom_id": "a", "prompt": [1, true]}': "something else than integers",
    b'{"custom_id": "a", "prompt": [1, 2.0]}': "something else than integers",
    b'{"custom_id": "a", "prompt": "p", "logit_bais": {}}': r"\['logit_bais'\] are unknown",
    b'{"custom_id": "a", "prompt": "p", "logit_bias": {"x": 1}}': "logit_bias has a key 'x'",
    b'{"custom_id": "a", "prompt": "p", "logit_bias": {"5": 1, "05": 2}}': "one bias per token id",
    b'{"custom_id": "a", "prompt": "p", "logit_bias": {"5": 101}}': "logit_bias=.*from -100.0 to 100.0",
    b'{"custom_id": "a", "prompt": "p", "prompt": "q"}': r"\['prompt'\] are given more than once",
    b'{"custom_id": "a", "prompt": "p", "top_p": 2}': "top_p=2 is not allowed",
    b'{"custom_id": "a", "prompt": "p", "top_p": NaN}': "top_p=nan is not allowed",
    b'{"custom_id": "a", "prompt": "p", "top_p": "1"}': "top_p='1' is not allowed",
    b'{"custom_id": "a", "prompt": "p", "max_tokens": 0}': "max_tokens=0 is not allowed",
    b'{"custom_id": "a", "prompt": "p", "stop": {"x": 1}}': "stop is an object",
    b'{"custom_id": "a", "prompt": "p", "temperature": 1' + b"0" * 400 + b"}": "temperature=10+ … 0+ .401 characters",
    b'{"custom_id": "a", "prompt": "p", "seed": 1' + b"0" * 5000 + b"}": "digits",
    b'{"custom_id": "a", "prompt": "p", "regex": "\\ud800"}': r"regex='\\ud800' is not allowed: .* half of a surrogate",
    b'{"custom_id": "a", "prompt": "p", "choices": ["\\ud800"]}': "choices=.* is not allowed: .* half of a surrogate",
    b'{"custom_id": "a", "prompt": "p", "json_schema": {"const": NaN}}': "json_schema=.*nan.* is not allowed: .*JSON",
    b'{"custom_id": "a", "prompt": "p", "json_schema": {"const": 1e999}}': "json_schema=.*inf.* is not allowed: .*JSON",
}


@pytest.mark.parametrize("raw", INVALID, ids=range(len(INVALID)))
def test_a_line_that_is_no_request_says_why(raw):
    entry = parse_request(raw, 9)
    assert isinstance(entry, InvalidLine)
    assert (entry.line, entry.custom_id) == (9, custom_id_of(raw, 9))
    assert re.search(INVALID[raw], entry.message)


def test_a_byte_order_mark_and_line_ends_of_windows_are_no_matter():
    entry = parse_request(b'\xef\xbb\xbf{"custom_id": "a", "prompt": "p"}\r\n', 1)
    assert isinstance(entry, JobRequest)


def test_blank_lines_count_but_are_no_requests():
    lines = [b"\n", b'{"custom_id": "a", "prompt": "p"}\n', b" \r\n", b'{"custom_id": "b", "prompt": "p"}']
    assert [entry.line for entry in read_requests(numbered(b"".join(lines)), {})] == [2, 4]


LINES = st.binary(max_size=8) | st.sampled_from(
    [b"{", b'"', b"\x00", b"\xef\xbb\xbf", b'{"prompt": "a"}', b"[1]", b" \r"]
)


@given(st.lists(LINES | st.lists(LINES, max_size=3).map(b"".join), max_size=8))
def test_each_line_of_any_bytes_is_a_request_or_says_why_not_or_is_blank(lines):
    content = b"\n".join(lines)

    entries = list(read_requests(numbered(content), set()))

    assert [entry.line for entry in entries] == [n for n, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    assert all(isinstance(entry, JobRequest) or entry.message for entry in entries)


@pytest.mark.parametrize("done", [{}, {1}])
def test_a_repeated_custom_id_is_refused_also_after_a_restart(done):
    lines = [b'{"custom_id": "a", "prompt": "p"}\n'] * 2
    *_, entry = read_requests(numbered(b"".join(lines)), done)
    assert isinstance(entry, InvalidLine)
    assert (entry.line, entry.custom_id) == (2, "a")


@pytest.mark.parametrize("done", [{}, {1}])
def test_a_line_without_custom_id_has_its_number(done):
    lines = b'{"prompt": "p"}\n{"prompt": "p"}\n{"custom_id": 7, "prompt": "p"}\n{"custom_id": "1", "prompt": "p"}'

    *entries, repeated = read_requests(numbered(lines), done)

    assert [entry.custom_id for entry in entries] == ["1", "2", "7"][len(done) :]
    assert "custom_id '1' is used on an earlier line" in str(repeated)


def test_the_seed_of_a_request_without_one_differs_by_line_and_custom_id():
    names = [("a", 1), ("a", 2), ("b", 1), ("2", 1), ("", 12)]
    requests = [request(line, custom_id=name) for name, line in names]
    assert len({entry.sampling_params.seed for entry in requests}) == len(names)


def test_the_seed_of_a_request_without_one_is_the_same_in_every_process():
    digest = hashlib.blake2b("4\né".encode(), digest_size=8).digest()
    for fields in ({}, {"seed": None}):
        assert request(4, custom_id="é", **fields).sampling_params.seed == int.from_bytes(digest, "big")


def test_a_result_has_everything_of_the_completion_on_one_line():
    entry = request(log_probs=2, prompt_log_probs=1)
    raw = completion_line(entry, [COMPLETION], IDENTITY)
    assert raw.count(b"\n") == 1
    assert raw.endswith(b"\n")
    record = json.loads(raw)
    assert len(record["made_by"].pop("record")) == 16
    assert record == {
        "line": 4,
        "custom_id": "a",
        "text": "a\n中\u2028",
        "token_ids": [7, 8],
        "log_probs": [-0.5, None],
        "top_log_probs": [{"7": -0.5, "9": -1.0}, {"8": None}],
        "prompt_log_probs": [None, -2.0, None],
        "prompt_top_log_probs": [{}, {"5": -1.0}, {"6": None}],
        "finish_reason": "stop",
        "num_prompt_tokens": 3,
        "seed": 11,
        "made_by": {"model": "m", "dtype": "float32", "line": entry.digest},
    }


def test_alternatives_are_left_out_when_not_asked_for():
    record = json.loads(completion_line(request(), [COMPLETION], IDENTITY))

    assert not record.keys() & {"top_log_probs", "prompt_log_probs", "prompt_top_log_probs"}
    record = json.loads(completion_line(request(prompt_log_probs=0), [COMPLETION], IDENTITY))
    assert record["prompt_log_probs"] == [None, -2.0, None]
    assert "prompt_top_log_probs" not in record


@pytest.mark.parametrize("custom_id", ["a", "", "中\u2028\n", "\ud800", None])
def test_a_record_tells_again_what_it_is_of_and_what_made_it(custom_id):
    invalid = InvalidLine(line=3, custom_id=custom_id, digest=digest_of(b"{"), message="why")
    raws = [error_line(invalid, "why \ud800", IDENTITY)]
    records = [Record(line=3, digest=invalid.digest, identity=IDENTITY, has_error=True)]
    if custom_id is not None:
        entry = request(custom_id=custom_id)
        raws.append(completion_line(entry, [COMPLETION], IDENTITY))
        records.append(Record(line=4, digest=entry.digest, identity=IDENTITY, has_error=False))
    assert [parse_record(raw) for raw in raws] == records
    assert all(raw.count(b"\n") == 1 for raw in raws)


def test_the_digest_of_a_line_is_of_its_content_without_the_space_around_it():
    lines = [b'{"a": 1}', b' {"a": 1}\r\n', b'{"a": 2}', b""]
    assert len({digest_of(line) for line in lines}) == 3


NO_RECORDS = [
    b"",
    b"\n",
    b'{"custom_id": "a", "prompt": "p"}\n',
    b'{"line": 1, "custom_id": "a", "prompt": "p"}\n',
    b'{"line": 0, "custom_id": "a", "error": "e"}\n',
    b'{"line": true, "custom_id": "a", "error": "e"}\n',
    b'{"line": 1, "custom_id": 2, "error": "e"}\n',
    b'{"line": 1, "custom_id": null, "token_ids": []}\n',
    b'{"line": 1, "custom_id": "a", "err\n',
]


@pytest.mark.parametrize("raw", NO_RECORDS)
def test_other_lines_are_not_taken_for_records(raw):
    with pytest.raises(ValueError, match="not a record"):
        parse_record(raw)


def test_the_record_of_a_request_that_ended_in_an_error_has_its_cause_and_what_was_made_before():
    failed = dataclasses.replace(COMPLETION, finish_reason="error", error="logits of token 3 are NaN")

    for entry, completions in [(request(), [failed]), (request(n=2), [COMPLETION, failed])]:
        raw = completion_line(entry, completions, IDENTITY)

        record = json.loads(raw)
        *_, sample = record.get("samples", [record])
        assert (sample["finish_reason"], sample["token_ids"]) == ("error", [7, 8])
        assert record["error"] == "logits of token 3 are NaN"
        assert parse_record(raw).has_error


def test_several_samples_are_one_record():
    other = dataclasses.replace(COMPLETION, sample_index=1, text="other")

    raw = completion_line(request(n=2), [COMPLETION, other], IDENTITY)

    record = json.loads(raw)
    assert [(s["sample_index"], s["text"]) for s in record["samples"]] == [(0, COMPLETION.text), (1, "other")]
    assert (record["seed"], record["num_prompt_tokens"]) == (11, len(COMPLETION.prompt_token_ids))
    assert parse_record(raw).line == 4


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_of_a_line_that_is_too_long_no_more_is_read_than_may_be_and_the_next_is_read(end, monkeypatch):
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(json_lines, "_SKIPPED_BYTES", 7)
    right, long = b'{"custom_id": "a", "prompt": "p"}', b'{"custom_id": "' + b"b" * 999 + b'", "prompt": "p"}'

    first, second, third = read_requests(numbered(b"\n".join([right, long, right[:-1] + b" }"]) + end), {})

    assert (first.custom_id, third.line) == ("a", 3)
    assert isinstance(second, InvalidLine)
    assert second.message == "the line has more than 100 bytes; give shorter ones"
    assert second.digest == digest_of(long[:101])


def test_a_line_of_just_so_many_bytes_is_read(monkeypatch):
    right = b'{"custom_id": "a", "prompt": "p"}'
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", len(right))

    (entry,) = read_requests(numbered(right + b"\n"), {})

    assert isinstance(entry, JobRequest)
