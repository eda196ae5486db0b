"""Values that no argument means, or that few do, each made anew for every case."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from jaxinfer.config import EngineConfig, SamplingParams


class Text(str):
    pass


class Number(int):
    pass


class OwnError(Exception):
    """Raised by a method of a value; it may go out as it is."""


class UnprintableError(Exception):
    """Raised by the `__repr__` of a value; no error message may fail by it."""


def _raise(*_: Any) -> Any:
    raise OwnError("of the value's own")


def _refuse_to_be_printed(*_: Any) -> Any:
    raise UnprintableError("no text")


class Unprintable:
    __repr__: Any = _refuse_to_be_printed
    __str__: Any = _refuse_to_be_printed
    __format__: Any = _refuse_to_be_printed


def _raising(*names: str) -> Callable[[], Any]:
    return type("Raising", (), dict.fromkeys(names, _raise))


def _nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def _own_item() -> list:
    value: list = [5]
    value.append(value)
    return value


class Endless:
    """A sequence without an end, that says it has one."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return 5

    def __iter__(self):
        return itertools.repeat(5)


SCALARS: dict[str, Callable[[], Any]] = {
    repr(value): lambda value=value: value
    for value in (
        *(None, True, False, ..., NotImplemented, object, KeyboardInterrupt, len),
        *(-1, 0, 1, 5, 2**31, 2**63, 2**64, -(2**63), 10**30),
        *(1e308, -1e308, float("nan"), float("inf"), float("-inf"), 0.5, -0.0, 1e-320, 5.0, 1j),
        *("", " ", "a", "\ud800", "\0", "5", "None", "/", "~", "é" * 3, b"", b"abc", b"\xff"),
        *(Text("a"), Number(5), Fraction(1, 3), Decimal("0.5"), Decimal("NaN"), Path("nowhere")),
        *(np.int8(5), np.uint64(2**64 - 1), np.float32(0.5), np.float64("nan"), np.bool_(True), np.str_("a")),
        *(np.datetime64(5, "s"), np.longdouble(5), np.complex64(1), np.float16("inf")),
        *(pd.NA, pd.NaT, pd.Timestamp(5), pd.Timedelta(5, "s")),
        *(pa.scalar(5), pa.scalar(0.5), pa.scalar(True), pa.scalar("a"), pa.scalar(b"a"), pa.scalar(None)),
    )
} | {
    "10**5000": lambda: 10**5000,
    "much text": lambda: "a" * 10_000,
    "an object": object,
    "parameters": SamplingParams,
    "a configuration": EngineConfig,
    "an error": lambda: ValueError("a"),
    "unprintable": Unprintable,
    **{
        f"raises in {' '.join(names)}": _raising(*names)
        for names in (
            ("__len__", "__getitem__"),
            ("__iter__",),
            ("__eq__",),
            ("__hash__",),
            ("__bool__",),
            ("__index__", "__int__", "__float__"),
            ("__array__",),
            ("__fspath__",),
            ("__getattr__",),
            ("__lt__", "__le__", "__gt__", "__ge__"),
            ("__call__",),
        )
    },
}
MANY: dict[str, Callable[[], Any]] = {
    "[]": list,
    "{}": dict,
    "()": tuple,
    "{1: 2}": lambda: {1: 2},
    "{'a': 1.0}": lambda: {"a": 1.0},
    "{5, 6}": lambda: {5, 6},
    "range(3)": lambda: range(3),
    "range(10**12)": lambda: range(10**12),
    "a long list": lambda: [5] * 5_000,
    "a long list of lists": lambda: [[5]] * 2_000,
    "a generator": lambda: (i for i in (5, 6)),
    "an endless generator": lambda: itertools.repeat(5),
    "an endless sequence": lambda: Endless(2),
    "an endless sequence of 2**62": lambda: Endless(2**62),
    "a sequence of -1": lambda: Endless(-1),
    "lists 100,000 deep": lambda: _nested(100_000),
    "a list in itself": _own_item,
    "a list of generators": lambda: [itertools.repeat(5), iter(())],
    "bytearray": lambda: bytearray(b"abc"),
    "memoryview": lambda: memoryview(b"abc"),
    **{
        f"np {dtype} {shape}": lambda dtype=dtype, shape=shape: np.zeros(shape, dtype)
        for dtype in ("int8", "uint64", "float16", "bool", "complex64", "O", "U1", "M8[s]", "i4,f4")
        for shape in ((), (0,), (2,), (1, 2))
    },
    "np fives": lambda: np.full(2, 5),
    "jnp int32": lambda: jnp.full(2, 5),
    "jnp bfloat16": lambda: jnp.ones((2, 2), jnp.bfloat16),
    "jnp scalar": lambda: jnp.int32(5),
    "torch": lambda: torch.tensor([5, 6]),
    "torch bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
    "torch with a gradient": lambda: torch.ones(2, requires_grad=True),
    "torch without data": lambda: torch.ones(2, device="meta"),
    "torch scalar": lambda: torch.tensor(5),
    "pandas numbers": lambda: pd.Series([5, 6], index=["a", "b"]),
    "pandas missing": lambda: pd.Series([5, None], dtype="Int64"),
    "pandas texts": lambda: pd.Series(["a", None]),
    "pandas table": lambda: pd.DataFrame({"role": ["user"], "content": ["a"]}),
    "pandas row": lambda: pd.Series({"role": "user", "content": "a"}),
    "pandas times": lambda: pd.date_range("2026", periods=2),
    "arrow numbers": lambda: pa.array([5, None]),
    "arrow texts": lambda: pa.chunked_array([["a"], ["b"]]),
    "arrow lists": lambda: pa.array([[5], None]),
    "arrow table": lambda: pa.table({"role": ["user"], "content": ["a"]}),
    "arrow mapping": lambda: pa.scalar({"a": 5, "role": None}),
}


def _one_of(values: dict[str, Callable[[], Any]]) -> st.SearchStrategy[Any]:
    return st.sampled_from(sorted(values)).map(lambda name: values[name]())


scalars = _one_of(SCALARS)
many = _one_of(MANY)
some = st.lists(scalars | many, max_size=3)
values = (
    scalars
    | many
    | some
    | some.map(tuple)
    | st.dictionaries(st.sampled_from(["a", 5, "temperature", None, 1.5]), scalars | many, max_size=2)
    | st.lists(st.tuples(scalars, scalars), max_size=2)
    | st.lists(some, max_size=2)
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
)
# JAX looks into lists, and prints values, before any code of ours sees them: of one level, and printable.
_printable = sorted(SCALARS.keys() - {"unprintable", "10**5000"})
leaves = st.sampled_from(_printable).map(lambda name: SCALARS[name]()) | st.just([]) | st.integers() | st.floats()
