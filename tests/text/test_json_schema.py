"""Schemas are rewritten without another meaning, and it is known whose objects may have a key twice."""

from __future__ import annotations

import json
from decimal import Decimal

import jsonschema
import pytest

from jaxinfer.text.ecmascript_regex import to_rust
from jaxinfer.text.json_schema import (
    MAX_LISTED_KEYS,
    byte_tokenizer,
    can_repeat_keys,
    can_run_out_of_keys,
    dump_json,
    list_keys,
    load_json,
    load_schema,
    matched_keys,
    patterns_of,
    translate_patterns,
)
from jaxinfer.text.schema_check import schema_checker
from jaxinfer.text.structure_trial import answers

LLMatcher = pytest.importorskip("llguidance").LLMatcher


def test_json_is_written_as_it_was_read():
    text = '{"a":[1,-2.50,1E+5,true,null,"\\u00e9\\n"],"b":{},"c":0.1000000000000000000001}'

    assert load_json(dump_json(load_json(text))) == load_json(text)
    assert load_json(text)["c"] == Decimal("0.1000000000000000000001")


REFUSED = {
    "twice": ('[{"a": 1, "b": 2, "a": 1}]', "an object has the key 'a' twice"),
    "twice by escape": ('{"a": 1, "\\u0061": 1}', "an object has the key 'a' twice"),
    "no number": ("[NaN]", "NaN is no number of JSON"),
    "infinity": ("-Infinity", "-Infinity is no number of JSON"),
    "large": ("[1e400]", "the number 1e400 is beyond the range of 64-bit floats"),
    "many digits": ("9" * 400, "is beyond the range"),
    "small": ("1e-400", "the number 1e-400 is beyond"),
    "hardly a number": ("-1.5E99999999999999999999", "is beyond"),
    "too small for decimals": ("1E-99999999999999999999", "is beyond"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_json_that_readers_take_for_different_things_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        load_json(text)


def test_a_length_may_be_written_as_a_float():
    assert dump_json(load_schema('{"maxLength": 3.0, "minLength": 2e0, "const": -0.0}')) == (
        '{"maxLength":3,"minLength":2,"const":0}'
    )


@pytest.mark.parametrize(
    "text", ["0", "-0.0e999", "0e-99999999999999999999", "1e308", "5e-324", "123456789012345678901234567890"]
)
def test_numbers_that_a_float_has_are_read_exactly(text):
    assert load_json(text) == (Decimal(text) if float(text) else 0)


A, B = {"type": "null"}, {"type": "boolean"}


def rewritten(schema):
    schema = load_schema(json.dumps(schema))
    translate_patterns(schema)
    return schema, list_keys(schema)


def test_patterns_are_translated_where_a_schema_has_them_and_nowhere_else():
    pattern = {"pattern": r"\s"}
    schema = {
        "properties": {"pattern": pattern, "patternProperties": {"items": [pattern]}},
        "patternProperties": {r"\S{99}": {"anyOf": [pattern]}},
        "const": pattern,
        "examples": [pattern],
        "$defs": {"a": pattern},
        "components": {"b": pattern, "c": pattern},
        "not": {"$ref": "#/components/b"},
    }

    new, _ = rewritten(schema)

    translated = {"pattern": to_rust(r"\s")}
    assert new["properties"] == {"pattern": translated, "patternProperties": {"items": [translated]}}
    assert new["patternProperties"] == {to_rust(r"\S{99}"): {"anyOf": [translated]}}
    assert (new["const"], new["examples"], new["$defs"]) == (pattern, [pattern], {"a": translated})
    assert new["components"] == {"b": translated, "c": pattern}
    assert patterns_of(schema) == {r"\s", r"\S{99}"}


def test_patterns_that_mean_the_same_are_both_kept():
    new, _ = rewritten({"patternProperties": {r"\d{99}": A, "[0-9]{99}": B}})

    assert new["patternProperties"] == {"[0-9]{99}": {"allOf": [A, B]}}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^a_[0-1]$", ["a_0", "a_1"]),
        (r"^(en|de|\u00e9|😀)$", ["de", "en", "é", "😀"]),
        (r'^["\\\n]$', ["\n", '"', "\\"]),
        ("^a?$", ["", "a"]),
        ("[]", []),
        ("^[a-z]$", [chr(ord("a") + i) for i in range(26)]),
        (r"^\d\d$", None),
        ("^a", None),
        ("", None),
        ("^a{99}$", None),
        ("^.$", None),
    ],
)
def test_the_keys_of_a_pattern_are_listed_if_they_are_few(pattern, expected):
    assert matched_keys(to_rust(pattern), MAX_LISTED_KEYS) == expected


def test_listed_keys_are_properties_of_all_that_holds_for_them():
    schema = {
        "properties": {"a": A},
        "patternProperties": {"^[ab]$": B, "^[bc]$": {"type": "string"}, "^x": {}},
        "$defs": {"pattern-0": A},
    }

    new, has_listed = rewritten(schema)

    first, second = {"$ref": "#/$defs/pattern-1"}, {"$ref": "#/$defs/pattern-2"}
    assert has_listed
    assert new["$defs"] == {"pattern-0": A, "pattern-1": B, "pattern-2": {"type": "string"}}
    assert new["patternProperties"] == {"^x": {}}
    assert new["properties"] == {
        "a": {"allOf": [A, first]},
        "b": {"allOf": [first, second]},
        "c": {"allOf": [second]},
    }


def test_no_more_keys_are_listed_of_an_object_than_llguidance_can_follow():
    new, has_listed = rewritten({"patternProperties": {"^[a-x]$": A, "^[A-X]$": A}})

    assert has_listed
    assert (len(new["properties"]), list(new["patternProperties"])) == (24, ["^[A-X]$"])


CLOSED = {"type": "object", "additionalProperties": False}
REPEATS = {
    "anything": ({}, True),
    "JSON mode": ({"type": "object"}, True),
    "scalars": ({"type": ["string", "integer", "boolean", "null"]}, False),
    "constant": ({"const": {"a": 1}}, False),
    "choice": ({"enum": [{"a": 1}, []]}, False),
    "properties": ({**CLOSED, "properties": {"a": A}}, False),
    "other properties": ({"type": "object", "properties": {"a": A}}, True),
    "other properties of a kind": ({**CLOSED, "additionalProperties": A}, True),
    "patterns": ({**CLOSED, "patternProperties": {"^a": A}}, True),
    "listed patterns": ({**CLOSED, "patternProperties": {"^a$": A}}, False),
    "within a property": ({**CLOSED, "properties": {"a": {"type": "object"}}}, True),
    "any property": ({**CLOSED, "properties": {"a": True}}, True),
    "any item": ({"type": "array"}, True),
    "items": ({"type": "array", "items": A}, False),
    "no items": ({"type": "array", "items": False}, False),
    "items after some": ({"type": "array", "prefixItems": [A]}, True),
    "older items": ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [A]}, True),
    "one of several": ({"anyOf": [A, CLOSED]}, False),
    "open one of several": ({"anyOf": [A, {"type": "object"}]}, True),
    "all of several": ({"allOf": [{**CLOSED, "properties": {"a": A}}, {"required": ["a"], **CLOSED}]}, False),
    "reference": ({"$ref": "#/$defs/a", "$defs": {"a": CLOSED}}, False),
    "open reference": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, True),
    "reference elsewhere": ({"$ref": "#/x/a~1b/0", "x": {"a/b": [{"type": "object"}]}}, True),
    "recursion": ({**CLOSED, "properties": {"a": {"$ref": "#"}}}, False),
}


@pytest.mark.parametrize(("schema", "expected"), REPEATS.values(), ids=REPEATS)
def test_it_is_known_whether_objects_may_have_keys_that_are_not_properties(schema, expected):
    new, _ = rewritten(schema)

    assert can_repeat_keys(new) == expected


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({**CLOSED, "patternProperties": {"^[a-z]{2}$": A}}, True),
        ({"patternProperties": {"^[a-z]{2}$": A}}, False),
        ({**CLOSED, "patternProperties": {"^[a-z]$": A}}, False),
        (CLOSED, False),
    ],
)
def test_it_is_known_whether_an_object_may_run_out_of_keys(schema, expected):
    new, _ = rewritten(schema)

    assert can_run_out_of_keys(new) == expected


def test_a_reference_into_patterns_is_refused():
    schema = {"patternProperties": {"^a": A}, "properties": {"b": {"$ref": "#/patternProperties/^a"}}}

    with pytest.raises(ValueError, match=r"\$ref='#/patternProperties/\^a' into patternProperties; put that part in"):
        rewritten(schema)


MAP = {"type": "object", "additionalProperties": {"type": "integer"}}
NAME, DEF = {"type": "string"}, {"type": "integer", "maximum": 3}
# Schemas whose keywords `llguidance` does not take as they are, and documents that it has to tell apart.
TRANSLATED = {
    "names of any text": ({**MAP, "propertyNames": NAME}, ['{"a":1}', '{"a":"b"}']),
    "names of any kind": ({**MAP, "propertyNames": True}, ['{"a":1}', '{"a":"b"}']),
    "names by reference": ({**MAP, "propertyNames": {"$ref": "#/$defs/K"}, "$defs": {"K": NAME}}, ['{"a":1}']),
    "no name": ({**MAP, "propertyNames": False}, ["{}", '{"a":1}']),
    "listed names": (
        {**MAP, "propertyNames": {"type": "string", "enum": ["a", "b"]}, "required": ["a"]},
        ['{"a":1}', '{"a":1,"b":2}', '{"b":1}', '{"a":1,"c":1}'],
    ),
    "listed names beside properties": (
        {**MAP, "propertyNames": {"const": "a"}, "properties": {"a": {"type": "null"}, "z": {}}},
        ['{"a":null}', '{"a":1}', '{"z":1}', "{}"],
    ),
    "names of a pattern": ({**MAP, "propertyNames": {"pattern": "^x"}}, ['{"x1":1}', '{"y":1}', '{"x":"a"}']),
    "names of a length": (
        {**MAP, "propertyNames": {"minLength": 1, "maxLength": 2}},
        ['{"":1}', '{"é":1}', '{"abc":1}'],
    ),
    "a path": ({"type": "string", "format": "path"}, ['"a"', "1"]),
    "a password": ({"type": "string", "format": "password", "minLength": 2}, ['"ab"', '"a"']),
    "a format of numbers": ({"type": "integer", "format": "int32"}, ["5", "1.5"]),
    "a reference with brackets": ({"$ref": "#/$defs/Foo[int]", "$defs": {"Foo[int]": DEF}}, ["3", "5"]),
    "a reference in percent": ({"$ref": "#/$defs/Foo%5Bint%5D", "$defs": {"Foo[int]": DEF}}, ["3", "5"]),
    "a reference in other letters": (
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/A<b|é> c"}}, "$defs": {"A<b|é> c": DEF}},
        ['{"a":3}', '{"a":5}'],
    ),
    "64 bits": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["5", str(-(2**63)), str(2**63 - 1)]),
    "no sign": ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["5", "-5", str(2**64 - 1)]),
    "a double": ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, ["5.5"]),
    "open bounds": ({"type": "number", "exclusiveMinimum": -(2**63), "exclusiveMaximum": 2**63}, ["5.5", str(2**60)]),
}


@pytest.mark.parametrize(("schema", "documents"), TRANSLATED.values(), ids=TRANSLATED)
def test_a_keyword_that_others_can_say_is_honoured(schema, documents):
    matcher = structure_of(schema)
    judge = jsonschema.Draft202012Validator(schema)

    for document in documents:
        assert admits(matcher, document) == judge.is_valid(json.loads(document)), document


def test_a_number_beyond_a_bound_of_64_bits_is_found_in_the_finished_document():
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}

    for document in (2**63, -(2**63) - 1):
        assert admits(structure_of(schema), str(document))
        fault = schema_checker(json.dumps(schema))(str(document))
        assert fault is not None
        assert "breaks json_schema" in fault


def structure_of(schema):
    answer = answers()(("json_schema", json.dumps(schema)))
    assert not isinstance(answer, str), answer
    matcher = LLMatcher(byte_tokenizer(), answer.grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def admits(matcher, document):
    at, spelled = matcher.deep_copy(), list(document.encode())
    return at.try_consume_tokens(spelled) == len(spelled) and at.is_accepting()


WRAPPED = {"name": "flag", "strict": True, "schema": {"enum": ["yes", "no"]}}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (WRAPPED, r"no keyword of JSON Schema, but \['name', 'strict', 'schema'\].*the value of 'schema'"),
        ({"json_schema": WRAPPED}, r"but \['json_schema'\].*the value of 'json_schema'"),
        ({"title": "T", "input_schema": {"type": "object"}}, r"but \['input_schema'\].*the value of 'input_schema'"),
        ({"propertys": 3}, r"but \['propertys'\]; give the schema itself$"),
        ({"type": "integer", "minimum": 2**60}, "which would be rounded"),
        ({"type": "integer", "maximum": -(2**60)}, "which would be rounded"),
        ({"const": {"minimum": -(2**63)}}, "which would be rounded"),
        ({"enum": [{"maximum": 2**63}]}, "which would be rounded"),
    ],
)
def test_what_says_nothing_and_what_would_be_rounded_is_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        load_schema(json.dumps(schema))


@pytest.mark.parametrize("schema", [{}, {"title": "Any"}, {"x-order": 3}, {"$defs": {"a": {}}}, {"description": "d"}])
def test_a_schema_that_admits_everything_stays_one(schema):
    assert load_schema(json.dumps(schema)) == schema
