"""`jaxinfer plan`: says where a model fits, and how fast it can be there, without its weights and without devices."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from jaxinfer.cli.options import from_arguments, read_replicas, read_size, reader
from jaxinfer.cli.output import show
from jaxinfer.config import AUTO, PLANNED_FIELDS, EngineConfig
from jaxinfer.xla_options import MEMORY_FRACTION

if TYPE_CHECKING:
    from jaxinfer.plan import Answer, CompiledStep, DeploymentPlan, Devices, Layout, Rates, StepFigures

OMITTED = tuple(field.name for field in fields(EngineConfig) if field.name not in PLANNED_FIELDS)
EXIT_FAILURE = 1
TITLES = ("tensor x experts", "parameters", "pages", "tokens", "rows", "decode", "tokens/s", "sums", "prefill")
NOTE = (
    "Bounds are rooflines: bytes and FLOPs by the data sheet, {context:,} tokens a row, no launch and no latency{but};"
    " real steps take longer. Sums: over devices, in a step."
)
UNEXPECTED = "not measured on this device"
MAX_ROWS = 6  # of the table
MAX_LISTED = 6  # splits in a line of those that do not fit
EXAMPLES = "v5e-8, v5litepod-8, v6e-8, v5p-64, tpu7x-8, L4, RTX4090, 4xH100, H200x4, 2xv5e-8 on two hosts"


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    command.add_argument("model", metavar="MODEL", help="a built-in name such as Llama-3-8B, a folder, GGUF or Hub id")
    device = f"{EXAMPLES}, …; without a number as few as hold the model"
    command.add_argument("--device", required=True, metavar="NAME", help=device)
    command.add_argument("--dtype", help="type of weights that are not packed: float32, bfloat16, float16 or auto")
    of_replicas = "copies of the model, which share the devices (default 1); auto: the most that they hold"
    replicas = {"dest": "num_replicas", "default": 1, "metavar": "N"}  # no option of an EngineConfig here
    command.add_argument("--replicas", type=reader(read_replicas, "N or auto"), **replicas, help=of_replicas)
    command.add_argument("--context", type=int, metavar="N", help="tokens of each decoding request (default 1024)")
    command.add_argument("--prompt", type=int, metavar="N", help="tokens before the first token (default 1024)")
    command.add_argument("--price", type=float, metavar="DOLLARS", help="of one device for an hour")
    rate = {"type": reader(_read_rate, "RATE"), "metavar": "RATE"}
    command.add_argument(
        "--load-bytes-per-second", **rate, help="at which weights are downloaded or read (default 1GB)"
    )
    command.add_argument("--compile", action="store_true", help="compile its steps too, by jaxinfer[aot], in minutes")
    command.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    own = command.add_argument_group("any other device, with --memory-bytes; or other rates of a known one")
    own.add_argument("--bandwidth", **rate, help="bytes a second of its memory, such as 5.3TB or 5.3e12")
    own.add_argument("--flops", type=float, metavar="RATE", help="FLOPs a second in 16 bits without sparsity, as 9e14")
    own.add_argument("--link-bandwidth", **rate, help="bytes a second to the other devices, if there are several")
    link = {"type": reader(_read_link, "RATE,LATENCY"), "metavar": "RATE,LATENCY"}
    own.add_argument("--host-link", **link, help="bytes a second and latency between hosts, such as 25GB,50us")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan and returns 0, or 1 if the model does not fit or its steps cannot be compiled."""
    config = from_arguments(EngineConfig, arguments)
    from jaxinfer.device import resolve_dtype
    from jaxinfer.plan import HostLink, compile_plan, parse_devices, plan_deployment
    from jaxinfer.plan.short_answer import LOAD_BYTES_PER_SECOND, answer

    dtype = None if arguments.dtype in (None, "auto") else resolve_dtype(arguments.dtype)
    rates = {"bandwidth": arguments.bandwidth, "flops": arguments.flops, "link_bytes": arguments.link_bandwidth}
    link = None if arguments.host_link is None else HostLink(**arguments.host_link)
    devices = parse_devices(arguments.device, memory_bytes=config.memory_bytes, host_link=link, **rates)
    options = {"dtype": dtype, "context": arguments.context, "prompt": arguments.prompt}
    num_replicas, plan = _plan_replicas(
        arguments.num_replicas, devices, lambda each: plan_deployment(arguments.model, each, config, **options)
    )
    load_rate = arguments.load_bytes_per_second
    found = answer(
        plan,
        num_replicas=num_replicas,
        price=arguments.price,
        load_bytes_per_second=LOAD_BYTES_PER_SECOND if load_rate is None else load_rate,
    )
    if not arguments.json:
        show("\n".join(describe_plan(plan, found, config, num_replicas, _fewer(num_replicas, devices))))
    compiled, failure = {}, None
    if arguments.compile and plan.best is not None:
        try:
            compiled = compile_plan(plan, config)
        except (ValueError, RuntimeError) as error:
            failure = " ".join(str(error).split())
    if arguments.json:
        steps = {name: asdict(step) for name, step in compiled.items()}
        further = {"replicas": num_replicas, "compiled": steps, "compiler_failure": failure}
        further |= {"answer": None if found is None else asdict(found)}
        show(json.dumps(plan.as_dict() | further))
    else:
        for line in describe_compiled(plan, compiled):
            show(line)
        if failure is not None:
            show(f"Its steps are not compiled: {failure}")
    return EXIT_FAILURE if plan.best is None or failure is not None else 0


def _plan_replicas(
    num_replicas: int | str, devices: Devices, plan: Callable[[Devices], DeploymentPlan]
) -> tuple[int, DeploymentPlan]:
    """Returns the number of replicas and the plan of each; of AUTO the most that the devices hold, else one."""
    if isinstance(num_replicas, int):
        return num_replicas, plan(devices.of_each(num_replicas))
    count = devices.count
    if count is None:
        name = devices.chip.name
        raise ValueError(
            f"--replicas {AUTO} shares all devices, and their number is not given; give {name}x8 or another"
        )
    for number in (n for n in range(count, 1, -1) if count % n == 0):
        if (found := plan(devices.of_each(number))).best is not None:
            return number, found
    return 1, plan(devices)


def _fewer(num_replicas: int, devices: Devices) -> list[int]:
    """Returns the smaller numbers of replicas that can share the devices; [] if the number of devices is free."""
    return [n for n in range(1, num_replicas) if devices.count is not None and devices.count % n == 0]


def describe_plan(
    plan: DeploymentPlan,
    found: Answer | None,
    config: EngineConfig,
    num_replicas: int = 1,
    fewer: Sequence[int] = (),
) -> Iterator[str]:
    """Yields the lines of a plan for people; it is that of each of `num_replicas` copies of the model.

    `fewer`: the numbers of copies that leave each more devices.
    """
    yield _heading(plan, config, num_replicas)
    fitting = [layout for layout in plan.layouts if layout.refusal is None]
    yield from _table(fitting)
    yield from _unfit([layout for layout in plan.layouts if layout.refusal is not None])
    if found is None:
        yield _refusal(plan, config, fewer)
        return
    best = fitting[0]
    yield from _between_hosts(plan, fitting)
    yield f"Take {_options(plan, best, num_replicas)}{_reason(best, fitting)}."
    yield from _rates(plan, found)
    yield _load(plan, found)
    yield NOTE.format(context=plan.context, but=" but that of hosts" if plan.devices.num_hosts > 1 else "")
    yield _sentence(plan, found)


def describe_compiled(plan: DeploymentPlan, compiled: Mapping[str, CompiledStep]) -> Iterator[str]:
    """Yields a line for each step that is compiled for the best layout of a plan."""
    for name, step in compiled.items():
        total = (step.argument_bytes + step.temporary_bytes) / 1e9
        yield (
            f"Compiled in {step.seconds:.0f} s: {name} takes {step.temporary_bytes / 1e6:,.1f} MB beside its arguments,"
            f" {total:,.1f} of {plan.usable_bytes / 1e9:,.1f} GB in all."
        )


def _heading(plan: DeploymentPlan, config: EngineConfig, num_replicas: int) -> str:
    takes_part = plan.devices.chip.platform == "gpu" and config.memory_bytes is None
    part = f" ({MEMORY_FRACTION:.0%} of its memory, which JAX takes)" if takes_part else ""
    each = f"each of {num_replicas} replicas " if num_replicas > 1 else ""
    stored = f"in {plan.dtype}"
    if plan.packing is not None:
        name = plan.packing if "-" in plan.packing else plan.packing.upper()
        stored = f"packed in {name}, {plan.checkpoint_bytes / 1e9:,.1f} GB"
    elif config.quantization is not None:
        stored = f"in {plan.dtype} rounded to {config.quantization}"
    return (
        f"{plan.model}: {plan.num_parameters / 1e9:,.2f} billion parameters {stored}, {each}on {plan.devices} with"
        f" {plan.usable_bytes / 1e9:,.1f} GB each{part}"
    )


def _table(layouts: Sequence[Layout]) -> Iterator[str]:
    """Yields a line for the splits that have the same parameters, times and rows: with the pages of the first."""
    splits: dict[tuple[str, ...], list[Layout]] = {}
    for layout in layouts:
        parameters, _, _, *figures = _cells(layout)
        splits.setdefault((parameters, *figures), []).append(layout)
    shown = [*splits.values()][:MAX_ROWS]
    rows = [TITLES, *((_names(same), *_cells(same[0])) for same in shown)] if splits else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *cells])
    if others := [layout for same in [*splits.values()][MAX_ROWS:] for layout in same]:
        most = max(layout.rate for layout in others)
        yield f"{len(others)} more splits have at most {figure(most)} tokens/s; --json lists them."


def _cells(layout: Layout) -> Iterator[str]:
    memory, decode, prefill = layout.memory, layout.decode, layout.prefill
    assert memory is not None
    assert decode is not None
    assert prefill is not None
    yield f"{memory.resident_bytes / 1e9:,.1f} GB"
    yield f"{memory.pool_bytes / 1e9:,.1f} GB"
    yield figure(layout.num_tokens)
    yield str(layout.num_rows)
    yield f"{figure(1e3 * decode.seconds)} ms"
    yield figure(decode.tokens_per_second)
    yield str(decode.num_collectives)
    yield f"{figure(prefill.tokens_per_second)}/s"


def _between_hosts(plan: DeploymentPlan, fitting: Sequence[Layout]) -> Iterator[str]:
    """Yields what the fastest layout with stages on several hosts, and the one without, take of the link of hosts."""
    if plan.devices.host_link is None:
        return
    on_several = [layout for layout in fitting if layout.num_hosts > 1]
    kinds = ([layout for layout in on_several if (layout.stages > 1) == has_stages] for has_stages in (False, True))
    found = [layouts[0] for layouts in kinds if layouts]
    if found:
        yield f"Between hosts ({plan.devices.host_link}):"
    for layout in found:
        decode, prefill = layout.decode, layout.prefill
        assert decode is not None
        assert prefill is not None
        rows = "row" if layout.num_rows == 1 else f"{layout.num_rows} rows"
        yield f"  {_name(layout)}: a decode step of {rows} {_sent(layout, decode)};"
        yield f"  {' ' * len(_name(layout))}  a prefill step of {prefill.num_tokens:,} tokens {_sent(layout, prefill)}."


def _sent(layout: Layout, step: StepFigures) -> str:
    """Returns what a step sends between hosts, and how long a stage waits."""
    times = f"{figure(1e3 * step.host_seconds)} of {figure(1e3 * step.seconds)} ms"
    sent = f"{figure(step.host_bytes / 1e6)} MB a host, {times}"
    if layout.stages == 1:
        return f"sends {step.num_messages} sums, {sent}"
    parts = "1 part" if step.num_parts == 1 else f"{step.num_parts} parts"
    return f"takes {step.num_ticks} ticks for {parts} ({step.idle_part:.0%} idle), {sent}"


def _unfit(layouts: Sequence[Layout]) -> Iterator[str]:
    """Yields a line for the splits that are too small, and one for each reason why a mesh cannot divide the model."""
    small = [layout for layout in layouts if layout.memory is not None]
    if small:
        nearest = min(small, key=_missing_bytes)
        which = f"; the nearest is {_name(nearest)}" if len(small) > 1 else ""
        yield f"Too small: {_names(small)}{which}: {nearest.refusal}."
    undivided: dict[str | None, list[Layout]] = {}
    for layout in layouts:
        if layout.memory is None:
            undivided.setdefault(layout.refusal, []).append(layout)
    for refusal, same in undivided.items():
        yield f"Not divided so: {_names(same)}: {refusal}."


def _missing_bytes(layout: Layout) -> int:
    assert layout.memory is not None
    return layout.memory.total_bytes - (layout.memory.limit_bytes or 0)


def _name(layout: Layout) -> str:
    stages = f" in {layout.stages} stages" if layout.stages > 1 else ""
    return f"{layout.tensor}x{layout.experts}{stages}"


def _names(layouts: Sequence[Layout]) -> str:
    names = [_name(layout) for layout in layouts[:MAX_LISTED]]
    more = len(layouts) - len(names)
    return (", " if any(layout.stages > 1 for layout in layouts) else " ").join(names) + (
        f" and {more} more" if more > 0 else ""
    )


def _refusal(plan: DeploymentPlan, config: EngineConfig, fewer: Sequence[int]) -> str:
    """Returns the sentence that a model does not fit, with the ways out that were not given yet."""
    smaller = {None: ", or --quantization int8 or int4", "int8": ", or --quantization int4"}
    rounded = "" if plan.packing else smaller.get(config.quantization, "")
    shares = f"fewer replicas ({', '.join(map(str, fewer))}), " if fewer else ""
    return f"{plan.model} does not fit on {plan.devices}: take {shares}more or larger devices{rounded}."


def _options(plan: DeploymentPlan, best: Layout, num_replicas: int) -> str:
    options = f"--stages {best.stages} " if best.stages > 1 else ""
    options += f"--tensor-parallel {best.tensor} --expert-parallel {best.experts}"
    options += f" --replicas {num_replicas}" if num_replicas > 1 else ""
    idle = ((plan.devices.count or 0) - best.num_devices) * num_replicas
    return f"{options}{f', which leaves {idle} devices idle' if idle else ''}"


def _reason(best: Layout, fitting: Sequence[Layout]) -> str:
    """Returns why the best layout is taken among those of its speed; "" if it is the fastest alone."""
    equal = [layout for layout in fitting if layout.rate == best.rate and layout is not best]
    if not equal:
        return ""
    if any(layout.num_devices > best.num_devices for layout in equal):
        return f": as fast as {_names(equal)}, with fewer devices"
    return f": as fast as {_names(equal)}, and with the fewest groups of experts, of which one waits for the fullest"


def _rates(plan: DeploymentPlan, found: Answer) -> Iterator[str]:
    """Yields a line for each figure, its bound beside what is to be expected."""
    rows = [("", "bound", "expected"), *_figures_of(plan, found)]
    columns = [*zip(*rows, strict=True)][: 2 if found.expected is None else 3]
    first, *others = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    width = max(map(len, first))
    for title, *cells in zip((row[0] for row in rows), *others, strict=True):
        yield "  ".join([title.ljust(width), *cells])
    measured, name = plan.devices.chip.measured, plan.devices.chip.name
    if measured is None:
        yield f"Expected: {UNEXPECTED} ({name})."
    else:
        yield (
            f"Expected: {measured.decode:.2f} of the bandwidth and {measured.prefill:.2f} of the FLOP/s, measured with"
            f" {measured.model} {name}."
        )


def _figures_of(plan: DeploymentPlan, found: Answer) -> Iterator[tuple[str, str, str]]:
    both = found.bound, found.expected or found.bound
    users = found.num_users

    def row(title: str, read: Callable[[Rates], str]) -> tuple[str, str, str]:
        return title, read(both[0]), read(both[1])

    yield row(
        f"first token of a prompt of {plan.prompt:,}, alone", lambda r: f"{figure(1e3 * r.first_token_seconds)} ms"
    )
    yield row("tokens/s of one user, alone", lambda r: figure(r.tokens_per_second_alone))
    yield row(f"tokens/s of one user of {users}", lambda r: figure(r.tokens_per_second_each))
    yield row(f"tokens/s of all {users}", lambda r: figure(r.tokens_per_second_all))
    if found.dollars_per_hour is not None:
        yield row("dollars per million tokens", lambda r: f"{r.dollars_per_million_tokens:,.3f}")


def _load(plan: DeploymentPlan, found: Answer) -> str:
    bound = "bandwidth, to read weights and pages" if found.is_memory_bound else "FLOP/s"
    price = f" ${found.dollars_per_hour:,.2f} an hour." if found.dollars_per_hour is not None else ""
    return (
        f"Decoding is bound by {bound}. Load: {plan.checkpoint_bytes / 1e9:,.1f} GB at"
        f" {found.load_bytes_per_second / 1e9:,.3g} GB/s take {figure(found.load_seconds)} s; compile: not"
        f" measured.{price}"
    )


def _sentence(plan: DeploymentPlan, found: Answer) -> str:
    used = found.stages * found.tensor * found.experts * found.num_replicas
    all_of_them = found.num_devices
    count = f"{used} of {all_of_them}" if used < all_of_them else str(used)
    users = "1 user" if found.num_users == 1 else f"{found.num_users} users"
    best = f"{figure(found.bound.tokens_per_second_each)} tokens/s{' each' if found.num_users > 1 else ''} at best"
    expected = ""
    if found.expected is not None:
        expected = f", {figure(found.expected.tokens_per_second_each)} expected"
    return (
        f"{plan.model} fits on {count} {plan.devices.chip.name} with room for {figure(found.num_tokens)} tokens;"
        f" {users} at {best}{expected}."
    )


def figure(number: float) -> str:
    """Returns a number in three digits, with none behind the point from 100 on."""
    digits = 2 - math.floor(math.log10(number)) if number > 0 else 0
    return f"{round(number, digits):,.{max(digits, 0)}f}"


def _read_rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float(read_size(text))


def _read_link(text: str) -> dict[str, float]:
    found = re.fullmatch(r"(.+),\s*([^,]+?)(s|ms|[u\u00b5]s)?", text.strip())
    if found is None:
        raise ValueError
    seconds = {None: 1.0, "s": 1.0, "ms": 1e-3}.get(found[3], 1e-6)
    return {"bytes_per_second": _read_rate(found[1]), "latency_seconds": float(found[2]) * seconds}
