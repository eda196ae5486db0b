"""Hermes 2 Pro, Qwen2.5, Qwen3 and models after them.

    <think>
    …
    </think>

    …
    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

Only an answer's beginning has reasoning: the model also writes `<think>` when it speaks of it. A call may come before
the end of the reasoning.
"""

from __future__ import annotations

from collections.abc import Generator

from jaxinfer.text.answers.lark import Lark, quoted
from jaxinfer.text.answers.parts import Output
from jaxinfer.text.answers.schemas import SchemaRules
from jaxinfer.text.answers.source import Reader, Source
from jaxinfer.text.answers.style import (
    BlockReader,
    Functions,
    Opening,
    Style,
    Thinking,
    answer_grammar,
    ends_in,
    json_call,
    read_blocks,
    read_named_call,
    read_thoughts,
)
from jaxinfer.text.answers.tools import ToolUse

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
THOUGHTS = Thinking(THINK, END_THINK)


def read_thinking(
    source: Source, output: Output, functions: Functions, opening: Opening, blocks: dict[str, BlockReader]
) -> Reader[None]:
    """Reads the reasoning at the beginning, if there is some, then content and blocks."""
    is_reasoning = opening == "reasoning"
    if opening == "beginning":
        source.hold()
        yield from source.skip_space()
        is_reasoning = yield from source.accept(THINK)
        if not is_reasoning:
            output.content.write(source.release())
        source.release()
    if is_reasoning:
        yield from read_thoughts(source, output, functions, END_THINK, blocks if functions else {})
    yield from read_blocks(source, output, functions, blocks if functions else {})


def _read(source: Source, output: Output, functions: Functions, opening: Opening) -> Reader[None]:
    yield from read_thinking(source, output, functions, opening, {CALL: _read_call})


def _read_call(source: Source, output: Output, functions: Functions) -> Generator[None, None, None]:
    yield from source.skip_space()
    if (yield from read_named_call(source, output, functions)):
        yield from source.skip_space()
        yield from source.accept_end(END_CALL)


def _grammar(lark: Lark, use: ToolUse, rules: SchemaRules, opening: Opening) -> str:
    line = quoted("\n")
    calls = [
        f"{line} {json_call(name, 'arguments', rules.json(name, function.parameters))} {line}"
        for name, function in use.functions.items()
    ]
    return answer_grammar(lark, HERMES, use, opening, calls, lark.mark(END_CALL), line)


HERMES = Style(
    name="hermes",
    marks=(THINK, END_THINK, CALL, END_CALL),
    is_used_by=lambda template: CALL in template and '"arguments"' in template,
    opening=ends_in(THINK),
    read=_read,
    grammar=_grammar,
    thinking=THOUGHTS,
    call=CALL,
)


def _read_reasoning(source: Source, output: Output, functions: Functions, opening: Opening) -> Reader[None]:
    yield from read_thinking(source, output, functions, opening, {})


# Models whose calls are in none of the styles, such as those of GLM 4.5 and MiniMax M2.
THINKING = Style(
    name="thinking",
    marks=(THINK, END_THINK),
    is_used_by=lambda template: END_THINK in template,
    opening=ends_in(THINK),
    read=_read_reasoning,
    thinking=THOUGHTS,
)
