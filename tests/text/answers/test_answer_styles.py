"""Which style a chat template has, where its prompt leaves off, and which tools a request may state."""

from __future__ import annotations

import pytest

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text.answers.answers import Answers, parse
from jaxinfer.text.answers.parts import Answer, ContentPiece
from jaxinfer.text.answers.styles.table import STYLES, style_of
from jaxinfer.text.answers.tools import MAX_TOOLS, NO_TOOLS, read_tools
from jaxinfer.text.chat_template import ChatTemplates
from jaxinfer.text.tokenizer import Tokenizer
from tests.text.answers.answer_texts import TOOLS, call, tokenizer_with, written
from tests.text.chat_templates import TEMPLATES

# What published templates write for a call, or for reasoning alone.
FRAGMENTS = {
    "hermes": """{{- '<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}""",
    "qwen_coder": "{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}",
    "llama3": """{{- '<|start_header_id|>assistant' }}{{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}""",
    "mistral": "{{- '[TOOL_CALLS]' + tool.function.name + '[ARGS]' + arguments }}",
    "mistral_list": """{{- "[TOOL_CALLS] [" }}{{- tool_call.function | tojson }}""",
    "gpt_oss": "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}",
    "gemma": "{{- '<|tool_call>call:' + function.name + '{' }}",
    "functiongemma": "{{ '<start_function_call>call:' + function.name + '{' }}",
    "deepseek": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}",
    "thinking": "<tool_call>{{ name }}\\n<arg_key> {{ content.split('</think>')[-1] }}",
}


@pytest.mark.parametrize("style", STYLES)
def test_a_style_is_known_by_its_template(style):
    assert style_of(FRAGMENTS[style]) is STYLES[style]


def test_templates_without_calls_have_no_style():
    assert {name: style_of(TEMPLATES[name]) for name in ("turns", "documents", "brackets")} == {
        **dict.fromkeys(("turns", "documents", "brackets"))
    }


OPENINGS = [
    ("hermes", "<|im_start|>assistant\n", "beginning"),
    ("hermes", "<|im_start|>assistant\n<think>\n", "reasoning"),
    ("hermes", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "beginning"),
    ("hermes", "<|im_start|>user\nWrite <think> again.<|im_end|>\n<|im_start|>assistant\n", "beginning"),
    ("mistral", "[INST]a[/INST][THINK]", "reasoning"),
    ("gpt_oss", "<|start|>user<|message|>a<|end|><|start|>assistant", "beginning"),
    ("gpt_oss", "<|end|><|start|>assistant<|channel|>analysis<|message|>I", "reasoning"),
    ("gpt_oss", "<|end|><|start|>assistant<|channel|>final<|message|>I", "content"),
    ("gemma", "<|turn>model\n", "beginning"),
    ("gemma", "<|turn>model\n<|channel>thought\n", "reasoning"),
    ("gemma", "<|turn>model\n<|channel>thought\n<channel|>", "beginning"),
    ("llama3", "<|start_header_id|>assistant<|end_header_id|>\n\n", "beginning"),
]


@pytest.mark.parametrize(("style", "prompt", "opening"), OPENINGS)
def test_a_prompt_shows_where_it_leaves_off(style, prompt, opening):
    assert STYLES[style].opening(prompt) == opening


def test_an_answer_goes_on_from_there():
    assert parse("Hm.\n</think>\n\nYes", STYLES["hermes"], opening="reasoning") == Answer("Yes", "Hm.")
    assert parse(
        "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes", STYLES["gpt_oss"], opening="reasoning"
    ) == (Answer("Yes", "Hm."))
    assert parse(" see<|return|>", STYLES["gpt_oss"], opening="content") == Answer(" see")


def test_tools_are_those_of_the_request():
    assert list(read_tools(TOOLS).functions) == ["get_weather", "stop-all"]
    assert not read_tools(TOOLS, "auto").is_required
    assert read_tools(TOOLS, "required").is_required
    assert read_tools(TOOLS, "none") == NO_TOOLS == read_tools(None) == read_tools(None, "auto")
    named = {"type": "function", "function": {"name": "stop-all"}}
    assert list(read_tools(TOOLS, named).functions) == list(read_tools(TOOLS, "stop-all").functions) == ["stop-all"]
    assert not read_tools(TOOLS, None, False).is_parallel


def tool(**more):
    return {"type": "function", "function": {"name": "f", **more}}


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_some_of_the_tools_may_be_allowed():
    use = read_tools(TOOLS, allowed("auto", "stop-all"))
    assert (list(use.functions), use.is_required) == (["stop-all"], False)
    use = read_tools(TOOLS, allowed("required", "stop-all", "get_weather"), False)
    assert (list(use.functions), use.is_required, use.is_parallel) == (["stop-all", "get_weather"], True, False)
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "stop-all"}]}
    assert list(read_tools(TOOLS, flat).functions) == ["stop-all"]


@pytest.mark.parametrize("name", ["auto", "none", "required"])
def test_a_function_may_be_called_as_a_word_is(name):
    named = {"type": "function", "function": {"name": name}}
    tools = [*TOOLS, {"name": name}]

    assert list(read_tools(tools, named).functions) == [name]
    assert read_tools(tools, named).is_required
    assert list(read_tools(tools, {"name": name}).functions) == [name]
    assert len(read_tools(tools, name).functions) == (0 if name == "none" else 3)


@pytest.mark.parametrize("key", ["strict", "description", "return", "cache_control"])
def test_a_function_may_say_what_changes_no_call(key):
    value = True if key == "strict" else "d" if key == "description" else {"type": "ephemeral"}

    assert read_tools([tool(**{key: value})]) == read_tools([tool()])


def test_a_call_has_no_parameters_but_those_of_the_schema_unless_it_says_so():
    is_open = {"type": "object", "additionalProperties": True}
    use = read_tools([*TOOLS, {"name": "log", "parameters": is_open}])

    assert use.functions["get_weather"].parameters["additionalProperties"] is False
    assert use.functions["stop-all"].parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert use.functions["log"].parameters == is_open


WRONG = [
    (([tool()], "always"), "tool_choice='always' is none of auto, none, required, nor a name in tools"),
    (([tool()], 3), "tool_choice=3 is not allowed"),
    (([tool()], {"type": "function"}), "tool_choice=.* is not allowed"),
    ((None, "required"), "tool_choice='required' without tools"),
    (([], "required"), "tools=.* at least one function"),
    (([tool()], None, "yes"), "parallel_tool_calls='yes' is not allowed"),
    (([tool(), tool()],), r"tools\[1\].name='f' is not allowed.*another name"),
    (([{"type": "web_search"}],), r"tools\[0\].type='web_search' is not allowed"),
    (([{"type": "function", "function": "f"}],), r"tools\[0\].function='f' is not allowed"),
    (([{"type": "function", "function": {"name": "a b"}}],), r"tools\[0\].name='a b' is not allowed"),
    (([tool(strict=1)],), r"tools\[0\].strict=1 is not allowed"),
    (([tool(parameters={"type": "string"})],), r"tools\[0\].parameters=.*with \"type\": \"object\""),
    (([tool(parameters=[])],), r"tools\[0\].parameters="),
    (("f",), "tools='f' is not allowed"),
    (([{"name": "f", "inputSchema": {"type": "object"}}],), r"tools\[0\].inputSchema: .*give the schema as parameters"),
    (([{"name": "f", "input_schema": {"type": "object"}}],), r"tools\[0\].input_schema: a tool has no such key"),
    (([tool(parameter={"type": "object"})],), r"tools\[0\].function.parameter: .*give the schema as parameters"),
    (([{**tool(), "parameters": {"type": "object"}}],), r"tools\[0\].parameters: a tool has no such key"),
    (([{**tool(), "annotations": "a"}],), r"tools\[0\].annotations: .*leave it out"),
    (([tool()], {"type": "function", "function": {"name": "f"}, "strict": True}), "tool_choice=.* is not allowed"),
    (([tool()], {"type": "function", "function": {"name": "f", "arguments": {}}}), "tool_choice=.* is not allowed"),
    (([tool()], {"type": "auto"}), "tool_choice=.* is not allowed"),
    (([tool()], allowed("any", "f")), "tool_choice=.* is not allowed.*allowed_tools"),
    (([tool()], allowed("auto")), "tool_choice=.* is not allowed.*allowed_tools"),
    (([tool()], allowed("auto", "g")), r"tool_choice=.* nor a name in tools: \['f'\]"),
    (([{"name": f"f{i}"} for i in range(MAX_TOOLS + 1)],), f"at most {MAX_TOOLS}"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_tools_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        read_tools(*arguments)


def answers_of(template, style="hermes"):
    backend = tokenizer_with(style, "special")._backend
    return Answers(Tokenizer(backend, ChatTemplates({"default": template}, {})))


def test_without_a_known_style_an_answer_is_content_and_no_call_can_be_demanded():
    answers = answers_of("{{ messages[0].content }}")
    params = SamplingParams()

    form = answers.form(TOOLS)

    assert form.sampling_params(params, [5]) is params
    assert answers.form([{"any": "thing"}], "none").style is None
    for choice in ("required", "stop-all"):
        with pytest.raises(ValueError, match="demands a tool call, and the chat template does not show.*hermes"):
            answers.form(TOOLS, choice)
    with pytest.raises(ValueError, match="answer_style='other' is not allowed"):
        answers.form(TOOLS, style="other")


def test_a_form_reads_tokens_without_the_special_ones_that_are_no_marks():
    answers = answers_of(FRAGMENTS["hermes"])
    form = answers.form(TOOLS)
    text = written("hermes", Answer("I ask.", "Hm.", (call("stop-all"),)))
    tokenizer = form._tokenizer
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), 0]  # and the end token

    whole = form.read(token_ids, SamplingParams(), [])
    reader = form.reader(SamplingParams(), [])
    parts = [part for token_id in token_ids for part in reader.push([token_id])] + reader.close()

    assert whole == Answer("I ask.", "Hm.", (call("stop-all"),))
    assert "".join(part.text for part in parts if isinstance(part, ContentPiece)) == "I ask."


def test_an_answer_ends_before_a_stop_string():
    form = answers_of(FRAGMENTS["hermes"]).form()
    token_ids = form._tokenizer.encode("<think>Hm.</think>One two three", add_special_tokens=False)

    assert form.read(token_ids, SamplingParams(stop=" three"), []) == Answer("One two", "Hm.")
    assert form.read(token_ids, SamplingParams(stop="Hm"), []) == Answer("")


def test_a_call_cannot_be_demanded_within_a_message_of_gpt_oss():
    answers = answers_of(FRAGMENTS["gpt_oss"], "gpt_oss")
    prompt = answers.tokenizer.encode("<|start|>assistant<|channel|>final<|message|>So", add_special_tokens=False)

    assert answers.form(TOOLS).sampling_params(SamplingParams(), prompt).structure is None
    with pytest.raises(ValueError, match="ends in the content of an answer"):
        answers.form(TOOLS, "required").sampling_params(SamplingParams(), prompt)
