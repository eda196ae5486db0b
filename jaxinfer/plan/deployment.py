"""Where a model fits, with how many pages, and which split of it takes the least time by the roofline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jaxinfer.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoint.formats.described import DescribedCheckpoint, stated_dtype
from jaxinfer.checkpoint.huggingface import read_json, without_download
from jaxinfer.checkpoint.making.assemblies import Assembly, assemblies_of, is_assembly
from jaxinfer.checkpoint.published import published_checkpoint
from jaxinfer.checkpoint.safetensors_file import DTYPES, StoredTensor
from jaxinfer.checkpoint.stored import Stored
from jaxinfer.config import PLANNED_FIELDS, CacheConfig, EngineConfig
from jaxinfer.device import ACCELERATOR_BATCHED_TOKENS
from jaxinfer.model.components.experts import EXPERTS_AXIS, MLP_AXIS
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import Params, abstract_params, over_mesh
from jaxinfer.parallel.placement import Placement, refuse_undivided
from jaxinfer.plan.cache import (
    MemoryQuestion,
    addressable_pages,
    check_open_pages,
    model_of_engine,
    resolve_max_model_len,
)
from jaxinfer.plan.compiler import SLICES, CompiledStep, CompileTask, compile_steps, require_compiler
from jaxinfer.plan.devices import Chip, Devices
from jaxinfer.plan.limits import SPARE, TOKENS_PER_ROW, plan_memory
from jaxinfer.plan.memory import MemoryPlan, num_bytes, num_elements, usable_pages
from jaxinfer.plan.roofline import Split, StepFigures, experts_of, prompt_seconds, step_figures
from jaxinfer.plan.step_shapes import max_batched_tokens, max_rows
from jaxinfer.validation import shown
from kernels_pallas.mesh_axes import STAGES_AXIS


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model split over some devices: heads and networks in `tensor` parts, experts in `experts` groups.

    * `stages`: groups of these devices, each with a part of the layers. `num_hosts`: on which all of them lie.
    * `refusal`: why it does not fit; None if it does.
    * `memory`: the plan of each device; None if the model cannot be split so.
    * `num_tokens`: that all pages hold.
    * `num_rows`: of a decode step, if each row has `DeploymentPlan.context` tokens.
    * `decode`, `decode_alone`: a step of these rows, and of one row.
    * `prefill`: a step of a prompt of the most tokens of a step.
    * `first_token_seconds`: the steps of a prompt of `DeploymentPlan.prompt` tokens that runs alone.
    """

    tensor: int
    experts: int
    stages: int = 1
    num_hosts: int = 1
    refusal: str | None = None
    memory: MemoryPlan | None = None
    num_tokens: int = 0
    num_rows: int = 0
    decode: StepFigures | None = None
    decode_alone: StepFigures | None = None
    prefill: StepFigures | None = None
    first_token_seconds: float | None = None

    @property
    def num_devices(self) -> int:
        return self.stages * self.tensor * self.experts

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the axes of its mesh."""
        stages = {STAGES_AXIS: self.stages} if self.stages > 1 else {}
        return {**stages, EXPERTS_AXIS: self.experts, MLP_AXIS: self.tensor}

    @property
    def placement(self) -> Placement:
        # An abstract mesh has all that shardings ask for.
        return Placement(AbstractMesh((*self.axes.values(),), (*self.axes,)))  # type: ignore[arg-type]

    @property
    def rate(self) -> float:
        """Tokens a second of all rows, in three digits: smaller differences are not the roofline's to tell."""
        return 0.0 if self.decode is None else float(f"{self.decode.tokens_per_second:.3g}")


@dataclass(frozen=True, kw_only=True)
class DeploymentPlan:
    """The ways to run a model on some devices. `layouts` has every split of it, the one that decodes fastest first.

    * `packing`: the format in which the checkpoint's weights are packed; None if they are floating point.
    * `checkpoint_bytes`: of the weights that a load reads: packed ones as on the device, the others as in their files,
      or in the type of config.json.
    * `usable_bytes`: of each device, for all that the engine has there.
    * `context`, `prompt`: tokens of each row of a decode step, and of the prompt whose first token is timed.
    """

    model: str
    dtype: str
    packing: str | None
    num_parameters: int
    checkpoint_bytes: int
    devices: Devices
    usable_bytes: int
    context: int
    prompt: int
    layouts: tuple[Layout, ...]

    @property
    def best(self) -> Layout | None:
        """The layout that fits and decodes most tokens a second by the roofline; None if none fits.

        Of those that are equally fast it has the fewest devices, then the fewest groups of experts, then of stages.
        """
        return next((layout for layout in self.layouts if layout.refusal is None), None)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        values, chip = asdict(self), self.devices.chip
        values["devices"]["chip"]["sheet"] = chip.sheet._asdict()
        return values


@dataclass(frozen=True, kw_only=True)
class _Question:
    """A model with the limits, the device and the lengths for which each of its layouts is planned.

    * `memory`: the model on one device.
    * `grouped`: the model with its layers in stacks that a scan can have, for a layout.
    * `weights`: the abstract parameters of the model on some mesh, in floating point and as they lie on the device.
    """

    memory: MemoryQuestion
    grouped: Callable[[Layout], ModelConfig]
    weights: Callable[[ModelConfig], tuple[Params, Params]]
    devices: Devices
    context: int
    prompt: int


def plan_deployment(
    model: str | Path,
    devices: Devices,
    config: EngineConfig | None = None,
    *,
    dtype: str | None = None,
    context: int | None = None,
    prompt: int | None = None,
) -> DeploymentPlan:
    """Plans every split of a model over up to all of some devices. It needs no weights and none of the devices.

    `model` is a name of `checkpoint.published`, a folder with a config.json, a GGUF file or a Hub id. Weights that it
    packs count as they lie on the device; the others in `dtype`, or as `config.quantization` rounds them. Without
    weights, their format is that of config.json. None is the dtype that an engine takes on such a device. Devices
    without a count are the fewest that hold the model. A row has `context` tokens and a prompt `prompt`, each 1,024 or
    all of a shorter request by default. Raises ValueError for unknown models, for a `context` or `prompt` beyond the
    model's length, for a quantization of packed weights, and for other fields of the configuration than PLANNED_FIELDS.
    """
    config = EngineConfig() if config is None else config
    for field in fields(EngineConfig):
        value = getattr(config, field.name)
        if field.name not in PLANNED_FIELDS and value != field.default:
            raise ValueError(f"{field.name}={shown(value)} is not planned; leave it out of the EngineConfig")
    chip = devices.chip
    dtype = chip.dtype if dtype is None else dtype
    checkpoint = _described(model)
    described = model_of_engine(checkpoint.config, config)
    longest = resolve_max_model_len(described, config)
    context, prompt = (_checked_length(name, n, longest) for name, n in (("context", context), ("prompt", prompt)))

    def grouped(layout: Layout) -> ModelConfig:
        mesh = layout.placement.mesh
        return over_mesh(checkpoint.grouped(described, scans=True, mesh=mesh), mesh)

    @cache  # most meshes have one and the same
    def weights(model: ModelConfig) -> tuple[Params, Params]:
        options: dict[str, Any] = {"quantization": config.quantization, "is_packed": chip.platform != "tpu"}
        return abstract_params(model, dtype), checkpoint.abstract_params(model, dtype, **options)

    numbers, _ = weights(checkpoint.grouped(described, scans=True))  # refuses a quantization of packed weights
    lengths = {"context": context, "prompt": prompt}
    memory = MemoryQuestion(model=described, config=config, dtype=dtype, platform=chip.platform)
    check_open_pages(memory)
    question = _Question(memory=memory, grouped=grouped, weights=weights, devices=devices, **lengths)
    count, layouts = _fewest(question, chip.counts if devices.count is None else (devices.count,))
    return DeploymentPlan(
        model=str(model),
        dtype=dtype,
        packing=None if checkpoint.packing is None else checkpoint.packing["quant_method"],
        num_parameters=num_elements(numbers),
        checkpoint_bytes=_checkpoint_bytes(checkpoint, described),
        devices=replace(devices, count=count),
        usable_bytes=chip.usable_bytes if config.memory_bytes is None else config.memory_bytes,
        context=context,
        prompt=prompt,
        layouts=tuple(sorted(layouts, key=_order)),
    )


def compile_plan(plan: DeploymentPlan, config: EngineConfig | None = None) -> dict[str, CompiledStep]:
    """Compiles the decode and the prefill step of a plan's best layout, with all pages, by the devices' own compiler.

    `config` is that of the plan. The devices need not be here. Each step takes a minute or so of this machine. Raises
    ValueError if no layout fits, or if the compiler is not installed or does not know the devices.
    """
    config, layout, chip = EngineConfig() if config is None else config, plan.best, plan.devices.chip
    if layout is None or layout.memory is None:
        raise ValueError(
            f"{plan.model} does not fit on {plan.devices}, so there is no step to compile; take more devices"
        )
    if chip.platform == "tpu" and chip.name not in SLICES:
        known = ", ".join(SLICES)
        raise ValueError(f"steps for a {chip.name} cannot be compiled without one; the TPUs that can are {known}")
    require_compiler(chip.name, chip.platform, layout.num_devices)
    checkpoint = _described(plan.model)
    model = model_of_engine(checkpoint.config, config)
    mesh = layout.placement.mesh
    model = checkpoint.grouped(model, scans=chip.platform != "gpu", mesh=mesh)
    split = over_mesh(model, mesh)
    weights: dict[str, Any] = {"dtype": plan.dtype, "param_bytes": layout.memory.resident_bytes}
    devices: dict[str, Any] = {"placement": layout.placement, "platform": chip.platform}
    question, cache, _ = _plan_memory(MemoryQuestion(model=split, config=config, **weights, **devices), chip)
    limits, longest = question.config, question.max_model_len
    options: dict[str, Any] = {"quantization": config.quantization, "is_packed": chip.platform != "tpu"}
    tokens = min(max_batched_tokens(limits), longest)
    shared: dict[str, Any] = {
        "cache": replace(cache, num_pages=layout.memory.num_pages),
        "max_context": longest,
        "dtype": plan.dtype,
        "params": checkpoint.abstract_params(split, plan.dtype, **options),
        "num_rows": max_rows(limits),
    }
    steps = {
        "decode": {"step": "decode_step", "num_tokens": max_rows(limits), **shared},
        "prefill": {"step": "prefill_step", "num_tokens": tokens, **shared},
    }
    task = CompileTask(chip=chip.name, platform=chip.platform, axes=layout.axes, config=model, steps=steps)
    return compile_steps(task)


def _described(model: str | Path) -> Checkpoint:
    """Returns a checkpoint whose tensors are known: from the headers of its files, or as config.json says."""
    name = str(model)
    if "/" not in name and not Path(name).exists():
        return published_checkpoint(name)
    checkpoint = open_checkpoint(without_download(model), ["config.json"])
    if checkpoint.packing is None or checkpoint.gguf is not None:
        return checkpoint
    try:
        checkpoint.plan(checkpoint.config)
    except ValueError:  # none are there, or not all
        return DescribedCheckpoint(checkpoint.path, read_json(checkpoint.config_file))
    return checkpoint


def _checkpoint_bytes(checkpoint: Checkpoint, model: ModelConfig) -> int:
    """Returns the bytes that a load reads, by the headers of the files or else by config.json."""
    params = checkpoint.abstract_params(model, stated_dtype(checkpoint))
    try:
        plan, stored = checkpoint.plan(model)
    except ValueError:  # no file is here, or not all
        return num_bytes(params)

    def packed_bytes(assembly: Assembly, param: Any) -> int:
        return 0 if _floats(assembly, stored) else num_bytes(param)

    packed = jax.tree.map(packed_bytes, plan, params, is_leaf=is_assembly)
    # Several tensors of a model may be parts of one in the file.
    floats = {name: one for each in assemblies_of(plan) for name, one in _floats(each, stored)}
    sizes = (math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize for tensor in floats.values())
    return sum(jax.tree.leaves(packed)) + sum(sizes)


def _floats(assembly: Assembly, stored: Mapping[str, Stored]) -> list[tuple[str, StoredTensor]]:
    """Returns the stored tensors of a tensor, by name, if they are floating point; [] if they are packed."""
    tensors = [(name, stored[name]) for name in assembly.names]
    floats = [(name, tensor) for name, tensor in tensors if isinstance(tensor, StoredTensor)]
    return floats if len(floats) == len(tensors) else []


def _checked_length(name: str, number: int | None, longest: int) -> int:
    number = min(TOKENS_PER_ROW, longest) if number is None else number
    if not 1 <= number <= longest:
        raise ValueError(f"{name}={number} is not between 1 and the {longest} tokens of a request; give another")
    return number


def _order(layout: Layout) -> tuple[float, ...]:
    return (layout.refusal is not None, -layout.rate, layout.num_devices, layout.experts, layout.stages)


def _splits(config: ModelConfig, devices: Devices) -> Iterator[Layout]:
    """Yields the layouts of each number of devices that divides their count; a dense model has experts=1.

    They lie on whole hosts, or on a part of one. Stages have whole hosts.
    """
    has_experts = any(experts_of(layer) is not None for layer in config.layers)
    count, per_host = devices.count or 1, devices.per_host or 1
    divisors = _divisors(count)
    for used in divisors:
        if per_host % used and used % per_host:
            continue
        num_hosts = max(used // per_host, 1)
        for stages in _divisors(num_hosts):
            own = used // stages
            for experts in (n for n in divisors if own % n == 0 and (n == 1 or has_experts)):
                yield Layout(stages=stages, tensor=own // experts, experts=experts, num_hosts=num_hosts)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _fewest(question: _Question, counts: tuple[int, ...]) -> tuple[int, list[Layout]]:
    """Returns the first number of devices on which a layout fits, else the last, and its layouts."""
    count, layouts = 0, list[Layout]()
    for count in counts:
        splits = _splits(question.memory.model, replace(question.devices, count=count))
        layouts = [_planned(question, layout) for layout in splits]
        if any(layout.refusal is None for layout in layouts):
            break
    return count, layouts


def _planned(question: _Question, layout: Layout) -> Layout:
    """Returns a layout with its figures, or its refusal."""
    memory, placement, chip, context = question.memory, layout.placement, question.devices.chip, question.context
    try:
        refuse_undivided(memory.model, layout.axes)
        model = question.grouped(layout)
        numbers, params = (placement.params(model, tree) for tree in question.weights(model))
    except ValueError as error:
        return replace(layout, refusal=str(error))
    memory = replace(memory, model=model, placement=placement, param_bytes=num_bytes(params))
    memory, _, plan = _plan_memory(memory, chip)
    config = memory.config
    layout = replace(layout, memory=plan, num_tokens=plan.num_pages * config.page_size)
    if plan.num_pages < 1:
        short = plan.total_bytes + plan.page_bytes - (plan.limit_bytes or 0)
        return replace(layout, refusal=f"{short / 1e9:,.1f} GB more than a device has", num_tokens=0)
    window = model.page_kinds[0].window
    if layout.num_tokens < (context if window is None else min(context, window)):
        return replace(layout, refusal=f"pages for {layout.num_tokens:,} tokens, fewer than the {context:,} of a row")
    split = Split(
        memory=memory,
        params=params,
        numbers=numbers,
        tensor=layout.tensor,
        experts=layout.experts,
        stages=layout.stages,
        num_hosts=layout.num_hosts,
        host_link=question.devices.host_link,
    )
    figures = partial(step_figures, split, chip)
    rows = max(min(max_rows(config), layout.num_tokens // context), 1)
    most = min(max_batched_tokens(config), memory.max_model_len)
    return replace(
        layout,
        num_rows=rows,
        decode=figures(num_rows=rows, tokens_per_row=1, context=context),
        decode_alone=figures(num_rows=1, tokens_per_row=1, context=context),
        prefill=figures(num_rows=1, tokens_per_row=most, context=most),
        first_token_seconds=prompt_seconds(split, chip, num_tokens=question.prompt, max_step_tokens=most),
    )


def _plan_memory(question: MemoryQuestion, chip: Chip) -> tuple[MemoryQuestion, CacheConfig, MemoryPlan]:
    """Returns what `plan_memory` does for such a device, with the pages that fit."""
    config = question.config
    limit = chip.usable_bytes - int(SPARE * chip.usable_bytes) if config.memory_bytes is None else config.memory_bytes
    tokens = config.max_num_batched_tokens or max(ACCELERATOR_BATCHED_TOKENS, config.max_num_seqs or 0)
    limits = {"max_num_batched_tokens": tokens, "max_mixed_tokens": tokens, "decode_loop_steps": 1}
    question = replace(question, config=replace(config, memory_bytes=limit, **limits))
    question, useful, plan = plan_memory(question, limit)
    num_pages = max(usable_pages(plan, useful.num_pages), 0)
    if chip.platform == "gpu":
        num_pages = addressable_pages(question, useful, num_pages)
    return question, useful, replace(plan, num_pages=num_pages)
