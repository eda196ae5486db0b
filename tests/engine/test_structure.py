"""Every output has the structure that was asked for, by independent judges, and what cannot be had is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.drafters import NgramDrafter
from jaxinfer.engine.llm import LLM
from jaxinfer.grammar import GrammarCompiler
from tests.engine.engines import GREEDY, are_tpu_kernels_interpreted, drafts_from, run_with_arrivals
from tests.engine.schemas import SCHEMAS

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


REFUSED = {
    "no JSON": ({"json_schema": '{"type"'}, "json_schema=.* cannot be compiled: .*expected"),
    "unknown type": ({"json_schema": {"type": "objct"}}, "json_schema=.* cannot be compiled: Invalid type: objct"),
    "not built": ({"json_schema": {"type": "string", "not": {"minLength": 3}}}, 'cannot be compiled: .*keys: ."not"'),
    "elsewhere": ({"json_schema": {"$ref": "http://a"}}, "cannot be compiled: .*http://a"),
    "regex": ({"regex": "(a"}, "regex='.a' cannot be compiled: .*unclosed group"),
    "backslash": ({"regex": "ab\\"}, r"regex='ab\\\\' ends in a backslash with nothing after it; double it"),
    "const": (
        {"json_schema": {"const": 2**53 + 1}},
        "has the integer 9007199254740993, which would be rounded",
    ),
    "bound": ({"json_schema": {"type": "integer", "minimum": -(10**30)}}, "has the integer -1000000.*would be rounded"),
    "multiple": (
        {"json_schema": {"type": "integer", "multipleOf": 9999991}},
        "multipleOf=9999991, .*at most 100,000",
    ),
    "decimals": ({"json_schema": '{"multipleOf": 3.1415927}'}, "has multipleOf=3.1415927, .*at most 100,000"),
    "huge": ({"json_schema": '{"multipleOf": 1e999999999}'}, r"has multipleOf=1E.999999999, .*at most 100,000"),
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

    monkeypatch.setattr(GrammarCompiler, "_matcher", lambda *_: pytest.fail("compiled again"))

    assert [completion.text for completion in llm.generate("a", params, show_progress=False)] == texts
    assert all(re.fullmatch("[a-c]{5}[d-f]{3}", text) for text in texts)


def test_a_structure_needs_a_tokenizer(mute_llm):
    with pytest.raises(ValueError, match="regex='a' cannot be compiled: .*no tokenizer"):
        mute_llm.add([5], SamplingParams(regex="a", max_tokens=2))
