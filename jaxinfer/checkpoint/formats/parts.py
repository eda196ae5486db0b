"""The stored parts of packed weights: found by their names, and checked."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from jaxinfer.checkpoint.safetensors_file import StoredTensor
from jaxinfer.checkpoint.stored import require_even, settings_error
from jaxinfer.validation import is_int

SCALE_TYPES = ("F16", "BF16", "F32")
MAX_PATTERN = 1000  # characters of a regular expression
# Of a pattern, so that matching takes no longer than a module's name to this power; and no group is repeated.
MAX_REPEATS = 4
OTHER = "use a checkpoint without it, or the unquantized one"


class Parts(dict[str, StoredTensor]):
    """The parts of one weight, by the last piece of their names."""

    def __init__(self, module: str, parts: Mapping[str, StoredTensor]) -> None:
        super().__init__(parts)
        self.module = module

    def require(self, name: str, dtypes: Collection[str], shape: tuple[int | None, ...]) -> StoredTensor:
        """Returns a part; raises ValueError if it is absent, or of another type or shape (None: any size)."""
        part = self.get(name)
        if part is None:
            raise ValueError(f"{self.module} is packed but has no {name}; download the checkpoint again")
        fits = len(part.shape) == len(shape) and all(
            want in (None, size) for size, want in zip(part.shape, shape, strict=True)
        )
        if part.dtype not in dtypes or not fits:
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(
                f"{self.module}.{name} is {part.dtype} {part.shape}, not ({sizes}) of {' or '.join(dtypes)} as its"
                " quantization_config says; use files of one and the same checkpoint"
            )
        return part


def packed_modules(
    stored: Mapping[str, StoredTensor], mark: str, names: Collection[str]
) -> tuple[dict[str, StoredTensor], Iterator[Parts]]:
    """Returns the tensors of no packed weight, and the parts of each weight that has a part called `mark`.

    `names` are those that parts may have.
    """
    modules = {name.removesuffix(f".{mark}") for name in stored if name.endswith(f".{mark}")}
    parts: dict[str, dict[str, StoredTensor]] = {module: {} for module in modules}
    others = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if module in modules and part in names:
            parts[module][part] = tensor
        else:
            others[name] = tensor
    if twice := [module for module in sorted(modules) if f"{module}.weight" in others]:
        raise ValueError(f"{twice[0]} has a {mark} and a weight in floating point; download the checkpoint again")
    return others, (Parts(module, parts[module]) for module in sorted(modules))


def is_listed(module: str, listed: Any) -> bool:
    """True if one of the listed names, or parts of names, is whole pieces of a module's name."""
    names = listed if isinstance(listed, list | Mapping) else ()
    return any(f".{name}." in f".{module}." for name in names if isinstance(name, str))


def require_pattern(method: str, key: str, pattern: str) -> str:
    """Returns a regular expression that is matched in short time; raises ValueError for what is none."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise settings_error(method, key, pattern, f"it is no regular expression: {error}") from None
    repeats = re.findall(r"(\\.|[^\\])([*+]|\{\d*,)", pattern)
    if len(pattern) > MAX_PATTERN or len(repeats) > MAX_REPEATS or any(repeated == ")" for repeated, _ in repeats):
        way_out = f"repeat no group, and {MAX_REPEATS} characters at most"
        raise settings_error(method, key, pattern, way_out)
    return pattern


def require_group_size(method: str, size: Any) -> int:
    """Returns a number of inputs that share a scale, -1 for all of them; raises ValueError for what is neither."""
    if not is_int(size) or (size < 1 and size != -1):
        raise settings_error(method, "group_size", size, "it is a number of inputs, or -1 for all of them")
    return size


def count_groups(module: str, num_inputs: int, size: int, bits: int) -> int:
    """Returns the groups of `size` inputs, -1 for all; raises ValueError if they do not divide the inputs."""
    size = num_inputs if size == -1 else size
    if num_inputs == 0 or num_inputs % size:
        raise ValueError(f"{module} has {num_inputs} inputs, which groups of {size} do not divide; use another file")
    require_even(module, size, bits)
    return num_inputs // size


def order_of_groups(name: str, of_inputs: np.ndarray, num_groups: int, *, may_differ: bool) -> np.ndarray:
    """Returns the inputs i32[in] group after group, for the group i32[in] of each.

    Raises ValueError if groups are not equally large or, unless they `may_differ`, if inputs are not in that order.
    """
    size = len(of_inputs) // num_groups
    plain = np.arange(len(of_inputs)) // size
    is_fit = np.array_equal(np.sort(of_inputs), plain) if may_differ else np.array_equal(of_inputs, plain)
    if not is_fit:
        raise ValueError(
            f"{name} does not give each of {num_groups} groups {size} inputs{'' if may_differ else ' in order'}, as its"
            " quantization_config says; use a checkpoint that fits it"
        )
    return np.argsort(of_inputs, kind="stable").astype(np.int32)
