"""Checks for fields of a configuration. Every error names the field, its value and the allowed values."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from jaxinfer.plain_values import PLAIN, plain

# The largest values of the device's 32-bit types.
MAX_INT, MAX_FLOAT = 2**31 - 1, 3.4e38
MAX_SHOWN = 200  # characters of a value in an error
MAX_ITEMS = 2**20  # of a list; the bound also stops endless generators


def shown(value: Any) -> str:
    """Returns a value's repr for an error message, shortened if long; its type if repr raises."""
    try:
        return cut(repr(value))
    except Exception as error:  # from the value's own __repr__, or from too many digits or levels
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"


def cut(text: str) -> str:
    """Returns a text for an error message, without its middle if it is longer than MAX_SHOWN characters."""
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[: MAX_SHOWN // 2]} … {text[-MAX_SHOWN // 4 :]} ({len(text):,} characters)"


def require(condition: bool, name: str, value: Any, requirement: str) -> None:
    if not condition:
        raise ValueError(f"{name}={shown(value)} is not allowed: {name} must be {requirement}")


def is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def require_int(name: str, value: Any, minimum: int, maximum: int = MAX_INT) -> None:
    bound = f"an integer from {minimum} to {maximum}"
    require(is_int(value) and minimum <= value <= maximum, name, value, bound)


def require_real(name: str, value: Any, minimum: float, maximum: float = math.inf) -> None:
    # NaN fails every comparison, so this refuses it too.
    bound = f"a finite number of at least {minimum}" + ("" if maximum == math.inf else f" and at most {maximum}")
    require(is_real(value) and minimum <= as_float(value) <= min(maximum, MAX_FLOAT), name, value, bound)


def as_float(value: Any) -> float:
    """Returns a number in double precision: NumPy warns if a narrow one is compared with one beyond its range."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def require_positive(name: str, value: Any) -> None:
    require_real(name, value, 0.0)
    require(value > 0, name, value, "greater than 0")


def require_bool(name: str, value: Any) -> None:
    as_bool(name, value)


def require_name(name: str, value: Any, allowed: Collection[str]) -> None:
    *others, last = allowed
    require(isinstance(value, str) and value in allowed, name, value, f"{', '.join(others)} or {last}")


def require_characters(name: str, text: str) -> None:
    """Raises ValueError for a text with half of a surrogate pair, which is no character and has no bytes in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}={shown(text)} is not allowed: {shown(text[error.start])} is half of a surrogate pair; give the"
            " whole character, or leave it out"
        ) from None


def as_path(name: str, value: Any) -> Path:
    """Returns the path of a file that may or may not exist."""
    require(isinstance(value, str | os.PathLike), name, value, "text or a Path")
    path, is_valid = Path(value), True
    try:
        is_valid = bool(path.name) and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_valid = False
    require(is_valid, name, value, "a file's path, without null characters and halves of surrogate pairs")
    return path


def as_plain(name: str, value: Any, convert: Callable[[Any], Any] = plain) -> Any:
    """Returns a value of NumPy, JAX, PyArrow or pandas as one of Python, see `plain`; ValueError if that fails."""
    try:
        return convert(value)
    except Exception as error:  # an array on another device, or of a type unknown to NumPy
        message = f"{name}={shown(value)} is not allowed: it cannot be read ({error}); give a value of Python"
        raise ValueError(message) from error


def as_bool(name: str, value: Any) -> bool:
    """Returns a truth value of Python or of another library as one of Python."""
    value = as_plain(name, value)
    require(isinstance(value, bool), name, value, "True or False")
    return value


def make_scalars_plain(config: Any) -> None:
    """Replaces the scalars of other libraries in the fields of a frozen dataclass by those of Python.

    Lists and arrays stay: the checks of their fields convert these with their items.
    """
    given = {name: value for name, value in vars(config).items() if type(value) not in PLAIN}
    for name, value in given.items():
        scalar = as_plain(name, value)
        if scalar is not value and not isinstance(scalar, list):
            object.__setattr__(config, name, scalar)


def as_tuple(name: str, values: Any, requirement: str, convert: Callable[[Any], Any] = plain) -> tuple[Any, ...]:
    """Returns the items of a list, an array, a column or another iterable, each as `as_plain` converts it.

    ValueError for more than MAX_ITEMS items.
    """
    values = as_plain(name, values)
    is_iterable = isinstance(values, Iterable) and not isinstance(
        values, str | bytes | bytearray | memoryview | Mapping
    )
    require(is_iterable, name, values, requirement)
    items = tuple(islice(values, MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        raise ValueError(f"{name}={shown(values)} has more than {MAX_ITEMS:,} items; give fewer")
    are_plain = PLAIN.issuperset(map(type, items))  # nearly always, and faster than a look at each
    return items if are_plain else tuple(as_plain(name, item, convert) for item in items)


def as_ints(name: str, values: Any, minimum: int = 0, maximum: int = MAX_INT) -> tuple[int, ...]:
    """Returns the integers of a list or an array; ValueError if one is not from `minimum` to `maximum`."""
    bound = f"several integers from {minimum} to {maximum}"
    items = as_tuple(name, values, bound)
    if set(map(type, items)) != {int}:  # nearly always equal, and faster than a check of each item
        require(all(map(is_int, items)), name, values, bound)
        items = tuple(map(int, items))
    require(not items or (minimum <= min(items) and max(items) <= maximum), name, values, bound)
    return items
