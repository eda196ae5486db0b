"""Options of XLA's compiler for CPU, with which tests compile in a third of the time.

Compiling takes most of the suite's time. Tests with the mark `bits` judge those of steps and kernels: `pytest -m bits`
compiles for them as for users. Other tests of bits are of what the host does with them, which no optimisation changes.
`--optimised` compiles so for any test.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest

from jaxinfer.checkpoint import checkpoint
from jaxinfer.checkpoint.making import assemblies, grouping
from jaxinfer.engine.execution import warm_up

# XLA ends a process for a flag that it does not know; the emitters are no option from 0.11 on.
_EMITTERS = (
    ["--xla_cpu_use_fusion_emitters=false"] if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11) else []
)
UNOPTIMISED = ("--xla_backend_optimization_level=0", *_EMITTERS)
# The other worker of a run has the other core. The code is the same.
ON_ONE_CORE = "--xla_cpu_parallel_codegen_split_count=1"


def flags_with(*flags: str) -> str:
    """Returns XLA_FLAGS of this process with these after them, each once; of two values the last one counts."""
    return " ".join(dict.fromkeys([*os.environ.get("XLA_FLAGS", "").split(), *flags]))


def set_options(*, is_optimised: bool) -> None:
    """Sets the options for this process, before JAX looks for its devices, and for the processes that it starts.

    Without optimisation, models of this process compute equal layers in a loop, as on TPU, and compile one of them.
    """
    os.environ["XLA_FLAGS"] = flags_with(ON_ONE_CORE, *(() if is_optimised else UNOPTIMISED))
    if not is_optimised:
        checkpoint.scans_layers = lambda: True


def layers_apart() -> contextlib.AbstractContextManager[None]:
    """Models that are loaded meanwhile have parameters for each layer by itself, as on CPU and GPU."""
    return _answered("scans_layers", False, checkpoint)


def products_joined() -> contextlib.AbstractContextManager[None]:
    """Models that are loaded and planned meanwhile have joined tensors, as on GPU."""
    return _answered("joins_products", True, checkpoint, warm_up)


def integers_as_on_tpu() -> contextlib.AbstractContextManager[None]:
    """Packed weights that are loaded meanwhile lie as on TPU."""
    return _answered("packs_integers", False, checkpoint, assemblies, grouping)


@contextlib.contextmanager
def _answered(question: str, answer: bool, *modules: Any) -> Iterator[None]:
    """Modules that ask this function of `jaxinfer.device` get this answer meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, question, lambda: answer)
        yield
