"""The functions that an answer may call, as OpenAI's API states them: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.plain_values import plain_mapping
from jaxinfer.text.chat_template import json_objects
from jaxinfer.validation import as_bool, as_plain, require, shown

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
CHOICES = ("auto", "none", "required")
NO_PARAMETERS = {"type": "object", "properties": {}}
# Keywords beside which `properties` need not be all that an object may have.
OPEN_ENDED = {
    *("$ref", "additionalProperties", "allOf", "anyOf", "else", "if", "oneOf", "patternProperties", "then"),
    "unevaluatedProperties",
}


@dataclass(frozen=True)
class Function:
    """A function of the request."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema of an object

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the parameters by name."""
        found = self.parameters.get("properties")
        return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True)
class ToolUse:
    """Which functions an answer may call, and if it has to."""

    functions: Mapping[str, Function]  # by name; none if the answer calls nothing
    is_required: bool = False
    is_parallel: bool = True  # if the answer may have several calls
    is_beside_document: bool = False  # if the answer may be a document instead


NO_TOOLS = ToolUse({})


def read_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool = True,
) -> ToolUse:
    """Returns how an answer may use tools.

    * `tools`: mappings like {"type": "function", "function": {"name": …, "parameters": JSON schema}}, or the inner one.
    * `tool_choice`: "auto" lets the model choose (default with tools), "none" rules calls out, "required" demands one,
      and the name of a function demands a call of that one, as does {"type": "function", "function": {"name": …}}.
    * `parallel_tool_calls`: if an answer may have more than one call.

    Raises ValueError for other values, for more than MAX_TOOLS tools, and for two of one name.
    """
    is_parallel = as_bool("parallel_tool_calls", parallel_tool_calls)
    choice = _choice(tool_choice)
    if choice == "none":
        return NO_TOOLS
    if tools is None:
        if choice in ("", "auto"):
            return NO_TOOLS
        raise ValueError(f"tool_choice={shown(tool_choice)} without tools; give the functions as tools")
    functions = _functions(json_objects("tools", tools))
    use = ToolUse(functions, is_parallel=is_parallel)
    if choice in ("", "auto"):
        return use
    require(bool(functions), "tools", tools, f"at least one function with tool_choice={shown(tool_choice)}")
    if choice == "required":
        return replace(use, is_required=True)
    if choice not in functions:
        raise ValueError(
            f"tool_choice={shown(tool_choice)} is none of {', '.join(CHOICES)}, nor a name in tools:"
            f" {shown([*functions])}"
        )
    return ToolUse({choice: functions[choice]}, is_required=True, is_parallel=is_parallel)


def is_free(tool_choice: Any) -> bool:
    """True if a tool_choice demands no call."""
    return _choice(tool_choice) in ("", "auto", "none")


def _choice(value: Any) -> str:
    """Returns the word or the name of a tool_choice, nothing for None."""
    value = as_plain("tool_choice", value, plain_mapping)
    if value is None:
        return ""
    name = value
    if isinstance(value, Mapping):
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, Mapping) else None
    bound = f'{", ".join(CHOICES)}, a name in tools, or {{"type": "function", "function": {{"name": …}}}}'
    require(isinstance(name, str) and bool(name), "tool_choice", value, bound)
    return str(name)


def _functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Function]:
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"tools has {len(tools):,} functions; give at most {MAX_TOOLS}")
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        require(tool.get("type", "function") == "function", f"{place}.type", tool.get("type"), '"function"')
        stated = tool.get("function", tool)
        require(isinstance(stated, Mapping), f"{place}.function", stated, "a mapping with name and parameters")
        name = stated.get("name")
        is_name = isinstance(name, str) and NAME.fullmatch(name) is not None
        require(is_name, f"{place}.name", name, "1 to 64 letters, digits, or the characters _ . -")
        require(name not in functions, f"{place}.name", name, "another name than those before it")
        strict = stated.get("strict")
        require(strict is None or isinstance(strict, bool), f"{place}.strict", strict, "True or False")
        functions[name] = Function(name, _closed(stated.get("parameters"), f"{place}.parameters"))
    return functions


def _closed(schema: Any, place: str) -> Mapping[str, Any]:
    """Returns the schema of a function's parameters; a call names no others, unless the schema says that it may."""
    schema = NO_PARAMETERS if schema is None or schema == {} else schema
    is_object = isinstance(schema, Mapping) and ("$ref" in schema or schema.get("type") == "object")
    require(is_object, place, schema, 'a JSON schema with "type": "object"')
    return schema if OPEN_ENDED & schema.keys() else {"properties": {}, **schema, "additionalProperties": False}
