"""Llama 3.1, 3.2, 3.3 and 4: a call is a JSON object, alone or after a mark.

    {"name": "f", "parameters": {"a": 1}}
    <|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}

Its templates show one call in a message, so the grammar has one as well.
"""

from __future__ import annotations

from collections.abc import Generator

from jaxinfer.text.answers.lark import Lark, holding, quoted, regex_of
from jaxinfer.text.answers.parts import Output
from jaxinfer.text.answers.schemas import SchemaRules
from jaxinfer.text.answers.source import Reader, Source
from jaxinfer.text.answers.style import Functions, Opening, Style, no_content, read_blocks, read_named_call
from jaxinfer.text.answers.tools import ToolUse

TAG = "<|python_tag|>"


def _read(source: Source, output: Output, functions: Functions, opening: Opening) -> Reader[None]:
    if functions and opening == "beginning":
        source.hold()
        yield from source.skip_space()
        yield from _read_calls(source, output, functions)
        output.content.write(source.release())
    yield from read_blocks(source, output, functions, {TAG: _read_calls} if functions else {})


def _read_calls(source: Source, output: Output, functions: Functions) -> Generator[None, None, None]:
    while (yield from read_named_call(source, output, functions)):
        source.hold()
        yield from source.skip_space()
        if not (yield from source.accept(";")):
            return
        yield from source.skip_space()


def _grammar(lark: Lark, use: ToolUse, rules: SchemaRules, opening: Opening) -> str:
    calls = []
    for name, function in use.functions.items():
        # One terminal up to the end of the name: a shorter one would lose against the terminal of other text.
        head = lark.rule(f"HEAD_{len(calls)}", rf'/\{{ ?"name": ?"{regex_of(name)}"/')
        arguments = rules.json(name, function.parameters)
        calls.append(" ".join([head, quoted(', "parameters": '), arguments, quoted("}")]))
    call = lark.rule("call", " | ".join(calls))
    tag = lark.mark(TAG)
    is_alone = opening == "beginning"  # with nothing before it, a call needs no mark
    if use.is_required:
        return lark.start(f"{tag}{'?' if is_alone else ''} {call}")
    excluded = [_begins_call(use)] if is_alone else []
    before = lark.up_to(TAG, "call_mark", *excluded)
    content = lark.text_without("CONTENT", holding(TAG), *excluded)
    return lark.start(f"{content} | {before} {call}{f' | {call}' if is_alone else ''}")


def _begins_call(use: ToolUse) -> str:
    """Returns a pattern of texts that begin a call without its mark."""
    names = "|".join(map(regex_of, use.functions))
    return rf'\s*\{{\s*"name"\s*:\s*"({names})"(?s:.*)'


def _excluded(style: Style, use: ToolUse, opening: Opening) -> list[str]:
    alone = [_begins_call(use)] if use.functions and opening == "beginning" else []
    return [*no_content(style, use, opening), *alone]


LLAMA = Style(
    name="llama3",
    marks=(TAG,),
    is_used_by=lambda template: "<|start_header_id|>" in template and '"parameters": ' in template,
    opening=lambda prompt: "beginning",
    read=_read,
    grammar=_grammar,
    call=TAG,
    excluded=_excluded,
)
