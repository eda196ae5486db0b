"""Holds a finished document against its JSON schema by `jsonschema`, which had no part in writing it; free of jax.

`llguidance` keeps less of some schemas than they say: it takes every year for a leap year, lets `"\\u0061"` be another
key than `"a"`, and rounds numbers to floats. What it wrote is checked before it is handed out as valid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Context, Decimal, localcontext
from typing import Any

from jaxinfer.text.ecmascript_regex import to_rust
from jaxinfer.text.json_schema import Schema, is_matched, load_json, matcher_of, patterns_of
from jaxinfer.validation import cut

MAX_STEPS = 200_000  # of the keywords in one document, and of their values: a second or two
MAX_HOST_NAME, MAX_LABEL, MAX_LOCAL_PART = 253, 63, 64  # characters, by RFC 1035 and RFC 5321
ARITHMETIC = Context(prec=10_000)


def schema_error(schema: Schema) -> str | None:
    """Returns what is wrong with a JSON schema, None if it is one. It takes seconds for a large one."""
    from jsonschema import SchemaError

    draft = _draft(schema)
    try:
        draft.check_schema(schema, format_checker=None)  # patterns are in another notation than Python's
    except SchemaError as error:
        place, uri = cut(error.json_path), draft.META_SCHEMA["$schema"]
        return f'{place}: {cut(error.message)}, by {uri}; if it is of an older draft, name that by "$schema"'
    except RecursionError:
        return "it is nested too deeply"
    return None


def schema_checker(schema: str) -> Callable[[str], str | None]:
    """Returns a function that says where a document breaks a schema, None if it does not.

    `llguidance` says what matches a pattern, in time that grows as the text does; Python's `re` takes exponential time
    for some, and has another notation.
    """
    from jsonschema import ValidationError, validators
    from jsonschema.exceptions import best_match
    from referencing import Registry

    loaded = load_json(schema)
    draft = _draft(loaded)
    steps = threading.local()  # several threads may check at once

    def counted(keyword: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def run(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
            steps.count += 1 + (len(value) if isinstance(value, list | dict) else 0)
            if steps.count > MAX_STEPS:
                raise ValueError(f"that takes more than {MAX_STEPS:,} steps")
            yield from keyword(validator, value, instance, schema) or ()

        return run

    matchers = {pattern: matcher_of(to_rust(pattern)) for pattern in patterns_of(loaded)}

    def matches(pattern: str, text: str) -> bool:
        return is_matched(matchers[pattern], text)

    def of_pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, str) and not matches(pattern, instance):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")

    def of_patterns(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[Any]:
        for pattern, part in patterns.items():
            for key, value in instance.items() if isinstance(instance, dict) else ():
                if matches(pattern, key):
                    yield from validator.descend(value, part, path=key, schema_path=pattern)

    def of_others(validator: Any, part: Any, instance: Any, schema: Any) -> Iterator[Any]:
        patterns = schema.get("patternProperties", ())
        for key, value in instance.items() if isinstance(instance, dict) else ():
            if key in schema.get("properties", ()) or any(matches(pattern, key) for pattern in patterns):
                continue
            if part is False:
                yield ValidationError(f"{key!r} is not a property that it has")
            else:
                yield from validator.descend(value, part, path=key)

    def of_unique(validator: Any, is_unique: Any, instance: Any, schema: Any) -> Iterator[Any]:
        # `jsonschema` compares each item with each, which takes minutes for some documents.
        if is_unique is True and isinstance(instance, list) and len(set(map(_key, instance))) < len(instance):
            yield ValidationError(f"{instance!r} has non-unique elements")

    own = {
        "pattern": of_pattern,
        "uniqueItems": of_unique,
        "patternProperties": of_patterns,
        "additionalProperties": of_others,
        "format": _format,
    }
    keywords = {name: counted(keyword) for name, keyword in {**draft.VALIDATORS, **own}.items()}
    types = draft.TYPE_CHECKER.redefine("integer", lambda _, value: _is_integer(value))
    # Without a registry of its own `jsonschema` would fetch what a schema refers to.
    validator = validators.extend(draft, keywords, type_checker=types)(loaded, registry=Registry())

    def check(document: str) -> str | None:
        steps.count = 0
        try:
            with localcontext(ARITHMETIC):
                broken = best_match(validator.iter_errors(load_json(document)))
        except RecursionError:
            return "the output is nested too deeply to be held against json_schema"
        except Exception as error:  # whatever went wrong: what was not checked is not handed out as valid
            return f"the output could not be held against json_schema: {cut(str(error))}"
        if broken is None:
            return None
        return (
            f"the output breaks json_schema at {cut(broken.json_path)}: {cut(broken.message)}; another"
            " seed or prompt may keep it"
        )

    return check


def _key(value: Any) -> Any:
    """Returns a key that two JSON values have in common exactly if they are equal: 1 equals 1.0, and not true."""
    if isinstance(value, dict):
        return "object", frozenset((key, _key(item)) for key, item in value.items())
    return ("array", *map(_key, value)) if isinstance(value, list) else (isinstance(value, bool), value)


def _draft(schema: Any) -> Any:
    """Returns `jsonschema`'s validator class for the draft that a schema names, 2020-12 where it names none."""
    from jsonschema import Draft202012Validator, validators

    return validators.validator_for(schema, default=Draft202012Validator)


def _format(validator: Any, name: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if isinstance(instance, str) and not FORMATS.get(name, lambda _: True)(instance):
        yield ValidationError(f"{instance!r} is not a {name}")


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _has_no_leap_second(text: str) -> bool:
    return ":60" not in text  # no time zone has such minutes


def _is_host(text: str) -> bool:
    return len(text) <= MAX_HOST_NAME and max(map(len, text.split("."))) <= MAX_LABEL


def _is_email(text: str) -> bool:
    local_part, _, host = text.rpartition("@")
    return len(local_part) <= MAX_LOCAL_PART and _is_host(host)


# Those of which `llguidance` admits more than there are. Few validators know when there was a leap second.
FORMATS: dict[str, Callable[[str], bool]] = {
    "date": _is_date,
    "date-time": lambda text: _is_date(text[:10]) and _has_no_leap_second(text),
    "time": _has_no_leap_second,
    "hostname": _is_host,
    "email": _is_email,
}


def _is_integer(value: Any) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int or (isinstance(value, Decimal) and value == value.to_integral_value())
