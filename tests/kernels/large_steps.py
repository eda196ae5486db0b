"""What the tests of large models on TPU and GPU share: their cases, and how a step is judged."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from scripts.kernels import large_models
from scripts.kernels.compilers import axes_of
from scripts.kernels.large_models import MEMORY, MESHES, cases_of, is_gpu
from tests.kernels.recorded import figures_of

COLLECTIVES = ("scripts/kernels/collectives.py",)


def steps_on(name: str, models: Iterable[str] = tuple(MESHES)) -> list[tuple[str, str, str]]:
    """Returns the model, the mesh and the case of each step that is compiled for devices of that name."""
    pairs = [(model, device) for model in models for device in MESHES[model] if axes_of(device)[0] == name]
    return [(model, device, case) for model, device in pairs for case in cases_of(model, device)]


@functools.cache
def compiled(model: str, device: str) -> dict[str, dict[str, Any]]:
    return figures_of(device, cases_of(model, device), large_models, () if is_gpu(device) else COLLECTIVES)


def check_step(model: str, device: str, case: str) -> None:
    """Asserts that a step compiles in time, updates the cache in place, and fits the memory of each device."""
    figures = compiled(model, device)[case]
    assert "error" not in figures, figures["error"]
    assert figures["in_place"]
    assert figures["argument_bytes"] + figures["temporary_bytes"] < MEMORY[axes_of(device)[0]]
    # Of all threads, for other work on the machine lengthens the time by the clock; 134 s are the most seen.
    assert max(figures["processor_seconds"], figures["lowering_seconds"]) < 180
