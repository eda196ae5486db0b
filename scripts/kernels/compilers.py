"""What the scripts that run the compilers of accelerators share: a process per device, and whole steps of a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.plan.compiler import ENVIRONMENT


class Case(NamedTuple):
    """A jitted function, its arguments as shapes, the cache that it must update in place, and kernels to look at."""

    function: Any
    arguments: dict[str, Any]
    cache: Any = None
    kernels: tuple[str, ...] = ()
    num_rows: int = 1  # of its products
    itemsize: int = 2  # bytes of an element of its weights, 1 if they are packed


def axes_of(device: str) -> tuple[str, dict[str, int]]:
    """Returns the name of the device and the sizes of the axes of a mesh: "v6e", "v6e-8", "v6e-4x8" or "v6e-2x4x8".

    A single number is of the axis "model", two are of "experts" and "model", three of "stages" too.
    """
    name, _, numbers = device.partition("-")
    sizes = [int(number) for number in numbers.split("x")] if numbers else [1]
    return name, dict(zip(("stages", "experts", "model")[-len(sizes) :], sizes, strict=True))


def step_case(
    mesh: Any,
    *,
    layout: str,
    model: str = "Llama-3-8B",
    num_pages: int,
    page_size: int,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    num_bounded_pages: tuple[int, ...] = (),
    kernels: tuple[str, ...] = (),
    checkpoint: Path | None = None,
    **options: Any,
) -> Case:
    """A whole step of a model of `checkpoint.published`, split over a whole mesh; `options` are those of `step_call`.

    Everything is in `dtype`, except weights that a `quantization` quantizes, or that a `checkpoint` of the model packs,
    and keys and values that are in `cache_dtype`, if given.
    """
    from jaxinfer.checkpoint import abstract_checkpoint
    from jaxinfer.checkpoint.published import published_config
    from jaxinfer.config import CacheConfig
    from jaxinfer.plan.compiler import step_call
    from kernels_pallas.gpu_products import weight_itemsize

    pages = {"num_pages": num_pages, "num_bounded_pages": num_bounded_pages, "page_size": page_size}
    cache = CacheConfig(**pages, dtype=cache_dtype or dtype)
    config = published_config(model)
    if checkpoint is not None:
        options["params"], config = abstract_checkpoint(checkpoint, dtype, mesh=mesh)
    function, arguments = step_call(mesh, config, layout=layout, cache=cache, dtype=dtype, **options)
    sizes = options["num_tokens"], weight_itemsize(arguments["params"])
    return Case(function, arguments, arguments["cache"], kernels, *sizes)


def on_mesh(tree: Any, mesh: Any) -> Any:
    """Returns the shapes of a tree's arrays, each whole on every device of a mesh."""
    from jaxinfer.parallel.placement import Placement

    return Placement(mesh).replicated(tree)


def lower_case(mesh: Any, make_case: Callable[[Any], Case], flags: str = "") -> dict[str, Any]:
    """Returns a digest of all that a compiler gets of a case, and the processor seconds to lower it.

    `flags` are those of the compiler.
    """
    import jax

    used = sum(os.times()[:4])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        case = make_case(mesh)
        program = case.function.lower(**case.arguments).as_text()
    devices = [(device.device_kind, repr(device)) for device in mesh.devices.flat]
    digest = blake2b("\n".join([program, repr(devices), repr(case.kernels), flags]).encode(), digest_size=20)
    return {"program": digest.hexdigest(), "lowering_seconds": round(sum(os.times()[:4]) - used, 1)}


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
