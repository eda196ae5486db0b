"""Every output has the structure that was asked for, by independent judges, and what cannot be had is refused."""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.drafters.drafters import NgramDrafter
from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.engine.llm import LLM
from jaxinfer.text import schema_check, structure_trial
from jaxinfer.text.grammar import GrammarCompiler
from jaxinfer.text.schema_check import schema_checker
from jaxinfer.text.tokenizer import Tokenizer
from tests.engine.engines import (
    EOS,
    GREEDY,
    ScriptedDrafter,
    are_tpu_kernels_interpreted,
    drafts_from,
    run_with_arrivals,
)
from tests.engine.schemas import SCHEMAS
from tests.on_demand import steps_on_demand

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

LARK = 'start: "(" (start | ITEM) ")"\nITEM: /[a-z]{1,3}/'
OTHERS = {
    "regex": ({"regex": "[A-F]{2}[0-9]{1,3}(x|yz)?"}, lambda text: re.fullmatch("[A-F]{2}[0-9]{1,3}(x|yz)?", text)),
    "choices": ({"choices": ['say "no"', "yes", "yes, sir"]}, lambda text: text in ('say "no"', "yes", "yes, sir")),
    "grammar": ({"grammar": LARK}, lambda text: re.fullmatch(r"\(+[a-z]{1,3}\)+", text) and is_balanced(text)),
}


def is_balanced(text):
    return text.count("(") == text.count(")")


@pytest.fixture(scope="module")
def bundled_llm(request):
    if are_tpu_kernels_interpreted():  # six layers of it would take a day
        return request.getfixturevalue("shared_llm")
    with steps_on_demand():
        return LLM()  # as other tests start it, so that its steps are compiled once


def of_schemas(schemas):
    """Parameters for some schemas, at temperatures 0, 1 and 2 in turn."""
    return [
        SamplingParams(json_schema=schema, max_tokens=90, seed=i, temperature=i % 3) for i, schema in enumerate(schemas)
    ]


def require_valid(completions, schemas):
    assert {c.finish_reason for c in completions} == {"stop"}
    for completion, schema in zip(completions, schemas, strict=True):
        jsonschema.validate(json.loads(completion.text), schema, format_checker=jsonschema.FormatChecker())


def test_every_output_of_the_bundled_model_follows_its_schema(bundled_llm):
    schemas = list(SCHEMAS.values())

    completions = bundled_llm.generate(["x = "] * len(schemas), of_schemas(schemas), show_progress=False)

    assert len(schemas) == 200
    require_valid(completions, schemas)


def test_every_output_of_a_random_model_follows_its_schema_with_drafts(crowded_llm):
    schemas = list(SCHEMAS.values())[::7]
    before = crowded_llm.metrics().num_drafted_tokens

    with drafts_from(crowded_llm, NgramDrafter()):
        completions = crowded_llm.generate([[9]] * len(schemas), of_schemas(schemas), show_progress=False)

    require_valid(completions, schemas)
    assert crowded_llm.metrics().num_drafted_tokens > before


FLAG, COMPACT = {"type": "boolean"}, {"x-guidance": {"whitespace_flexible": False}}
# Objects that `llguidance` by itself gives a key twice; tests/text/test_grammar.py has more.
MAPS = [
    {"type": "object", "patternProperties": {"^a_[0-1]$": FLAG}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^[ab]{1,7}$": FLAG}, "additionalProperties": False},
    {"type": "object", "properties": {"a": FLAG}, "additionalProperties": FLAG, "maxProperties": 4, "required": ["a"]},
    {"type": "object"},
]


def test_no_object_has_a_key_twice_with_drafts_and_in_any_company(llm, crowded_llm):
    params = [
        SamplingParams(json_schema={**schema, **COMPACT}, temperature=1.5, seed=i, max_tokens=60)
        for schema in MAPS
        for i in range(4)
    ]
    prompts = [[7 + i] for i in range(len(params))]
    alone = llm.generate(prompts, params, show_progress=False)
    before = crowded_llm.metrics().num_accepted_tokens

    with drafts_from(crowded_llm, ScriptedDrafter(0.7, alone)):
        together = run_with_arrivals(crowded_llm, prompts, params, mean_arrivals=2.0)

    assert [(c.text, c.log_probs) for c in together] == [(c.text, c.log_probs) for c in alone]
    assert crowded_llm.metrics().num_accepted_tokens > before
    assert {completion.finish_reason for completion in alone} <= {"stop", "length"}
    complete = [(c.text, i // 4) for i, c in enumerate(alone) if c.finish_reason == "stop"]
    assert len(complete) > 5
    for text, i in complete:
        jsonschema.validate(json.loads(text, object_pairs_hook=unique), MAPS[i])


def unique(pairs):
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def test_a_stop_string_in_the_last_token_of_a_structure_ends_it_before_that_string(llm):
    params = SamplingParams(json_schema={"const": {"a": [1]}, **COMPACT}, stop=["}"], max_tokens=60)

    completion = llm.generate("a", params, show_progress=False)[0]

    assert (completion.text, completion.finish_reason) == ('{"a":[1]', "stop")


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 3.0, "seed": 4}, {"min_tokens": 4, "seed": 1}])
def test_every_output_of_a_random_model_has_the_structure(llm, kind, fields):
    structure, is_right = OTHERS[kind]

    completion = llm.generate("a", SamplingParams(**structure, **fields, max_tokens=90), show_progress=False)[0]

    assert completion.finish_reason in ("stop", "length")
    assert is_right(completion.text) or completion.finish_reason == "length"


def test_a_structure_goes_on_as_long_as_it_may_where_end_tokens_are_ignored(llm):
    params = SamplingParams(regex="[a-c]{2,6}", n=9, seed=1, temperature=2.0, max_tokens=9)

    short, long = (llm.generate("a", replace(params, ignore_eos=each), show_progress=False) for each in (False, True))

    assert min(len(c.text) for c in short) < 6
    assert {(len(c.text), c.finish_reason) for c in long} == {(6, "stop")}


def test_structures_are_the_same_in_any_company_and_after_preemption(llm, crowded_llm):
    # Of the long ones no three fit the pool.
    structures = [*(fields for fields, _ in OTHERS.values()), *[{"regex": "[a-c]{28}"}] * 7]
    params = [SamplingParams(**fields, seed=i, max_tokens=30) for i, fields in enumerate(structures)]
    prompts = [[5 + i] * (i + 5) for i in range(len(params))]
    alone = [llm.generate(*pair, show_progress=False)[0] for pair in zip(prompts, params, strict=True)]

    before = crowded_llm.metrics().num_preemptions

    together = run_with_arrivals(crowded_llm, prompts, params, mean_arrivals=9.0)

    assert crowded_llm.metrics().num_preemptions > before
    assert [(c.text, c.log_probs) for c in together] == [(c.text, c.log_probs) for c in alone]


ONLY_DATE = {"type": "string", "format": "date", "pattern": "^2023-02-29$"}
# Schemas that leave room for one document, and whether that follows them.
ONLY_DOCUMENTS = {
    "leap year": ({"format": "date", "pattern": "^2024-02-29$"}, True),
    "no leap year": ({"format": "date", "pattern": "^2023-02-29$"}, False),
    "moment": ({"format": "date-time", "pattern": "^2023-02-28T12:00:00Z$"}, True),
    "no such day": ({"format": "date-time", "pattern": "^1900-02-29T12:00:00Z$"}, False),
    "leap second": ({"format": "date-time", "pattern": "^2023-02-28T12:00:60Z$"}, False),
    "time": ({"format": "time", "pattern": "^12:00:60Z$"}, False),
    "properties": ({"patternProperties": {"^(a|b)$": {"const": 1}}, "required": ["a", "b"], "maxProperties": 2}, True),
    "repeated key": ({"patternProperties": {"^a$": {"const": 1}}, "minProperties": 2}, False),
    "key of a pattern": (
        {"patternProperties": {"^a$": ONLY_DATE}, "required": ["a"], "maxProperties": 1},
        False,
    ),
    "other key": ({"additionalProperties": ONLY_DATE, "required": ["a"], "maxProperties": 1}, False),
    "decimals": ({"const": 0.1}, True),
    "many decimals": ('{"const": 0.1000000000000000000001}', False),
    "draft 7": ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"const": 1}], "minItems": 1}, True),
    "one of": ({"oneOf": [{"const": 1}, {"minimum": 1, "maximum": 1}]}, False),
}
TYPES = {"format": "string", "required": "object", "minProperties": "object", "items": "array", "oneOf": "integer"}


@pytest.mark.parametrize(("schema", "is_right"), ONLY_DOCUMENTS.values(), ids=ONLY_DOCUMENTS)
def test_what_breaks_its_schema_does_not_count_as_complete(llm, schema, is_right):
    if isinstance(schema, dict):
        options = {"whitespace_flexible": False, "coerce_one_of": True}
        kinds = [kind for name, kind in TYPES.items() if name in schema]
        closed = {"additionalProperties": False, "additionalItems": False, "maxItems": 1}
        schema = {**closed, **schema, "x-guidance": options} | ({"type": kinds[0]} if kinds else {})

    completion = llm.generate("a", SamplingParams(json_schema=schema, max_tokens=400), show_progress=False)[0]

    assert completion.finish_reason == ("stop" if is_right else "error"), completion.text
    assert (completion.error is None) == is_right
    assert is_right or re.match(r"the output breaks json_schema at \$|every key that json_schema", completion.error)


@pytest.mark.parametrize("skips", [True, False])
def test_the_end_token_is_no_part_of_the_document_that_is_checked(llm, skips):
    schema = {"type": "integer", "minimum": 100}  # which the end token ends, for a digit could follow
    params = SamplingParams(json_schema=schema, max_tokens=90, logit_bias={EOS: 9.0}, skip_special_tokens=skips)

    completion = llm.generate("a", params, show_progress=False)[0]

    assert (completion.finish_reason, completion.error) == ("stop", None)
    assert completion.token_ids[-1] == EOS
    assert completion.text.endswith("<end>") != skips
    jsonschema.validate(json.loads(completion.text.removesuffix("<end>")), schema)


def test_tokens_that_the_model_lacks_leave_structures_possible(tmp_path):
    shutil.copy(BUNDLED_MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"extra_special_tokens": {"image_token": "<img>"}}')
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer is not None
    grammar = GrammarCompiler(tokenizer, tokenizer.vocab_size - 1, (0,)).compile(SamplingParams(choices=["y", "no"]))
    assert grammar is not None

    allowed = np.unpackbits(grammar.mask().view(np.uint8), bitorder="little").nonzero()[0]

    assert {tokenizer.text_of(int(token_id)) for token_id in allowed} == {"y", "n", "no"}


@pytest.mark.parametrize(
    ("name", "most"), [("hostname", ".".join(["a" * 60] * 4) + ".aaaaaaaaa"), ("email", "a" * 64 + "@" + "b" * 63)]
)
def test_a_name_may_have_so_many_characters(name, most):
    check = schema_checker(json.dumps({"format": name}))

    assert check(json.dumps(most)) is None
    assert "at $: " in str(check(json.dumps(f"a{most}")))
    assert "at $: " in str(check(json.dumps(f"{most}b")))


UNIQUE = [
    ("[1, 1.0]", False),
    ("[1, true]", True),
    ('[0, false, null, ""]', True),
    ('[{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}]', False),
    ('[{"a": 1}, {"a": 2}, ["a", 1]]', True),
    ("[[1, [true]], [1, [1]]]", True),
    ('["1", 1]', True),
]


@pytest.mark.parametrize(("document", "is_unique"), UNIQUE)
def test_items_are_unique_if_no_two_are_equal_by_the_schema(document, is_unique):
    schema = {"uniqueItems": True}

    assert (schema_checker(json.dumps(schema))(document) is None) == is_unique
    assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(document)) == is_unique


def test_many_items_are_compared_in_time_that_grows_as_they_do():
    mixed = [{"a": i} if i % 2 else [i] for i in range(20_000)]  # which have no order

    assert schema_checker('{"uniqueItems": true}')(json.dumps(mixed)) is None
    assert "non-unique" in str(schema_checker('{"uniqueItems": true}')(json.dumps([*mixed, {"a": 1}])))


def test_threads_that_check_at_once_have_steps_of_their_own(monkeypatch):
    monkeypatch.setattr(schema_check, "MAX_STEPS", 20_000)
    check = schema_checker(json.dumps({"items": {"type": "integer", "minimum": 0}}))
    document = json.dumps([1] * 6_000)  # more than half of the steps

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(check, [document] * 4)) == [None] * 4


UNCHECKED = {
    "deep for json": ({}, "[" * 9_000 + "]" * 9_000, "nested too deeply"),
    "deep": ({"items": {"$ref": "#"}}, "[" * 600 + "]" * 600, "nested too deeply"),
    # Every level doubles the work of those below.
    "long": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}] * 2}}},
        "[" * 30 + "1" + "]" * 30,
        "takes more than 200,000 steps",
    ),
    "no JSON": ({}, "{", "could not be held against json_schema"),
    "elsewhere": ({"$ref": "http://a/b"}, "{}", "could not be held against json_schema"),
}


@pytest.mark.parametrize(("schema", "document", "message"), UNCHECKED.values(), ids=UNCHECKED)
def test_a_document_that_cannot_be_checked_does_not_count_as_complete(schema, document, message):
    assert message in str(schema_checker(json.dumps(schema))(document))


TOO_LARGE = {"properties": {f"p{i}": {"type": "null"} for i in range(90)}, "minProperties": 1}
# Without `}` among the tokens a comma must follow, after which there is no other key. (A short one would be listed.)
DEAD_END = {"patternProperties": {"^a{70}$": {"enum": [1]}}, "required": ["a" * 70]}


@pytest.mark.parametrize(("keywords", "reason"), [(TOO_LARGE, "Parser Error: Current row has"), (DEAD_END, "NoExt")])
def test_a_structure_that_cannot_be_followed_ends_with_the_cause(llm, keywords, reason):
    options = {"whitespace_flexible": False}
    schema = {"type": "object", "additionalProperties": False, "x-guidance": options, **keywords}
    tokens = sorted({token_id for letter in '{"a:p1,' for token_id in llm.tokenizer.encode(letter)})
    params = SamplingParams(json_schema=schema, allowed_token_ids=tokens, max_tokens=400)

    completion = llm.generate("a", params, show_progress=False)[0]

    assert completion.finish_reason == "error"
    assert f"llguidance could not follow the structure further: {reason}" in completion.error


@pytest.mark.parametrize("fields", [{"choices": ["hello"]}, {"regex": "hello"}, {"json_schema": {"const": "hello"}}])
def test_a_structure_is_spelled_in_the_tokens_that_are_allowed(llm, fields):
    text = '"hello"' if "json_schema" in fields else "hello"
    letters = tuple({token_id for letter in '"helo' for token_id in llm.tokenizer.encode(letter)})
    params = SamplingParams(**fields, allowed_token_ids=letters, max_tokens=9)

    completion = llm.generate("a", params, show_progress=False)[0]

    assert (completion.text, completion.finish_reason) == (text, "stop")


REFUSED = {
    "no JSON": ({"json_schema": '{"type"'}, "json_schema=.* is not JSON: Expecting ':'"),
    "no keywords": ({"json_schema": "[1]"}, "json_schema='.1.' is not an object of keywords"),
    "deep": ({"json_schema": '{"items":' * 9_000 + "{}" + "}" * 9_000}, "json_schema=.* is nested too deeply$"),
    "too deep": (
        {"json_schema": '{"items":' * 400 + "{}" + "}" * 400},
        "json_schema is not .*: it is nested too deeply",
    ),
    "unknown type": ({"json_schema": {"type": "objct"}}, "json_schema is not a JSON schema: .*type: 'objct' is not"),
    "older draft": ({"json_schema": {"items": [{}]}}, 'json_schema is not .*items: .*name that by "\\$schema"'),
    "no draft": ({"json_schema": {"$schema": [1]}}, r"has \$schema=\[1\], which names no draft"),
    "lenient": ({"json_schema": {"x-guidance": {"lenient": True}}}, "has the option lenient.*leave it out"),
    "not built": ({"json_schema": {"type": "string", "not": {"minLength": 3}}}, 'cannot be compiled: .*keys: ."not"'),
    "elsewhere": ({"json_schema": {"$ref": "http://a"}}, "cannot be compiled: .*http://a"),
    "regex": ({"regex": "(a"}, "regex='.a' cannot be compiled: .*unclosed group"),
    "backslash": ({"regex": "ab\\"}, r"regex='ab\\\\' ends in a backslash with nothing after it; double it"),
    "const": (
        {"json_schema": {"const": 2**53 + 1}},
        "has the integer 9007199254740993, which would be rounded",
    ),
    "digits": (
        {"json_schema": '{"const": ' + "9" * 5_000 + "}"},
        r"is not JSON: the number 9+ … 9+ \(5,000 characters\) is beyond the range of 64-bit floats",
    ),
    "bound": ({"json_schema": {"type": "integer", "minimum": 10**30}}, "has the integer 1000000.*would be rounded"),
    "long": ({"regex": "a" * 262145}, "^regex has 262,145 characters; give at most 262,144"),
    "choices": ({"choices": ["a" * 200_000, "b" * 70_000]}, "^choices has 270,000 characters; give at most 262,144"),
    "grammar": ({"grammar": "start: x"}, "grammar='start: x' cannot be compiled: .*unknown name"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compiled_is_refused_with_the_reason_and_the_engine_goes_on(llm, fields, message):
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        llm.add("a", SamplingParams(**fields))

    assert not llm.has_unfinished
    assert llm.generate("a", SamplingParams(choices=["b"]), show_progress=False)[0].text == "b"


# For each keyword that docs/structured-output.md lists as refused: the keywords that give it a meaning.
NOT_BUILT = {
    "not": {"not": {"minLength": 3}, "type": "string"},
    "if": {"if": {"minimum": 3}, "type": "integer"},
    "contains": {"contains": {"const": 1}, "type": "array"},
    "uniqueItems": {"uniqueItems": True, "type": "array"},
    "propertyNames": {"propertyNames": {"format": "date"}, "type": "object"},
    "unevaluatedItems": {"unevaluatedItems": False, "type": "array"},
    "unevaluatedProperties": {"unevaluatedProperties": False, "type": "object"},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}, "type": "object"},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}, "type": "object"},
    "format": {"format": "regex", "type": "string"},
    "oneOf": {"oneOf": [{"minimum": 0}, {"maximum": 9}], "type": "integer"},
    "patternProperties": {"patternProperties": {"^a": {"const": 1}, "b$": {"const": 2}}, "type": "object"},
    "minProperties": {"properties": {"a": {}, "b": {}}, "minProperties": 2, "required": ["a"], "type": "object"},
}


@pytest.mark.parametrize(("keyword", "schema"), NOT_BUILT.items(), ids=NOT_BUILT)
def test_what_a_schema_may_not_have_is_refused_by_name(llm, keyword, schema):
    with pytest.raises(ValueError, match=f"(?s)cannot be compiled: .*{keyword}"):
        llm.add("a", SamplingParams(json_schema=schema))


TOO_MUCH = {
    "time": {"json_schema": {"type": "string", "allOf": [{"pattern": f"a{i}"} for i in range(100)]}},
    "remainders": {"json_schema": {"type": "integer", "multipleOf": 9999991}},
    "properties": {
        "json_schema": {
            "type": "object",
            "properties": {f"p{i}": {} for i in range(2_000)},
            "minProperties": 1,
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("fields", TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_structure_that_takes_too_much_to_compile_is_refused(llm, fields, monkeypatch):
    monkeypatch.setattr(structure_trial, "MAX_SECONDS", 2)

    with pytest.raises(
        ValueError, match=r"json_schema takes more than (2 seconds|2 GiB of memory) to compile; make it"
    ):
        llm.add("a", SamplingParams(**fields))

    assert llm.generate("a", SamplingParams(choices=["b"]), show_progress=False)[0].text == "b"


def test_the_process_of_trials_ends_with_those_who_use_it():
    trials = structure_trial.Trials()
    trials.run("regex", "a")
    processes = [limited._process for limited in trials._processes._idle if limited._process is not None]

    del trials

    assert [process.poll() is not None for process in processes] == [True]


def test_a_refusal_is_short_whatever_is_refused(llm):
    bad = {"choices": None, "regex": "(" + "a" * 200_000, "json_schema": '{"type": "' + "x" * 200_000 + '"}'}
    for fields in ({name: value} for name, value in bad.items() if value):
        with pytest.raises(ValueError, match="characters") as refusal:
            llm.add("a", SamplingParams(**fields))
        assert len(str(refusal.value)) < 2_000
    with pytest.raises(ValueError, match="characters") as refusal:
        llm.add(dict.fromkeys(range(100000), "x"), GREEDY)
    assert len(str(refusal.value)) < 2_000


def test_a_structure_is_compiled_once_for_all_who_have_it(llm, monkeypatch):
    params = SamplingParams(regex="[a-c]{5}[d-f]{3}", n=3, seed=0, max_tokens=20)
    texts = [completion.text for completion in llm.generate("a", params, show_progress=False)]

    monkeypatch.setattr(GrammarCompiler, "_compiled", lambda *_: pytest.fail("compiled again"))

    assert [completion.text for completion in llm.generate("a", params, show_progress=False)] == texts
    assert all(re.fullmatch("[a-c]{5}[d-f]{3}", text) for text in texts)


def test_a_structure_needs_a_tokenizer(mute_llm):
    with pytest.raises(ValueError, match="regex='a' needs a tokenizer, which this checkpoint does not have"):
        mute_llm.add([5], SamplingParams(regex="a", max_tokens=2))
