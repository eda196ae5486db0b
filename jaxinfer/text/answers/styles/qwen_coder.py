"""Qwen3-Coder and Qwen3.5: a parameter of a call is a block of its own, and a string stands there as it is.

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    <parameter=b>
    some "text",
    of two lines
    </parameter>
    </function>
    </tool_call>

Which values are strings only the schema says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from jaxinfer.text.answers.lark import Lark, quoted, regex_of
from jaxinfer.text.answers.parts import Output
from jaxinfer.text.answers.schemas import SchemaRules, not_honoured
from jaxinfer.text.answers.source import Marks, Reader, Source
from jaxinfer.text.answers.style import Functions, Opening, Style, answer_grammar, begin_call, ends_in
from jaxinfer.text.answers.styles.hermes import CALL, END_CALL, END_THINK, THINK, THOUGHTS, read_thinking
from jaxinfer.text.answers.tools import Function, ToolUse
from jaxinfer.text.json_schema import dump_json, load_json
from jaxinfer.text.schema_check import schema_checker
from jaxinfer.validation import shown

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
NAME = re.compile(r"[^<>\n]*")
MAX_NAME = 256  # characters of the name of a function or a parameter
STRING_KEYWORDS = {"type", "minLength", "maxLength", "title", "description", "default", "examples", "format"}


def _read(source: Source, output: Output, functions: Functions, opening: Opening) -> Reader[None]:
    yield from read_thinking(source, output, functions, opening, {CALL: _read_call})


def _read_call(source: Source, output: Output, functions: Functions) -> Generator[None, None, None]:
    yield from source.skip_space()
    if not (yield from source.accept(FUNCTION)):
        return
    name = yield from source.word(NAME, MAX_NAME)
    if name not in functions or not (yield from source.accept(">")):
        return
    begin_call(source, output, name)
    output.arguments("{")
    separator = ""
    yield from source.skip_space()
    while (yield from source.accept(PARAMETER)):
        parameter = yield from source.word(NAME, MAX_NAME)
        if not (yield from source.accept(">")):
            return
        pieces: list[str] = []
        if not (yield from source.until(Marks(END_PARAMETER), pieces.append)):
            return
        text = "".join(pieces).removeprefix("\n").removesuffix("\n")
        value = _value(text, functions[name], parameter)
        output.arguments(f"{separator}{json.dumps(parameter, ensure_ascii=False)}: {value}")
        separator = ", "
        yield from source.skip_space()
    if not (yield from source.accept(END_FUNCTION)):
        return
    output.arguments("}")
    yield from source.skip_space()
    yield from source.accept_end(END_CALL)


def _value(text: str, function: Function, parameter: str) -> str:
    """Returns the JSON of a parameter: that of its text, if that is JSON and valid by the schema, or else a string."""
    string = json.dumps(text, ensure_ascii=False)
    if parameter not in function.properties:
        return string
    check = schema_checker(json.dumps(_schema_of(function, parameter)))
    try:
        value = dump_json(load_json(text))
    except (ValueError, RecursionError):
        return string
    return value if check(value) is None or check(string) is not None else string


def _schema_of(function: Function, parameter: str) -> dict[str, Any]:
    """Returns the schema of a parameter alone, with the definitions that it may refer to."""
    definitions = {name: function.parameters[name] for name in ("$defs", "definitions") if name in function.parameters}
    part = function.properties[parameter]
    return {**definitions, **part} if isinstance(part, Mapping) else definitions


def _grammar(lark: Lark, use: ToolUse, rules: SchemaRules, opening: Opening) -> str:
    calls = []
    for name, function in use.functions.items():
        try:
            parameters = _parameters(lark, rules, function)
        except ValueError as error:
            raise not_honoured(name, error) from None
        head, end = quoted(f"\n{FUNCTION}{name}>\n"), quoted(f"{END_FUNCTION}\n")
        calls.append(f"{head} {parameters} {end}")
    return answer_grammar(lark, QWEN_CODER, use, opening, calls, lark.mark(END_CALL), quoted("\n"))


def _parameters(lark: Lark, rules: SchemaRules, function: Function) -> str:
    """Returns an expression for the parameters of a call, in the order of the schema."""
    rules.json(function.name, function.parameters)  # which refuses what is no JSON schema
    known = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description"}
    if unknown := function.parameters.keys() - known - {"$schema", "x-guidance"}:
        raise ValueError(
            f"the calls of this model cannot keep the keyword {sorted(unknown)[0]!r} beside the parameters"
        )
    required = set(function.parameters.get("required", ()))
    if missing := required - function.properties.keys():
        raise ValueError(f"{shown(sorted(missing)[0])} is required, but none of the properties")
    members = []
    for name in function.properties:
        if not NAME.fullmatch(name) or not name:
            raise ValueError(f"the calls of this model cannot have a parameter {shown(name)}")
        head = quoted(f"{PARAMETER}{name}>\n")
        member = lark.named(f"{head} {_value_rule(lark, rules, function, name)}")
        members.append(member if name in required else f"{member}?")
    return " ".join(members)


def _value_rule(lark: Lark, rules: SchemaRules, function: Function, name: str) -> str:
    """Returns an expression for a value and the end of its block."""
    part = function.properties[name]
    end = f"\n{END_PARAMETER}\n"
    kinds = part.get("type") if isinstance(part, Mapping) else None
    if kinds == "string" and part.keys() & {"const", "enum"}:
        check = schema_checker(json.dumps(_schema_of(function, name)))
        values = [one for one in part.get("enum", [part.get("const")]) if one and check(json.dumps(one)) is None]
        if not values:
            raise ValueError(f"the parameter {shown(name)} admits no text")
        return f"({' | '.join(map(quoted, values))}) {quoted(end)}"
    if kinds != "string" and not (isinstance(part, Mapping) and _may_be_text(part)):
        return f"{rules.json(function.name, _schema_of(function, name))} {quoted(end)}"
    if kinds == "string" and (unknown := part.keys() - STRING_KEYWORDS):
        raise ValueError(f"the calls of this model cannot keep the keyword {sorted(unknown)[0]!r} of a string")
    least, most = (part.get("minLength", 0), part.get("maxLength", "")) if kinds == "string" else (0, "")
    # The block ends at the first mark, so the text has none.
    again = f"(?s:.*){regex_of(END_PARAMETER)}(?s:.*){regex_of(END_PARAMETER)}(?s:.*)"
    text = rf"(?s:.{{{least},{most}}})\n{regex_of(END_PARAMETER)}\n"
    rule = f"string_{least}_{most}"
    lark.rule(f"{rule}[lazy]", lark.rule(rule.upper(), f"/{text}/ & ~/{again}/"))
    return rule


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    """True if any string is valid, beside values of other types."""
    parts = schema.get("anyOf", ())
    kinds = schema.get("type", ())
    is_plain = schema.keys() <= {"type", "title", "description", "default", "examples"}
    return any(part == {"type": "string"} for part in parts) or (is_plain and "string" in kinds)


QWEN_CODER = Style(
    name="qwen_coder",
    marks=(THINK, END_THINK, CALL, END_CALL),
    is_used_by=lambda template: CALL in template and FUNCTION in template,
    opening=ends_in(THINK),
    read=_read,
    grammar=_grammar,
    thinking=THOUGHTS,
    call=CALL,
)
