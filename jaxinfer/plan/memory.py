"""What an engine needs of its device: parameters, what compiled functions take beside them, and pages in the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax

from jaxinfer.display.html import bar

# A step is launched before the one ahead of it is read, so there are inputs and results of two.
IN_FLIGHT = 2
# Compiling again for pages that take less than this part of the limit is not worth the time.
WASTE = 0.02
# What compiled functions need hardly depends on the number of pages, so the second round nearly always fits.
MAX_ROUNDS = 4

# Left free for compiled functions that do not say what they need.
UNTOLD_BYTES = 2**30
# Numbers of pages between a power of two and the next. Free bytes differ by a few MB from start to start, and each
# number has executables of its own.
STEPS_PER_OCTAVE = 64

Compiled = TypeVar("Compiled")


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on a device at most. `resident_bytes`: parameters, of a drafter as well. `limit_bytes`: None for none.

    If `num_devices` share the model, each has these bytes.
    """

    resident_bytes: int
    step_bytes: int
    page_bytes: int
    num_pages: int
    bounded_bytes: int = 0  # of pools whose size no limit changes: windows and states
    limit_bytes: int | None = None
    num_devices: int = 1

    @property
    def pool_bytes(self) -> int:
        return self.num_pages * self.page_bytes + self.bounded_bytes

    @property
    def total_bytes(self) -> int:
        return self.resident_bytes + self.pool_bytes + self.step_bytes

    @property
    def num_fitting(self) -> int:
        """How many pages the limit has room for; those there are, where there is no limit."""
        if self.limit_bytes is None:
            return self.num_pages
        return (self.limit_bytes - self.resident_bytes - self.step_bytes - self.bounded_bytes) // self.page_bytes

    def _repr_html_(self) -> str:
        parts = {"parameters": self.resident_bytes, "pages": self.pool_bytes, "steps": self.step_bytes}
        return bar(parts, self.limit_bytes)

    def __str__(self) -> str:
        parts = (self.resident_bytes, self.pool_bytes, self.bounded_bytes, self.step_bytes, self.total_bytes)
        resident, pool, bounded, steps, total = (f"{num_bytes / 1e6:,.1f} MB" for num_bytes in parts)
        limit = "" if self.limit_bytes is None else f" of {self.limit_bytes / 1e6:,.1f} MB"
        further = f" and for windows and states ({bounded})" if self.bounded_bytes else ""
        pages = f"{pool} in {self.num_pages} pages{further}"
        each = f"each of {self.num_devices} devices: " if self.num_devices > 1 else ""
        return f"{each}{resident} of parameters + {pages} + {steps} for steps = {total}{limit}"


def num_bytes(tree: Any) -> int:
    """Returns the bytes of the arrays of a tree on each of their devices, abstract ones included.

    Integers of 4 bits lie two to a byte.
    """
    return sum(-(-_size(leaf) * jax.dtypes.itemsize_bits(leaf.dtype) // 8) for leaf in jax.tree.leaves(tree))


def num_elements(tree: Any) -> int:
    """Returns the number of elements of the arrays of a tree on each of their devices."""
    return sum(map(_size, jax.tree.leaves(tree)))


def _size(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    return math.prod(leaf.shape if sharding is None else sharding.shard_shape(leaf.shape))


def step_bytes(compiled: jax.stages.Compiled, inputs: Iterable[Any]) -> int:
    """Returns what a compiled function needs beside what lives on the device anyway.

    `inputs` are those of its arguments that are made for each call. Where the device does not tell, it is UNTOLD_BYTES.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        return UNTOLD_BYTES
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + IN_FLIGHT * (num_bytes(tuple(inputs)) + results)


def fit_pages(
    compile_for: Callable[[int], tuple[Compiled, int]],
    guess: MemoryPlan,
    *,
    is_fixed: bool,
    reserved: int = 0,
    allowed: Callable[[int], int] = lambda num_pages: num_pages,
) -> tuple[Compiled, MemoryPlan]:
    """Compiles for the most pages that fit into the limit, at most `guess.num_pages`, and returns the plan.

    `compile_for` takes a number of pages and returns what it compiled and what that needs; `guess.step_bytes` is what
    it may need. `reserved` bytes stay for steps that are compiled later, as far as `guess.num_pages` leave them with
    `is_fixed`. `allowed` takes a number of pages and returns the most up to it that a kernel can use. Raises ValueError
    if the limit is too small; with `is_fixed`, for `guess.num_pages`. Otherwise pages within a limit come in the steps
    of `usable_pages`.
    """
    most, least = guess.num_pages, guess.num_pages if is_fixed else 1
    without_steps = replace(guess, step_bytes=0)
    _require_room(without_steps, least)  # what cannot fit at all is not worth compiling
    if is_fixed and guess.limit_bytes is not None:
        reserved = min(reserved, guess.limit_bytes - without_steps.total_bytes)
    num_pages = max(allowed(usable_pages(guess, most)), least)
    for _ in range(MAX_ROUNDS):
        compiled, needed = compile_for(num_pages)
        plan = replace(guess, step_bytes=max(needed, reserved), num_pages=num_pages)
        _require_room(plan, least)
        fitting = max(allowed(usable_pages(plan, most)), least)
        if plan.limit_bytes is None or 0 <= (fitting - num_pages) * plan.page_bytes <= WASTE * plan.limit_bytes:
            return compiled, plan
        num_pages = fitting
    raise RuntimeError(f"what compiled steps need keeps changing with the number of pages: {plan}")


def usable_pages(plan: MemoryPlan, most: int) -> int:
    """Returns `most`, or fewer pages that the limit has room for, in steps of at most 1/STEPS_PER_OCTAVE of them.

    `most` itself may lie between two steps: it follows from the engine's limits, which are the same in each start.
    """
    if plan.limit_bytes is None or plan.num_fitting >= most:
        return most
    step = 2 ** (max(plan.num_fitting, 1).bit_length() - 1) // STEPS_PER_OCTAVE
    return plan.num_fitting - plan.num_fitting % max(step, 1)


def _require_room(plan: MemoryPlan, num_pages: int) -> None:
    if plan.limit_bytes is not None and plan.num_fitting < num_pages:
        problem = f"memory_bytes={plan.limit_bytes} is too little: {plan}"
        if plan.resident_bytes >= plan.limit_bytes:
            raise ValueError(
                f"{problem}; the parameters alone do not fit: raise EngineConfig.memory_bytes, set"
                " EngineConfig.quantization or take a smaller model"
            )
        raise ValueError(
            f"{problem}; raise EngineConfig.memory_bytes or lower num_pages, page_size, max_num_seqs or"
            " max_num_batched_tokens"
        )
