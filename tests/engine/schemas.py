"""200 JSON schemas over the vocabulary of JSON Schema, whose documents are short whoever writes them."""

from __future__ import annotations

from itertools import islice, product
from typing import Any

LEAVES: dict[str, dict[str, Any]] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer range": {"type": "integer", "minimum": -7, "maximum": 120},
    "integer above": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 9},
    "integer below zero": {"type": "integer", "minimum": -40, "exclusiveMaximum": -3},
    "integer multiple": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
    "string lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "string of one length": {"type": "string", "minLength": 3, "maxLength": 3},
    "empty string": {"type": "string", "maxLength": 0},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-[0-9]{3}$"},
    "pattern of choices": {"type": "string", "pattern": "^(red|green|[0-9a-f]{6})$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "enum of strings": {"enum": ["red", "green", "blue"]},
    "enum of anything": {"enum": ["red", 3, None, True, [], {"a": 1}]},
    "enum of a type": {"type": "string", "enum": ["a", "b c", 'd"e', "f\\g"]},
    "const string": {"const": "x y"},
    "const number": {"const": -12},
    "const array": {"const": [1, [2, "three"]]},
    "const object": {"const": {"a": [1, 2], "b": None}},
    "types": {"type": ["boolean", "null"]},
    "types with limits": {"type": ["integer", "string"], "minimum": 1, "maximum": 99, "maxLength": 3},
    "annotations": {"title": "T", "description": "D", "default": 1, "examples": [1], "type": "integer", "enum": [1, 2]},
    "any of": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1, "maximum": 3}]},
    "any of constants": {"anyOf": [{"const": "on"}, {"const": "off"}]},
    "one of": {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]},
    "all of lengths": {"allOf": [{"type": "string", "minLength": 1}, {"maxLength": 4}]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "array of one length": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 3, "maxItems": 3},
    "empty array": {"type": "array", "maxItems": 0},
    "tuple": {"type": "array", "prefixItems": [{"type": "null"}, {"enum": [1, "a"]}], "items": False, "minItems": 2},
    "tuple and more": {
        "type": "array",
        "prefixItems": [{"const": "id"}],
        "items": {"type": "boolean"},
        "minItems": 1,
        "maxItems": 3,
    },
    "object": {"type": "object", "properties": {"a": {"type": "null"}, "b": {"enum": [1, 2]}}, "required": ["b"]},
    "object of optional values": {"type": "object", "properties": {"p": {"type": "null"}, "q": {"type": "boolean"}}},
    "empty object": {"type": "object", "properties": {}},
    "object in object": {
        "type": "object",
        "properties": {"in": {"type": "object", "properties": {"z": {"type": "null"}}, "required": ["z"]}},
        "required": ["in"],
    },
    "reference": {"$ref": "#/$defs/leaf"},
}

# Ways to use a schema within another.
WRAPPERS: dict[str, Any] = {
    "alone": lambda leaf: leaf,
    "in an array": lambda leaf: {"type": "array", "items": leaf, "minItems": 1, "maxItems": 2},
    "in an object": lambda leaf: {
        "type": "object",
        "properties": {"k": leaf, "done": {"type": "boolean"}},
        "required": ["k"],
    },
    "or nothing": lambda leaf: {
        "anyOf": [{"type": "array", "items": leaf, "minItems": 1, "maxItems": 1}, {"type": "null"}]
    },
    "by reference": lambda leaf: {
        "$defs": {"it": leaf},
        "type": "array",
        "prefixItems": [{"$ref": "#/$defs/it"}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
}


def closed(schema: Any) -> Any:
    """The schema without properties that it does not name, so that an output has an end."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    extra = {"additionalProperties": False} if "properties" in schema and schema.get("type") == "object" else {}
    literal = ("const", "enum", "default", "examples")
    return {name: part if name in literal else closed(part) for name, part in schema.items()} | extra


def complete(name: str, wrapper: str) -> dict[str, Any]:
    schema = closed(WRAPPERS[wrapper](LEAVES[name]))
    definitions = {"leaf": {"type": "integer", "minimum": 1, "maximum": 12}} | schema.pop("$defs", {})
    # Without room for white space, of which there may be any amount.
    return {"$defs": definitions, **schema, "x-guidance": {"whitespace_flexible": False}}


SCHEMAS = {f"{name} {wrapper}": complete(name, wrapper) for wrapper, name in islice(product(WRAPPERS, LEAVES), 200)}
