"""Conversations of a job have the answers of `LLM.chat`, with tool calls and reasoning apart, in every format."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from jaxinfer.batch_job import run_batch
from jaxinfer.config import SamplingParams
from tests.engine.engines import small_engine
from tests.text.answers.checkpoints import bias_to_end, save_checkpoint_with_marks

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TALK = [{"role": "user", "content": "a"}]
TOOLS = [{"type": "function", "function": {"name": "stop"}}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return small_engine(save_checkpoint_with_marks(tmp_path_factory.mktemp("marks")), max_model_len=256)


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_the_answers_of_a_job_are_those_of_chat(llm, tmp_path, name):
    bias = bias_to_end(llm.tokenizer, "hermes")
    params = SamplingParams(max_tokens=60, seed=3, n=2, logit_bias=bias)
    options = {"tools": TOOLS, "chat_template": TEMPLATE + "<think>", "answer_style": "hermes", "tool_choice": "stop"}
    expected = llm.chat(TALK, params, show_progress=False, **options)
    fields = {"max_tokens": 60, "seed": 3, "n": 2, "logit_bias": bias}
    lines = [
        {"custom_id": "answer", "messages": TALK, **options, **fields},
        {"custom_id": "refused", "messages": TALK, **options, "tool_choice": "dance"},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))

    run_batch(llm, tmp_path / "in.jsonl", tmp_path / name, show_progress=False)

    if name.endswith(".parquet"):
        with open(tmp_path / name, "rb") as file:
            answer, refused = pq.ParquetFile(file, pre_buffer=False).read(use_threads=False).to_pylist()
    else:
        answer, refused = map(json.loads, (tmp_path / name).read_text().splitlines())
    assert "tool_choice='dance'" in refused["error"]
    for sample, completion in zip(answer["samples"], expected, strict=True):
        assert sample["content"] == completion.content
        assert sample.get("reasoning") == completion.reasoning
        assert completion.tool_calls
        calls = [{"name": call.name, "arguments": call.arguments} for call in completion.tool_calls]
        assert sample["tool_calls"] == calls


def test_a_document_after_reasoning_is_the_content_of_lines_in_both_formats(llm, tmp_path):
    schema = {"enum": ["yes", "no"]}
    options = {"chat_template": TEMPLATE + "<think>", "answer_style": "hermes"}
    params = SamplingParams(max_tokens=60, seed=3, json_schema=schema, thinking_token_budget=5)
    (expected,) = llm.chat(TALK, params, show_progress=False, **options)
    fields = {**options, "max_tokens": 60, "seed": 3, "thinking_token_budget": 5}
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    body = {"model": llm.model_names[0], "messages": TALK, "response_format": form, **fields}
    openai_line = {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = [{"custom_id": "a", "messages": TALK, "json_schema": schema, **fields}, openai_line]
    lines.append({"custom_id": "c", "prompt": "a", "thinking_token_budget": 5})
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))

    run_batch(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl", show_progress=False)

    own, body, refused = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert body["response"]["status_code"] == 200, body
    message = body["response"]["body"]["choices"][0]["message"]
    assert (own["content"], own["reasoning"]) == (expected.content, expected.reasoning)
    assert (message["content"], message["reasoning_content"]) == (expected.content, expected.reasoning)
    assert json.loads(expected.content) in schema["enum"]
    assert "thinking_token_budget=5 needs an answer to a conversation" in refused["error"]
