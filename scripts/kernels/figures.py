"""What a compiled program needs: memory, launches, schedules, and the weights that it copies.

The tests record these figures until this code, a compiler or the program changes (`tests/kernels/recorded.py`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from scripts.kernels.compilers import Case, axes_of
from scripts.kernels.tpu_schedule import schedule_figures

CUBLAS = "cuBLASLt"
DENSE, PACKED = "dense_product", "packed_product"  # our kernels of products


def compile_on_gpu(device: str, make_case: Callable[[Any], Case]) -> dict[str, Any]:
    """Returns what a case needs, its Pallas kernels under "kernels"."""
    from kernels_pallas import gpu_compiler

    mesh = gpu_mesh(device)
    device, _ = axes_of(device)
    case = make_case(mesh)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_TO": folder}):
        sizes = {"num_rows": case.num_rows, "itemsize": case.itemsize}
        compiled = gpu_compiler.compile_for(device, mesh, case.function, case.arguments, **sizes)
        launches = (*compiled.launches, *gpu_compiler.mosaic_launches(Path(folder)))
    compiled = dataclasses.replace(compiled, launches=launches)
    gpu, text = gpu_compiler.GPUS[device], compiled.program.as_text() or ""
    own = {name: count for name in (DENSE, PACKED) if (count := len(compiled.kernels(name)))}
    copied = {"copied_weights": copied_weights(text, case.arguments["params"])} if "params" in case.arguments else {}
    return {
        **memory_figures(compiled.program, case.cache),
        **copied,
        "num_launches": len(compiled.launches) + products(text).get(CUBLAS, 0),
        "spilling": sorted({launch.name for launch in compiled.launches if launch.spill_bytes}),
        "products": products(text) | own,
        "float_sums": float_sums(text),
        **control_flow(text),
        "seconds": round(compiled.seconds, 2),
        "processor_seconds": round(compiled.processor_seconds, 2),
        "kernels": [
            {**launch._asdict(), "programs_per_core": gpu_compiler.programs_per_core(gpu, launch)}
            for kernel in case.kernels
            for launch in compiled.kernels(kernel)
        ],
    }


def gpu_mesh(device: str) -> Any:
    """Returns a mesh of a device's GPUs, which need not be here; `axes_of` has its axes."""
    from kernels_pallas import gpu_compiler

    return gpu_compiler.mesh_of(*axes_of(device))


def float_sums(hlo: str) -> int:
    """Returns how many products and sums of floats a program has that XLA adds up in an order of its own choice."""
    bodies = re.findall(r"^%?(\S+) \([^)]*: (?:bf16|f16|f32)\[\][^)]*\) -> \S+ \{$(.*?)^\}", hlo, re.M | re.S)
    adders = {name for name, body in bodies if re.search(r"\badd\(", body)}
    applied = re.findall(r" (?:reduce|reduce-window|scatter)\(.*to_apply=%?([\w.\-]+)", hlo)
    products = len(re.findall(r" (?:dot|convolution)\(", hlo)) + hlo.count("__cublas")
    return sum(name in adders for name in applied) + products


def control_flow(hlo: str) -> dict[str, Any]:
    """Returns the conditions of a program, for which the host waits, and the turns of its loops, None if unknown."""
    loops = [line for line in hlo.splitlines() if re.search(r" while\(", line)]
    counts = [re.search(r'"known_trip_count":\{"n":"(\d+)"', line) for line in loops]
    return {
        "num_conditions": len(re.findall(r" conditional\(", hlo)),
        "loop_turns": [None if count is None else int(count[1]) for count in counts],
    }


def products(hlo: str) -> dict[str, int]:
    """Returns the numbers of XLA's products in a program for GPUs, by the way they are computed.

    That is CUBLAS, or the tile of Triton as sizes of the result, the inputs and the stages: "16x64x128x3".
    """
    counts = Counter([CUBLAS] * hlo.count('custom_call_target="__cublas$lt$matmul"'))
    # The inputs' sizes are those of the first fusion inside.
    bodies = dict(re.findall(r"^%(\S+) \(.*?\{$(.*?)^\}", hlo, re.M | re.S))
    for line in hlo.splitlines():
        if '"kind":"__triton_nested_gemm_fusion"' not in line:
            continue
        sizes = re.findall(r'"sizes":\["([\d",]+)"\]', line)[0].replace('"', "").split(",")
        stages = re.search(r'"num_stages":"?(\d+)', line)
        inputs = re.search(r'"sizes":\["?(\d+)"?\]', bodies[re.search(r"calls=%([\w.\-]+)", line)[1]])  # type: ignore[index]
        tile = [size for size in sizes if size != "1"] + [inputs[1] if inputs else "?", stages[1] if stages else "?"]
        counts["x".join(tile)] += 1
    return dict(counts)


def compile_on_tpu(mesh: Any, dump: Path, make_case: Callable[[Any], Case]) -> dict[str, Any]:
    """Returns what a case needs, its kernel's schedule included."""
    import jax

    seen = set(dump.iterdir())
    start, used = time.perf_counter(), sum(os.times()[:4])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        case = make_case(mesh)
        lowered = case.function.lower(**case.arguments)
    compiled = lowered.compile()
    figures = memory_figures(compiled, case.cache)
    if "params" in case.arguments:
        figures["copied_weights"] = copied_weights(compiled.as_text(), case.arguments["params"])
    figures["seconds"] = round(time.perf_counter() - start, 1)
    figures["processor_seconds"] = round(sum(os.times()[:4]) - used, 1)
    for kernel in case.kernels:
        figures |= schedule_figures(set(dump.iterdir()) - seen, kernel)
    return figures


def memory_figures(compiled: Any, cache: Any) -> dict[str, Any]:
    """Returns the bytes of a program's arguments, those beside arguments and results, and if the cache stays in place.

    All per device.
    """
    import jax

    def size(a: Any) -> int:
        shape = a.shape if a.sharding is None else a.sharding.shard_shape(a.shape)
        return math.prod(shape) * a.dtype.itemsize

    memory = compiled.memory_analysis()
    in_place = memory.alias_size_in_bytes >= sum(map(size, jax.tree.leaves(cache)))
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "in_place": in_place,
    }


# Operations that write a copy of an array, whole or a slice of it.
WRITING = {"copy", "transpose", "fusion", "convert", "reshape", "dynamic-slice", "slice", "concatenate", "multiply"}
# Elements of a weight that is looked for: its products take their time by reading it.
MIN_WEIGHT = 2**21


def copied_weights(hlo: str, params: Any) -> list[str]:
    """Returns the operations of a compiled program that read a weight, or its stack, and write a copy of it.

    Each is an opcode and a shape, such as "copy bf16[1,128,192,2048]". Operations inside fusions write no memory, and
    fusions with a product write its result. An asynchronous copy moves a weight to where its product reads it, but not
    one of a whole stack in a loop over its layers. `params` are shapes with shardings; weights are known by their
    number of elements on a device.
    """
    import jax

    def shape_of(a: Any) -> tuple[int, ...]:
        return a.shape if a.sharding is None else a.sharding.shard_shape(a.shape)

    # (elements of an array, those of a weight in it)
    sizes = {(math.prod(shape), math.prod(shape[1:])) for shape in map(shape_of, jax.tree.leaves(params.layers))}
    sizes |= {(math.prod(shape_of(a)),) * 2 for a in jax.tree.leaves((params.embedding, params.unembedding))}
    sizes = {pair for pair in sizes if pair[1] >= MIN_WEIGHT}
    fused, computation = set(re.findall(r"fusion\(.*calls=(%[\w.\-]+)", hlo)), None
    results: dict[str, dict[str, int]] = {}  # by operation, the elements of each array that it writes
    multiplying, writing, moving, found = set(), [], [], []
    for line in hlo.splitlines():
        if header := re.match(r"(ENTRY )?(%[\w.\-]+) \(", line):
            is_once, computation = header.groups()
        operation = re.match(r"\s+(?:ROOT )?(%[\w.\-]+) = (.*?) ([\w\-]+)\((.*)", line)
        if operation is None:
            continue
        name, types, opcode, rest = operation.groups()
        arrays = re.findall(r"(\w+\[([\d,]+)\])", types)
        results[name] = {array: math.prod(map(int, shape.split(","))) for array, shape in arrays}
        if opcode in ("convolution", "dot"):
            multiplying.add(computation)
        if computation not in fused and opcode in WRITING:
            writing.append((name, opcode, rest))
        if not is_once and (opcode == "copy-start" or "ConcatBitcast" in rest):  # the latter ends one in several parts
            moving.append((name, opcode))
    for name, opcode, rest in writing:
        named = set(re.findall(r"%[\w.\-]+", rest))  # operands, and the computation of a fusion
        if named & multiplying:
            continue
        read = {count for operand in named for count in results.get(operand, {}).values()}
        copies = {count for whole, part in sizes if whole in read for count in (whole, part)}
        found += [f"{opcode} {array}" for array, count in results[name].items() if count in copies]
    stacks = {whole for whole, part in sizes if whole > part}
    for name, opcode in moving:
        found += [f"{opcode} {array}" for array, count in results[name].items() if count in stacks]
    return found
