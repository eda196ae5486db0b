"""The real CUDA compiler on a host without a GPU: what a program for an A100, L4, H100 or H200 will need.

XLA, Triton and ptxas compile for a described device; nothing is executed. The wheels that it takes are those of the
extra `aot`. A fatal error of the compiler ends the process, so compile what may fail in a subprocess; and let it start
with JAX_PLATFORMS=cpu, or jax looks for a driver.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from kernels_pallas.gpu_products import compiler_options


class Gpu(NamedTuple):
    """A device to compile for. Sizes in bytes, rates in units per second, from NVIDIA's data sheets."""

    kind: str
    arch: str  # for ptxas
    num_cores: int
    fpus_per_core: int
    threads_per_core: int
    shared_per_core: int
    shared_per_block: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: float
    bf16_flops: float
    clock_ghz: float


GPUS: Mapping[str, Gpu] = {
    "T4": Gpu("Tesla T4", "sm_75", 40, 64, 1024, 65536, 65536, 4 << 20, 15_800_000_000, 320e9, 0.0, 1.59),
    "A100": Gpu(
        "NVIDIA A100-SXM4-80GB", "sm_80", 108, 64, 2048, 167936, 166912, 40 << 20, 85_100_068_864, 2039e9, 312e12, 1.41
    ),
    "L4": Gpu("NVIDIA L4", "sm_89", 58, 128, 1536, 102400, 101376, 48 << 20, 23_600_000_000, 300e9, 121e12, 2.04),
    "H100": Gpu(
        "NVIDIA H100 80GB HBM3",
        "sm_90a",
        132,
        128,
        2048,
        233472,
        232448,
        50 << 20,
        85_000_000_000,
        3350e9,
        989e12,
        1.98,
    ),
    "H200": Gpu(
        "NVIDIA H200", "sm_90a", 132, 128, 2048, 233472, 232448, 50 << 20, 151_397_597_184, 4800e9, 989e12, 1.98
    ),
}
REGISTERS_PER_CORE = 65536
OPERANDS = {"bf16", "f16", "tf32", "e4m3", "s8"}  # of matrix products, by PTX's names
PLUGINS = ("xla_cuda12", "xla_cuda13")


class Launch(NamedTuple):
    """One kernel of a compiled program."""

    name: str
    grid: int  # programs
    threads: int  # per program
    shared_bytes: int
    registers: int  # per thread
    spill_bytes: int  # stored per thread
    # Asynchronous copies that no innermost loop waits for; None if no such loop copies so.
    loads_ahead: int | None = None
    # Matrix products of its PTX without the number of rows, which decide by what steps a result is added up.
    instructions: tuple[str, ...] = ()
    # Instructions of Hopper, in kernels of Pallas' Mosaic GPU alone.
    tensor_copies: int = 0
    warpgroup_products: int = 0


@dataclass(frozen=True)
class Compiled:
    """A program for a GPU. What a loop body launches counts once."""

    program: jax.stages.Compiled
    launches: tuple[Launch, ...]
    seconds: float  # to lower and compile
    processor_seconds: float  # the same, over all threads

    def kernels(self, name: str) -> list[Launch]:
        """Returns the launches of a Pallas kernel of that name."""
        return [launch for launch in self.launches if re.fullmatch(rf"{name}(__\d+)?", launch.name)]


def is_available() -> bool:
    """Returns whether the wheels of the compiler are installed."""
    return any(_files_of("jax_plugins", name) for name in PLUGINS) and _ptxas() is not None


def _ptxas() -> Path | None:
    return next(iter(_files_of("nvidia", "cuda_nvcc/bin/ptxas") + _files_of("nvidia", "cu13/bin/ptxas")), None)


def _files_of(package: str, path: str) -> list[Path]:
    """Returns where a file lies in a package that is spread over several folders."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    return [Path(folder) / path for folder in folders if (Path(folder) / path).exists()]


def mesh_of(name: str, axes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of GPUs of `GPUS`, which need not be here, with axes of these names and sizes."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=name,
        target_config=_target_config(GPUS[name]),
        topology=f"1x1x{math.prod(axes.values())}",
    )
    return Mesh(np.array(topology.devices).reshape(*axes.values()), tuple(axes))


def compile_for(
    name: str, mesh: Mesh, function: Any, arguments: Mapping[str, Any], *, num_rows: int = 1, itemsize: int = 2
) -> Compiled:
    """Compiles a jitted function for GPUs of `GPUS`, from trees of `jax.ShapeDtypeStruct` that are placed on `mesh`.

    `num_rows` and `itemsize` are those of `compiler_options`. Raises the compiler's own errors, or ends the process.
    """
    start, used = time.perf_counter(), sum(os.times()[:4])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered, options = function.lower(**arguments), compiler_options(num_rows, itemsize)
    with tempfile.TemporaryDirectory() as folder:
        # XLA of jax 0.11 writes PTX only where the second names it; every emitter would take five times as long.
        dumped = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
        compiled = lowered.compile(compiler_options={**options, **dumped})
        seconds, used = time.perf_counter() - start, sum(os.times()[:4]) - used
        launches = _launches(Path(folder), GPUS[name].arch)
    return Compiled(compiled, launches, seconds, used)


def _launches(folder: Path, arch: str) -> tuple[Launch, ...]:
    """Reads XLA's list of launches, and from ptxas what each kernel takes."""
    usage, ahead, instructions = {}, {}, {}
    for ptx in folder.glob("*.ptx"):
        entries = ptx.read_text().split(".entry ")[1:]
        if not entries:
            continue  # constants alone
        ahead |= {entry[: entry.index("(")]: loads_ahead(entry) for entry in entries}
        instructions |= {entry[: entry.index("(")]: matrix_instructions(entry) for entry in entries}
        command = [str(_ptxas()), "-v", f"-arch={arch}", str(ptx), "-o", os.devnull]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        for entry in log.split("Compiling entry function '")[1:]:
            registers = int(re.search(r"Used (\d+) registers", entry)[1])  # type: ignore[index]
            usage[entry[: entry.index("'")]] = (registers, int(re.search(r"(\d+) bytes spill stores", entry)[1]))  # type: ignore[index]
    (sequence,) = folder.glob("*thunk_sequence.txt")
    launches = []
    for line in sequence.read_text().splitlines():
        found = re.search(r"(\S+) grid: \[(.+)\] threads: \[(.+)\] +shared_memory: (\d+) bytes", line)
        if found:
            kernel, *sizes, shared = found.groups()
            grid, threads = (math.prod(int(n) for n in size.split(",")) for size in sizes)
            if kernel not in usage:
                raise RuntimeError(f"XLA has written no PTX of kernel {kernel!r}, so what it needs is not known")
            registers, spill_bytes = usage[kernel]
            read = registers, spill_bytes, ahead[kernel], instructions[kernel]
            launches.append(Launch(kernel, grid, threads, int(shared), *read))
    return tuple(launches)


def mosaic_launches(folder: Path) -> list[Launch]:
    """Reads what Mosaic GPU writes of each kernel to the folder MOSAIC_GPU_DUMP_TO; XLA lists them among calls."""
    launches = []
    for log in sorted(folder.glob("*.ptxas")):
        usage, ptx = log.read_text(), log.with_suffix(".ptx").read_text()
        passes = log.with_suffix(".mlir-passes.log").read_text()
        launch = re.search(r"gpu.launch_func .*blocks in \((.+)\) threads in \((.+)\) +dynamic\S+ %c(\d+)", passes)
        if launch is None:
            raise RuntimeError(f"Mosaic GPU has written no launch of {log.stem!r}, so what it needs is not known")
        grid, threads = (math.prod(int(n) for n in re.findall(r"%c(\d+)", size)) for size in launch.groups()[:2])
        name, registers, spill_bytes = (
            re.search(pattern, usage)[1]  # type: ignore[index]
            for pattern in (r"function '(\w+)_mosaic_gpu_kernel'", r"Used (\d+) registers", r"(\d+) bytes spill stores")
        )
        counts = {
            "tensor_copies": ptx.count("cp.async.bulk.tensor"),
            "warpgroup_products": ptx.count("wgmma.mma_async"),
        }
        launches.append(
            Launch(
                name,
                grid,
                threads,
                int(launch[3]),
                int(registers),
                int(spill_bytes),
                **counts,  # pyright: ignore[reportArgumentType]
            )
        )
    return launches


def matrix_instructions(entry: str) -> tuple[str, ...]:
    """Returns the matrix products of a PTX entry, each kind once: "wgmma m64 k16 bf16", "mma m16 k16 f16"."""
    found = re.findall(r"(wgmma\.mma_async|mma)\.sync\.aligned\.(m\d+)n\d+(k\d+)\.(\S+)", entry)
    kinds = {
        (name.split(".")[0], m, k, min(set(types.split(".")) & OPERANDS, default="?")) for name, m, k, types in found
    }
    return tuple(sorted(" ".join(kind) for kind in kinds))


def loads_ahead(entry: str) -> int | None:
    """Returns the least number of copies that an innermost loop of a PTX entry leaves under way when it waits.

    0 says that some loop waits for all that it has asked for; None, that no innermost loop waits for any.
    """
    lines = entry.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := re.match(r"\s*(\$\w+):", line))}
    branches = [(i, re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)) for i, line in enumerate(lines)]
    loops = [(labels[found[1]], i) for i, found in branches if found and labels[found[1]] <= i]
    waits = [
        int(found[1])
        for start, end in loops
        if not any(start <= other[0] and other[1] <= end and other != (start, end) for other in loops)
        for line in lines[start:end]
        if (found := re.search(r"cp\.async\.wait_group\s+(\d+)", line))
    ]
    return min(waits, default=None)


def programs_per_core(gpu: Gpu, launch: Launch) -> int:
    """Returns how many programs of a kernel fit on a multiprocessor at once."""
    by_registers = REGISTERS_PER_CORE // max(launch.registers * launch.threads, 1)
    by_shared = gpu.shared_per_core // max(launch.shared_bytes, 1)
    return min(by_registers, by_shared, gpu.threads_per_core // launch.threads)


def _target_config(gpu: Gpu) -> str:
    """The device as XLA's GpuTargetConfigProto."""
    major, minor = gpu.arch.removeprefix("sm_").removesuffix("a")
    feature = "ACCELERATED_FEATURES" if gpu.arch.endswith("a") else "NONE"
    return f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: {gpu.shared_per_core} threads_per_core_limit: {gpu.threads_per_core}
      core_count: {gpu.num_cores} fpus_per_core: {gpu.fpus_per_core}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {int(gpu.bandwidth)} l2_cache_size: {gpu.l2_bytes} clock_rate_ghz: {gpu.clock_ghz}
      device_memory_size: {gpu.memory_bytes} shared_memory_per_block_optin: {gpu.shared_per_block}
      cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
      registers_per_core_limit: {REGISTERS_PER_CORE} registers_per_block_limit: {REGISTERS_PER_CORE}
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      runtime_version: "12.8.0" driver_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
    }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{gpu.kind}" """
