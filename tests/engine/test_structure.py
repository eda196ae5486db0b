"""Every output has the structure that was asked for, by independent judges, and what cannot be had is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.engine.llm import LLM
from tests.engine.engines import quick_engine, run_with_arrivals, save_small_checkpoint, small_engine

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

NAME = {"type": "string", "maxLength": 8}
SCHEMAS: dict[str, Any] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer range": {"type": "integer", "minimum": -7, "maximum": 120},
    "exclusive range": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 9},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
    "string": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "enum": {"enum": ["red", "green", 3, None, True, {"a": 1}]},
    "const": {"const": {"a": [1, 2]}},
    "types": {"type": ["boolean", "null"]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "null"}, NAME], "items": False, "minItems": 2},
    "nested arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
        "minItems": 1,
        "maxItems": 2,
    },
    "object": {"type": "object", "properties": {"a": {"type": "null"}, "b": NAME}, "required": ["b"]},
    "closed object": {
        "type": "object",
        "properties": {"name": NAME, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
    },
    "values": {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]},
    "anyOf": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1, "maximum": 3}, NAME]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]},
    "definitions": {
        "$defs": {"point": {"type": "array", "prefixItems": [{"enum": [0, 1]}] * 2, "items": False, "minItems": 2}},
        "type": "array",
        "items": {"$ref": "#/$defs/point"},
        "minItems": 1,
        "maxItems": 2,
    },
    "deep": {
        "type": "object",
        "properties": {
            "a": {"type": "object", "properties": {"b": {"type": "array", "items": {"const": 1}, "maxItems": 2}}},
            "c": {"anyOf": [{"const": "x"}, {"type": "null"}]},
        },
        "required": ["a", "c"],
    },
}


def closed(schema):
    """The schema without properties that it does not name and without spaces, so that an output has an end."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    extra = {"additionalProperties": False} if "properties" in schema else {}
    return {name: closed(part) if name not in ("const", "enum") else part for name, part in schema.items()} | extra


SCHEMAS = {name: closed(schema) | {"x-guidance": {"whitespace_flexible": False}} for name, schema in SCHEMAS.items()}
LARK = 'start: "(" (start | ITEM) ")"\nITEM: /[a-z]{1,3}/'
OTHERS = {
    "regex": ({"regex": "[A-F]{2}[0-9]{1,3}(x|yz)?"}, lambda text: re.fullmatch("[A-F]{2}[0-9]{1,3}(x|yz)?", text)),
    "choices": ({"choices": ['say "no"', "yes", "yes, sir"]}, lambda text: text in ('say "no"', "yes", "yes, sir")),
    "grammar": ({"grammar": LARK}, lambda text: re.fullmatch(r"\(+[a-z]{1,3}\)+", text) and is_balanced(text)),
}


def is_balanced(text):
    return text.count("(") == text.count(")")


@pytest.fixture(scope="module")
def bundled_llm():
    return LLM(config=EngineConfig(max_num_seqs=8, max_num_batched_tokens=64))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_every_output_of_the_bundled_model_follows_its_schema(bundled_llm, temperature):
    params = [
        SamplingParams(json_schema=schema, max_tokens=200, seed=i, temperature=temperature)
        for i, schema in enumerate([*SCHEMAS.values()] * 2)
    ]

    completions = bundled_llm.generate(["x = "] * len(params), params, show_progress=False)

    assert {c.finish_reason for c in completions} == {"stop"}
    for completion, schema in zip(completions, [*SCHEMAS.values()] * 2, strict=True):
        jsonschema.validate(json.loads(completion.text), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 3.0, "seed": 4}, {"min_tokens": 4, "seed": 1}])
def test_every_output_of_a_random_model_has_the_structure(llm, kind, fields):
    structure, is_right = OTHERS[kind]

    completion = llm.generate("a", SamplingParams(**structure, **fields, max_tokens=90), show_progress=False)[0]

    assert completion.finish_reason in ("stop", "length")
    assert is_right(completion.text) or completion.finish_reason == "length"


def test_an_end_token_ends_the_structure_even_where_it_is_ignored(llm):
    params = SamplingParams(regex="[ab]*", logit_bias={0: 100}, ignore_eos=True, temperature=0)

    completion = llm.generate("a", params, show_progress=False)[0]

    assert (completion.token_ids, completion.finish_reason) == ((0,), "stop")


def test_structures_are_the_same_in_any_company_and_after_preemption(llm, checkpoint):
    crowded = small_engine(checkpoint, max_num_seqs=3, max_num_batched_tokens=5, num_pages=5)
    params = [SamplingParams(**fields, seed=i, max_tokens=30) for i, (fields, _) in enumerate([*OTHERS.values()] * 3)]
    prompts = [[5 + i] * (4 * i + 1) for i in range(len(params))]
    alone = [llm.generate(*pair, show_progress=False)[0] for pair in zip(prompts, params, strict=True)]

    together = run_with_arrivals(crowded, prompts, params, mean_arrivals=9.0)

    assert [(c.text, c.log_probs) for c in together] == [(c.text, c.log_probs) for c in alone]


REFUSED = {
    "no JSON": ({"json_schema": '{"type"'}, "json_schema=.* cannot be compiled: .*expected"),
    "unknown type": ({"json_schema": {"type": "objct"}}, "json_schema=.* cannot be compiled: Invalid type: objct"),
    "not built": ({"json_schema": {"type": "string", "not": {"minLength": 3}}}, 'cannot be compiled: .*keys: ."not"'),
    "elsewhere": ({"json_schema": {"$ref": "http://a"}}, "cannot be compiled: .*http://a"),
    "regex": ({"regex": "(a"}, "regex='.a' cannot be compiled: .*unclosed group"),
    "grammar": ({"grammar": "start: x"}, "grammar='start: x' cannot be compiled: .*unknown name"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compiled_is_refused_with_the_reason_and_the_engine_goes_on(llm, fields, message):
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        llm.add("a", SamplingParams(**fields))

    assert not llm.has_unfinished
    assert llm.generate("a", SamplingParams(choices=["b"]), show_progress=False)[0].text == "b"


def test_a_structure_needs_a_tokenizer(tmp_path):
    mute = quick_engine(save_small_checkpoint(tmp_path / "mute", with_tokenizer=False))

    with pytest.raises(ValueError, match="regex='a' cannot be compiled: .*no tokenizer"):
        mute.add([5], SamplingParams(regex="a"))
