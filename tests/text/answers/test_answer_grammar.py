"""The content of an answer has the structure of its request, after any reasoning: random walks through the masks."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from jaxinfer.sampling_params import AnswerParams, SamplingParams, params_of
from jaxinfer.text.answers.answers import AnswerForm, Answers
from jaxinfer.text.answers.parts import Answer, answer_of
from jaxinfer.text.answers.schemas import SchemaRules
from jaxinfer.text.answers.structure import NO_TEXT_LEFT, AnswerGrammar, compile_structure
from jaxinfer.text.answers.styles.table import STYLES
from jaxinfer.text.answers.tools import NO_TOOLS, read_tools
from jaxinfer.text.chat_template import ChatTemplates
from jaxinfer.text.grammar import GrammarCompiler
from jaxinfer.text.tokenizer import Tokenizer
from tests.text.answers.answer_texts import SCHEMAS, TOOL_STYLES, TOOLS, call, tokenizer_with, written

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

EOS = 0
RULES = SchemaRules()
THINKERS = [name for name, style in STYLES.items() if style.thinking is not None]
KINDS = pytest.mark.parametrize("kind", ["special", "added", "text"])
EACH_STYLE = pytest.mark.parametrize("style", STYLES)
EACH_THINKER = pytest.mark.parametrize("style", THINKERS)

SCHEMA = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}, "why": {"enum": ["a {b}", "</think>", "c"]}},
    "required": ["good"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CHOICES = ["yes", "no {a}", "yes, sir"]
LARK = 'start: "(" (start | ITEM) ")"\nITEM: /[a-z]{1,3}/'


def is_balanced(text):
    return text.count("(") == text.count(")") and re.fullmatch(r"\(+[a-z]{1,3}\)+", text) is not None


STRUCTURES: dict[str, Any] = {
    "json_schema": (SCHEMA, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    "regex": ("[A-F]{2}[0-9]{1,3}(x|yz)?", lambda text: re.fullmatch("[A-F]{2}[0-9]{1,3}(x|yz)?", text)),
    "choices": (CHOICES, lambda text: text in CHOICES),
    "grammar": (LARK, is_balanced),
}
END = {name: style.thinking.end for name, style in STYLES.items() if style.thinking is not None}
OPENED = {
    "hermes": "<think>\n",
    "thinking": "<think>\n",
    "qwen_coder": "<think>\n",
    "deepseek": "<think>",
    "mistral": "[THINK]",
    "mistral_list": "[THINK]",
    "gemma": "<|channel>thought\n",
    "gpt_oss": "<|start|>assistant<|channel|>analysis<|message|>",
}
# How a prompt ends: the model opens the reasoning itself or has none, the template opens it, or closes it at once.
CASES = [("special", "own"), ("text", "own"), ("added", "opened"), ("text", "opened"), ("special", "closed")]
PROMPTS = {"own": {}, "opened": OPENED, "closed": dict.fromkeys(THINKERS, "<think>\n\n</think>\n\n")}


@cache
def compiler_of(style, kind):
    tokenizer = tokenizer_with(style, kind)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [EOS])
    compiler._trials = RULES._trials  # one process for all
    return compiler


def begin(style, kind, params, use=NO_TOOLS, prompt="", continues=False) -> tuple[AnswerForm, Any, Any]:
    """The form of an answer after a prompt, its parameters and its structure at the beginning."""
    tokenizer = tokenizer_with(style, kind)
    form = AnswerForm(STYLES[style], use, continues, tokenizer, RULES)
    params = form.sampling_params(params, tokenizer.encode(f"a{prompt}", add_special_tokens=False))
    return form, params, compile_structure(compiler_of(style, kind), tokenizer, params)


def allowed(state):
    return np.flatnonzero(np.unpackbits(state.mask().view(np.uint8), bitorder="little")).tolist()


def follow(state, token_ids):
    """Accepts tokens as far as the masks let them through; returns how many."""
    for count, token_id in enumerate(token_ids):
        if state.is_complete or not state.allows(token_id):
            return count
        assert token_id in allowed(state)
        state.accept(token_id)
    return len(token_ids)


def walk(state, choose, token_ids=(), max_tokens=200, ruled_out=()):
    """Completes an answer at random, with marks and the end often; None for one that has not ended."""
    token_ids = [*token_ids]
    while not state.is_complete and len(token_ids) < max_tokens:
        tokens = [token_id for token_id in allowed(state) if token_id not in ruled_out]
        assert tokens, state.error
        weights = [30_000 if token_id == EOS else 3_000 if token_id >= 4096 else 1 for token_id in tokens]
        (token_id,) = choose.choices(tokens, weights)
        assert state.allows(token_id)
        state.accept(token_id)
        token_ids += [token_id] if token_id != EOS else []
    return token_ids if state.is_complete else None


def read(form, params, token_ids, prompt=""):
    """The answer, which is the same whole and token by token."""
    prompt_ids = form._tokenizer.encode(f"a{prompt}", add_special_tokens=False)
    whole = form.read(token_ids, params, prompt_ids)
    reader = form.reader(params, prompt_ids)
    parts = [part for token_id in token_ids for part in reader.push([token_id])] + reader.close()
    assert answer_of(parts) == whole
    return whole


def encoded(form, text):
    return form._tokenizer.encode(text, add_special_tokens=False)


def thoughts(style, choose):
    """Long reasoning with braces, documents, torn marks and other texts near the style's, and no whole mark."""
    torn = [mark[:i] for mark in STYLES[style].marks for i in range(1, len(mark))]
    others = ['{"good": true}', "{", "}", '"', "yes", "AB1", "(a)", "\n\n", " é", "<", "]", "thought", "final", *torn]
    while True:
        text = "So " + "".join(choose.choices(others, k=60)) + " I know."
        if not any(mark in text for mark in STYLES[style].marks):
            return text


@pytest.mark.parametrize(("kind", "prompt"), CASES)
@EACH_STYLE
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_content_is_the_document_with_and_without_reasoning(style, kind, structure, prompt):
    choose, (value, is_right) = random.Random(f"{style} {kind} {structure} {prompt}"), STRUCTURES[structure]
    ending = PROMPTS[prompt].get(style, "")
    form, params, beginning = begin(style, kind, SamplingParams(**{structure: value}), prompt=ending)
    is_open = style in THINKERS and prompt == "opened"
    marks = {i for i in range(beginning._parts.early.size * 32) if form._tokenizer.text_of(i).strip()[:1] in ("<", "[")}

    for thinks in (False, True) if style in THINKERS and not is_open else (is_open,):
        state, text, reasoning = beginning.begin_again(), "", None
        if thinks:
            reasoning = thoughts(style, choose)
            text = written(style, Answer("x", reasoning)).removesuffix("x").rstrip("\n")
            text = text[text.index(reasoning) :] if is_open else text
        elif style == "gpt_oss":
            text = "<|channel|>final<|message|>"
        token_ids = encoded(form, text)
        assert follow(state, token_ids) == len(token_ids)
        token_ids = walk(state, choose, token_ids, max_tokens=len(token_ids) + 150, ruled_out=marks)

        assert token_ids is not None
        answer = read(form, params, token_ids, ending)
        assert is_right(answer.content)
        assert answer.reasoning == reasoning
        assert state.fault("") is None


@pytest.mark.parametrize("kind", ["special", "added"])
@EACH_STYLE
def test_whatever_a_random_model_writes_the_content_is_the_document(style, kind):
    form, params, beginning = begin(style, kind, SamplingParams(choices=CHOICES))
    choose = random.Random(style)

    walks = [walk(beginning.begin_again(), choose) for _ in range(8)]
    answers = [read(form, params, token_ids) for token_ids in walks if token_ids is not None]

    assert len(answers) >= 4
    assert {answer.content for answer in answers} <= set(CHOICES)
    assert style not in THINKERS or any(answer.reasoning for answer in answers)


@KINDS
@EACH_THINKER
def test_reasoning_neither_ends_the_answer_nor_begins_the_document_before_its_mark(style, kind):
    form, _, state = begin(style, kind, SamplingParams(choices=CHOICES), prompt=OPENED[style])
    choose = random.Random(style)

    for _ in range(5):
        token_ids = encoded(form, thoughts(style, choose))
        assert follow(state, token_ids) == len(token_ids)
        assert EOS not in allowed(state)
        assert not state.is_complete
    rest = encoded(form, END[style])
    if style == "gpt_oss":
        rest += encoded(form, "<|start|>assistant<|channel|>final<|message|>")
    rest += encoded(form, "yes")
    assert follow(state, rest) == len(rest)
    assert EOS in allowed(state)


def test_a_message_that_goes_on_is_a_document_from_its_first_token():
    for style in STYLES:
        prompt = "<|start|>assistant<|channel|>final<|message|>" if style == "gpt_oss" else ""
        form, _, state = begin(style, "special", SamplingParams(choices=CHOICES), prompt=prompt, continues=True)

        texts = {form._tokenizer.text_of(token_id) for token_id in allowed(state)}
        assert all(any(choice.startswith(text) for choice in CHOICES) for text in texts)


def test_without_a_style_or_a_conversation_a_structure_is_as_it_was_given():
    params = SamplingParams(choices=CHOICES)
    form = AnswerForm(None, NO_TOOLS, False, tokenizer_with("hermes", "special"), RULES)

    assert form.sampling_params(params, [5]) is params
    free = SamplingParams(max_tokens=4)
    for style in STYLES:
        assert begin(style, "special", free)[1] is free


def test_a_model_that_does_not_know_the_marks_of_reasoning_begins_with_the_document():
    params = SamplingParams(choices=CHOICES)
    for kind, template, thinks in (("text", "<tool_call>", False), ("special", "", True), ("text", "</think>", True)):
        tokenizer = Tokenizer(tokenizer_with("hermes", kind)._backend, ChatTemplates({"default": template}, {}))
        form = Answers(tokenizer).form(TOOLS, style="hermes")
        state = compile_structure(compiler_of("hermes", kind), tokenizer, form.sampling_params(params, [5]))
        texts = {tokenizer.text_of(token_id)[0] for token_id in allowed(state)}

        assert ("<" in texts) == (thinks or kind == "text")  # where a call may begin
        assert follow(state, encoded(form, "<think>")) == (len(encoded(form, "<think>")) if thinks else 1)


SPELLED = {
    "hermes": ("<think>a</think>b", False),
    "qwen_coder": (" <think>a", False),
    "deepseek": ("<think>", False),
    "thinking": ("<think>", False),
    "mistral": ("a[THINK]b", False),
    "mistral_list": ('a[TOOL_CALLS] [{"name": "stop-all"', True),
    "gemma": ("a<|channel>thought", False),
    "functiongemma": ("a<start_function_call>", True),
    "gpt_oss": ("a<|end|>", False),
    "llama3": ('{"name": "stop-all", "x": 1}', True),
}


@EACH_STYLE
def test_no_document_has_text_that_is_read_as_reasoning_or_as_a_call(style):
    text, has_tools = SPELLED[style]
    use = read_tools(TOOLS) if has_tools else NO_TOOLS
    form, _, state = begin(style, "special", SamplingParams(regex="(?s:.)+"), use)
    before = encoded(form, "<|channel|>final<|message|>") if style == "gpt_oss" else []
    spelled = tokenizer_with(style, "text").encode(text, add_special_tokens=False)

    assert follow(state, before) == len(before)
    assert follow(state.begin_again(), before + spelled) < len(before + spelled)


def test_a_document_that_only_spells_a_mark_ends_with_an_error_that_says_so():
    form, _, state = begin("gemma", "special", SamplingParams(choices=["a<|channel>b"]))

    walked = []
    while tokens := allowed(state):
        state.accept(tokens[0])
        walked.append(tokens[0])

    assert form._tokenizer.decode(walked) in "a<|channel>"
    assert state.error == NO_TEXT_LEFT


@EACH_THINKER
def test_a_complete_document_is_checked_without_the_reasoning(style):
    only_date = {"type": "string", "format": "date", "pattern": "^2023-02-29$"}
    state = begin(style, "special", SamplingParams(json_schema=only_date), prompt=OPENED[style])[2]
    tokenizer = tokenizer_with(style, "special")
    rest = END[style] + ("<|start|>assistant<|channel|>final<|message|>" if style == "gpt_oss" else "")
    token_ids = tokenizer.encode(f'"2023-02-29"{rest}"2023-02-29"', add_special_tokens=False)

    assert follow(state, token_ids) == len(token_ids)
    state.accept(EOS) if not state.is_complete else None

    assert state.is_complete
    assert "date" in (state.fault("") or "")


def test_no_object_after_reasoning_has_a_key_twice():
    schema = {"type": "object", "patternProperties": {"^a_[0-1]$": {}}, "additionalProperties": False}
    form, _, state = begin("hermes", "special", SamplingParams(json_schema=schema), prompt=OPENED["hermes"])
    token_ids = encoded(form, '{"a_0": 1}</think>{"a_0": 1, "a_')

    assert follow(state, token_ids) == len(token_ids)
    assert "0" not in {form._tokenizer.text_of(token_id) for token_id in allowed(state)}


# With tools.


@KINDS
@pytest.mark.parametrize("style", TOOL_STYLES)
def test_beside_tools_an_answer_is_a_document_or_valid_calls(style, kind):
    use = read_tools(TOOLS)
    form, params, beginning = begin(style, kind, SamplingParams(json_schema=SCHEMA), use)
    choose = random.Random(style)
    document = written(style, Answer('{"good":true}'))
    made = Answer("", None, (call("get_weather", city="a", days=2),))
    wrong = Answer("", None, (call("get_weather", city="a", days=10),))

    for text in (document, written(style, made)):
        state, token_ids = beginning.begin_again(), encoded(form, text)
        assert follow(state, token_ids) == len(token_ids)
        assert state.is_complete or EOS in allowed(state)
    for text in (written(style, wrong), "It is good."):
        token_ids = encoded(form, text)
        assert follow(beginning.begin_again(), token_ids) < len(token_ids)

    head = written(style, made)
    prefix = encoded(form, head[: head.index("get_weather") + len("get_weather")])
    for begun in ([], prefix) if kind != "text" else (prefix,):
        for _ in range(4):
            state = beginning.begin_again()
            assert follow(state, begun) == len(begun)
            if (token_ids := walk(state, choose, begun, max_tokens=300)) is None:
                continue
            answer = read(form, params, token_ids)
            for one in answer.tool_calls:
                jsonschema.validate(json.loads(one.arguments), SCHEMAS[one.name])
            assert bool(answer.tool_calls) or begun == []
            if not answer.tool_calls:
                jsonschema.validate(json.loads(answer.content), SCHEMA)


@pytest.mark.parametrize("style", TOOL_STYLES)
def test_a_demanded_call_beside_a_structure_is_a_call(style):
    use = read_tools(TOOLS, "stop-all")
    form, _, state = begin(style, "special", SamplingParams(json_schema=SCHEMA), use)
    token_ids = encoded(form, written(style, Answer("", None, (call("stop-all"),))))
    document = encoded(form, written(style, Answer('{"good":true}')))

    assert follow(state.begin_again(), document) < len(document)
    assert follow(state, token_ids) == len(token_ids)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("with_document", [False, True])
@pytest.mark.parametrize("style", [name for name in TOOL_STYLES if name in THINKERS and name != "gpt_oss"])
@KINDS
def test_a_call_before_the_end_of_the_reasoning_is_valid_and_ends_the_answer(style, kind, with_document, choice):
    structure: Any = {"json_schema": SCHEMA} if with_document else {}
    use = read_tools(TOOLS, choice, parallel_tool_calls=False)
    form, params, beginning = begin(style, kind, SamplingParams(**structure), use, OPENED[style])
    text = "Hm. " + written(style, Answer("", None, (call("get_weather", city="a"),)))
    wrong = "Hm. " + written(style, Answer("", None, (call("get_weather", city="Constantinople"),)))

    token_ids, state = encoded(form, text), beginning.begin_again()
    assert follow(state, token_ids) == len(token_ids)
    assert state.is_complete or EOS in allowed(state)
    answer = read(form, params, token_ids, OPENED[style])
    assert (answer.content, answer.reasoning) == ("", "Hm.")
    assert answer.tool_calls == (call("get_weather", city="a"),)
    token_ids = encoded(form, wrong)
    assert follow(beginning.begin_again(), token_ids) < len(token_ids)


# The budget of thinking.


def ends_of(style, kind):
    """Tokens that may begin the mark of the end of reasoning, or that end it in another way."""
    marks = STYLES[style].marks if kind != "text" else ()
    tokenizer = tokenizer_with(style, kind)
    return {EOS, *(tokenizer.token_to_id(mark) for mark in marks)}


@pytest.mark.parametrize("budget", [0, 5])
@pytest.mark.parametrize("prompt", ["own", "opened"])
@pytest.mark.parametrize("structure", [None, "json_schema"])
@pytest.mark.parametrize("kind", ["special", "text"])
@EACH_THINKER
def test_reasoning_ends_at_its_budget_to_the_token(style, kind, structure, prompt, budget):
    given: Any = {} if structure is None else {structure: STRUCTURES[structure][0]}
    params = SamplingParams(**given, thinking_token_budget=budget)
    ending = PROMPTS[prompt].get(style, "")
    form, params, state = begin(style, kind, params, prompt=ending)
    choose = random.Random(f"{style}{kind}{budget}")
    head = "" if prompt == "opened" else OPENED[style].strip().removeprefix("<|start|>assistant")
    token_ids, end_ids = encoded(form, head), params.shape.end_token_ids
    never = ends_of(style, kind)

    assert follow(state, token_ids) == len(token_ids)
    for _ in range(budget):
        tokens = [i for i in allowed(state) if i not in never and "<" not in form._tokenizer.text_of(i)]
        tokens = [i for i in tokens if "[" not in form._tokenizer.text_of(i)]
        token_ids.append(choose.choice(tokens))
        state.accept(token_ids[-1])
    for end_id in end_ids:
        assert allowed(state) == [end_id]
        assert [state.allows(i) for i in (end_id, 50)] == [True, False]
        state.accept(end_id)
    token_ids += end_ids
    assert len(allowed(state)) > 1 or style == "gpt_oss"  # of which one text comes next

    if structure is not None:
        next_message = encoded(form, "<|start|>assistant<|channel|>final<|message|>" if style == "gpt_oss" else "")
        assert follow(state, next_message) == len(next_message)
        token_ids += next_message
        token_ids = walk(state, choose, token_ids, max_tokens=len(token_ids) + 150)
        assert token_ids is not None
        answer = read(form, params, token_ids, ending)
        assert STRUCTURES[structure][1](answer.content)
        assert (answer.reasoning is None) or budget > 0
    else:
        assert EOS in allowed(state)


@EACH_THINKER
def test_reasoning_that_ends_within_its_budget_is_left_alone(style):
    params = SamplingParams(thinking_token_budget=30)
    form, _, state = begin(style, "special", params, prompt=OPENED[style])
    token_ids = encoded(form, "So it is." + END[style])

    assert follow(state, token_ids) == len(token_ids)
    for _ in range(40):
        assert (
            len(allowed(state)) == tokenizer_with(style, "special").vocab_size // 32 * 32 or len(allowed(state)) > 4000
        )
        state.accept(50)


@EACH_THINKER
def test_an_answer_that_begins_with_content_has_no_reasoning_to_end(style):
    _, _, state = begin(style, "special", SamplingParams(thinking_token_budget=0))

    for _ in range(9):
        assert len(allowed(state)) > 4000
        state.accept(50)


def test_reasoning_that_begins_again_has_what_is_left_of_the_budget():
    form, _, state = begin("mistral", "special", SamplingParams(thinking_token_budget=5))
    first = encoded(form, "[THINK]")

    for count in (3, 2):
        assert follow(state, first) == 1
        for _ in range(count):
            assert len(allowed(state)) > 4000
            state.accept(50)
        end = encoded(form, "[/THINK]")
        assert follow(state, end) == 1
        state.accept(50)
    assert follow(state, first) == 1
    assert allowed(state) == encoded(form, "[/THINK]")


@pytest.mark.parametrize("style", [name for name in TOOL_STYLES if name in THINKERS and name != "gpt_oss"])
def test_no_budget_ends_a_call_within_the_reasoning(style):
    params = SamplingParams(thinking_token_budget=4, json_schema=SCHEMA)
    form, _, state = begin(style, "special", params, read_tools(TOOLS), OPENED[style])
    token_ids = encoded(form, written(style, Answer("", None, (call("get_weather", city="a", days=2),))))

    assert follow(state, token_ids) == len(token_ids)
    assert state.is_complete or EOS in allowed(state)


@pytest.mark.parametrize("style", ["hermes", "gemma", "gpt_oss"])
def test_drafts_get_the_masks_that_the_same_tokens_get_one_by_one(style):
    params = SamplingParams(choices=CHOICES, thinking_token_budget=3)
    form, _, state = begin(style, "special", params, prompt=OPENED[style])
    final = encoded(form, "<|start|>assistant<|channel|>final<|message|>") if style == "gpt_oss" else []
    drafts = [50, 51, 52, *encoded(form, END[style]), *final, *encoded(form, "yes"), EOS]
    parents = range(-1, len(drafts) - 1)

    assert state.allowed(drafts, parents) == [*range(len(drafts))]
    assert state.allowed([50, 51, 52, 53, 54], range(-1, 4)) == [0, 1, 2]
    together = state.masks(drafts, parents)

    alone = state.begin_again()
    for token_id, mask in zip(drafts, together, strict=False):
        assert (alone.mask() == mask).all()
        alone.accept(token_id)
    assert alone.is_complete
    assert not state.is_complete


def test_end_tokens_are_left_alone_with_ignore_eos_until_nothing_else_may_follow():
    params = SamplingParams(regex="[a-c]{2,3}", ignore_eos=True)
    form, _, state = begin("hermes", "special", params, prompt=OPENED["hermes"])
    token_ids = encoded(form, "Hm.</think>") + [encoded(form, one)[0] for one in "ab"]

    assert follow(state, token_ids) == len(token_ids)
    assert EOS not in allowed(state)
    state.accept(encoded(form, "c")[0])
    assert state.is_complete or allowed(state) == [EOS]


REFUSED: dict[str, Any] = {
    "no style": (None, {}, "the chat template shows none"),
    "no reasoning": ("llama3", {}, "the style llama3 has none"),
    "no reasoning either": ("functiongemma", {"regex": "a"}, "the style functiongemma has none"),
    "ngrams": ("hermes", {"no_repeat_ngram_size": 3}, "no_repeat_ngram_size may rule out the mark '</think>'"),
    "bad words": ("hermes", {"bad_words": [[7, 4096], [7, 4097]]}, "bad_words may rule out the mark '</think>'"),
    "allowed tokens": ("gemma", {"allowed_token_ids": [50]}, "allowed_token_ids may rule out the mark"),
}


@pytest.mark.parametrize(("style", "fields", "message"), REFUSED.values(), ids=REFUSED)
def test_a_budget_that_cannot_be_kept_is_refused_by_name(style, fields, message):
    tokenizer = tokenizer_with(style or "hermes", "special")
    form = AnswerForm(None if style is None else STYLES[style], NO_TOOLS, False, tokenizer, RULES)

    with pytest.raises(ValueError, match=f"thinking_token_budget=4 cannot be honoured.*{message}.*leave"):
        form.sampling_params(SamplingParams(thinking_token_budget=4, **fields), [5])


def test_a_budget_without_a_conversation_is_refused():
    tokenizer = tokenizer_with("hermes", "special")

    with pytest.raises(ValueError, match="thinking_token_budget=4 needs an answer to a conversation"):
        compile_structure(compiler_of("hermes", "special"), tokenizer, SamplingParams(thinking_token_budget=4))


def test_parameters_of_an_answer_are_the_same_after_a_way_through_json():
    _, params, state = begin("hermes", "special", SamplingParams(choices=CHOICES, thinking_token_budget=4))
    plain = SamplingParams(choices=CHOICES)

    assert isinstance(params, AnswerParams)
    assert isinstance(state, AnswerGrammar)
    for each in (params, plain):
        assert params_of(json.loads(json.dumps(asdict(each)))) == each
    assert replace(params, seed=3).shape == params.shape
