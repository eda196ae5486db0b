"""DeepSeek V3.1: reasoning as in Qwen3, and calls between special tokens.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
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
    answer_grammar,
    ends_in,
    read_arguments,
)
from jaxinfer.text.answers.styles.hermes import END_THINK, THINK, THOUGHTS, read_thinking
from jaxinfer.text.answers.tools import ToolUse

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
NAME = re.compile(r"[A-Za-z0-9_.-]*")
MAX_NAME = 65  # characters, one more than a name has


def _read(source: Source, output: Output, functions: Functions, opening: Opening) -> Reader[None]:
    yield from read_thinking(source, output, functions, opening, {CALLS: _read_calls})


def _read_calls(source: Source, output: Output, functions: Functions) -> Generator[None, None, None]:
    while True:
        yield from source.skip_space()
        if not (yield from source.accept(CALL)):
            break
        name = yield from source.word(NAME, MAX_NAME)
        if name not in functions or not (yield from source.accept(SEPARATOR)):
            return
        if not (yield from read_arguments(source, output, name)):
            return
        yield from source.skip_space()
        if not (yield from source.accept_end(END_CALL)):
            return
        source.hold()
    if (yield from source.accept_end(END_CALLS)):
        source.release()


def _grammar(lark: Lark, use: ToolUse, rules: SchemaRules, opening: Opening) -> str:
    begin, separator, end = map(lark.mark, (CALL, SEPARATOR, END_CALL))
    calls = [
        f"{begin} {quoted(name)} {separator} {rules.json(name, function.parameters)} {end}"
        for name, function in use.functions.items()
    ]
    one = lark.rule("one_call", " | ".join(calls))
    listed = [f"{one}+" if use.is_parallel else one]
    only_one = replace(use, is_parallel=False)
    return answer_grammar(lark, DEEPSEEK, only_one, opening, listed, lark.mark(END_CALLS))


DEEPSEEK = Style(
    name="deepseek",
    marks=(THINK, END_THINK, CALLS, END_CALLS, CALL, SEPARATOR, END_CALL),
    # V3 and R1 write "function" before the separator, and a fenced block after it.
    is_used_by=lambda template: CALLS in template and SEPARATOR in template and "```json" not in template,
    opening=ends_in(THINK),
    read=_read,
    grammar=_grammar,
    thinking=THOUGHTS,
    call=CALLS,
)
