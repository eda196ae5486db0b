"""What a configuration checks its fields with: every refusal names the field, the value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

# The device computes with 32 bits.
MAX_INT, MAX_FLOAT = 2**31 - 1, 3.4e38
MAX_SHOWN = 200  # characters of a value in an error


def shown(value: Any) -> str:
    """Returns a value as it reads in an error, cut where it is long."""
    return cut(repr(value))


def cut(text: str) -> str:
    """Returns a text as it reads in an error: without its middle where it is long."""
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[: MAX_SHOWN // 2]} … {text[-MAX_SHOWN // 4 :]} ({len(text):,} characters)"


def require(condition: bool, name: str, value: Any, requirement: str) -> None:
    if not condition:
        raise ValueError(f"{name}={shown(value)} is not allowed: {name} must be {requirement}")


def is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def require_int(name: str, value: Any, minimum: int, maximum: int = MAX_INT) -> None:
    bound = f"an integer from {minimum} to {maximum}"
    require(is_int(value) and minimum <= value <= maximum, name, value, bound)


def require_real(name: str, value: Any, minimum: float, maximum: float = math.inf) -> None:
    # NaN fails every comparison, so it is refused here as well.
    is_real: bool = isinstance(value, Real) and not isinstance(value, bool)
    bound = f"a finite number of at least {minimum}" + ("" if maximum == math.inf else f" and at most {maximum}")
    number: Any = value
    require(is_real and minimum <= number <= min(maximum, MAX_FLOAT), name, value, bound)


def require_positive(name: str, value: Any) -> None:
    require_real(name, value, 0.0)
    require(value > 0, name, value, "greater than 0")


def require_bool(name: str, value: Any) -> None:
    require(isinstance(value, bool), name, value, "True or False")


def as_tuple(name: str, values: Any, requirement: str) -> tuple[Any, ...]:
    require(isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping), name, values, requirement)
    return tuple(values)
