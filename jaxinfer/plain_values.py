"""Converts values of NumPy, JAX, PyTorch, PyArrow and pandas to values of Python.

No library is imported here. A type is known by the method with which its library converts it.
"""

from __future__ import annotations

import math
from types import NoneType
from typing import Any

PLAIN = frozenset({str, int, float, bool, NoneType, list, tuple, dict, bytes, bytearray, memoryview})
# In this order, for some types have two: scalars of PyArrow; its arrays and tables; those of all others.
METHODS = ("as_py", "to_pylist", "tolist")


def plain(value: Any) -> Any:
    """Returns a scalar, an array, a column or a table of another library as a value of Python.

    A scalar becomes a number, text or a truth value, an array or a column becomes a list, and a table becomes a list of
    its rows, as dicts. The items of an array of objects stay as they are. Returns any other value unchanged. Raises the
    library's own exception for a value that it cannot convert, such as an array without data.
    """
    if type(value) in PLAIN or isinstance(value, type):
        return value
    for method in METHODS:
        if hasattr(value, method):
            return getattr(value, method)()
    if hasattr(value, "to_dict") and hasattr(value, "columns"):  # a DataFrame of pandas
        return value.to_dict("records")
    return value.__array__().tolist() if hasattr(value, "__array__") else value


def plain_mapping(value: Any) -> Any:
    """Returns a row of a table, which is a Series of pandas, as a dict by its labels; other values as `plain` does."""
    is_row = hasattr(value, "to_dict") and not hasattr(value, "columns") and not isinstance(value, type)
    return value.to_dict() if is_row else plain(value)


def is_missing(value: Any) -> bool:
    """True for None and NaN, and for the NA and NaT of pandas, which stand for no value in a column."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or type(value).__name__ in ("NAType", "NaTType")
