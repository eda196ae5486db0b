"""Mistral's models: a list of calls, and since 2025 one mark for each call.

    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]a1b2c3d4e[ARGS]{}

Both are read, and which of them an answer has to have is that of the template. Reasoning is between [THINK] and
[/THINK].
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import replace

from jaxinfer.text.answers.lark import Lark, quoted
from jaxinfer.text.answers.parts import Output
from jaxinfer.text.answers.schemas import SchemaRules
from jaxinfer.text.answers.source import Reader, Source
from jaxinfer.text.answers.style import (
    Functions,
    Opening,
    Style,
    Thinking,
    answer_grammar,
    ends_in,
    json_call,
    read_arguments,
    read_blocks,
    read_named_call,
    read_thoughts,
    thoughts_up_to,
)
from jaxinfer.text.answers.tools import ToolUse

THINK, END_THINK = "[THINK]", "[/THINK]"
CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
THOUGHTS = Thinking(THINK, END_THINK, is_anywhere=True)
MARKS = (THINK, END_THINK, CALLS, CALL_ID, ARGUMENTS)
NAME, ID = re.compile(r"[A-Za-z0-9_.-]*"), re.compile(r"[A-Za-z0-9]*")
MAX_NAME = 65  # characters, one more than a name has


def _read(source: Source, output: Output, functions: Functions, opening: Opening) -> Reader[None]:
    calls = {CALLS: _read_calls} if functions else {}
    if opening == "reasoning":
        yield from read_thoughts(source, output, functions, END_THINK, calls)
    yield from read_blocks(source, output, functions, {THINK: thoughts_up_to(END_THINK, calls), **calls})


def _read_calls(source: Source, output: Output, functions: Functions) -> Generator[None, None, None]:
    yield from source.skip_space()
    if (yield from source.accept("[")):
        yield from _read_list(source, output, functions)
        return
    name = yield from source.word(NAME, MAX_NAME)
    call_id = None
    if (yield from source.accept(CALL_ID)):
        call_id = yield from source.word(ID, MAX_NAME)
    yield from source.accept(ARGUMENTS)
    if name in functions:
        yield from read_arguments(source, output, name, call_id)


def _read_list(source: Source, output: Output, functions: Functions) -> Reader[None]:
    while True:
        yield from source.skip_space()
        if not (yield from read_named_call(source, output, functions)):
            return
        yield from source.skip_space()
        if not (yield from source.accept(",")):
            break
        source.hold(",")
    yield from source.accept_end("]")


def _grammar(lark: Lark, use: ToolUse, rules: SchemaRules, opening: Opening) -> str:
    calls = []
    for name, function in use.functions.items():
        has_id = f"({lark.mark(CALL_ID)} /[A-Za-z0-9]{{9}}/)? " if lark.is_special(CALL_ID) else ""
        arguments = rules.json(name, function.parameters)
        calls.append(f"{quoted(name)} {has_id}{lark.mark(ARGUMENTS)} {arguments}")
    return answer_grammar(lark, MISTRAL, use, opening, calls)


def _list_grammar(lark: Lark, use: ToolUse, rules: SchemaRules, opening: Opening) -> str:
    calls = [json_call(name, "arguments", rules.json(name, f.parameters)) for name, f in use.functions.items()]
    one = lark.rule("one_call", " | ".join(calls))
    several = f"({quoted(', ')} {one})*" if use.is_parallel else ""
    listed = [f"{quoted(' ')}? {quoted('[')} {one} {several} {quoted(']')}"]
    only_one = replace(use, is_parallel=False)
    return answer_grammar(lark, MISTRAL_LIST, only_one, opening, listed)


MISTRAL = Style(
    name="mistral",
    marks=MARKS,
    is_used_by=lambda template: CALLS in template and ARGUMENTS in template,
    opening=ends_in(THINK),
    read=_read,
    grammar=_grammar,
    thinking=THOUGHTS,
    call=CALLS,
)
MISTRAL_LIST = replace(
    MISTRAL, name="mistral_list", is_used_by=lambda template: CALLS in template, grammar=_list_grammar
)
