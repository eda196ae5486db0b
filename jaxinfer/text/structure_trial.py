"""Compiles structures for trial in processes of their own.

Some take `llguidance` minutes or gigabytes, and its own limits stop not all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from jaxinfer.text.json_schema import (
    Schema,
    byte_tokenizer,
    can_repeat_keys,
    can_run_out_of_keys,
    dump_json,
    list_keys,
    load_schema,
    translate,
    translate_patterns,
)
from jaxinfer.text.limited_process import EndedError, LimitedProcesses, LimitError
from jaxinfer.text.schema_check import schema_checker, schema_error
from jaxinfer.validation import shown

MAX_SECONDS = 2.5  # of processor time; the engine then compiles the same again, in the same time
MAX_PROCESSES = 4
TOKEN_ID = re.compile(r"<\[\d+\]>")


class Compilable(NamedTuple):
    """A structure that compiles within the limits, unless `llguidance` refuses it."""

    grammar: str  # in Lark's notation
    can_repeat_keys: bool = False  # of a JSON schema: `llguidance` may give an object a key twice
    can_run_out_of_keys: bool = False  # and may begin a key that is there already and can only end


def require_packages(kind: str) -> None:
    """Raises ValueError if a package is missing that structures of this kind need."""
    try:
        for package in ("llguidance", "jsonschema")[: 2 if kind == "json_schema" else 1]:
            import_module(package)
    except ImportError as missing:
        raise ValueError(f"{kind} needs the package {missing.name}: pip install 'jaxinfer[grammar]'") from None


class Trials:
    """Compiles structures from any number of threads, in a bounded number of processes that begin when needed."""

    def __init__(self) -> None:
        self._processes = LimitedProcesses("jaxinfer.text.structure_trial", MAX_PROCESSES)

    def run(self, kind: str, value: Any) -> Compilable:
        """Returns a structure as `llguidance` takes it, after it was compiled within the limits.

        Raises ValueError if that takes too much time or memory or ends the process, or if a text is no JSON schema, and
        BusyError if the machine is too busy.
        Other faults show where the structure is compiled for use.
        """
        try:
            answer = self._processes.ask([kind, value], MAX_SECONDS)
        except LimitError as limit:
            raise ValueError(f"{kind} takes more than {limit} to compile; make it smaller or simpler") from None
        except EndedError as end:
            raise ValueError(f"{kind} ends the process that compiles it ({end}); make it simpler") from None
        if isinstance(answer, str):
            raise ValueError(answer)
        return Compilable(*answer)


def answers() -> Callable[[tuple[str, Any]], Compilable | str]:
    """Returns the function of the process, from a kind of structure and its value to the structure or its refusal."""

    def answer(structure: tuple[str, Any]) -> Compilable | str:
        kind, value = structure
        try:
            if kind == "json_schema":
                return _compiled_schema(value)
            compilable = Compilable(_in_lark(kind, value))
            _compiles(compilable)
            return compilable
        except RecursionError:
            return f"{kind}={shown(value)} is nested too deeply"
        except ValueError as error:
            return str(error)

    return answer


def _compiled_schema(text: str) -> Compilable:
    schema = load_schema(text)
    error = schema_error(schema)
    if error is not None:
        raise ValueError(f"json_schema is not a JSON schema: {error}")
    translate(schema)
    translate_patterns(schema)
    schema_checker(text)  # it compiles the patterns once more
    plain = _in_percent_json(schema)
    # `llguidance` bounds the number of keys only if they come from patterns, or all have to come.
    if list_keys(schema) and _compiles(listed := _in_percent_json(schema)):
        return listed
    _compiles(plain)
    return plain


def _in_percent_json(schema: Schema) -> Compilable:
    return Compilable(f"start: %json {dump_json(schema)}", can_repeat_keys(schema), can_run_out_of_keys(schema))


def _in_lark(kind: str, value: Any) -> str:
    """Writes a structure other than a JSON schema in Lark's notation."""
    from llguidance import LLMatcher

    if kind == "choices":
        return "start: " + " | ".join(map(json.dumps, value))
    if kind == "regex":
        if (len(value) - len(value.rstrip("\\"))) % 2 == 1:
            raise ValueError(
                f"regex={shown(value)} ends in a backslash with nothing after it; double it or leave it out"
            )
        return json.loads(LLMatcher.grammar_from_regex(value))["grammars"][0]["lark_grammar"]
    return value


def for_bytes(grammar: str) -> str:
    """Returns a grammar for the vocabulary of bytes, which of the tokens that it names has only the special ones."""
    return TOKEN_ID.sub("<[256]>", grammar)


def _compiles(structure: Compilable) -> bool:
    """Compiles a structure for a vocabulary of bytes; false if `llguidance` refuses it."""
    from llguidance import LLMatcher

    matcher = LLMatcher(byte_tokenizer(), for_bytes(structure.grammar), log_level=0)
    if matcher.is_error():
        return False
    matcher.compute_bitmask()
    return True
