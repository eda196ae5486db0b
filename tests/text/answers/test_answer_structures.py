"""What the structure of an answer lets through: random walks through its masks, and `jsonschema` as the judge."""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
import pytest

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text.answers.answers import AnswerForm
from jaxinfer.text.answers.lark import Lark
from jaxinfer.text.answers.parts import Answer
from jaxinfer.text.answers.schemas import SchemaRules
from jaxinfer.text.answers.style import Opening
from jaxinfer.text.answers.styles.table import STYLES
from jaxinfer.text.answers.tools import read_tools
from jaxinfer.text.grammar import GrammarCompiler
from tests.text.answers.answer_texts import (
    NO_REASONING,
    ONE_CALL,
    SCHEMAS,
    TOOL_STYLES,
    TOOLS,
    call,
    tokenizer_with,
    written,
)

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

EOS = 0
RULES = SchemaRules()
KINDS = pytest.mark.parametrize("kind", ["special", "added", "text"])
EACH_STYLE = pytest.mark.parametrize("style", TOOL_STYLES)


def grammar_of(style, kind, use, opening: Opening = "beginning"):
    make = STYLES[style].grammar
    assert make is not None
    return make(Lark(tokenizer_with(style, kind)), use, RULES, opening)


@cache
def begun(style, kind, tool_choice, is_parallel=True, opening: Opening = "beginning"):
    """The form of an answer, and its structure at the beginning."""
    tokenizer, use = tokenizer_with(style, kind), read_tools(TOOLS, tool_choice, is_parallel)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [EOS])
    compiler._trials = RULES._trials  # one process for all
    structure = compiler.compile(SamplingParams(grammar=grammar_of(style, kind, use, opening)))
    assert structure is not None
    form = AnswerForm(STYLES[style], use, opening == "content", tokenizer, RULES)
    return form, structure


@cache
def weights(style, kind):
    """Tokens that answers are made of come often, and end tokens and marks more often."""
    tokenizer = tokenizer_with(style, kind)
    texts = [tokenizer.text_of(i) for i in range(tokenizer.vocab_size)]
    often = np.array([not set(text) - set('ab01"]},') for text in texts])
    is_mark = np.arange(len(texts)) >= 4096
    return 1.0 + 100.0 * often + 300.0 * is_mark + 600.0 * (np.arange(len(texts)) == EOS)


def allowed(state, count):
    return np.flatnonzero(np.unpackbits(state.mask().view(np.uint8), bitorder="little")[:count])


def follow(state, token_ids):
    """Accepts tokens as far as the masks let them through; returns how many."""
    for count, token_id in enumerate(token_ids):
        if state.is_complete or not state.allows(token_id):
            return count
        state.accept(token_id)
    return len(token_ids)


def walk(style, kind, choose, *begin, prefix="", max_tokens=300):
    """A complete answer with `prefix`, at random; None for one that has not ended."""
    form, structure = begun(style, kind, *begin)
    state, weight = structure.begin_again(), weights(style, kind)
    token_ids = form._tokenizer.encode(prefix, add_special_tokens=False)
    assert follow(state, token_ids) == len(token_ids)
    while not state.is_complete and len(token_ids) < max_tokens:
        tokens = allowed(state, len(weight))
        assert len(tokens), state.error
        (token_id,) = choose.choices(tokens.tolist(), weight[tokens].tolist())
        state.accept(token_id)
        if token_id == EOS:
            break
        token_ids.append(token_id)
    else:
        if not state.is_complete:
            return None
    return form.read(token_ids, SamplingParams(), [])


def require_valid(answer):
    for one in answer.tool_calls:
        jsonschema.validate(json.loads(one.arguments), SCHEMAS[one.name])


# What a model writes before it may only write a call: then no random text is in the way.
BEFORE = dict.fromkeys(TOOL_STYLES, "") | {
    "gpt_oss": "<|channel|>commentary to=functions.",
    "gemma": "<|tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "hermes": "<tool_call>",
    "qwen_coder": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral_list": "[TOOL_CALLS]",
}


@KINDS
@EACH_STYLE
def test_a_required_call_comes_and_is_valid(style, kind):
    choose = random.Random(0)
    answers = [walk(style, kind, choose, "required", prefix=BEFORE[style]) for _ in range(12)]

    complete = [answer for answer in answers if answer is not None]
    assert len(complete) >= 3
    for answer in complete:
        assert answer.tool_calls
        assert answer.content == ""
        require_valid(answer)
    if style in ONE_CALL:
        assert all(len(answer.tool_calls) == 1 for answer in complete)


@EACH_STYLE
def test_a_named_call_is_one_of_that_function_and_alone_unless_parallel(style):
    choose = random.Random(1)
    for _ in range(6):
        answer = walk(style, "special", choose, "stop-all", False, prefix=BEFORE[style])
        assert answer is not None
        assert [(one.name, one.arguments) for one in answer.tool_calls] == [("stop-all", "{}")]


@KINDS
@EACH_STYLE
def test_with_auto_a_call_is_valid_once_it_has_begun(style, kind):
    choose = random.Random(2)
    head = written(style, Answer("Wait.", None, (call("get_weather", city="a"),)))
    prefix = head[: head.index("get_weather") + len("get_weather")]
    answers = [walk(style, kind, choose, "auto", prefix=prefix) for _ in range(6)]

    complete = [answer for answer in answers if answer is not None]
    assert complete
    for answer in complete:
        assert answer.content == "Wait."
        assert answer.tool_calls[0].name == "get_weather"
        require_valid(answer)


WRITTEN = {
    "call": Answer("", None, (call("get_weather", city="Paris", days=3, place={"x": 0.5, "y": None}),)),
    "reasoning and call": Answer("", "I {think}.", (call("stop-all"),)),
    "calls": Answer("", None, (call("stop-all"), call("get_weather", city="Rome", hours=[True, False]))),
    "content": Answer('Yes: {"a": 1} <b>.\n'),
    "content and call": Answer("I ask.", "Hm.", (call("get_weather", city="Paris", units=None),)),
}
INVALID = {
    "no city": call("get_weather", days=3),
    "too long": call("get_weather", city="Constantinople"),
    "another parameter": call("get_weather", city="Paris", country="F"),
    "another type": call("get_weather", city="Paris", days=True),
    "too great": call("get_weather", city="Paris", days=10),
    "another unit": call("get_weather", city="Paris", units="K"),
    "too many": call("get_weather", city="Paris", hours=[True] * 3),
    "in an object": call("get_weather", city="Paris", place={"x": 2}),
    "no parameters": call("stop-all", city="Paris"),
    "no such function": call("start-all"),
}


def reaches(style, kind, tool_choice, answer):
    """True if the structure lets all of an answer's text through."""
    form, structure = begun(style, kind, tool_choice)
    token_ids = form._tokenizer.encode(written(style, answer), add_special_tokens=False)
    state = structure.begin_again()
    return follow(state, token_ids) == len(token_ids) and (state.is_complete or state.allows(EOS))


@KINDS
@EACH_STYLE
@pytest.mark.parametrize("case", WRITTEN)
def test_answers_in_the_style_of_the_template_are_let_through(style, kind, case):
    answer = WRITTEN[case]
    if (style in ONE_CALL and len(answer.tool_calls) > 1) or (style in NO_REASONING and answer.reasoning is not None):
        pytest.skip("the style has no such answers")

    assert reaches(style, kind, "auto", answer)
    assert reaches(style, kind, "required", answer) == ("content" not in case)


@KINDS
@EACH_STYLE
@pytest.mark.parametrize("case", INVALID)
def test_calls_that_break_the_schema_are_ruled_out(style, kind, case):
    answer = Answer("", None, (INVALID[case],))

    assert not reaches(style, kind, "required", answer)
    if style == "llama3" and case == "no such function":
        return  # a JSON object that is no call
    assert not reaches(style, kind, "auto", answer)


@EACH_STYLE
def test_no_text_spells_the_mark_of_a_call_in_other_tokens(style):
    _, structure = begun(style, "special", "auto")
    whole = written(style, Answer("I ask.", None, (call("rob_bank"),)))
    spelled = tokenizer_with(style, "text").encode(whole, add_special_tokens=False)

    assert follow(structure.begin_again(), spelled) < len(spelled)


@EACH_STYLE
def test_reasoning_that_the_prompt_has_begun_goes_on_before_the_call(style):
    if style in NO_REASONING or style == "gpt_oss":
        pytest.skip("templates of the style begin no reasoning")
    form, structure = begun(style, "special", "required", True, "reasoning")
    whole = written(style, Answer("", "Hm.", (call("stop-all"),)))
    rest = whole[whole.index("Hm.") :]
    token_ids = form._tokenizer.encode(rest, add_special_tokens=False)

    assert follow(structure.begin_again(), token_ids) == len(token_ids)


@pytest.mark.parametrize("style", ["gemma", "hermes"])
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, "get.*cannot be honoured"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "get.*is not a JSON schema"),
        ({"type": "object", "required": 1}, "get.*is not a JSON schema"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_with_the_functions_name(style, schema, message):
    use = read_tools([{"name": "get", "parameters": schema}])
    with pytest.raises(ValueError, match=message):
        grammar_of(style, "special", use)


def test_qwen_coder_keeps_strings_to_their_schemas_or_refuses_them():
    def made(part):
        use = read_tools([{"name": "get", "parameters": {"type": "object", "properties": {"a": part}}}])
        return grammar_of("qwen_coder", "special", use)

    assert '("bb")' in (made({"type": "string", "enum": ["a", "bb"], "minLength": 2}) or "")
    assert '("a")' in (made({"type": "string", "const": "a"}) or "")
    for part, message in (
        ({"type": "string", "pattern": "a"}, "'pattern'"),
        ({"type": "string", "enum": [""]}, "no text"),
    ):
        with pytest.raises(ValueError, match=message):
            made(part)


def test_gemma_refuses_keywords_that_its_notation_does_not_keep():
    for part in ({"type": "string", "pattern": "a"}, {"enum": [{}]}, {"enum": ["a"], "type": "string", "minLength": 2}):
        use = read_tools([{"name": "get", "parameters": {"type": "object", "properties": {"a": part}}}])
        with pytest.raises(ValueError, match="no notation"):
            grammar_of("gemma", "special", use)
