"""Where a model fits, with how many pages, and which split of it takes the least time by the roofline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxinfer.capacity.compiler import CompiledStep, Request, compile_steps, require_compiler
from jaxinfer.capacity.devices import Chip, Devices
from jaxinfer.capacity.roofline import Split, StepFigures, experts_of, num_elements, step_figures
from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.checkpoint.published import published_config
from jaxinfer.config import PLANNED_FIELDS, CacheConfig, EngineConfig
from jaxinfer.device import ACCELERATOR_BATCHED_TOKENS
from jaxinfer.engine.device_limits import PAGES_PART, TOKENS_PER_ROW, fitting_rows
from jaxinfer.engine.execution.memory_plan import (
    SPARE,
    addressable_pages,
    guess_memory,
    one_page,
    plan_cache,
    resolve_max_model_len,
)
from jaxinfer.engine.execution.step_shapes import max_batched_tokens, max_rows, plan_buckets
from jaxinfer.model.cache import page_bytes
from jaxinfer.model.components.experts import EXPERTS_AXIS, MLP_AXIS
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import Params, abstract_params, over_mesh
from jaxinfer.model.quantized_params import quantize_weights
from jaxinfer.parallel.placement import Placement, refuse_undivided
from jaxinfer.plan.memory import MemoryPlan, num_bytes
from jaxinfer.validation import shown


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model split over some devices: heads and networks in `tensor` parts, experts in `experts` groups.

    * `refusal`: why it does not fit; None if it does.
    * `memory`: the plan of each device; None if the model cannot be split so.
    * `num_tokens`: that all pages hold.
    * `num_rows`: of a decode step, if each row has `DeploymentPlan.context` tokens.
    * `decode`, `prefill`: a step of these rows, and one of a prompt of the most tokens of a step.
    """

    tensor: int
    experts: int
    refusal: str | None = None
    memory: MemoryPlan | None = None
    num_tokens: int = 0
    num_rows: int = 0
    decode: StepFigures | None = None
    prefill: StepFigures | None = None

    @property
    def num_devices(self) -> int:
        return self.tensor * self.experts


@dataclass(frozen=True, kw_only=True)
class DeploymentPlan:
    """The ways to run a model on some devices. `layouts` has every split of it, the one that decodes fastest first."""

    model: str
    dtype: str
    num_parameters: int
    devices: Devices
    context: int  # tokens of each row of a decode step
    layouts: tuple[Layout, ...]

    @property
    def best(self) -> Layout | None:
        """The layout that fits and decodes most tokens a second by the roofline; None if none fits."""
        return next((layout for layout in self.layouts if layout.refusal is None), None)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return asdict(self)


def plan_deployment(
    model: str | Path,
    devices: Devices,
    config: EngineConfig | None = None,
    *,
    dtype: str | None = None,
    context: int | None = None,
) -> DeploymentPlan:
    """Plans every split of a model over up to all of some devices. It needs no weights and none of the devices.

    `model` is a name of `checkpoint.published`, a folder with a config.json, a GGUF file or a Hub id; of these only the
    configuration is read, so the weights count in `dtype` or as `config.quantization` rounds them. None is the dtype
    that an engine takes on such a device. A row has `context` tokens, 1,024 or all of a shorter request by default.
    Raises ValueError for unknown models, for a `context` beyond the model's length, and for other fields of the
    configuration than PLANNED_FIELDS.
    """
    config = EngineConfig() if config is None else config
    for field in fields(EngineConfig):
        value = getattr(config, field.name)
        if field.name not in PLANNED_FIELDS and value != field.default:
            raise ValueError(f"{field.name}={shown(value)} is not planned; leave it out of the EngineConfig")
    dtype = devices.chip.dtype if dtype is None else dtype
    described = _described(model, config)
    longest = resolve_max_model_len(described, config)
    context = min(TOKENS_PER_ROW, longest) if context is None else context
    if not 1 <= context <= longest:
        raise ValueError(f"context={context} is not between 1 and the {longest} tokens of a request; give another")
    layouts = [
        _layout(described, config, devices.chip, dtype, context, tensor, experts)
        for tensor, experts in _splits(described, devices.count)
    ]
    return DeploymentPlan(
        model=str(model),
        dtype=dtype,
        num_parameters=num_elements(abstract_params(described, dtype)),
        devices=devices,
        context=context,
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
    require_compiler(plan.devices.name, chip.platform, layout.num_devices)
    sizes = {EXPERTS_AXIS: layout.experts, MLP_AXIS: layout.tensor}
    model = _described(plan.model, config)
    placement = Placement(AbstractMesh((*sizes.values(),), (*sizes,)))  # type: ignore[arg-type]
    split, of_params = over_mesh(model, placement.mesh), layout.memory.resident_bytes
    limits, cache, _ = _plan_memory(split, config, plan.dtype, placement, of_params, chip)
    tokens = min(max_batched_tokens(limits), resolve_max_model_len(model, config))
    shared: dict[str, Any] = {
        "cache": replace(cache, num_pages=layout.memory.num_pages),
        "max_context": resolve_max_model_len(model, config),
        "dtype": plan.dtype,
        "quantization": config.quantization,
        "num_rows": max_rows(limits),
    }
    steps = {
        "decode": {"step": "decode_step", "num_tokens": max_rows(limits), **shared},
        "prefill": {"step": "prefill_step", "num_tokens": tokens, **shared},
    }
    return compile_steps(Request(chip=plan.devices.name, platform=chip.platform, axes=sizes, config=model, steps=steps))


def _described(model: str | Path, config: EngineConfig) -> ModelConfig:
    name = str(model)
    is_name = "/" not in name and not Path(name).exists()
    described = published_config(name) if is_name else open_checkpoint(model, ["config.json"]).config
    return described.for_length(config.max_model_len)


def _order(layout: Layout) -> tuple[float, ...]:
    rate = 0 if layout.decode is None else layout.decode.tokens_per_second
    return (layout.refusal is not None, -rate, layout.num_devices, layout.experts)


def _splits(config: ModelConfig, count: int) -> Iterator[tuple[int, int]]:
    """Yields (tensor, experts) for each number of devices that divides their count; a dense model has experts=1."""
    has_experts = any(experts_of(layer) is not None for layer in config.layers)
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    for used in divisors:
        yield from ((used // n, n) for n in divisors if used % n == 0 and (n == 1 or has_experts))


def _layout(
    model: ModelConfig, config: EngineConfig, chip: Chip, dtype: str, context: int, tensor: int, experts: int
) -> Layout:
    layout = Layout(tensor=tensor, experts=experts)
    sizes = {EXPERTS_AXIS: experts, MLP_AXIS: tensor}
    # An abstract mesh has all that shardings ask for.
    placement = Placement(AbstractMesh((*sizes.values(),), (*sizes,)))  # type: ignore[arg-type]
    try:
        refuse_undivided(model, sizes)
        model = over_mesh(model, placement.mesh)
        numbers = placement.params(model, abstract_params(model, dtype))
        params = placement.params(model, _stored(model, dtype, config.quantization, chip))
    except ValueError as error:
        return replace(layout, refusal=str(error))
    config, _, memory = _plan_memory(model, config, dtype, placement, num_bytes(params), chip)
    layout = replace(layout, memory=memory, num_tokens=memory.num_pages * config.page_size)
    if memory.num_pages < 1:
        short = memory.total_bytes + memory.page_bytes - (memory.limit_bytes or 0)
        return replace(layout, refusal=f"{short / 1e9:,.1f} GB more than a device has", num_tokens=0)
    window = model.page_kinds[0].window
    if layout.num_tokens < (context if window is None else min(context, window)):
        return replace(layout, refusal=f"pages for {layout.num_tokens:,} tokens, fewer than the {context:,} of a row")
    page = one_page(config, dtype)
    split = Split(
        config=model,
        params=params,
        numbers=numbers,
        page_bytes=tuple(
            page_bytes(model, page, chip.platform, kind=kind, mesh=placement.mesh)
            for kind in range(len(model.page_kinds))
        ),
        page_size=config.page_size,
        itemsize=jnp.dtype(dtype).itemsize,
        tensor=tensor,
        experts=experts,
    )
    figures = partial(step_figures, split, chip)
    rows = max(min(max_rows(config), layout.num_tokens // context), 1)
    prompt = min(max_batched_tokens(config), resolve_max_model_len(model, config))
    return replace(
        layout,
        num_rows=rows,
        decode=figures(num_rows=rows, tokens_per_row=1, context=context),
        prefill=figures(num_rows=1, tokens_per_row=prompt, context=prompt),
    )


def _stored(config: ModelConfig, dtype: str, quantization: str | None, chip: Chip) -> Params:
    """Returns the abstract parameters as they lie on a device of this kind."""
    params = abstract_params(config, dtype)
    if quantization is None:
        return params
    options: dict[str, Any] = {"quantization": quantization, "is_packed": chip.platform != "tpu"}
    return jax.eval_shape(partial(quantize_weights, config=config, **options), params)


def _plan_memory(
    model: ModelConfig, config: EngineConfig, dtype: str, placement: Placement, param_bytes: int, chip: Chip
) -> tuple[EngineConfig, CacheConfig, MemoryPlan]:
    """Returns an engine's configuration with its limits, its largest useful cache, and the plan of such a device."""
    limit = chip.usable_bytes - int(SPARE * chip.usable_bytes) if config.memory_bytes is None else config.memory_bytes
    rows = config.max_num_seqs
    if rows is None:
        rows = fitting_rows(config, model, dtype, placement, PAGES_PART * (limit - param_bytes), chip.platform)
    tokens = config.max_num_batched_tokens or max(ACCELERATOR_BATCHED_TOKENS, rows)
    config = replace(
        config, max_num_seqs=rows, max_num_batched_tokens=tokens, max_mixed_tokens=tokens, decode_loop_steps=1
    )
    max_model_len = resolve_max_model_len(model, config)
    useful = plan_cache(model, replace(config, memory_bytes=limit), dtype, max_model_len, placement=placement)
    on_device: dict[str, Any] = {"placement": placement, "layout": chip.platform}
    plan = guess_memory(model, useful, plan_buckets(config), resident_bytes=param_bytes, limit_bytes=limit, **on_device)
    num_pages = max(min(plan.num_fitting, useful.num_pages), 0)
    if chip.platform == "gpu":
        num_pages = addressable_pages(model, useful, num_pages, **on_device)
    return config, useful, replace(plan, num_pages=num_pages)
