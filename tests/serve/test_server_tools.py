"""Reasoning and tool calls over HTTP: those of `LLM.chat`, whole and streamed, in every style."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from jaxinfer.config import SamplingParams
from tests.engine.engines import small_async_engine, small_engine
from tests.serve.servers import NAME, TEMPLATE, serving
from tests.text.answers.answer_texts import TOOL_STYLES
from tests.text.answers.checkpoints import bias_to_end, save_checkpoint_with_marks

TALK: list[Any] = [{"role": "user", "content": "a"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]


NAMED: Any = {"type": "function", "function": {"name": "stop"}}


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    return save_checkpoint_with_marks(tmp_path_factory.mktemp("marks"))


@pytest.fixture(scope="module")
def llm(marked):
    return small_engine(marked, max_model_len=256)


@pytest.fixture(scope="module")
def client(marked):
    with (
        serving(small_async_engine(marked, max_model_len=256), allows_chat_templates=True) as (_, address),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def joined(chunks: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """The content, reasoning, calls and finish reason of a stream of one sample."""
    content, reasoning, calls, reason = "", "", [], ""
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert call.id
                assert call.type == "function"
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        reason = choice.finish_reason
    return content, reasoning, [(name, arguments) for name, arguments in calls], reason


@pytest.mark.parametrize("style", TOOL_STYLES)
@pytest.mark.parametrize(
    ("choice", "own"), [("required", "required"), ({"type": "function", "function": {"name": "stop"}}, "stop")]
)
def test_calls_are_those_of_llm(llm, client, style, choice, own):
    bias = bias_to_end(llm.tokenizer, style)
    params = SamplingParams(max_tokens=200, seed=5, logit_bias=bias)
    options: Any = {"tools": TOOLS, "tool_choice": own, "parallel_tool_calls": False, "answer_style": style}
    (expected,) = llm.chat(TALK, params, chat_template=TEMPLATE, show_progress=False, **options)
    fields: Any = {
        "model": NAME,
        "messages": TALK,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 5,
        "logit_bias": {str(token_id): value for token_id, value in bias.items()},
        "extra_body": {"answer_style": style},
    }

    whole = client.chat.completions.create(**fields).choices[0]
    content, reasoning, calls, reason = joined(client.chat.completions.create(stream=True, **fields))

    expected_calls = [(call.name, call.arguments) for call in expected.tool_calls]
    assert len(expected_calls) == 1
    assert [(call.function.name, call.function.arguments) for call in whole.message.tool_calls] == expected_calls
    assert calls == expected_calls
    assert (whole.finish_reason, reason) == ("tool_calls", "tool_calls")
    assert (whole.message.content, content) == (None, "")
    assert getattr(whole.message, "reasoning_content", None) == expected.reasoning == (reasoning or None)
    jsonschema.validate(json.loads(calls[0][1]), SCHEMA if calls[0][0] == "weather" else {})


def test_reasoning_is_apart_from_content(llm, client):
    template = TEMPLATE + "<think>"
    bias = {llm.tokenizer.token_to_id("</think>"): 3.0}
    params = SamplingParams(max_tokens=20, temperature=0, logit_bias=bias)
    (expected,) = llm.chat(TALK, params, chat_template=template, answer_style="hermes", show_progress=False)
    fields: Any = {"model": NAME, "messages": TALK, "max_tokens": 20, "temperature": 0}
    fields["logit_bias"] = {str(token_id): value for token_id, value in bias.items()}
    fields["extra_body"] = {"chat_template": template, "answer_style": "hermes"}

    message = client.chat.completions.create(**fields).choices[0].message
    content, reasoning, _, _ = joined(client.chat.completions.create(stream=True, **fields))

    assert expected.reasoning
    assert (message.content, message.reasoning_content) == (expected.content, expected.reasoning)
    assert (content, reasoning) == (expected.content, expected.reasoning)


OPENED = {"hermes": "<think>", "mistral": "[THINK]", "gemma": "<|channel>thought"}
DOCUMENT: Any = {"type": "object", "properties": {"good": {"type": "boolean"}}, "required": ["good"]}
DOCUMENT = {**DOCUMENT, "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("style", OPENED)
def test_a_document_after_reasoning_is_the_content_whole_streamed_and_in_python(llm, client, style, tools):
    template = TEMPLATE + OPENED[style]
    params = SamplingParams(max_tokens=200, seed=6, json_schema=DOCUMENT, thinking_token_budget=9)
    given: Any = {"chat_template": template, "answer_style": style}
    (expected,) = llm.chat(TALK, params, tools=tools, show_progress=False, **given)
    form = {"type": "json_schema", "json_schema": {"name": "form", "strict": True, "schema": DOCUMENT}}
    fields: Any = {"model": NAME, "messages": TALK, "max_tokens": 200, "seed": 6, "response_format": form}
    fields |= {"tools": tools} if tools else {}
    fields["extra_body"] = {**given, "thinking_token_budget": 9}

    message = client.chat.completions.create(**fields).choices[0].message
    content, reasoning, calls, reason = joined(client.chat.completions.create(stream=True, **fields))

    assert expected.reasoning
    assert (message.content or "", message.reasoning_content) == (expected.content, expected.reasoning)
    assert (content, reasoning) == (expected.content, expected.reasoning)
    assert calls == [(call.name, call.arguments) for call in expected.tool_calls]
    if calls:
        jsonschema.validate(json.loads(calls[0][1]), SCHEMA if calls[0][0] == "weather" else {})
    else:
        jsonschema.validate(json.loads(content), DOCUMENT)
        assert reason == "stop"


def test_no_effort_turns_reasoning_off_if_the_template_can(client):
    template = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}b{% else %}<think>{% endif %}"
    fields: Any = {"model": NAME, "messages": TALK, "max_tokens": 4, "temperature": 0}
    fields["extra_body"] = {"chat_template": template, "answer_style": "hermes"}

    thinking = client.chat.completions.create(**fields).choices[0].message
    plain = client.chat.completions.create(reasoning_effort="none", **fields).choices[0].message

    assert (thinking.content, bool(thinking.reasoning_content)) == ("", True)
    assert plain.content
    assert getattr(plain, "reasoning_content", None) is None
    fields["extra_body"]["chat_template_kwargs"] = {"enable_thinking": True}
    with pytest.raises(openai.BadRequestError, match="reasoning_effort cannot be honoured"):
        client.chat.completions.create(reasoning_effort="none", **fields)


def test_an_answer_can_be_had_as_it_is_written(llm, client):
    fields: Any = {"model": NAME, "messages": TALK, "max_tokens": 8, "temperature": 0}
    fields["extra_body"] = {"skip_special_tokens": False, "chat_template": TEMPLATE + "<think>"}
    params = SamplingParams(max_tokens=8, temperature=0, skip_special_tokens=False)
    (expected,) = llm.chat(TALK, params, chat_template=TEMPLATE + "<think>", show_progress=False)

    message = client.chat.completions.create(**fields).choices[0].message
    content, _, _, _ = joined(client.chat.completions.create(stream=True, **fields))

    assert (message.content, content) == (expected.text, expected.text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required"}, "demands a tool call"),
        ({"tool_choice": "dance", "answer_style": "hermes"}, "tool_choice='dance'"),
        ({}, "the chat template does not show the model these 2"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}}, "not show"),
        (
            {"tools": [{"name": "f", "inputSchema": SCHEMA}], "tool_choice": "required", "answer_style": "llama3"},
            "tools[0].inputSchema",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}], "answer_style": "hermes"}, "tools[0].name"),
        ({"answer_style": "none"}, "answer_style"),
        ({"skip_special_tokens": False}, "tools need its parts"),
        ({"reasoning_effort": "low"}, "the chat template does not read it"),
        ({"tools": [], "thinking_token_budget": 4}, "thinking_token_budget=4 cannot be honoured"),
        ({"thinking_token_budget": -1, "answer_style": "hermes"}, "thinking_token_budget"),
        ({"reasoning_effort": "none"}, "the chat template does not read it"),
    ],
)
def test_a_demand_that_cannot_be_met_is_refused(client, fields, message):
    body = {"model": NAME, "messages": TALK, "tools": TOOLS, **fields}

    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/chat/completions", body=body, cast_to=object)

    assert message in refused.value.message
