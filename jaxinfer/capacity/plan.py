"""Where a model fits, with how many pages, and which split of it takes the least time by the roofline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxinfer.capacity.devices import Chip, Devices
from jaxinfer.capacity.roofline import Split, StepFigures, experts_of, num_elements, step_figures
from jaxinfer.checkpoint import read_config, resolve_checkpoint
from jaxinfer.checkpoint.published import published_config
from jaxinfer.config import EngineConfig
from jaxinfer.device import ACCELERATOR_BATCHED_TOKENS
from jaxinfer.engine.device_limits import ACCELERATOR_ROWS, PAGES_PART, TOKENS_PER_ROW
from jaxinfer.engine.execution.memory_plan import (
    SPARE,
    guess_step_bytes,
    one_page,
    plan_further_kinds,
    resolve_max_model_len,
)
from jaxinfer.engine.execution.step_shapes import MAX_ROWS, plan_buckets, rows_within_tokens
from jaxinfer.model.cache import abstract_cache, cache_shardings
from jaxinfer.model.components.experts import EXPERTS_AXIS, MLP_AXIS
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import Params, abstract_params, shardings
from jaxinfer.model.quantized_params import quantize_weights, quantized_shardings
from jaxinfer.plan.memory import MemoryPlan, num_bytes


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
    dtype: str = "bfloat16",
    context: int = TOKENS_PER_ROW,
) -> DeploymentPlan:
    """Plans every split of a model over up to all of some devices. It needs no weights and none of the devices.

    `model` is a name of `checkpoint.published`, a folder with a config.json, a GGUF file or a Hub id; of these only the
    configuration is read, so the weights count in `dtype` or as `config.quantization` rounds them. Raises ValueError
    for unknown models and for a `context` beyond the model's length.
    """
    config = EngineConfig() if config is None else config
    name = str(model)
    is_name = "/" not in name and not Path(name).exists()
    described = published_config(name) if is_name else read_config(resolve_checkpoint(model, ["config.json"]))
    described = described.for_length(config.max_model_len)
    longest = resolve_max_model_len(described, config)
    if not 1 <= context <= longest:
        raise ValueError(f"context={context} is not between 1 and the {longest} tokens of a request; give another")
    layouts = [
        _layout(described, config, devices.chip, dtype, context, tensor, experts)
        for tensor, experts in _splits(described, devices.count)
    ]
    return DeploymentPlan(
        model=name,
        dtype=dtype,
        num_parameters=num_elements(abstract_params(described, dtype)),
        devices=devices,
        context=context,
        layouts=tuple(sorted(layouts, key=_order)),
    )


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
    mesh = AbstractMesh((experts, tensor), (EXPERTS_AXIS, MLP_AXIS))
    try:
        numbers, params = params_of_device(model, dtype, mesh, config.quantization, chip.platform)
        page_bytes = page_bytes_of_device(model, config, dtype, mesh, chip.platform)
    except ValueError as error:
        return replace(layout, refusal=str(error))
    memory, rows, prompt = _plan_memory(model, config, num_bytes(params), page_bytes, chip)
    layout = replace(layout, memory=memory, num_tokens=memory.num_pages * config.page_size)
    if memory.num_pages < 1:
        short = memory.total_bytes + memory.page_bytes - (memory.limit_bytes or 0)
        return replace(layout, refusal=f"{short / 1e9:,.1f} GB more than a device has", num_tokens=0)
    figures = partial(
        step_figures,
        Split(
            config=model,
            params=params,
            numbers=numbers,
            page_bytes=page_bytes,
            page_size=config.page_size,
            itemsize=jnp.dtype(dtype).itemsize,
            tensor=tensor,
            experts=experts,
        ),
        chip,
    )
    rows = max(min(rows, layout.num_tokens // context), 1)
    return replace(
        layout,
        num_rows=rows,
        decode=figures(num_rows=rows, tokens_per_row=1, context=context),
        prefill=figures(num_rows=1, tokens_per_row=prompt, context=prompt),
    )


def params_of_device(
    config: ModelConfig, dtype: str, mesh: AbstractMesh, quantization: str | None, platform: str
) -> tuple[Params, Params]:
    """Returns the shapes of a device's parameters, in floating point and as they are stored."""
    whole: Any = abstract_params(config, dtype)
    placement: Any = shardings(config, mesh)  # type: ignore[arg-type]  an abstract mesh has all that it reads
    numbers = _of_device(whole, placement)
    if quantization is None:
        return numbers, numbers
    options: dict[str, Any] = {"config": config, "quantization": quantization, "is_packed": platform != "tpu"}
    stored = jax.eval_shape(partial(quantize_weights, **options), whole)
    return numbers, _of_device(stored, quantized_shardings(stored, placement))


def _of_device(tree: Any, placement: Any) -> Any:
    """Returns the shapes of a device's parts of the arrays."""
    return jax.tree.map(lambda a, at: jax.ShapeDtypeStruct(at.shard_shape(a.shape), a.dtype), tree, placement)


def page_bytes_of_device(
    model: ModelConfig, config: EngineConfig, dtype: str, mesh: AbstractMesh, layout: str
) -> tuple[int, ...]:
    """Returns the bytes of a page of each kind on a device; token ids lie with the first."""
    cache = abstract_cache(model, one_page(config, dtype), layout)
    placement = cache_shardings(cache, mesh, config=model)  # type: ignore[arg-type]
    parts = _of_device(cache, placement)
    found = [0] * len(model.page_kinds)
    found[0] = num_bytes(parts.tokens)
    for stack, pool in zip(model.mixer_stacks, parts.pools, strict=True):
        found[stack.kind] += num_bytes(pool)
    return tuple(found)


def _plan_memory(
    model: ModelConfig, config: EngineConfig, param_bytes: int, page_bytes: tuple[int, ...], chip: Chip
) -> tuple[MemoryPlan, int, int]:
    """Returns the plan of a device, the most rows of a step, and the most tokens of a prompt in a step.

    If the configuration leaves the rows open, they are as many as an engine takes there.
    """
    limit = int(chip.usable_bytes * (1 - SPARE)) if config.memory_bytes is None else config.memory_bytes
    max_model_len = resolve_max_model_len(model, config)
    first, *further = page_bytes

    def pools(rows: int, tokens_per_row: int) -> tuple[int, int]:
        """Returns the pages of the first kind for these rows, and the bytes of the other kinds."""
        kinds = plan_further_kinds(model, _sized(config, rows), max_model_len)
        bounded = sum(kind.num_pages * of_page for kind, of_page in zip(kinds, further, strict=True))
        return rows * -(-min(tokens_per_row, max_model_len) // config.page_size), bounded

    rows = config.max_num_seqs or rows_within_tokens(config, ACCELERATOR_ROWS)
    while config.max_num_seqs is None and rows > MAX_ROWS:
        num_pages, bounded = pools(rows, TOKENS_PER_ROW)
        if num_pages * first + bounded <= PAGES_PART * (limit - param_bytes):
            break
        rows = max(rows // 2, MAX_ROWS)
    useful, bounded = pools(rows, max_model_len)
    config = _sized(config, rows)
    plan = MemoryPlan(
        resident_bytes=param_bytes,
        step_bytes=guess_step_bytes(model, plan_buckets(config)),
        page_bytes=first,
        num_pages=0,
        bounded_bytes=bounded,
        limit_bytes=limit,
    )
    assert config.max_num_batched_tokens is not None
    num_pages = max(min(plan.num_fitting, useful), 0)
    return replace(plan, num_pages=num_pages), rows, min(config.max_num_batched_tokens, max_model_len)


def _sized(config: EngineConfig, rows: int) -> EngineConfig:
    """Returns the configuration with a number for each limit that it leaves to an accelerator."""
    tokens = config.max_num_batched_tokens or max(ACCELERATOR_BATCHED_TOKENS, rows, config.max_mixed_tokens or 0)
    mixed = config.max_mixed_tokens or tokens
    return replace(
        config, max_num_seqs=rows, max_num_batched_tokens=tokens, max_mixed_tokens=mixed, decode_loop_steps=1
    )
