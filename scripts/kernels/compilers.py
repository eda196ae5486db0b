"""What the scripts that run the compilers of accelerators share: a process per device, and whole steps of a model."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# What jax would do for the machine at hand is not wanted: it would look for a driver, and what comes from a cache of
# compiled programs leaves no trace of its kernels. Kernels name no lines of the source: programs compare by their text.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


class Case(NamedTuple):
    """A jitted function, its arguments as shapes, the cache that it must update in place, and kernels to look at."""

    function: Any
    arguments: dict[str, Any]
    cache: Any = None
    kernels: tuple[str, ...] = ()


def axes_of(device: str) -> tuple[str, dict[str, int]]:
    """Returns the name of the device and the sizes of the axes of a mesh: "v6e", "v6e-8" or "v6e-4x8".

    A single number is of the axis "model", two are of "experts" and "model".
    """
    name, _, numbers = device.partition("-")
    sizes = [int(number) for number in numbers.split("x")] if numbers else [1]
    return name, dict(zip(("experts", "model")[-len(sizes) :], sizes, strict=True))


def step_case(
    mesh: Any,
    *,
    step: str,
    layout: str,
    model: str = "Llama-3-8B",
    num_tokens: int,
    num_rows: int,
    num_pages: int,
    page_size: int,
    max_context: int = 8192,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    num_bounded_pages: tuple[int, ...] = (),
    kernels: tuple[str, ...] = (),
    tree_q_len: int = 0,
    mixed_q_len: int = 0,
    loop_steps: int = 0,
    form: str = "plain",
    max_log_probs: int = 0,
    sampling_log_probs: bool = False,
    checkpoint: Path | None = None,
) -> Case:
    """A whole step of a model of `checkpoint.published`, split over a whole mesh.

    `step` is its name in `jaxinfer.steps.steps`.
    With a `tree_q_len` it verifies trees of that many tokens; with a `mixed_q_len`, drafts beside rows that prefill. A
    decode loop has `loop_steps`. Steps that verify nothing draw in a `form`, and give `sampling_log_probs` if asked. In
    the full form they give up to `max_log_probs` alternatives.
    Everything is in `dtype`, except weights that a `quantization` quantizes, or that a `checkpoint` of the model packs.
    """
    import jax

    from jaxinfer.checkpoint import abstract_checkpoint
    from jaxinfer.checkpoint.published import published_config
    from jaxinfer.config import CacheConfig
    from jaxinfer.model.batch import lay_out_batch
    from jaxinfer.model.cache import abstract_cache
    from jaxinfer.model.params import abstract_params, over_mesh
    from jaxinfer.model.quantized_params import quantize_weights
    from jaxinfer.parallel.placement import Placement
    from jaxinfer.sampling.batch import make_sampling
    from jaxinfer.steps import steps
    from jaxinfer.steps.options import StepOptions

    config, placement = over_mesh(published_config(model), mesh), Placement(mesh)
    if layout == "gpu":  # as `load_checkpoint` groups layers there
        config = config.regrouped((1,) * config.num_layers)
    params = abstract_params(config, dtype)
    if checkpoint is not None:
        params, config = abstract_checkpoint(checkpoint, dtype, mesh=mesh)
    if quantization is not None:
        options = {"config": config, "quantization": quantization, "is_packed": layout != "tpu"}
        params = jax.eval_shape(functools.partial(quantize_weights, **options), params)
    pages = {"num_pages": num_pages, "num_bounded_pages": num_bounded_pages, "page_size": page_size}
    cache = abstract_cache(config, CacheConfig(**pages, dtype=dtype), layout)
    cache = placement.cache(config, cache)
    sizes = {"num_tokens": num_tokens, "num_rows": num_rows, "table_width": max_context // page_size}
    num_masks = num_tokens if tree_q_len else num_rows * mixed_q_len or None
    host = {
        "batch": lay_out_batch([], page_size=page_size, num_further_kinds=len(config.page_kinds) - 1, **sizes),
        "sampling": make_sampling([], num_rows=num_rows, vocab_size=config.vocab_size, num_masks=num_masks),
    }
    statics: dict[str, Any] = {"form": form, "sampling_log_probs": sampling_log_probs, "max_log_probs": max_log_probs}
    if tree_q_len or mixed_q_len:
        statics = {"q_len": tree_q_len or mixed_q_len, "max_log_probs": 20}
    if tree_q_len:
        host["parents"] = jax.ShapeDtypeStruct((num_tokens,), "int32")
    if mixed_q_len:
        host["num_drafts"] = jax.ShapeDtypeStruct((num_rows,), "int32")
    if loop_steps:
        host["max_tokens"], statics["num_steps"] = jax.ShapeDtypeStruct((num_rows,), "int32"), loop_steps
    arguments = {"params": placement.params(config, params), "cache": cache, **placement.replicated(host)}
    options = StepOptions(config=config, mesh=mesh, **statics)
    function = functools.partial(getattr(steps, step), options=options)
    return Case(jax.jit(function, donate_argnames="cache"), arguments, cache, kernels)


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
