"""Compiles whole steps for TPUs and GPUs that are not here, by the compilers of the extra `aot`.

The compilers run in a process of their own, which gets a pickled `CompileTask` and prints the figures as JSON.
"""

from __future__ import annotations

import functools
import json
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxinfer.config import CacheConfig
from jaxinfer.model.batch import lay_out_batch
from jaxinfer.model.cache import abstract_cache
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.joined_params import join_products
from jaxinfer.model.params import Params, abstract_params, over_mesh
from jaxinfer.model.quantized_params import quantize_weights
from jaxinfer.model.stages import for_stages, num_stages
from jaxinfer.parallel.placement import Placement
from jaxinfer.sampling.batch import make_sampling
from jaxinfer.steps import steps
from jaxinfer.steps.steps import StepOptions
from kernels_pallas import gpu_compiler
from kernels_pallas.gpu_products import weight_itemsize

ROOT = Path(__file__).resolve().parents[2]
# What jax would do for the machine at hand is not wanted: it would look for a driver, and what comes from a cache of
# compiled programs leaves no trace of its kernels. Kernels name no lines of the source: programs compare by their text.
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
TPU_ENVIRONMENT = {
    # A second process may load libtpu, and there is no cloud machine to ask for its topology.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}
WORKER = "from jaxinfer.plan import compiler; compiler.main()"
INSTALL = 'pip install "jaxinfer[aot]", on Linux'
# The shapes of slices of TPUs, smallest first.
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
DEEP = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
SLICES = {"v5e": FLAT, "v6e": FLAT, "v5p": DEEP, "tpu7x": DEEP}
ONE_CHIP = {"chips_per_host_bounds": [1, 1, 1]}


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """The compiler's figures of a step: bytes on each device, and seconds of the clock to lower and compile it."""

    argument_bytes: int  # parameters, pages, and the step's batch
    temporary_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CompileTask:
    """Steps to compile, by name, for a mesh of axes of these sizes of a chip; each has the options of `step_call`."""

    chip: str
    platform: str
    axes: Mapping[str, int]
    config: ModelConfig
    steps: Mapping[str, Mapping[str, Any]]


def compile_steps(task: CompileTask) -> dict[str, CompiledStep]:
    """Compiles steps in a process of their own, for a fatal error of a compiler ends a process.

    Raises ValueError if the compiler is not installed or knows no such devices, RuntimeError if it fails.
    """
    require_compiler(task.chip, task.platform, math.prod(task.axes.values()))
    environment = ENVIRONMENT | (TPU_ENVIRONMENT if task.platform == "tpu" else {})
    worker = subprocess.run(
        [sys.executable, "-c", WORKER],
        env={**os.environ, **environment},
        input=pickle.dumps(task),
        capture_output=True,
        check=False,
    )
    if worker.returncode:
        raise RuntimeError(
            f"the compiler failed with {worker.returncode}: {worker.stderr.decode(errors='replace')[-600:]}"
        )
    return {name: CompiledStep(**figures) for name, figures in json.loads(worker.stdout.splitlines()[-1]).items()}


def require_compiler(chip: str, platform: str, count: int) -> None:
    """Raises ValueError, with the way out, if the compiler for devices is not installed or cannot describe them."""
    is_there = find_spec("libtpu") is not None if platform == "tpu" else gpu_compiler.is_available()
    name = "the compiler for TPU (libtpu)" if platform == "tpu" else "the CUDA compiler for JAX"
    if not is_there:
        raise ValueError(f"{name} is not installed: {INSTALL}; a plan alone needs none")
    if platform == "gpu":
        _gpu_of(chip)
    else:
        _slice_of(chip, count)


def compiler_version(platform: str) -> str:
    """Returns the compiler's package and its version."""
    package = "libtpu" if platform == "tpu" else "jax-cuda12-plugin"
    return f"{package} {version(package)}"


def tpu_mesh(chip: str, axes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of TPUs, which need not be here, with axes of these names and sizes: of the smallest slice."""
    count = math.prod(axes.values())
    shape = _slice_of(chip, count)
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{chip}:{shape}", **(ONE_CHIP if shape == "1x1" else {})
    )
    return Mesh(np.array(topology.devices[:count]).reshape(*axes.values()), tuple(axes))


def described_devices(chip: str, platform: str, count: int) -> list[Any]:
    """Returns all devices of a machine or slice of a number of chips, which need not be here.

    Raises ValueError if there is no such slice.
    """
    mesh = tpu_mesh(chip, {"all": count}) if platform == "tpu" else gpu_compiler.mesh_of(_gpu_of(chip), {"all": count})
    devices = mesh.devices.flat[0].client.devices()
    if len(devices) != count:
        raise ValueError(f"{count} devices of {chip} are no whole slice; the smallest that has them has {len(devices)}")
    return devices


def _gpu_of(chip: str) -> str:
    """Returns the compiler's name for a GPU of `devices.CHIPS`."""
    # An A100 of 40 GB differs in memory and bandwidth alone.
    name = "A100" if chip == "A100-80GB" else chip
    if name not in gpu_compiler.GPUS:
        known = ", ".join(gpu_compiler.GPUS)
        raise ValueError(f"steps for {chip} cannot be compiled without one; the GPUs that can are {known}")
    return name


def _slice_of(chip: str, count: int) -> str:
    def size(shape: str) -> int:
        return math.prod(map(int, shape.split("x")))

    fitting = [shape for shape in SLICES[chip] if size(shape) >= count]
    if not fitting:
        raise ValueError(f"{count} chips are more than the largest slice of {chip} here, {size(SLICES[chip][-1])}")
    return fitting[0]


def step_call(
    mesh: Mesh | None,
    config: ModelConfig,
    *,
    step: str,
    layout: str,
    num_tokens: int,
    num_rows: int,
    cache: CacheConfig,
    max_context: int = 8192,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    params: Params | None = None,
    tree_q_len: int = 0,
    mixed_q_len: int = 0,
    loop_steps: int = 0,
    form: str = "plain",
    max_log_probs: int = 0,
    sampling_log_probs: bool = False,
    exact: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Returns a jitted step of a model, split over a whole mesh if there is one, and its arguments as shapes.

    `step` is its name in `jaxinfer.steps.steps`. With a `tree_q_len` it verifies trees of that many tokens; with a
    `mixed_q_len`, drafts beside rows that prefill. A decode loop has `loop_steps`. Steps that verify nothing draw in a
    `form`, and give `sampling_log_probs` if asked. In the full form they give up to `max_log_probs` alternatives.
    `exact` is that of `StepOptions`.
    Weights are in `dtype`, except those that a `quantization` quantizes; or as those that are given as shapes.
    """
    config, placement = over_mesh(config, mesh), Placement(mesh)
    # As `load_checkpoint` groups layers in stages, and on GPU.
    if num_stages(mesh) > 1:
        config = for_stages(config, num_stages(mesh), scans=layout != "gpu")
    elif layout == "gpu":
        config = config.regrouped((1,) * config.num_layers)
    weights = abstract_params(config, dtype) if params is None else params
    if quantization is not None:
        options = {"config": config, "quantization": quantization, "is_packed": layout != "tpu"}
        weights = jax.eval_shape(functools.partial(quantize_weights, **options), weights)
    sizes = {"num_tokens": num_tokens, "num_rows": num_rows, "table_width": -(-max_context // cache.page_size)}
    num_masks = num_tokens if tree_q_len else num_rows * mixed_q_len or None
    num_kinds = len(config.page_kinds) - 1
    host = {
        "batch": lay_out_batch([], page_size=cache.page_size, num_bounded_kinds=num_kinds, **sizes),
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
    statics |= {"exact": exact}
    pages = placement.cache(config, abstract_cache(config, cache, layout))
    weights = placement.params(config, weights)
    weights = join_products(weights, config) if layout == "gpu" else weights
    arguments = {"params": weights, "cache": pages, **placement.replicated(host)}
    function = functools.partial(getattr(steps, step), options=StepOptions(config=config, mesh=mesh, **statics))
    return jax.jit(function, donate_argnames="cache"), arguments


def _compile(task: CompileTask, device: str, mesh: Mesh, options: Mapping[str, Any]) -> CompiledStep:
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        function, arguments = step_call(mesh, task.config, layout=task.platform, **options)
        if task.platform == "tpu":
            program = function.lower(**arguments).compile()
    if task.platform == "gpu":
        sizes = {"num_rows": options["num_tokens"], "itemsize": weight_itemsize(arguments["params"])}
        program = gpu_compiler.compile_for(device, mesh, function, arguments, **sizes).program
    memory = program.memory_analysis()
    assert memory is not None
    return CompiledStep(
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        seconds=round(time.perf_counter() - start, 1),
    )


def main() -> None:
    """Compiles the steps of the task in the standard input."""
    task = pickle.loads(sys.stdin.buffer.read())
    is_tpu = task.platform == "tpu"
    device = task.chip if is_tpu else _gpu_of(task.chip)
    mesh = (tpu_mesh if is_tpu else gpu_compiler.mesh_of)(device, task.axes)
    compiled = {name: asdict(_compile(task, device, mesh, options)) for name, options in task.steps.items()}
    print(json.dumps(compiled), flush=True)
