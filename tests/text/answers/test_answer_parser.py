"""What an answer is split into: by writers of the formats, by the parser of `transformers`, and for broken text."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.text.answers.answers import AnswerParser, parse
from jaxinfer.text.answers.parts import Answer, ArgumentsPiece, CallBegin, ToolCall, answer_of
from jaxinfer.text.answers.style import Opening
from jaxinfer.text.answers.styles.table import STYLES
from jaxinfer.text.answers.tools import NO_TOOLS, read_tools
from tests.text.answers.answer_texts import NO_REASONING, SCHEMAS, TOOL_STYLES, TOOLS, call, written

USE = read_tools(TOOLS)
MARK_BEGUN = re.compile(r"<[^<>]*$")
PARIS, ROME, STOP = call("get_weather", city="Paris", days=3), call("get_weather", city='R{o}\\m"é'), call("stop-all")
ANSWERS = {
    "content": Answer("It is  warm.\n\n- Dry\n"),
    "reasoning": Answer("Warm.", "The user asks\nfor <weather> {a}."),
    "call": Answer("", None, (PARIS,)),
    "reasoning and call": Answer("", "I call.", (ROME,)),
    "all": Answer("I ask.", "Hm.", (PARIS,)),
    "calls": Answer("", None, (ROME, STOP, PARIS)),
}


def parsed(text, style, opening: Opening = "beginning", use=USE, cuts=()):
    """The answer, fed in the pieces between some places."""
    parser = AnswerParser(STYLES[style], use, opening)
    places = [0, *sorted(cuts), len(text)]
    parts = [part for start, end in pairwise(places) for part in parser.feed(text[start:end])]
    return answer_of([*parts, *parser.close()])


@pytest.mark.parametrize("style", TOOL_STYLES)
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_is_read_as_it_was_written(style, answer):
    if answer.reasoning is not None and style in NO_REASONING:
        pytest.skip("this style has no reasoning")

    found = parse(written(style, answer), STYLES[style], USE)

    assert (found.content, found.reasoning) == (answer.content, answer.reasoning)
    assert [(c.name, json.loads(c.arguments)) for c in found.tool_calls] == [
        (c.name, json.loads(c.arguments)) for c in answer.tool_calls
    ]


THOUGHT = {"hermes": "<think>", "qwen_coder": "<think>", "deepseek": "<think>", "gemma": "<|channel>thought"}
THOUGHT |= {"mistral": "[THINK]", "mistral_list": "[THINK]"}


@pytest.mark.parametrize("opening", ["beginning", "reasoning"])
@pytest.mark.parametrize("style", THOUGHT)
def test_a_call_before_the_end_of_the_reasoning_is_a_call(style, opening):
    thinking, made = STYLES[style].thinking, written(style, ANSWERS["call"])
    assert thinking is not None
    head = THOUGHT[style] if opening == "beginning" else ""

    cut = parsed(f"{head}I look.\n{made}", style, opening)
    whole = parsed(f"{head}I look.\n{made}\nI wait.{thinking.end}\nDone.", style, opening)

    assert (cut.content, cut.reasoning) == ("", "I look.")
    assert (whole.content, whole.reasoning) == ("Done.", "I look.\nI wait.")
    for answer in (cut, whole):
        assert [json.loads(one.arguments) for one in answer.tool_calls] == [json.loads(PARIS.arguments)]
    assert parse(f"{head}I look. {made}", STYLES[style], NO_TOOLS, opening).tool_calls == ()


@pytest.mark.parametrize("style", THOUGHT)
@pytest.mark.parametrize("text", [" in a sentence", '\n{"a": "', "\n<function=rob_bank>", "call:rob_bank{", "", "["])
def test_the_mark_of_a_call_without_one_is_reasoning(style, text):
    mark, thinking = STYLES[style].call, STYLES[style].thinking
    assert thinking is not None

    found = parse(f"{THOUGHT[style]}I say {mark}{text} twice.{thinking.end}Done.", STYLES[style], USE)

    assert (found.content, found.tool_calls) == ("Done.", ())
    assert found.reasoning == f"I say {mark}{text} twice." or style in ("mistral", "mistral_list")


def pieces_of(style):
    """Texts near the style's format: its marks whole and cut, its answers, and words that tear them apart."""
    marks = STYLES[style].marks
    torn = [mark[:-1] for mark in marks] + [mark[1:] for mark in marks]
    heads = ['{"name": "get_weather", "arguments": ', '{"name": "stop-all", "parameters": ', "call:stop-all"]
    heads += [
        "stop-all",
        "analysis",
        "commentary to=functions.stop-all",
        "final",
        "assistant",
        "thought\n",
        "[",
        "]",
        ",",
        ";",
    ]
    values = ["{}", '{"a": [1, {"b": "\\u00e9\\n"}]}', "{a:1", '"', "\\", "}", "tru", "-1e5", " ", "\n\n", "é", "x"]
    return st.sampled_from([*marks, *torn, *heads, *values, *(written(style, answer) for answer in ANSWERS.values())])


@pytest.mark.parametrize("style", STYLES)
@given(data=st.data())
def test_the_cuts_between_pieces_change_nothing(style, data):
    answers = st.sampled_from(list(ANSWERS.values())).map(lambda answer: written(style, answer))
    text = data.draw(st.lists(pieces_of(style), max_size=8).map("".join) | answers | st.text())
    opening = data.draw(st.sampled_from(["beginning", "reasoning", "content"]))
    cuts = data.draw(st.just(range(len(text))) | st.lists(st.integers(0, len(text))))

    whole = parse(text, STYLES[style], USE, opening)

    assert parsed(text, style, opening, cuts=cuts) == whole
    assert {c.name for c in whole.tool_calls} <= set(SCHEMAS)


@pytest.mark.parametrize("style", STYLES)
@given(text=st.text())
def test_text_without_marks_and_calls_is_content_as_it_is(style, text):
    if not any(mark[0] in text for mark in (*STYLES[style].marks, "{")):
        assert parse(text, STYLES[style], USE) == Answer(text)
    assert parse(text, None, USE) == Answer(text)


@pytest.mark.parametrize("style", TOOL_STYLES)
def test_without_functions_a_call_is_content(style):
    text = written(style, ANSWERS["call"])

    found = parse(text, STYLES[style], NO_TOOLS)

    assert found.tool_calls == ()
    assert "get_weather" in found.content or style == "gpt_oss"  # which has the name in a header
    assert "Paris" in found.content


@pytest.mark.parametrize("style", TOOL_STYLES)
def test_a_call_of_an_unknown_function_is_content(style):
    found = parse(written(style, Answer("", None, (call("rob_bank", city="Paris"),))), STYLES[style], USE)

    assert found.tool_calls == ()
    assert "Paris" in found.content


@pytest.mark.parametrize("style", TOOL_STYLES)
def test_a_call_that_is_cut_short_has_the_beginning_of_its_arguments(style):
    text = written(style, ANSWERS["call"])
    whole = PARIS.arguments

    for end in range(len(text)):
        if style in ("gemma", "functiongemma", "qwen_coder") and MARK_BEGUN.search(text[:end]):
            continue  # what is left of a mark is content
        found = parse(text[:end], STYLES[style], USE)
        if not found.tool_calls:
            assert found.content in text
        else:
            assert whole.startswith(found.tool_calls[0].arguments)
            assert found.content == ""


def test_arguments_stream_before_the_call_is_complete():
    parser = AnswerParser(STYLES["hermes"], USE, new_id=lambda: "id")

    parts = parser.feed('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa')

    assert parts == [CallBegin(0, "id", "get_weather"), ArgumentsPiece(0, '{"city": "Pa')]
    assert parser.feed('ris"') == [ArgumentsPiece(0, 'ris"')]


BROKEN = {
    "no object": ("hermes", "<tool_call>\nnothing\n</tool_call>"),
    "no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    "name twice": ("hermes", '<tool_call>{"name": "get_weather", "name": 1'),
    "text for arguments": ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{}"'),
    "end of the string missing": ("llama3", '{"name": "get_weath'),
    "other JSON": ("llama3", '{"name": "Ann", "age": 3}'),
    "no arguments": ("mistral", "[TOOL_CALLS]get_weather[ARGS]none"),
    "no call in the list": ("mistral", "[TOOL_CALLS] [1, 2]"),
    "no separator": ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather{}"),
    "no header": ("gpt_oss", "Hello! <|end|>"),
    "no JSON on commentary": ("gpt_oss", "<|channel|>commentary to=functions.stop-all<|message|>hm"),
    "no function": ("qwen_coder", "<tool_call>\n<parameter=city>\nParis\n</parameter>"),
    "no braces": ("gemma", "<|tool_call>call:get_weather()<tool_call|>"),
}


@pytest.mark.parametrize(("style", "text"), BROKEN.values(), ids=BROKEN)
def test_what_begins_a_call_and_is_none_is_content(style, text):
    found = parse(text, STYLES[style], USE)

    assert found == Answer(text.removesuffix("<|end|>"))


def test_arguments_before_the_name_and_other_keys_make_a_call():
    text = '<tool_call> {"id": [1, "}"], "arguments": {"city": "</tool_call>"}, "name": "get_weather"} </tool_call> ok'

    found = parse(text, STYLES["hermes"], USE)

    assert found == Answer("ok", None, (ToolCall("", "get_weather", '{"city": "</tool_call>"}'),))


def test_values_of_qwen_coder_are_strings_where_the_schema_has_strings():
    properties = {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "bound": {"anyOf": [{"type": "integer", "minimum": 10}, {"type": "string"}]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
    }
    parameters = {"type": "object", "properties": properties, "$defs": {"item": {"type": "number"}}}
    values = {"text": '5\n\n"</x>', "count": "5", "either": "null", "bound": "5", "items": "[1, 2.5]", "other": "5"}
    blocks = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    text = f"<tool_call>\n<function=f>\n{blocks}</function>\n</tool_call>"

    (one,) = parse(text, STYLES["qwen_coder"], read_tools([{"name": "f", "parameters": parameters}])).tool_calls

    assert json.loads(one.arguments) == {
        **{"text": '5\n\n"</x>', "count": 5, "either": None},
        **{"bound": "5", "items": [1, 2.5], "other": "5"},
    }


def test_a_mark_of_reasoning_in_content_is_content():
    assert parse("Write <think> here.", STYLES["hermes"]) == Answer("Write <think> here.")


def test_messages_of_one_channel_are_lines_apart():
    text = "<|start|>assistant".join(
        [f"<|channel|>{name}<|message|>{name[0]}<|end|>" for name in ("analysis", "analysis", "commentary", "final")]
    )

    assert parse(text, STYLES["gpt_oss"], USE) == Answer("c\nf", "a\na")


def test_the_id_that_a_model_gives_a_call_is_its_id():
    found = parse("[TOOL_CALLS]stop-all[CALL_ID]a1b2c3d4e[ARGS]{}", STYLES["mistral"], USE)

    assert found.tool_calls[0].id == "a1b2c3d4e"


def test_ids_differ_and_have_the_form_that_every_template_takes():
    found = parse(written("hermes", ANSWERS["calls"]), STYLES["hermes"], USE)

    ids = [one.id for one in found.tool_calls]
    assert len(set(ids)) == 3
    assert all(len(one) == 9 and one.isalnum() for one in ids)


@pytest.mark.parametrize("style", STYLES)
def test_no_reader_leaves_more_unread_than_a_mark_so_that_the_time_is_linear(style):
    marks = STYLES[style].marks
    units = [" ", "<", "[", *marks, *(mark[:-1] for mark in marks), '{"name": "', "call:stop-all{", "a:[", '"', "\\"]
    for head in ("", written(style, ANSWERS["call"])[:-12]):
        for unit in units:
            parser = AnswerParser(STYLES[style], USE)
            for character in head + unit * (300 // len(unit)):
                parser.feed(character)
                unread = len(parser._source._text) - parser._source._at
                assert unread <= max(map(len, marks)) + len("assistant")
            parser.close()


# The templates of `transformers` for what its server cannot find at a tokenizer.
RESPONSES = {"hermes": "qwen3", "qwen_coder": "qwen3_5", "gemma": "gemma4"}


@pytest.mark.parametrize("style", RESPONSES)
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_answers_are_those_of_transformers(style, answer):
    utils = pytest.importorskip("transformers.cli.serving.utils")
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    templates = utils._RESPONSE_TEMPLATE_FALLBACKS
    (template,) = [t for kinds, t in templates.items() if RESPONSES[style] in kinds]
    if style == "gemma" and STOP in answer.tool_calls:
        pytest.skip("its pattern has no names with a hyphen")
    text = written(style, answer)

    message = parsing.parse_response(text, template, prefix="", tools=TOOLS)

    found = parse(text, STYLES[style], USE)
    assert (found.content.strip(), found.reasoning) == (message.get("content", ""), message.get("reasoning_content"))
    assert [{"name": c.name, "arguments": json.loads(c.arguments)} for c in found.tool_calls] == [
        one["function"] for one in message.get("tool_calls", [])
    ]
