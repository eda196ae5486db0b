"""What a structure lets through, by random walks through its masks and judges that had no part in them."""

from __future__ import annotations

import ipaddress
import json
import random
import re
import threading
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import date
from decimal import Decimal, localcontext
from functools import cache

import numpy as np
import pytest

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text import grammar, structure_trial
from jaxinfer.text.grammar import NO_KEY_LEFT, GrammarCompiler
from jaxinfer.text.limited_process import LimitedProcess
from jaxinfer.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

VOCAB_SIZE, EOS = 4096, 0
COMPACT = {"x-guidance": {"whitespace_flexible": False}}


def new_compiler():
    return GrammarCompiler(Tokenizer.from_path("jaxinfer/assets/tiny"), VOCAB_SIZE, [EOS])


@pytest.fixture(scope="module")
def compiler():
    return new_compiler()


@cache
def texts():
    tokens = new_compiler()._tokens()
    return [tokens.decode_bytes([token_id]) for token_id in range(VOCAB_SIZE)]


@cache
def weights():
    """So that strings are short and often the same, and objects are not: tokens of few characters come often."""
    often = [not set(text) - set(b'ab019"\\:,') for text in texts()]
    ends = [i == EOS or not set(text) - set(b'"}]') for i, text in enumerate(texts())]
    return 1.0 + 400.0 * np.array(often) + 100.0 * np.array(ends)


def tokens_of(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE])


def walk(state, choose, max_tokens=60):
    """The text, the finish reason and the error of a model without preferences, as `Request` has them."""
    written = b""
    for _ in range(max_tokens):
        allowed = tokens_of(state.mask())
        if not len(allowed):
            return written.decode(), "exhausted" if state.error is None else "error", state.error
        (token_id,) = choose.choices(allowed.tolist(), weights()[allowed].tolist())
        state.accept(token_id)
        written += texts()[token_id] if token_id != EOS else b""
        if state.is_complete:
            fault = state.fault(written.decode())
            return written.decode(), "stop" if fault is None else "error", fault
    return written.decode("utf-8", "replace"), "length", None


def begin(compiler, **structure):
    state = compiler.compile(SamplingParams(**structure))
    assert state is not None
    return state


def walks(compiler, schema, count, max_tokens=60, seed=0):
    beginning = begin(compiler, json_schema={**COMPACT, **schema})
    choose = random.Random(seed)
    return [walk(beginning.begin_again(), choose, max_tokens) for _ in range(count)]


def unique(pairs):
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def strict_json(text):
    return json.loads(text, object_pairs_hook=unique, parse_float=Decimal, parse_constant=pytest.fail)


CLOSED = {"type": "object", "additionalProperties": False}
FLAG = {"type": "boolean"}
# Objects that `llguidance` by itself gives a key twice.
REPEATING = {
    "few keys": {**CLOSED, "patternProperties": {"^a_[0-1]$": FLAG}},
    "few keys, at least one": {**CLOSED, "patternProperties": {"^a_[0-1]$": FLAG}, "minProperties": 1},
    "few keys beside others": {
        **CLOSED,
        "properties": {"a": FLAG},
        "patternProperties": {"^[ab]$": FLAG, "^[c-e]$": {"type": "null"}},
        "required": ["b"],
    },
    "some keys": {**CLOSED, "patternProperties": {"^[a-e][0-9]$": FLAG}},
    "counted keys": {**CLOSED, "patternProperties": {"^[a-e][0-9]$": FLAG}, "minProperties": 3, "maxProperties": 5},
    "one character": {**CLOSED, "patternProperties": {"^.$": FLAG}},
    "JSON mode": {"type": "object"},
    "map": {"type": "object", "additionalProperties": FLAG},
    "small map": {"type": "object", "additionalProperties": FLAG, "minProperties": 2, "maxProperties": 4},
    "beside properties": {"type": "object", "properties": {"a": FLAG, "\n": FLAG}, "additionalProperties": FLAG},
    "beside required": {"type": "object", "required": ["b", "a"], "additionalProperties": FLAG},
    "escapes": {
        "type": "object",
        "additionalProperties": FLAG,
        "x-guidance": {"json_allow_general_unicode_escapes": True},
    },
    "in an array": {"type": "array", "items": {"type": "object", "additionalProperties": FLAG}, "minItems": 2},
    "in itself": {"type": "object", "additionalProperties": {"anyOf": [FLAG, {"$ref": "#"}]}},
    "merged": {"allOf": [{"patternProperties": {"^.{1,2}$": FLAG}}, CLOSED | {"patternProperties": {"^.{1,2}$": {}}}]},
    "white space": {"type": "object", "additionalProperties": FLAG, "x-guidance": {"whitespace_flexible": True}},
}


@pytest.mark.parametrize("schema", REPEATING.values(), ids=REPEATING)
def test_no_object_has_a_key_twice(compiler, schema):
    results = walks(compiler, schema, 40)

    complete = [text for text, reason, _ in results if reason == "stop"]
    assert {reason for _, reason, _ in results} <= {"stop", "length"}
    assert len(complete) >= 10
    assert max(text.count(":") for text in complete) > 1
    for text in complete:
        jsonschema.validate(strict_json(text), schema)


def test_a_key_is_left_out_from_where_it_would_be_a_second_one(compiler):
    state = begin(compiler, json_schema={**COMPACT, "type": "object", "additionalProperties": FLAG})
    ids = {text: token_id for token_id, text in enumerate(texts())}
    for text in (b"{", b'"', b"a", b'":', b"t", b"rue", b",", b'"', b"a"):
        assert ids[text] in tokens_of(state.mask())
        state.accept(ids[text])

    again = [ids[b'"'], ids[b'":']]

    assert not set(again) & set(tokens_of(state.mask()).tolist())
    assert ids[b"b"] in tokens_of(state.mask())
    assert state.allowed([ids[b'"'], ids[b"b"], ids[b'"']], [-1, -1, 1]) == [1, 2]
    assert [len(tokens_of(mask)) > 0 for mask in state.masks([ids[b"b"], ids[b'"']], [-1, 0])] == [True] * 3


def test_an_object_without_another_key_ends_with_the_cause(compiler):
    schema = {**CLOSED, "patternProperties": {"^a{70}$": FLAG}, "minProperties": 2}

    assert {result[1:] for result in walks(compiler, schema, 3, max_tokens=200)} == {("error", NO_KEY_LEFT)}


def test_schemas_without_the_construct_are_not_followed_a_second_time(compiler):
    for schema in (CLOSED | {"properties": {"a": FLAG}}, {"type": "integer"}, {"type": "array", "items": FLAG}):
        assert begin(compiler, json_schema=schema)._keys is None


# A spelling of a property's name that `llguidance` takes for another key.
def test_another_spelling_of_a_property_is_held_against_its_schema(compiler):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": FLAG}
    state = begin(compiler, json_schema=schema)

    assert state.fault('{"\\u0061": 1}') is None
    assert "at $.a: " in state.fault('{"\\u0061": true}')
    assert "has the key 'a' twice" in state.fault('{"a": 1, "\\u0061": 1}')


def is_time(text):
    return re.fullmatch(r"([01]\d|2[0-3])(:[0-5]\d){2}(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)", text, re.A)


def is_host(text):
    labels = text.split(".")
    return len(text) <= 253 and all(
        re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?", part) for part in labels
    )


DURATION = r"P(?!$)(\d+W|(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)?(T(?=\d)(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S))?)"
FORMATS = {
    "date": date.fromisoformat,
    "time": is_time,
    "date-time": lambda text: date.fromisoformat(text[:10]) and text[10] in "tT" and is_time(text[11:]),
    "duration": lambda text: re.fullmatch(DURATION, text, re.A),
    "email": lambda text: re.fullmatch(r"(?!\.)(?!.*\.[.@])[^@\s]{1,64}@[^@\s]+", text),
    "hostname": is_host,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": lambda text: str(uuid.UUID(text)) == text.lower(),
    "uri": lambda text: re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]*", text) and not re.search(r'[<>"{}|\\^`]', text),
}


def format_checker():
    checker = jsonschema.FormatChecker(formats=())
    for name, is_valid in FORMATS.items():
        checker.checks(name, raises=ValueError)(
            lambda value, is_valid=is_valid: not isinstance(value, str) or is_valid(value)
        )
    return checker


STRINGS = ["a", "b", "ab", "", "é", "😀", "a b", '"', "\\", "\n", "x-1", "\u0001", "/"]
NUMBERS = [0, 1, -1, 2, 5, -7, 0.5, 0.1, -0.5, 2.25, 100, 1e3, 1e-3, 0.3, 99.99, 1.0, -0.0, 2**53, 1e15, 1e21, 1e-7]
PATTERNS = ["^a", "b$", "^[ab]{1,3}$", "a|b", "^x-", "^.$", r"^\d+$", r'^[^"]*$', r"^[^\\]{1,2}$", r"^\S+$", "^(a|b)$"]


def random_value(r, depth):
    kind = r.choice(["word", "number", "string"] + ["list", "object"] * (depth > 0))
    if kind == "list":
        return [random_value(r, depth - 1) for _ in range(r.randint(0, 2))]
    if kind == "object":
        return {r.choice(STRINGS): random_value(r, depth - 1) for _ in range(r.randint(0, 2))}
    return r.choice({"word": [None, True, False], "number": NUMBERS, "string": STRINGS}[kind])


def random_schema(r, depth):
    def some(chance, **keywords):
        return keywords if r.random() < chance else {}

    def part():
        return random_schema(r, depth - 1) if depth > 0 else True

    kind = r.choice(["const", "enum", "anyOf", "oneOf", "allOf", "$ref"] + ["array", "number", "string", "object"] * 3)
    if kind == "const":
        return {"const": random_value(r, 1)}
    if kind == "enum":
        return {"enum": [random_value(r, 1) for _ in range(r.randint(1, 3))]}
    if kind == "$ref":
        return {"$ref": "#/$defs/x"}
    if kind in ("anyOf", "oneOf", "allOf"):
        return {kind: [part(), part()]}
    keywords: dict = {"type": kind}
    if kind == "number":
        keywords["type"] = r.choice(["number", "integer"])
        keywords |= some(0.5, **{r.choice(["minimum", "exclusiveMinimum"]): r.choice(NUMBERS)})
        keywords |= some(0.5, **{r.choice(["maximum", "exclusiveMaximum"]): r.choice(NUMBERS)})
        keywords |= some(0.3, multipleOf=r.choice([2, 3, 7, 0.1, 0.5, 0.25, 0.01, 1.5, 10, 0.3]))
    elif kind == "string":
        keywords |= some(0.4, minLength=r.randint(0, 3)) | some(0.6, maxLength=r.randint(0, 5))
        keywords |= some(0.3, pattern=r.choice(PATTERNS)) | some(0.2, format=r.choice(list(FORMATS)))
    elif kind == "array":
        keywords |= some(0.7, items=part()) | some(0.3, prefixItems=[part() for _ in range(r.randint(1, 2))])
        keywords |= some(0.4, minItems=r.randint(0, 2)) | {"maxItems": r.randint(0, 3)}
    else:
        keywords |= some(0.6, properties={r.choice(STRINGS): part() for _ in range(r.randint(1, 3))})
        keywords |= some(0.4, patternProperties={r.choice(PATTERNS): part() for _ in range(r.randint(1, 2))})
        keywords |= some(0.6, additionalProperties=r.choice([False, part()]))
        keywords |= some(0.3, required=sorted({r.choice(STRINGS) for _ in range(2)}))
        keywords |= some(0.25, minProperties=r.randint(0, 3)) | some(0.35, maxProperties=r.randint(0, 4))
    names = list(keywords)
    r.shuffle(names)
    return {name: keywords[name] for name in names}


DEFINITIONS = [
    {"type": "string", "maxLength": 3},
    {"type": "object", "additionalProperties": {"$ref": "#/$defs/x"}, "maxProperties": 2},
    {"type": "array", "items": {"$ref": "#/$defs/x"}, "maxItems": 2},
]


@pytest.mark.parametrize("seed", range(8))
def test_every_document_of_a_random_schema_is_valid_or_an_error(compiler, seed):
    r = random.Random(seed)
    reasons = []
    for _ in range(12):
        options = {"whitespace_flexible": r.random() < 0.2, "coerce_one_of": r.random() < 0.3}
        schema = {**random_schema(r, 2), "$defs": {"x": r.choice(DEFINITIONS)}, "x-guidance": options}
        try:
            results = walks(compiler, schema, 3, seed=seed)
        except ValueError as refusal:
            reasons.append(f"refusal of {str(refusal)[:11]}")
            continue
        exact = json.loads(json.dumps(schema), parse_float=Decimal)
        judge = jsonschema.Draft202012Validator(exact, format_checker=format_checker())
        for text, reason, _ in results:
            reasons.append(reason)
            with localcontext(prec=1_000):
                assert reason != "stop" or list(judge.iter_errors(strict_json(text))) == [], (text, schema)

    assert reasons.count("stop") > len(reasons) / 2
    assert set(reasons) <= {"stop", "length", "error", "refusal of json_schema"}


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("regex", r"[^\x00-\x{10FFFF}]", r"regex='.*' admits no output: NoExtensionBias"),
        ("grammar", "start: x\nx: x", "grammar='start: x.*' admits no output: NoExtensionBias"),
        ("json_schema", {"$ref": "#"}, "json_schema=.* admits no output: NoExtensionBias"),
        ("json_schema", {"allOf": [{"const": 1}, {"const": 2}]}, "json_schema=.* cannot be compiled: .*Unsatisfiable"),
        (
            "json_schema",
            '{"type": "null", "type": "null"}',
            "json_schema=.* is not JSON: an object has the key 'type' twice",
        ),
        ("json_schema", '{"const": 1e999}', "json_schema=.* is not JSON: the number 1e999 is beyond"),
        ("json_schema", '{"const": NaN}', "json_schema=.* is not JSON: NaN is no number of JSON"),
        (
            "json_schema",
            '{"const": "\\ud800"}',
            r"json_schema='\\ud800' is not allowed: '\\ud800' is half of a surrogate",
        ),
        (
            "json_schema",
            {"properties": {"a": {"pattern": "a(?=b)"}}},
            "json_schema cannot be compiled: the pattern 'a.*looks",
        ),
        (
            "json_schema",
            {"patternProperties": {"(": {}}},
            r"json_schema cannot be compiled: the pattern '\(' has a group",
        ),
    ],
)
def test_a_structure_that_cannot_be_had_is_refused_by_its_name(compiler, kind, value, message):
    with pytest.raises(ValueError, match=f"(?s)^{message}"):
        compiler.compile(SamplingParams(**{kind: value}))


def test_patterns_of_a_one_of_tell_its_options_apart(compiler):
    options = [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]
    schema = {"oneOf": options, "x-guidance": {"coerce_one_of": True}}

    results = walks(compiler, schema, 10)

    assert {reason for _, reason, _ in results} == {"stop", "length"}


def in_threads(count, function):
    """What a function returns for 0, 1, …, each in its own thread at the same time."""
    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(function, i) for i in range(count)]]


def test_a_structure_that_many_threads_want_is_compiled_once(monkeypatch):
    compiler, runs = new_compiler(), []
    started = threading.Barrier(8)
    run = structure_trial.Trials.run
    monkeypatch.setattr(structure_trial.Trials, "run", lambda *args: runs.append(args[1:]) or run(*args))

    def compiled(_):
        started.wait(timeout=60)
        return begin(compiler, regex="[a-c]{5}")

    states = in_threads(8, compiled)

    assert runs == [("regex", "[a-c]{5}")]
    assert len({id(state) for state in states}) == 8
    assert {walk(state, random.Random(i))[1] for i, state in enumerate(states)} == {"stop"}


def test_a_refusal_reaches_every_thread_that_waits_for_it_and_is_not_kept(monkeypatch):
    compiler = new_compiler()

    def refused(_):
        with pytest.raises(ValueError, match="regex='[(]a' cannot be compiled") as refusal:
            begin(compiler, regex="(a")
        return str(refusal.value)

    assert len(set(in_threads(4, refused))) == 1
    assert not compiler._known


def test_an_interrupted_thread_leaves_the_work_to_another(monkeypatch):
    compiler, begun, go_on = new_compiler(), threading.Event(), threading.Event()
    run = structure_trial.Trials.run

    def interrupted_once(*args):
        if begun.is_set():
            return run(*args)
        begun.set()
        go_on.wait(timeout=60)
        raise KeyboardInterrupt

    class Awaited(Future):
        def result(self, timeout=None):
            go_on.set()
            return super().result(timeout)

    monkeypatch.setattr(structure_trial.Trials, "run", interrupted_once)
    monkeypatch.setattr(grammar, "Future", Awaited)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(begin, compiler, regex="a")
        begun.wait(timeout=60)
        second = pool.submit(begin, compiler, regex="a")  # it waits for the first, which is then interrupted

        assert isinstance(first.exception(), KeyboardInterrupt)
        assert tokens_of(second.result().mask()).tolist() == [texts().index(b"a")]


def test_different_structures_compile_at_the_same_time_within_a_bound(monkeypatch):
    together = threading.Barrier(structure_trial.MAX_PROCESSES)  # it opens only if so many ask at once
    asking, most = [], []

    def ask(process, question, max_seconds):
        asking.append(process)
        most.append(len(asking))
        together.wait(timeout=60)
        asking.remove(process)
        return ['start: "a"']

    monkeypatch.setattr(LimitedProcess, "ask", ask)
    trials = structure_trial.Trials()

    in_threads(4 * structure_trial.MAX_PROCESSES, lambda i: trials.run("regex", f"{i}"))

    assert max(most) == structure_trial.MAX_PROCESSES


def test_a_state_begins_again_without_compiling_after_its_structure_was_dropped(monkeypatch):
    compiler = new_compiler()
    monkeypatch.setattr(grammar, "NUM_KNOWN", 1)
    state = begin(compiler, json_schema={**COMPACT, **REPEATING["map"]})
    first = walk(state, random.Random(5))
    begin(compiler, regex="b")
    assert len(compiler._known) == 1
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *_: pytest.fail("compiled again"))

    assert walk(state.begin_again(), random.Random(5)) == first
