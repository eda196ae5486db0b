"""Lines in OpenAI's batch file format: the answers of the server, resumed and merged like any others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.batch_job import merge_shards, run_batch
from jaxinfer.batch_job.records import InvalidLine, JobRequest, parse_request
from jaxinfer.config import SamplingParams
from jaxinfer.openai import answers
from tests.engine.engines import save_small_checkpoint, small_engine

NAME = "named"
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "chat_template": "{{ messages[0].content }}"}
TEXT = {"model": NAME, "prompt": "hello", "temperature": 0, "max_tokens": 5}


def line(custom_id: str, url: str, body: Any, **more: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": f"/v1/{url}", "body": body, **more})


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return small_engine(save_small_checkpoint(tmp_path_factory.mktemp("small") / NAME))


def records_of(path: Any) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_results_are_those_of_llm_in_openais_form(llm, tmp_path):
    lines = [
        line("text", "completions", {**TEXT, "logprobs": 2}),
        line("ids", "completions", {**TEXT, "prompt": [5, 6], "temperature": 1.0, "seed": 4, "n": 2}),
        line("chat", "chat/completions", {**CHAT, "temperature": 0, "max_tokens": 4, "logprobs": True}),
        line("wrong", "completions", {**TEXT, "temperatur": 1}),
        json.dumps({"custom_id": "ours", "prompt": "hello", "temperature": 0, "max_tokens": 5}),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    greedy = SamplingParams(temperature=0, max_tokens=5)
    (text,) = llm.generate("hello", greedy, show_progress=False)
    samples = llm.generate([5, 6], SamplingParams(max_tokens=5, seed=4, n=2), show_progress=False)

    summary = run_batch(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl", show_progress=False)

    assert (summary.num_completed, summary.num_errors) == (4, 1)
    by_text, by_ids, by_chat, wrong, ours = records_of(tmp_path / "out.jsonl")
    for record in (by_text, by_ids):
        assert (record["response"]["status_code"], record["error"]) == (200, None)
        body = {**record["response"]["body"], "system_fingerprint": ""}
        answers.CompletionAnswer.model_validate(body, strict=True)
    assert by_text["response"]["body"]["choices"][0]["text"] == text.text == ours["text"]
    assert by_text["response"]["body"]["choices"][0]["logprobs"]["token_logprobs"] == list(text.log_probs)
    assert [choice["text"] for choice in by_ids["response"]["body"]["choices"]] == [c.text for c in samples]
    answers.ChatAnswer.model_validate({**by_chat["response"]["body"], "system_fingerprint": ""}, strict=True)
    assert (wrong["custom_id"], wrong["response"]["status_code"], wrong["error"]) == ("wrong", 400, None)
    assert "temperatur" in wrong["response"]["body"]["error"]["message"]


def test_failed_lines_have_a_file_of_their_own_with_the_servers_answers(llm, tmp_path):
    long = [5] * 200
    lines = [
        line("good", "completions", TEXT),
        line("wrong", "completions", {**TEXT, "temperatur": 1}),
        line("long", "completions", {**TEXT, "prompt": long}),
        line("many", "completions", {**TEXT, "logprobs": 99}),
        line("good too", "completions", TEXT),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    paths = (tmp_path / "in.jsonl", tmp_path / "out.jsonl")

    for _ in range(2):  # the second run finds all done
        summary = run_batch(llm, *paths, errors_path=tmp_path / "errors.jsonl", show_progress=False)

    assert (summary.num_done_before, summary.num_errors_before, summary.num_completed) == (5, 3, 0)
    assert [record["custom_id"] for record in records_of(tmp_path / "out.jsonl")] == ["good", "good too"]
    failed = records_of(tmp_path / "errors.jsonl")
    assert [record["custom_id"] for record in failed] == ["wrong", "long", "many"]
    assert {record["response"]["status_code"] for record in failed} == {400}
    errors = [record["response"]["body"]["error"] for record in failed]
    assert [error["code"] for error in errors] == [None, "context_length_exceeded", None]
    assert {error["type"] for error in errors} == {"invalid_request_error"}


def test_a_job_in_shards_yields_the_bytes_of_one_host(llm, tmp_path):
    # They share a page, so that some hosts find more in the cache than others.
    bodies = [{**TEXT, "prompt": [*range(5, 30), 30 + i], "temperature": 1.0} for i in range(12)]
    (tmp_path / "in.jsonl").write_text("\n".join(line(str(i), "completions", body) for i, body in enumerate(bodies)))
    run_batch(llm, tmp_path / "in.jsonl", tmp_path / "whole.jsonl", show_progress=False)

    for index in (1, 2, 3):
        run_batch(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl", shard=(index, 3), show_progress=False)
    merge_shards(tmp_path / "in.jsonl", tmp_path / "out.jsonl")

    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    again = run_batch(llm, tmp_path / "in.jsonl", tmp_path / "whole.jsonl", show_progress=False)
    assert (again.num_done_before, again.num_completed) == (12, 0)


def test_a_table_has_no_columns_for_these_results(llm, tmp_path):
    (tmp_path / "in.jsonl").write_text(line("a", "completions", TEXT))

    with pytest.raises(ValueError, match="name the output .jsonl"):
        run_batch(llm, tmp_path / "in.jsonl", tmp_path / "out.parquet", show_progress=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (line("a", "embeddings", {"model": "m", "input": "a"}), "is no request of a job"),
        (line("a", "completions", TEXT, method="GET"), "is no request of a job"),
        (line("a", "completions", TEXT, priority="batch"), "['priority'] are unknown"),
        (line("a", "completions", {**TEXT, "stream": True}), "has no streams"),
        (line("a", "completions", {**TEXT, "prompt": ["a", "b"]}), "several prompts"),
        (line("a", "completions", {**TEXT, "temperature": -1}), "temperature=-1.0 is not allowed"),
        (line("a", "completions", None), "body: "),
        (line("a", "chat/completions", {"model": "m"}), "body: messages: "),
    ],
)
def test_a_wrong_line_is_refused_with_the_reason(text, message):
    entry = parse_request(text.encode(), 1)

    assert isinstance(entry, InvalidLine)
    assert entry.is_openai
    assert message in entry.message


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["chat/completions", "completions", "x"]), st.dictionaries(st.sampled_from([*CHAT, *TEXT]), ANY))
def test_any_body_is_a_request_or_is_refused(url, body):
    entry = parse_request(line("a", url, {**TEXT, **CHAT, **body}).encode(), 1)

    assert isinstance(entry, JobRequest | InvalidLine)
