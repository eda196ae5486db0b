"""The functions that an answer may call, as OpenAI's API states them: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.plain_values import plain_mapping
from jaxinfer.text.chat_template import json_objects
from jaxinfer.validation import as_bool, as_plain, cut, require, shown

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
CHOICES = ("auto", "none", "required")
# Keys beside which a tool has no others. Some clients ask for a cache, or describe what a function returns.
TOOL_KEYS = ("type", "function", "cache_control")
FUNCTION_KEYS = (
    *("type", "name", "description", "parameters", "strict"),
    *("return", "returns", "response", "cache_control"),
)
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


@dataclass(frozen=True)
class Choice:
    """A tool_choice: one of CHOICES, and the names of the functions that may be called, None for all."""

    word: str
    names: tuple[str, ...] | None = None


def read_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool = True,
) -> ToolUse:
    """Returns how an answer may use tools.

    * `tools`: mappings like {"type": "function", "function": {"name": …, "parameters": JSON schema}}, or the inner one.
    * `tool_choice`: "auto" lets the model choose (default with tools), "none" rules calls out, "required" demands one,
      and the name of a function demands a call of that one, as does {"type": "function", "function": {"name": …}}.
      {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": […]}} allows some functions.
    * `parallel_tool_calls`: if an answer may have more than one call.

    Raises ValueError for other values, for more than MAX_TOOLS tools, and for two of one name.
    """
    is_parallel = as_bool("parallel_tool_calls", parallel_tool_calls)
    choice = read_choice(tool_choice)
    if choice.word == "none" or (tools is None and choice == Choice("auto")):
        return NO_TOOLS
    if tools is None:
        raise ValueError(f"tool_choice={shown(tool_choice)} without tools; give the functions as tools")
    functions = _functions(json_objects("tools", tools))
    if choice.word == "required":
        require(bool(functions), "tools", tools, f"at least one function with tool_choice={shown(tool_choice)}")
    for name in choice.names or ():
        if name not in functions:
            raise ValueError(
                f"tool_choice={shown(tool_choice)} is none of {', '.join(CHOICES)}, nor a name in tools:"
                f" {shown([*functions])}"
            )
    allowed = functions if choice.names is None else {name: functions[name] for name in choice.names}
    return ToolUse(allowed, is_required=choice.word == "required", is_parallel=is_parallel)


def is_free(tool_choice: Any) -> bool:
    """True if a tool_choice demands no call."""
    return read_choice(tool_choice).word != "required"


def read_choice(value: Any) -> Choice:
    """Returns a tool_choice as it is meant; ValueError for what is none."""
    value = as_plain("tool_choice", value, plain_mapping)
    if value is None:
        return Choice("auto")
    if isinstance(value, str) and value:
        return Choice(value) if value in CHOICES else Choice("required", (value,))
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        return _allowed_tools(value)
    name = _named(value)
    bound = f'{", ".join(CHOICES)}, a name in tools, or {{"type": "function", "function": {{"name": …}}}}'
    require(name is not None, "tool_choice", value, bound)
    return Choice("required", (str(name),))


def _named(value: Any) -> str | None:
    """Returns the name of the function that a mapping stands for, None if it is none."""
    if not isinstance(value, Mapping) or value.get("type", "function") != "function":
        return None
    function = value.get("function", value)
    keys = value.keys() - {"type", "function"} if "function" in value else set()
    name = function.get("name") if isinstance(function, Mapping) and not keys else None
    return name if isinstance(name, str) and name and not function.keys() - {"type", "name"} else None


def _allowed_tools(value: Mapping[str, Any]) -> Choice:
    stated = value.get("allowed_tools", {name: item for name, item in value.items() if name != "type"})
    keys = value.keys() - {"type", "allowed_tools"} if "allowed_tools" in value else set()
    tools = stated.get("tools") if isinstance(stated, Mapping) and not keys else None
    names = list(map(_named, tools)) if isinstance(tools, list | tuple) else []
    is_right = bool(names) and None not in names and stated.keys() <= {"mode", "tools"}
    bound = '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [functions by name]}}'
    require(is_right and stated.get("mode", "auto") in ("auto", "required"), "tool_choice", value, bound)
    return Choice(stated.get("mode", "auto"), tuple(dict.fromkeys(str(name) for name in names)))


def _functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Function]:
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"tools has {len(tools):,} functions; give at most {MAX_TOOLS}")
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        require(tool.get("type", "function") == "function", f"{place}.type", tool.get("type"), '"function"')
        stated = tool.get("function", tool)
        require(isinstance(stated, Mapping), f"{place}.function", stated, "a mapping with name and parameters")
        _require_keys(tool, TOOL_KEYS if "function" in tool else FUNCTION_KEYS, place)
        _require_keys(stated, FUNCTION_KEYS, f"{place}.function" if "function" in tool else place)
        name = stated.get("name")
        is_name = isinstance(name, str) and NAME.fullmatch(name) is not None
        require(is_name, f"{place}.name", name, "1 to 64 letters, digits, or the characters _ . -")
        require(name not in functions, f"{place}.name", name, "another name than those before it")
        strict = stated.get("strict")
        require(strict is None or isinstance(strict, bool), f"{place}.strict", strict, "True or False")
        functions[name] = Function(name, _closed(stated.get("parameters"), f"{place}.parameters"))
    return functions


def _require_keys(values: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    for name, value in values.items():
        if name not in known and value is not None:
            way_out = "give the schema as parameters" if isinstance(value, Mapping) else "leave it out"
            raise ValueError(f"{place}.{cut(name)}: a tool has no such key, and none is ignored; {way_out}")


def _closed(schema: Any, place: str) -> Mapping[str, Any]:
    """Returns the schema of a function's parameters; a call names no others, unless the schema says that it may."""
    schema = NO_PARAMETERS if schema is None or schema == {} else schema
    is_object = isinstance(schema, Mapping) and ("$ref" in schema or schema.get("type") == "object")
    require(is_object, place, schema, 'a JSON schema with "type": "object"')
    return schema if OPEN_ENDED & schema.keys() else {"properties": {}, **schema, "additionalProperties": False}
