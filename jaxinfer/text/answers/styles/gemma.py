"""Gemma 4 and FunctionGemma: calls in a notation of their own, which becomes JSON.

    <|channel>thought
    …<channel|>
    <|tool_call>call:f{a:1,b:<|"|>text<|"|>,c:[true,{d:null}]}<tool_call|>
    <start_function_call>call:f{b:<escape>text<escape>}<end_function_call>

Gemma 3 has no notation: its template shows no tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.text.answers.lark import Lark, quoted
from jaxinfer.text.answers.parts import Output
from jaxinfer.text.answers.schemas import SchemaRules, not_honoured
from jaxinfer.text.answers.source import SCALAR, Marks, Reader, Source, Write
from jaxinfer.text.answers.style import (
    BlockReader,
    Functions,
    Opening,
    Style,
    Thinking,
    answer_grammar,
    begin_call,
    read_blocks,
    read_thoughts,
)
from jaxinfer.text.answers.tools import ToolUse
from jaxinfer.text.schema_check import schema_checker
from jaxinfer.validation import shown

THOUGHT, END_THOUGHT = "<|channel>", "<channel|>"
CHANNEL = "thought"
THOUGHTS = Thinking(THOUGHT, END_THOUGHT, CHANNEL, is_anywhere=True)
NAME, KEY, BARE = re.compile(r"[A-Za-z0-9_.-]*"), re.compile(r"[^:{}\[\],<>]*"), re.compile(r"[^{}\[\],<>]*")
MAX_WORD = 256  # characters of a name, a key, or a value without quotes
MAX_DEPTH = 64
# Keywords that say nothing about what is valid.
ANNOTATIONS = {
    *("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples"),
    *("format", "nullable", "readOnly", "title", "writeOnly", "x-guidance"),
}
NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
KEYWORDS = {
    "string": ("minLength", "maxLength"),
    "integer": NUMERIC,
    "number": NUMERIC,
    "boolean": (),
    "null": (),
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}


@dataclass(frozen=True)
class _Notation:
    call: str  # the mark that begins a call
    end_call: str
    quote: str  # the mark around strings
    has_thoughts: bool

    def read(self, source: Source, output: Output, functions: Functions, opening: Opening) -> Reader[None]:
        calls = {self.call: self._read_call} if functions else {}
        if opening == "reasoning":
            yield from read_thoughts(source, output, functions, END_THOUGHT, calls)
        thoughts = {THOUGHT: _thought_reader(calls)} if self.has_thoughts else {}
        yield from read_blocks(source, output, functions, {**thoughts, **calls})

    def _read_call(self, source: Source, output: Output, functions: Functions) -> Generator[None, None, None]:
        if not (yield from source.accept("call:")):
            return
        name = yield from source.word(NAME, MAX_WORD)
        if name not in functions or (yield from source.peek()) != "{":
            return
        begin_call(source, output, name)
        if (yield from self._read_value(source, output.arguments, MAX_DEPTH)):
            yield from source.accept_end(self.end_call)

    def _read_value(self, source: Source, write: Write, depth: int) -> Reader[bool]:
        """Reads a value and writes it as JSON; False if it breaks off, or is nested more than `depth` deep."""
        yield from source.skip_space()
        if (yield from source.accept(self.quote)):
            return (yield from self._read_string(source, write))
        for bracket, end in ("{}", "[]"):
            if depth and (yield from source.accept(bracket)):
                write(bracket)
                return (yield from self._read_items(source, write, bracket, end, depth - 1))
        word = (yield from source.word(BARE, MAX_WORD)).strip()
        if not word or not (yield from source.peek()):  # which may have been cut short
            return False
        write(word if SCALAR.fullmatch(word) else json.dumps(word, ensure_ascii=False))
        return True

    def _read_items(self, source: Source, write: Write, bracket: str, end: str, depth: int) -> Reader[bool]:
        yield from source.skip_space()
        is_first = True
        while not (yield from source.accept(end)):
            if not is_first:
                if not (yield from source.accept(",")):
                    return False
                write(", ")
                yield from source.skip_space()
            is_first = False
            if bracket == "{" and not (yield from self._read_key(source, write)):
                return False
            if not (yield from self._read_value(source, write, depth)):
                return False
            yield from source.skip_space()
        write(end)
        return True

    def _read_key(self, source: Source, write: Write) -> Reader[bool]:
        if (yield from source.accept(self.quote)):
            if not (yield from self._read_string(source, write)):
                return False
        else:
            key = (yield from source.word(KEY, MAX_WORD)).strip()
            if (yield from source.peek()) != ":":
                return False
            write(json.dumps(key, ensure_ascii=False))
        yield from source.skip_space()
        if not (yield from source.accept(":")):
            return False
        write(": ")
        return True

    def _read_string(self, source: Source, write: Write) -> Reader[bool]:
        write('"')
        end = yield from source.until(Marks(self.quote), lambda text: write(json.dumps(text, ensure_ascii=False)[1:-1]))
        write('"' if end else "")
        return bool(end)

    def grammar(self, lark: Lark, use: ToolUse, rules: SchemaRules, opening: Opening) -> str:
        calls = []
        for name, function in use.functions.items():
            try:
                rule = _Arguments(self.quote, lark, rules, name, function.parameters).rule()
            except ValueError as error:
                raise not_honoured(name, error) from None
            calls.append(f"{quoted(f'call:{name}')} {rule}")
        style = GEMMA if self.has_thoughts else FUNCTION_GEMMA
        return answer_grammar(lark, style, use, opening, calls, lark.mark(self.end_call))


def _thought_reader(calls: Mapping[str, BlockReader]) -> BlockReader:
    def read(source: Source, output: Output, functions: Functions) -> Generator[None, None, None]:
        source.release()
        yield from source.accept(CHANNEL)
        yield from read_thoughts(source, output, functions, END_THOUGHT, calls)

    return read


class _Arguments:
    """Makes rules of one function's schema: in this notation `llguidance` reads none by itself."""

    def __init__(self, quote: str, lark: Lark, rules: SchemaRules, name: str, schema: Mapping[str, Any]) -> None:
        self._quote = quote
        self._lark = lark
        self._rules = rules
        self._name = name
        self._schema = schema
        self._named: dict[str, str] = {}  # by the reference to each definition the name of its rule

    def rule(self) -> str:
        """Returns an expression for the arguments. Raises ValueError for keywords that it cannot honour."""
        self._rules.json(self._name, self._schema)  # which refuses what is no JSON schema
        return self._value(self._schema, MAX_DEPTH)

    def _value(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or not depth:
            raise ValueError(f"a part of it, {shown(schema)}, is no object of keywords, or nested too deeply")
        keywords = schema.keys() - ANNOTATIONS
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if "$ref" in keywords:
            known = {"$ref"}
        elif "anyOf" in keywords:
            known = {"anyOf"}
        elif keywords & {"const", "enum"}:
            known = {"const", "enum", "type"}
        elif kinds:
            known = {"type"}.union(*(KEYWORDS[kind] for kind in kinds))
        else:
            raise ValueError(f"a part of it, {shown(schema)}, has no type")
        if unknown := keywords - known:
            raise ValueError(
                f"the calls of this model have no notation for the keyword {sorted(unknown)[0]!r} in {shown(schema)}"
            )
        if "$ref" in keywords:
            return self._reference(schema["$ref"], depth)
        if "anyOf" in keywords:
            return f"({' | '.join(self._value(part, depth - 1) for part in schema['anyOf'])})"
        if keywords & {"const", "enum"}:
            fault = schema_checker(json.dumps(schema))
            values = [one for one in schema.get("enum", [schema.get("const")]) if fault(json.dumps(one)) is None]
            if not values:
                raise ValueError(f"a part of it, {shown(schema)}, admits no value")
            return f"({' | '.join(map(self._written, values))})"
        return f"({' | '.join(self._of_kind(kind, schema, depth - 1) for kind in kinds)})"

    def _reference(self, reference: Any, depth: int) -> str:
        known = self._named.get(reference)
        if known is None:
            part: Any = self._schema
            for step in str(reference).removeprefix("#").split("/")[1:]:
                part = part.get(step) if isinstance(part, Mapping) else None
            known = self._named[reference] = self._lark.new_name()
            self._lark.rule(known, self._value(part, depth - 1))
        return known

    def _written(self, value: Any) -> str:
        """Returns an expression for one value."""
        if isinstance(value, str):
            quote = self._lark.mark(self._quote)
            return f"{quote} {quoted(value)} {quote}" if value else f"{quote} {quote}"
        if isinstance(value, list | dict):
            raise ValueError("the calls of this model have no notation for lists and objects in enum and const")
        return quoted(json.dumps(value))

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "string":
            return self._string(schema.get("minLength", 0), schema.get("maxLength", ""))
        if kind == "array":
            return self._array(schema, depth)
        if kind == "object":
            return self._object(schema, depth)
        own = {name: schema[name] for name in ("type", *KEYWORDS[kind]) if name in schema} | {"type": kind}
        return self._rules.json(self._name, own)

    def _string(self, least: int, most: int | str) -> str:
        quote = self._lark.mark(self._quote)
        # Without a special token for the quote, no string has the first character of the quote.
        character = "." if self._lark.is_special(self._quote) else f"[^{self._quote[0]}]"
        text = f"/(?s:{character}{{{max(least, 1)},{most}}})/{'' if least else '?'}"
        return f"{quote} {text} {quote}" if most != 0 else f"{quote} {quote}"

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems", "")
        if most == 0:
            return quoted("[]")
        item = self._lark.named(self._value(schema.get("items"), depth))
        bounds = f"{{{max(least - 1, 0)},{most and most - 1}}}"
        further = "" if most == 1 else f"({quoted(',')} {item}){bounds}"
        items = f"{quoted('[')} {item} {further} {quoted(']')}"
        return items if least else f"({quoted('[]')} | {items})"

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        if schema.get("additionalProperties") not in (None, False, True):
            raise ValueError("the calls of this model have no notation for the keyword 'additionalProperties'")
        required = set(schema.get("required", ()))
        members = []
        for key, part in sorted(schema.get("properties", {}).items()):
            if not KEY.fullmatch(key) or not key or key != key.strip():
                raise ValueError(f"the calls of this model have no notation for the key {shown(key)}")
            members.append((key in required, f"{quoted(f'{key}:')} {self._value(part, depth)}"))
            required -= {key}
        if required:
            raise ValueError(f"{shown(sorted(required)[0])} is required, but none of the properties")
        # From the last member back: what may follow if some member came before, and if none did.
        later = first = ""
        for is_required, member in reversed(members):
            begin = self._lark.named(member)
            if is_required:
                later, first = f"{quoted(',')} {begin} {later}", f"{begin} {later}"
            else:
                later, first = _optional(f"{quoted(',')} {begin} {later}", later), _optional(f"{begin} {later}", first)
            later, first = (self._lark.named(body) for body in (later, first))
        return f"{quoted('{')} {first} {quoted('}')}"


def _optional(with_member: str, without: str) -> str:
    return f"{with_member} | {without}" if without else f"({with_member})?"


def _opening(prompt: str) -> Opening:
    begun = prompt.rfind(THOUGHT)
    is_open = begun >= 0 and prompt[begun:].removeprefix(THOUGHT).strip() in ("", CHANNEL)
    return "reasoning" if is_open else "beginning"


def _style(name: str, notation: _Notation) -> Style:
    notation_marks = (notation.call, notation.end_call, notation.quote)
    return Style(
        name=name,
        marks=(*((THOUGHT, END_THOUGHT) if notation.has_thoughts else ()), *notation_marks),
        is_used_by=lambda template: notation.call in template,
        opening=_opening if notation.has_thoughts else lambda prompt: "beginning",
        read=notation.read,
        grammar=notation.grammar,
        thinking=THOUGHTS if notation.has_thoughts else None,
        call=notation.call,
    )


GEMMA = _style("gemma", _Notation("<|tool_call>", "<tool_call|>", '<|"|>', has_thoughts=True))
FUNCTION_GEMMA = _style(
    "functiongemma", _Notation("<start_function_call>", "<end_function_call>", "<escape>", has_thoughts=False)
)
