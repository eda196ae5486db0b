"""What the scripts that run the compilers of accelerators share: a process per device, and the model they compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.config import ModelConfig

ROOT = Path(__file__).resolve().parent.parent
# What jax would do for the machine at hand is not wanted: it would look for a driver, and what comes from a cache of
# compiled programs leaves no trace of its kernels.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def llama_3_8b(layer_groups: tuple[int, ...] | None = None) -> ModelConfig:
    """Returns the shape of Llama 3 8B."""
    from jaxinfer.config import ModelConfig

    return ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position=8192,
        rope_theta=500000.0,
        layer_groups=layer_groups,
    )


def compile_in_process(
    script: str, arguments: Iterable[str], cases: Iterable[str], environment: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Runs `script --worker arguments --cases cases` alone, for a fatal compiler error ends a process.

    Returns what it printed of each case by `print_figures`, or {"error": …}.
    """
    cases = list(cases)
    worker = subprocess.run(
        [sys.executable, script, "--worker", *arguments, "--cases", *cases],
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in worker.stdout.splitlines() if line.startswith("{")]
    results = {line.pop("case"): line for line in lines}
    missing = {"error": f"the process ended with {worker.returncode}: {worker.stderr[-600:]}"}
    return {name: results.get(name, missing) for name in cases}


def print_figures(cases: Iterable[str], compile_case: Callable[[str], dict[str, Any]]) -> None:
    """Compiles cases and prints a line of JSON for each, with its error if there is one."""
    for name in cases:
        try:
            figures = compile_case(name)
        except Exception as error:  # whatever it is belongs in the table
            figures = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
        print(json.dumps({"case": name, **figures}), flush=True)
