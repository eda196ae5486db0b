"""Messages as clients send them reach the prompt in the form that their template reads, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from jaxinfer.text.chat_template import ChatTemplates
from tests.text.chat_templates import TEMPLATES

HI, SURE = {"role": "user", "content": "Hi"}, {"role": "user", "content": "Sure?"}
RESULT = {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "dry"}
SHOWS_ALL = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
KNOWS_FOUR_ROLES = """{%- for m in messages %}
{%- if m.role == 'system' %}<sys>{{ m.content }}{%- elif m.role == 'user' %}<user>{{ m.content }}
{%- elif m.role == 'assistant' %}<assistant>{{ m.content }}{%- elif m.role == 'tool' %}<tool>{{ m.content }}{%- endif %}
{%- endfor %}"""
# DeepSeek: the arguments of a call are joined as text, and the content is asked for null.
JOINS_ARGUMENTS = """{%- for m in messages %}{%- if m['role'] == 'user' %}{{ '<User>' + m['content'] }}{%- endif %}
{%- if m['role'] == 'assistant' and m['tool_calls'] is defined and m['tool_calls'] is not none %}
    {%- for t in m['tool_calls'] %}{%- set call = '<call>' + t['function']['name'] + '<sep>' %}
        {%- set call = call + t['function']['arguments'] %}
        {%- if m['content'] is none %}{{ call }}{%- else %}{{ m['content'] + call }}{%- endif %}{%- endfor %}
{%- elif m['role'] == 'assistant' %}{{ '<Assistant>' + m['content'] + '<end>' }}{%- endif %}
{%- if m['role'] == 'tool' %}{{ '<out>' + m['content'] }}{%- endif %}{%- endfor %}"""
# Llama: the key of the calls is asked for, whatever it has.
ASKS_FOR_CALLS = """{%- for m in messages %}{%- if 'tool_calls' in m %}
{%- if not m.tool_calls|length == 1 %}{{ raise_exception('one call at a time') }}{%- endif %}
{{- m.tool_calls[0].function.name + ' ' }}{{ m.tool_calls[0].function.arguments | tojson }}
{%- else %}{{ '<' + m.role + '>' + m['content'] }}{%- endif %}{%- endfor %}"""
# GLM: goes through the arguments.
LISTS_ARGUMENTS = """{%- for m in messages %}{%- if m.role == 'assistant' %}{%- for c in m.tool_calls %}
{{- '<call>' + c.function.name }}{%- for k, v in c.function.arguments.items() %}{{ '<' + k + '>' ~ v }}{%- endfor %}
{%- endfor %}{%- else %}{{ '<' + m.role + '>' + m.content }}{%- endif %}{%- endfor %}"""
PRINTS_ARGUMENTS = """{%- for m in messages %}{%- if m.tool_calls %}{{- m.tool_calls[0].function.arguments }}
{%- else %}{{ '<' + m.role + '>' + m.content }}{%- endif %}{%- endfor %}"""
GOES_THROUGH_PARTS = """{%- for m in messages %}<{{ m.role }}>{%- for part in m.content %}
{%- if part.type == 'text' %}[{{ part.text }}]{%- elif part.type == 'image' %}<image>{%- endif %}
{%- endfor %}{%- endfor %}"""
TEMPLATES_WITH_CALLS = {
    "joins": JOINS_ARGUMENTS,
    "asks": ASKS_FOR_CALLS,
    "lists": LISTS_ARGUMENTS,
    "prints": PRINTS_ARGUMENTS,
    "chatml": TEMPLATES["chatml"],
    "headers": TEMPLATES["headers"],
}


@pytest.fixture(scope="module")
def templates():
    return ChatTemplates({}, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="module")
def text_of(templates):
    def text_of(template: str, *messages: Any, **arguments: Any) -> str:
        return templates.render_chat(messages, chat_template=template, **arguments)

    return text_of


def call(*, content: Any = None, **function: Any) -> dict[str, Any]:
    made = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "weather", **function}}
    return {"role": "assistant", "content": content, "tool_calls": [made]}


# ---- what clients send along, or send back


ASKS_NOTHING = {
    "tool_calls": [],
    "refusal": None,
    "audio": None,
    "function_call": None,
    "annotations": [],
    "reasoning_content": None,
    "name": "ann",
    "index": 0,
    "id": "msg_1",
    "parsed": None,
    "provider_specific_fields": {"citations": None},
}


@pytest.mark.parametrize("template", [JOINS_ARGUMENTS, ASKS_FOR_CALLS, SHOWS_ALL, KNOWS_FOUR_ROLES])
@pytest.mark.parametrize("key", ASKS_NOTHING)
def test_a_key_that_asks_for_nothing_leaves_the_prompt_as_it_is(text_of, template, key):
    answer = {"role": "assistant", "content": "Forty-two."}

    expected = text_of(template, HI, answer, SURE)

    assert "Forty-two." in expected
    assert text_of(template, HI, {**answer, key: ASKS_NOTHING[key]}, SURE) == expected


def test_an_answer_comes_back_as_openais_client_writes_it(text_of):
    answer = ChatCompletionMessage(role="assistant", content="Yes", tool_calls=[], annotations=[]).model_dump()

    assert text_of(JOINS_ARGUMENTS, HI, answer, SURE) == "<User>Hi<Assistant>Yes<end><User>Sure?"


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_that_comes_back_is_the_templates_to_show(text_of, key):
    answer = {"role": "assistant", "content": "Yes", key: "hm"}
    template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"

    assert text_of(KNOWS_FOUR_ROLES, HI, answer) == "<user>Hi<assistant>Yes"
    assert text_of(template, answer) == "hmYes"


def test_a_refusal_without_content_is_the_content(text_of):
    refused = {"role": "assistant", "content": None, "refusal": "No."}

    assert text_of(KNOWS_FOUR_ROLES, HI, refused) == "<user>Hi<assistant>No."


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({**HI, "contents": "b"}, r"messages\[0\].contents"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f"}}, r"messages\[0\].function_call"),
        ({"role": "assistant", "content": "a", "audio": {"id": "b"}}, r"messages\[0\].audio"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "weight": 2}]},
            r"messages\[0\].content\[0\].weight",
        ),
        ({**call(), "tool_calls": [{**call()["tool_calls"][0], "when": 3}]}, r"messages\[0\].tool_calls\[0\].when"),
        (call(argument="{}"), r"messages\[0\].tool_calls\[0\].function.argument"),
    ],
)
def test_a_key_that_the_template_does_not_read_is_refused(text_of, message, place):
    with pytest.raises(ValueError, match=f"{place}: .*does not read|{place}: no template reads"):
        text_of(TEMPLATES["chatml"], message)


def test_a_key_that_the_template_reads_is_its_own(text_of):
    template = "{% for m in messages %}{{ m.content }}{% if m.prefix %}|{% endif %}{% endfor %}"

    assert text_of(template, {**HI, "prefix": True}) == "Hi|"
    assert text_of("{{ messages | tojson }}", {"role": "user", "mood": "x"}) == '[{"role": "user", "mood": "x"}]'


# ---- roles


INSTRUCTION = {"role": "developer", "content": "Answer in French."}


@pytest.mark.parametrize("template", [KNOWS_FOUR_ROLES, TEMPLATES["chatml"], TEMPLATES["state"], SHOWS_ALL])
@pytest.mark.parametrize("place", [0, 1])
def test_a_developer_is_a_system_to_a_template_that_names_none(text_of, template, place):
    messages = [HI, HI]
    messages.insert(place, INSTRUCTION)

    text = text_of(template, *messages)

    assert "Answer in French." in text
    assert text == text_of(template, *({**m, "role": m["role"].replace("developer", "system")} for m in messages))


def test_a_developer_stays_one_to_a_template_that_names_it(text_of):
    template = "{% for m in messages %}{{ '<dev>' if m.role == 'developer' else m.role }}{{ m.content }}{% endfor %}"

    assert text_of(template, INSTRUCTION, HI) == "<dev>Answer in French.userHi"


SHOWS_A_FIRST_SYSTEM = """{%- if messages[0].role == 'system' %}<sys>{{ messages[0].content }}{%- endif %}
{%- for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{%- endfor %}"""


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (SHOWS_A_FIRST_SYSTEM, [HI, INSTRUCTION], r"messages\[1\].role is 'developer'.*the first message"),
        (SHOWS_A_FIRST_SYSTEM, [INSTRUCTION, INSTRUCTION, HI], r"messages\[1\].role is 'developer'.*one of them alone"),
        (SHOWS_A_FIRST_SYSTEM, [HI, {**INSTRUCTION, "role": "system"}], r"messages\[1\].role is 'system'"),
        (TEMPLATES["documents"], [INSTRUCTION, HI], r"messages\[0\].role is 'developer'.*leaves such a message out"),
        (KNOWS_FOUR_ROLES, [{"role": "function", "content": "dry"}], r"messages\[0\].role is 'function'.*tool, user"),
        (SHOWS_A_FIRST_SYSTEM, [HI, RESULT], r"messages\[1\].role is 'tool'.*: assistant, system, user"),
        (KNOWS_FOUR_ROLES, [HI, {"role": "critic", "content": "Bad."}], r"messages\[1\].role is 'critic'"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused_by_its_role(text_of, template, messages, message):
    with pytest.raises(ValueError, match=message):
        text_of(template, *messages)


# ---- calls


@pytest.mark.parametrize("template", TEMPLATES_WITH_CALLS.values(), ids=TEMPLATES_WITH_CALLS)
@pytest.mark.parametrize(
    "function",
    [{"arguments": "null"}, {"arguments": None}, {}, {"arguments": ""}, {"arguments": {}}],
)
def test_no_arguments_are_an_empty_object(text_of, template, function):
    assert text_of(template, HI, call(**function), RESULT) == text_of(template, HI, call(arguments="{}"), RESULT)


@pytest.mark.parametrize("content", [None, "", "Let me look."])
@pytest.mark.parametrize("arguments", ['{"city":  "Rome"}', {"city": "Rome"}])
def test_a_template_that_joins_arguments_gets_their_text(text_of, content, arguments):
    text = arguments if isinstance(arguments, str) else '{"city": "Rome"}'

    shown = text_of(JOINS_ARGUMENTS, HI, call(content=content, arguments=arguments), RESULT)

    assert shown == f"<User>Hi{content or ''}<call>weather<sep>{text}<out>dry"


def test_arguments_are_written_as_json_and_never_as_python_writes_them(text_of):
    assert text_of(PRINTS_ARGUMENTS, HI, call(content="", arguments={"a": True})) == '<user>Hi{"a": true}'
    assert text_of(ASKS_FOR_CALLS, HI, call(arguments='{"a": true}')) == '<user>Hiweather {"a": true}'
    assert text_of(LISTS_ARGUMENTS, HI, call(arguments='{"a": 5}')) == "<user>Hi<call>weather<a>5"


@pytest.mark.parametrize("arguments", ["[1]", "{", 5, "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(text_of, arguments):
    with pytest.raises(ValueError, match=r"messages\[1\].tool_calls\[0\].function.arguments is .*; give"):
        text_of(JOINS_ARGUMENTS, HI, call(arguments=arguments))


# ---- parts


def parts(*texts: str, role: str = "user") -> dict[str, Any]:
    return {
        "role": role,
        "content": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts],
    }


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (KNOWS_FOUR_ROLES, "<sys>S<user>a\nb<assistant>c"),
        (SHOWS_ALL, "<system>S<user>a\nb<assistant>c"),
        (GOES_THROUGH_PARTS, "<system>[S]<user>[a][b]<assistant>[c]"),
        (TEMPLATES["turns"], "<s><turn>user\nS\n\nab</turn>\n<turn>model\nc</turn>\n"),
    ],
)
def test_parts_of_text_reach_every_template(text_of, template, expected):
    answer = {"role": "assistant", "content": "c"}

    assert text_of(template, parts("S", role="system"), parts("a", "b"), answer) == expected
    kinds = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b", "annotations": []}]
    assert text_of(template, parts("S", role="system"), {"role": "user", "content": kinds}, answer) == expected


def test_a_template_that_goes_through_parts_gets_a_text_as_one(text_of):
    assert text_of(GOES_THROUGH_PARTS, HI, parts("c", role="assistant")) == "<user>[Hi]<assistant>[c]"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "image", None])
@pytest.mark.parametrize("template", [GOES_THROUGH_PARTS, KNOWS_FOUR_ROLES])
def test_a_part_that_is_no_text_is_refused_by_its_type(text_of, template, kind):
    part = {"type": kind, str(kind): {"url": "data:,"}}

    with pytest.raises(ValueError, match=rf"messages\[0\].content\[1\] is a part of type {kind!r}; .*text alone"):
        text_of(template, {"role": "user", "content": [{"type": "text", "text": "a"}, part]})


# ---- variables and documents


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "self", "chat_template", "add_generation_prompt"])
def test_a_name_that_every_template_has_is_no_variable(text_of, name):
    with pytest.raises(ValueError, match=f"chat_template_kwargs has '{name}'; give it as an argument of its own"):
        text_of(SHOWS_ALL, HI, variables={name: []})


def test_a_variable_that_no_template_reads_is_refused_with_what_it_reads(text_of):
    with pytest.raises(ValueError, match="'enable_thinking', which the chat template does not read.*what it reads: x"):
        text_of("{{ x }}<think>{{ messages[0].content }}", HI, variables={"enable_thinking": False})
    with pytest.raises(ValueError, match="'mood', which .*reads: nothing beside the conversation"):
        text_of(SHOWS_ALL, HI, variables={"mood": "calm"})
    assert text_of("{{ x }}{{ self }}", HI, variables={"x": 1, "y": None}).startswith("1")


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_a_model_that_never_thinks_may_be_told_not_to(text_of, name):
    assert text_of(SHOWS_ALL, HI, variables={name: False}) == "<user>Hi"
    with pytest.raises(ValueError, match=f"'{name}', which the chat template does not read"):
        text_of(SHOWS_ALL, HI, variables={name: True})


def test_documents_that_the_template_does_not_show_are_refused(text_of):
    with pytest.raises(ValueError, match="documents cannot be honoured: the chat template does not show them"):
        text_of(SHOWS_ALL, HI, documents=[{"text": "a"}])
    assert "one" in text_of(TEMPLATES["documents"], HI, documents=[{"title": "t", "text": "one"}])
    assert text_of(SHOWS_ALL, HI, documents=[]) == "<user>Hi"


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_conversation_of_texts_has_the_text_of_transformers_templates(templates, template):
    messages = [HI, {"role": "assistant", "content": "Yes"}, SURE]

    assert templates.render_chat(messages, chat_template=template) == templates.render(messages, chat_template=template)


def test_a_template_that_loops_for_ever_ends_in_an_error(text_of):
    with pytest.raises(ValueError, match="the chat template takes more than 3 seconds"):
        text_of("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", HI)
    assert text_of(SHOWS_ALL, HI) == "<user>Hi"
