"""A quarter of the time to compile, for tests that judge numbers within rounding, or the bits of steps by themselves.

Most of the suite's time goes into compiling. The engines that judge bits, and the logits of `test_exactness.py`, are
compiled as users have them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import pytest

from jaxinfer.engine.execution import executable_cache
from jaxinfer.engine.execution.compiled_steps import COMPILING


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


_compile_with: Any = jax.stages.Lowered.compile
_options_with = executable_cache._options


def _compile_unoptimised(lowered: Any, compiler_options: dict[str, Any] | None = None) -> Any:
    return _compile_with(lowered, {**(compiler_options or {}), **UNOPTIMISED})


def _options_unoptimised() -> list[str]:
    """Returns options for the key on disk, so that engines that judge bits do not load these steps."""
    return [*_options_with(), repr(UNOPTIMISED)]


@contextlib.contextmanager
def unoptimised_steps() -> Iterator[None]:
    """Engines that are made meanwhile compile their steps so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", _compile_unoptimised)
        patch.setattr(executable_cache, "_options", _options_unoptimised)
        yield
        for thread in threading.enumerate():
            if thread.name.startswith(COMPILING):
                thread.join()


def unoptimised_copy(module: ModuleType) -> Any:
    """The module once more, with its jitted functions compiled so."""
    spec = importlib.util.spec_from_file_location(f"unoptimised {module.__name__}", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=UNOPTIMISED))
        spec.loader.exec_module(copy)
    return copy
