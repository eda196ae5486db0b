"""A quarter of the time to compile, for tests that judge numbers within rounding, or no numbers at all.

Most of the suite's time goes into compiling. What judges bits is compiled as users have it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jaxinfer.engine.compiled_steps import COMPILING


def _is_known(option: str, value: Any) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options={option: value})()
    except jax.errors.JaxRuntimeError:
        return False
    return True


# Options of the compiler for CPU come and go between its versions.
UNOPTIMISED: dict[str, Any] = {
    option: value
    for option, value in {
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    }.items()
    if _is_known(option, value)
}


@contextlib.contextmanager
def unoptimised_steps() -> Iterator[None]:
    """Engines that are made meanwhile compile their steps so."""
    compile_with: Any = jax.stages.Lowered.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda lowered: compile_with(lowered, UNOPTIMISED))
        yield
        for thread in threading.enumerate():
            if thread.name.startswith(COMPILING):
                thread.join()
