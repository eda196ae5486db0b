"""Conversations with tools through the engine: what a random model has to call is valid, in every style."""

from __future__ import annotations

import json

import pytest

from jaxinfer import SamplingParams
from tests.engine.engines import require_idle, small_engine
from tests.text.answers.answer_texts import ONE_CALL, TOOL_STYLES
from tests.text.answers.checkpoints import bias_to_end, save_checkpoint_with_marks

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
ASK = [{"role": "user", "content": "a"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
SCHEMAS = {"weather": SCHEMA, "stop": {"maxProperties": 0}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = save_checkpoint_with_marks(tmp_path_factory.mktemp("marks"))
    llm = small_engine(folder, max_model_len=256)
    yield llm
    require_idle(llm)
    llm.close()


def params_for(llm, style, **more):
    return SamplingParams(max_tokens=200, logit_bias=bias_to_end(llm.tokenizer, style), **more)


def chat(llm, style, params, **options):
    given = {"tools": TOOLS, "chat_template": TEMPLATE, "answer_style": style, "show_progress": False, **options}
    return llm.chat(ASK, params, **given)


@pytest.mark.parametrize("style", TOOL_STYLES)
def test_a_demanded_call_is_made_and_valid(llm, style):
    greedy = params_for(llm, style, temperature=0)
    sampled = params_for(llm, style, n=4, seed=7)
    completions = [
        *chat(llm, style, greedy, tool_choice="required", parallel_tool_calls=False),
        *chat(llm, style, sampled, tool_choice="required", parallel_tool_calls=False),
    ]

    assert [c.finish_reason for c in completions] == ["stop"] * 5
    for completion in completions:
        (call,) = completion.tool_calls
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        assert completion.content == ""
        assert completion.error is None


@pytest.mark.parametrize("style", TOOL_STYLES)
def test_a_named_function_is_called(llm, style):
    (completion,) = chat(llm, style, params_for(llm, style, temperature=0), tool_choice="stop")

    assert {(call.name, call.arguments) for call in completion.tool_calls} == {("stop", "{}")}
    assert len(completion.tool_calls) == 1 or style not in ONE_CALL


def test_the_same_request_has_an_equal_completion_with_other_ids(llm):
    params = params_for(llm, "hermes", seed=3)
    (first,), (second,) = (chat(llm, "hermes", params, tool_choice="required") for _ in range(2))

    assert first.tool_calls == second.tool_calls
    assert first.tool_calls[0].id != second.tool_calls[0].id


def test_each_conversation_has_the_parameters_and_the_answer_of_its_own(llm):
    several = [SamplingParams(max_tokens=3, n=2, seed=1), params_for(llm, "llama3", temperature=0)]
    options = {"tools": TOOLS, "chat_template": TEMPLATE, "answer_style": "llama3", "show_progress": False}

    two_and_one = llm.chat([ASK, ASK], several, tool_choice="weather", **options)

    assert [c.finish_reason for c in two_and_one] == ["length", "length", "stop"]
    assert [len(c.tool_calls) for c in two_and_one] == [0, 0, 1]


def test_content_is_the_text_and_generate_has_none(llm):
    params = SamplingParams(max_tokens=5, temperature=0)
    (answer,) = chat(llm, None, params, tools=None)
    (plain,) = llm.generate("a", params, show_progress=False)

    assert (answer.content, answer.reasoning, answer.tool_calls) == (answer.text, None, ())
    assert (plain.content, plain.reasoning, plain.tool_calls) == (None, None, ())


def test_reasoning_is_apart_from_content(llm):
    params = SamplingParams(max_tokens=6, temperature=0)
    template = TEMPLATE + "<think>\n"

    (answer,) = chat(llm, "hermes", params, tools=None, chat_template=template)

    assert answer.reasoning == answer.text.strip()
    assert answer.content == ""


def test_a_demand_that_cannot_be_met_is_refused_before_anything_runs(llm):
    cases = [
        ({"tool_choice": "required", "answer_style": None}, "demands a tool call"),
        ({"tool_choice": "dance"}, "tool_choice='dance'"),
        ({"tools": [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}]}, "function f"),
        ({"tools": [{"name": "f", "parameters": {"type": "object", "required": 3}}]}, "function f"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            chat(llm, "hermes", SamplingParams(max_tokens=3), **options)
    with pytest.raises(ValueError, match="is not a SamplingParams"):
        chat(llm, "hermes", [3])
