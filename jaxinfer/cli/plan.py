"""`jaxinfer plan`: says where a model fits, and how fast it can be there, without its weights and without devices."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from jaxinfer.cli.options import from_arguments
from jaxinfer.cli.output import show
from jaxinfer.config import PLANNED_FIELDS, EngineConfig
from jaxinfer.xla_options import MEMORY_FRACTION

if TYPE_CHECKING:
    from jaxinfer.capacity import CompiledStep, DeploymentPlan, Layout

OMITTED = tuple(field.name for field in fields(EngineConfig) if field.name not in PLANNED_FIELDS)
EXIT_FAILURE = 1
TITLES = ("tensor", "experts", "parameters", "pages", "tokens", "rows", "decode", "tokens/s", "sums", "prefill")
NOTE = (
    "Times are rooflines: bytes and FLOPs by the data sheet, {context:,} tokens a row, no launch and no latency; real"
    " steps take longer. Sums: over devices, in a step."
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    command.add_argument("model", metavar="MODEL", help="a built-in name such as Llama-3-8B, a folder, GGUF or Hub id")
    command.add_argument("--device", required=True, metavar="NAME", help="v5e-4, v6e-8, v5p-64, L4, A100x2, H200x4, …")
    command.add_argument("--dtype", help="type of the weights: float32, bfloat16, float16 or auto (default)")
    replicas = {"dest": "num_replicas", "type": int, "default": 1, "metavar": "N"}  # no option of an EngineConfig here
    command.add_argument("--replicas", **replicas, help="copies of the model, which share the devices (default 1)")
    command.add_argument("--context", type=int, metavar="N", help="tokens of each decoding request (default 1024)")
    command.add_argument("--compile", action="store_true", help="compile its steps too, by jaxinfer[aot], in minutes")
    command.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan and returns 0, or 1 if the model does not fit or its steps cannot be compiled."""
    config = from_arguments(EngineConfig, arguments)
    from jaxinfer.capacity import compile_plan, parse_devices, plan_deployment
    from jaxinfer.device import resolve_dtype

    dtype = None if arguments.dtype in (None, "auto") else resolve_dtype(arguments.dtype)
    devices = parse_devices(arguments.device).of_each(arguments.num_replicas)
    plan = plan_deployment(arguments.model, devices, config, dtype=dtype, context=arguments.context)
    if not arguments.json:
        show("\n".join(describe_plan(plan, arguments.num_replicas)))
    compiled, failure = {}, None
    if arguments.compile and plan.best is not None:
        try:
            compiled = compile_plan(plan, config)
        except (ValueError, RuntimeError) as error:
            failure = " ".join(str(error).split())
    if arguments.json:
        steps = {name: asdict(step) for name, step in compiled.items()}
        further = {"replicas": arguments.num_replicas, "compiled": steps, "compiler_failure": failure}
        show(json.dumps(plan.as_dict() | further))
    else:
        for line in describe_compiled(plan, compiled):
            show(line)
        if failure is not None:
            show(f"Its steps are not compiled: {failure}")
    return EXIT_FAILURE if plan.best is None or failure is not None else 0


def describe_plan(plan: DeploymentPlan, num_replicas: int = 1) -> Iterator[str]:
    """Yields the lines of a plan for people; it is that of each of `num_replicas` copies of the model."""
    chip = plan.devices.chip
    size = f"{plan.num_parameters / 1e9:,.2f} billion parameters in {plan.dtype}"
    part = f" ({MEMORY_FRACTION:.0%} of its memory, which JAX takes)" if chip.platform == "gpu" else ""
    each = f"each of {num_replicas} replicas " if num_replicas > 1 else ""
    yield f"{plan.model}: {size}, {each}on {plan.devices} with {chip.usable_bytes / 1e9:,.1f} GB each{part}"
    rows = [TITLES, *(tuple(_cells(layout)) for layout in plan.layouts if layout.refusal is None)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if len(rows) > 1:
        yield from ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    for layout in plan.layouts:
        if layout.refusal is not None:
            yield f"tensor={layout.tensor} experts={layout.experts}: {layout.refusal}"
    best = plan.best
    if best is None:
        yield f"It does not fit on {plan.devices}: take more or larger devices, or --quantization int8 or int4."
        return
    idle = plan.devices.count - best.num_devices
    options = f"--tensor-parallel {best.tensor} --expert-parallel {best.experts}"
    options += f" --replicas {num_replicas}" if num_replicas > 1 else ""
    idle *= num_replicas
    yield f"Take {options}{f', which leaves {idle} devices idle' if idle else ''}."
    yield NOTE.format(context=plan.context)


def describe_compiled(plan: DeploymentPlan, compiled: Mapping[str, CompiledStep]) -> Iterator[str]:
    """Yields a line for each step that is compiled for the best layout of a plan."""
    for name, step in compiled.items():
        total = (step.argument_bytes + step.temporary_bytes) / 1e9
        yield (
            f"Compiled in {step.seconds:.0f} s: {name} takes {step.temporary_bytes / 1e6:,.1f} MB beside its arguments,"
            f" {total:,.1f} of {plan.devices.chip.usable_bytes / 1e9:,.1f} GB in all."
        )


def _cells(layout: Layout) -> Iterator[str]:
    memory, decode, prefill = layout.memory, layout.decode, layout.prefill
    assert memory is not None
    assert decode is not None
    assert prefill is not None
    yield from (str(layout.tensor), str(layout.experts))
    yield f"{memory.resident_bytes / 1e9:,.1f} GB"
    yield f"{memory.pool_bytes / 1e9:,.1f} GB"
    yield from (f"{layout.num_tokens:,}", str(layout.num_rows))
    yield f"{1e3 * decode.seconds:.2f} ms"
    yield f"{decode.tokens_per_second:,.0f}"
    yield str(decode.num_collectives)
    yield f"{prefill.tokens_per_second:,.0f}/s"
