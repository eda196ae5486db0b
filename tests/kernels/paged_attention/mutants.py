"""Kernels with a wrong line, to see whether their tests notice."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest import mock


def mutant(modules: Sequence[ModuleType], line: str, replacement: str) -> Any:
    """Returns the last of some modules with one line replaced, in whichever of them it stands.

    They come in the order in which one needs another: each imports the mutants before it.
    """
    sources = {module.__name__: inspect.getsource(module) for module in modules}
    assert sum(source.count(line) for source in sources.values()) == 1, line
    with mock.patch.dict(sys.modules):
        for name, source in sources.items():
            sys.modules[name] = types.ModuleType(name)
            exec(compile(source.replace(line, replacement), "mutant", "exec"), vars(sys.modules[name]))
        return sys.modules[modules[-1].__name__]
