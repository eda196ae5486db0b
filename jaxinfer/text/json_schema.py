"""Reads JSON, and rewrites a JSON schema so that `llguidance` follows it as JSON Schema means it; free of jax."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from jaxinfer.text.ecmascript_regex import to_rust
from jaxinfer.validation import cut, require_characters, shown

MAX_EXACT = 2**53  # above it `llguidance` rounds integers to floats
# Of the patterns of an object. If one of n properties has to come, `llguidance` makes more than n² items of its parser,
# and it follows 2,000.
MAX_LISTED_KEYS = 32
MAX_KEY_BYTES = 64

# The keywords that hold schemas: one, several in a list, and several by name.
ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
LISTED = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")

# Keywords that narrow a schema only together with others, or not at all.
ANNOTATIONS = frozenset(
    {
        *("$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "default", "definitions", "deprecated"),
        *("description", "examples", "readOnly", "title", "writeOnly"),
    }
)
CONSTRAINTS = frozenset(
    {
        *(*ONE, *LISTED, *NAMED, "$dynamicRef", "$ref", "const", "dependencies", "dependentRequired", "enum", "format"),
        *("exclusiveMaximum", "exclusiveMinimum", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum"),
        *("minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern", "required"),
        *("type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "contentEncoding", "contentMediaType"),
    }
) - {"$defs", "definitions"}
# Those that JSON Schema defines. To it, any other `format` is an annotation.
FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri"),
        *("iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri", "uri-reference"),
        *("uri-template", "uuid"),
    }
)
IN_URI = "#/%~!$&'()*+,;=:@?"  # beside letters and digits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Schema = dict[str, Any]


def load_json(text: str) -> Any:
    """Parses JSON without rounding a number.

    Raises ValueError also for what readers take for different things: an object with a key twice, NaN, infinity, and
    numbers beyond 64-bit floats. Raises RecursionError for what is nested deeply.
    """
    return json.loads(
        text, parse_float=_number, parse_int=_number, parse_constant=_refuse_constant, object_pairs_hook=_object
    )


def dump_json(value: Any) -> str:
    """Writes what `load_json` returned."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(name)}:{dump_json(part)}' for name, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(dump_json, value))}]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value)


def load_schema(text: str) -> Schema:
    """Parses a JSON schema. Raises ValueError for what is none, and for what `llguidance` takes for something else."""
    try:
        schema = load_json(text)
    except RecursionError:
        raise ValueError(f"json_schema={shown(text)} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"json_schema={shown(text)} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema={shown(text)} is not an object of keywords")
    if not isinstance(draft := schema.get("$schema", ""), str):
        raise ValueError(f"json_schema has $schema={shown(draft)}, which names no draft of JSON Schema")
    _require_keywords(schema)
    options = schema.get("x-guidance")
    if isinstance(options, dict) and options.get("lenient"):
        raise ValueError(
            "json_schema has the option lenient, by which keywords would be passed over; leave it out, and what cannot"
            " be kept is refused by name"
        )
    todo: list[tuple[Any, bool]] = [(schema, True)]  # values, and if they may be schemas
    while todo:
        value, may_narrow = todo.pop()
        if isinstance(value, dict):
            todo += [(name, False) for name in value]
            for name, part in value.items():
                if name not in ("default", "examples") and not (may_narrow and _is_loose(name, part)):
                    todo.append((part, may_narrow and name not in ("const", "enum")))
        elif isinstance(value, list):
            todo += [(part, may_narrow) for part in value]
        elif isinstance(value, str):
            require_characters("json_schema", value)
        elif _is_whole(value) and abs(value) > MAX_EXACT:
            raise ValueError(
                f"json_schema has the integer {cut(str(value))}, which would be rounded: integers are exact up to"
                " 2**53; give smaller ones, or strings"
            )
    return schema


def _require_keywords(schema: Schema) -> None:
    """Raises ValueError for an object that is no schema but holds one, such as OpenAI's with a name beside it."""
    others = [name for name in schema if name not in ANNOTATIONS | CONSTRAINTS and not name.startswith(("$", "x-"))]
    if others and not CONSTRAINTS & schema.keys():
        inner = next((name for name in others if isinstance(schema[name], dict)), None)
        way_out = "" if inner is None else f", which may be the value of {shown(inner)}"
        raise ValueError(
            f"json_schema has no keyword of JSON Schema, but {shown(others)}; give the schema itself{way_out}"
        )


def _is_loose(name: str, value: Any) -> bool:
    """True if a keyword is a bound that all numbers up to 2**53 are within, such as those of types of 64 bits."""
    if not isinstance(value, int | Decimal) or isinstance(value, bool):
        return False
    is_lower = name in ("minimum", "exclusiveMinimum") and value < -MAX_EXACT
    return is_lower or (name in ("maximum", "exclusiveMaximum") and value > MAX_EXACT)


def translate(schema: Schema) -> None:
    """Rewrites the keywords of a schema that `llguidance` does not take, as far as others say the same.

    * `propertyNames` becomes properties or a pattern; it goes if every name has it.
    * A bound beyond 2**53 goes if integers up to there are within it: finished documents are held against it.
    * A `format` that JSON Schema does not define goes.
    * A `$ref` is written with the characters of URIs.
    """
    for part in list(_subschemas(schema)):
        for name in [name for name, value in part.items() if _is_loose(name, value)]:
            del part[name]
        if isinstance(kind := part.get("format"), str) and kind not in FORMATS:
            del part["format"]
        if isinstance(reference := part.get("$ref"), str):
            part["$ref"] = quote(reference, safe=IN_URI)
        if "propertyNames" in part:
            _translate_names(part, schema)


def _translate_names(part: Schema, schema: Schema) -> None:
    names = part["propertyNames"]
    if isinstance(names, dict) and names.keys() - ANNOTATIONS == {"$ref"} and names["$ref"].startswith("#"):
        names = _found(schema, names["$ref"])
    if names is False:
        names = {"enum": []}
    if names is True:
        names = {}
    if not isinstance(names, dict) or "string" not in names.get("type", "string"):
        return
    keywords = {name: value for name, value in names.items() if name not in ANNOTATIONS | {"type"}}
    others, given = part.get("additionalProperties", True), dict(_parts(part, "properties"))
    if not keywords:
        del part["propertyNames"]
    elif "patternProperties" in part:
        return
    elif keywords.keys() in ({"enum"}, {"const"}):
        listed = keywords.get("enum", [keywords.get("const")])
        allowed = [name for name in listed if isinstance(name, str)]
        of_others = {} if others is False else dict.fromkeys(allowed, others)
        part["properties"] = of_others | {name: given[name] for name in allowed if name in given}
        part["additionalProperties"] = False
        del part["propertyNames"]
    elif not given and keywords.keys() <= {"minLength", "maxLength"}:
        pattern = f"^[^]{{{keywords.get('minLength', 0)},{keywords.get('maxLength', '')}}}$"
        part |= {"patternProperties": {pattern: others}, "additionalProperties": False}
        del part["propertyNames"]
    elif not given and keywords.keys() == {"pattern"}:
        part |= {"patternProperties": {str(keywords["pattern"]): others}, "additionalProperties": False}
        del part["propertyNames"]


def translate_patterns(schema: Schema) -> None:
    """Rewrites the patterns of a schema from ECMAScript's notation to that of `llguidance`.

    Raises ValueError for a pattern that it cannot follow.
    """
    for part in list(_subschemas(schema)):
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = _translated(pattern)
        if of_patterns := _parts(part, "patternProperties"):
            translated: Schema = {}
            for pattern, value in of_patterns.items():
                name = _translated(pattern)
                translated[name] = {"allOf": [translated[name], value]} if name in translated else value
            part["patternProperties"] = translated


def patterns_of(schema: Schema) -> set[str]:
    """Returns the patterns of a schema, for values and for keys."""
    patterns = set()
    for part in _subschemas(schema):
        patterns |= {part["pattern"]} if isinstance(part.get("pattern"), str) else set()
        patterns |= _parts(part, "patternProperties").keys()
    return patterns


def list_keys(schema: Schema) -> bool:
    """Makes properties of the keys of those translated patterns that match few keys; returns whether there were any.

    That changes nothing for documents. But `llguidance` writes a property once at most, and goes on to another key only
    if there is one left.
    """
    definitions = dict(_parts(schema, "$defs"))
    names = (name for i in count() if (name := f"pattern-{i}") not in definitions)
    for part in list(_subschemas(schema)):
        patterns = _parts(part, "patternProperties")
        listed: dict[str, list[Any]] = {}  # for each key the schemas of its patterns
        for pattern in list(patterns):
            keys = matched_keys(pattern, MAX_LISTED_KEYS - len(listed))
            if keys is not None:
                name = next(names)
                definitions[name] = patterns.pop(pattern)
                for key in keys:
                    listed.setdefault(key, []).append({"$ref": f"#/$defs/{name}"})
        if listed:
            given = part.get("properties", {})
            for key in given.keys() & listed.keys():
                listed[key].insert(0, given[key])
            part["properties"] = {**given, **{key: {"allOf": parts} for key, parts in listed.items()}}
    has_listed = len(definitions) > len(_parts(schema, "$defs"))
    if has_listed:
        schema["$defs"] = definitions
    return has_listed


def matched_keys(pattern: str, most: int) -> list[str] | None:
    """Returns the keys that a translated pattern matches, in order; None if they are more than `most`, or long."""
    front = [(matcher_of(pattern), b"")]
    keys: set[str] = set()
    for _ in range(MAX_KEY_BYTES):
        # Every one of these begins a key, and few keys have two spellings.
        if len(front) + len(keys) > 2 * most:
            return None
        longer = []
        for state, spelled in front:
            mask = int.from_bytes(state.compute_bitmask(), "little")
            for byte in (byte for byte in range(256) if mask >> byte & 1):
                ahead = state.deep_copy()
                ahead.consume_token(byte)
                longer.append((ahead, spelled + bytes([byte])))
        keys |= {json.loads(spelled) for state, spelled in longer if state.is_stopped()}
        front = [(state, spelled) for state, spelled in longer if not state.is_stopped()]
        if not front:
            return sorted(keys) if len(keys) <= most else None
    return None


def matcher_of(pattern: str) -> LLMatcher:
    """Returns a matcher of the spellings of the strings that a translated pattern matches, byte by byte.

    Its time grows as a string does.
    """
    from llguidance import LLMatcher

    schema = json.dumps({"type": "string", "pattern": pattern})
    return LLMatcher(byte_tokenizer(), LLMatcher.grammar_from_json_schema(schema), log_level=0)


@cache
def byte_tokenizer() -> LLTokenizer:
    """Returns the tokenizer of which each byte is a token."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def is_matched(matcher: LLMatcher, text: str) -> bool:
    """True if a pattern's matcher, which it leaves as it is, matches a text."""
    spelled = list(json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").encode())
    at = matcher.deep_copy()
    return at.try_consume_tokens(spelled) == len(spelled) and at.is_accepting()


def can_repeat_keys(schema: Schema) -> bool:
    """True if `llguidance` may write an object with a key twice: for one with keys that are not `properties`."""
    return any(map(_is_open, _subschemas(schema)))


def can_run_out_of_keys(schema: Schema) -> bool:
    """True if some object of a schema has keys by patterns alone, so that a key may have no other beside it."""
    return any(
        part.get("additionalProperties") is False and _parts(part, "patternProperties") for part in _subschemas(schema)
    )


def _is_open(schema: Schema) -> bool:
    """True if a schema by itself admits objects with keys that it does not name, or arrays with such objects."""
    # Others narrow it: they count for themselves, for they are among the subschemas as well.
    if any(name in schema for name in ("$ref", "allOf", "anyOf", "const", "enum", "oneOf")):
        return False
    kinds = schema.get("type", ("array", "object"))
    is_open_array = "array" in kinds and not isinstance(schema.get("items"), dict | bool)
    is_closed_object = schema.get("additionalProperties") is False and not _parts(schema, "patternProperties")
    return is_open_array or ("object" in kinds and not is_closed_object)


def _subschemas(schema: Schema) -> Iterator[Schema]:
    """Returns a schema and all parts of it that may apply to a part of a document; {} stands for True."""
    todo: list[Any] = [schema]
    seen = set()
    while todo:
        part = todo.pop()
        if part is True:
            yield {}
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        for name, value in part.items():
            if name in ONE:
                todo.append(value)
            if name in LISTED and isinstance(value, list):
                todo += value
            if name in NAMED:
                todo += _parts(part, name).values()
            if name == "$ref" and isinstance(value, str) and value.startswith("#/"):
                todo.append(_found(schema, value))


def _parts(schema: Schema, keyword: str) -> Schema:
    """Returns the schemas that a keyword holds by name."""
    parts = schema.get(keyword)
    return parts if isinstance(parts, dict) else {}


def _found(schema: Schema, reference: str) -> Any:
    """Returns the part of a schema that a reference within it points to, None for no part."""
    part: Any = schema
    for name in reference.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if name == "patternProperties":
            raise ValueError(f"json_schema has $ref={shown(reference)} into patternProperties; put that part in $defs")
        if isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        else:
            part = part.get(name) if isinstance(part, dict) else None
    return part


def _translated(pattern: str) -> str:
    try:
        return to_rust(pattern)
    except ValueError as error:
        raise ValueError(f"json_schema cannot be compiled: {error}") from None


def _is_whole(value: Any) -> bool:
    """True if a number is written as an integer."""
    return isinstance(value, int) or (isinstance(value, Decimal) and value.as_tuple().exponent == 0)


def _number(text: str) -> int | Decimal:
    is_zero = not set(text.lower().partition("e")[0]) & set("123456789")
    if math.isinf(float(text)) or (float(text) == 0) != is_zero:
        raise ValueError(f"the number {cut(text)} is beyond the range of 64-bit floats, as which readers take it")
    number = Decimal(0 if is_zero else text)  # whose exponent may be anything
    is_int = text.lstrip("-").isdecimal() or (abs(number) <= MAX_EXACT and number == number.to_integral_value())
    return int(number) if is_int else number


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"an object has the key {shown(name)} twice")
        members[name] = value
    return members
