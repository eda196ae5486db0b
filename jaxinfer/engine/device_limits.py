"""The choices that an engine leaves to the device: number of devices, rows, tokens of a step, decode loops."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxinfer.checkpoint import Checkpoint
from jaxinfer.config import AUTO, EngineConfig, Parallelism
from jaxinfer.device import free_bytes
from jaxinfer.engine.execution.memory_plan import (
    bytes_of_bounded,
    guess_memory,
    one_page,
    plan_cache,
    plan_further_kinds,
    plan_limit,
    resolve_max_model_len,
)
from jaxinfer.model.adapted_params import abstract_slots
from jaxinfer.model.cache import page_bytes
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import Params
from jaxinfer.parallel.placement import DEFAULT_DEVICE, Placement, name_idle_devices, possible_splits
from jaxinfer.plan.memory import MemoryPlan, num_bytes
from jaxinfer.plan.step_shapes import (
    MAX_ROWS,
    loop_steps,
    max_batched_tokens,
    max_mixed_tokens,
    max_rows,
    plan_buckets,
    rows_within_tokens,
)
from kernels_pallas.device import data_sheet

logger = logging.getLogger(__name__)

# Bytes per second of a device without a data sheet here.
OTHER_BANDWIDTH = 1e12
# Rows that take about as long to multiply as the weights take to read: 153 (A100) to 560 (v6e) by the data sheets.
ACCELERATOR_ROWS = 256
# Tokens of a request for which each row has pages; a request may have more if others have fewer.
TOKENS_PER_ROW = 1024
# The part of the free memory that pages may take; steps need the rest.
PAGES_PART = 0.8
# Seconds of a layer's kernels beside reading its weights. On an H200 a step of 28 layers takes 1.25 ms, of which the
# weights take 0.25; a TPU starts its operations without such gaps.
LAYER_SECONDS = {"gpu": 35e-6, "tpu": 10e-6}
# Seconds of a decode loop as planned. Long contexts add to them, up to MAX_LOOP_SECONDS. No reader notices such bursts.
LOOP_SECONDS, MAX_LOOP_SECONDS = 0.005, 0.010
MAX_LOOP_STEPS = 8


def fewest_devices(checkpoint: Checkpoint, config: EngineConfig, dtype: str, *, speculates: bool) -> Parallelism | None:
    """Returns the split of a checkpoint over the fewest devices of this process that hold it; None is one device.

    They hold it if, beside parameters and steps, each has room for the pages of a request of TOKENS_PER_ROW tokens. If
    one device holds it, if none do, if devices report no limit, like CPUs, or if there are other processes, it is None.
    The devices that stay idle are logged unless replicas take them, and the reason if none hold it. A drafter does not
    count.
    """
    if jax.process_count() > 1 or jax.local_device_count() == 1 or free_bytes(jax.local_devices()) is None:
        return None
    find_refusal = functools.partial(_refusal, checkpoint, config, dtype, speculates=speculates)
    splits, refusal = [*possible_splits(checkpoint.config)], None
    for split in splits:
        refusal = find_refusal(split)
        if refusal is None:
            if config.parallelism is None:
                # The last ones have most devices; of one number the first has the fewest groups of experts.
                wider = sorted(splits[splits.index(split) :], key=lambda other: -other.devices_per_replica)
                best = next(other for other in wider if other == split or find_refusal(other) is None)
                name_idle_devices(split, best)
            return None if split == Parallelism() else split
    logger.warning("no split over the devices of this process holds the model; of %s: %s", splits[-1], refusal)
    return None


def chosen_parallelism(
    checkpoint: Checkpoint,
    config: EngineConfig,
    dtype: str,
    devices: Sequence[Any] | None,
    *,
    speculates: bool,
) -> Parallelism | None:
    """Returns the parallelism of an engine, with a number of replicas; None is one device.

    If the configuration has none, it is that of `fewest_devices`. `devices` are those that the user has given, None for
    all of this process. Raises ValueError if replicas="auto" cannot share given devices evenly.
    """
    given = config.parallelism
    if given is None:
        return fewest_devices(checkpoint, config, dtype, speculates=speculates) if devices is None else None
    if given.replicas != AUTO:
        return given
    split = given
    if devices is None and given.devices_per_replica == 1:
        split = fewest_devices(checkpoint, config, dtype, speculates=speculates) or Parallelism()
    each, num_devices = split.devices_per_replica, jax.local_device_count() if devices is None else len(devices)
    if num_left := num_devices % each:
        if devices is not None:
            raise ValueError(f"replicas={AUTO!r} of {each} devices each cannot share {num_devices}; give a multiple")
        logger.warning("%d of the %d devices stay idle: each replica has %d", num_left, num_devices, each)
    return replace(split, replicas=max(num_devices // each, 1), prefill=given.prefill)


def _refusal(
    checkpoint: Checkpoint, config: EngineConfig, dtype: str, split: Parallelism, *, speculates: bool
) -> str | None:
    """Returns why devices do not hold a model that is split so; None if they do."""
    try:
        memory = _planned_memory(checkpoint, config, dtype, split, speculates=speculates)
    except ValueError as error:
        return str(error)
    return None if memory.num_fitting >= memory.num_pages else f"its memory is short: {memory}"


def _planned_memory(
    checkpoint: Checkpoint, config: EngineConfig, dtype: str, split: Parallelism, *, speculates: bool
) -> MemoryPlan:
    """Returns the plan of each device with the fewest pages that an engine may have."""
    placement = Placement.of(checkpoint.config, split)
    abstract, model = checkpoint.abstract(dtype, quantization=config.quantization, mesh=placement.mesh)
    model = model.for_length(config.max_model_len)
    params = placement.params(model, abstract)
    config = fit_limits(config, model, params, dtype, speculates=speculates, placement=placement)
    max_model_len = resolve_max_model_len(model, config)
    cache = plan_cache(model, config, dtype, max_model_len, None, placement)
    slots = abstract_slots(model, config.max_adapters, config.max_adapter_rank, dtype)
    memory = guess_memory(
        model,
        cache,
        plan_buckets(config),
        resident_bytes=num_bytes((params, slots)),
        limit_bytes=plan_limit(config, 0, placement),
        placement=placement,
    )
    of_request = -(-min(TOKENS_PER_ROW, max_model_len) // config.page_size)
    needed = min(of_request, cache.num_pages) if config.num_pages is None else config.num_pages
    return replace(memory, num_pages=needed)


def fit_limits(
    config: EngineConfig,
    model_config: ModelConfig,
    params: Params,
    dtype: str,
    *,
    speculates: bool,
    placement: Placement = DEFAULT_DEVICE,
) -> EngineConfig:
    """Returns the configuration with a number for each limit that it leaves to the device.

    `params` may be abstract. A CPU computes 32 rows at most, and no decode loops. An accelerator computes the rows that
    multiply in the time that reading the weights takes, if memory has pages for them. It loops over steps so short that
    the host would hold them up. With speculation, which helps few rows, it has the rows of a CPU.
    """
    is_cpu = jax.default_backend() == "cpu"
    if config.max_num_seqs is None and not is_cpu and not speculates:
        slots = abstract_slots(model_config, config.max_adapters, config.max_adapter_rank, dtype)
        room = _room(config, num_bytes((params, slots)), placement)
        rows = fitting_rows(config, model_config, dtype, placement, room)
        config = replace(config, max_num_seqs=rows)
    steps = config.decode_loop_steps
    if steps is None:
        seconds = predicted_step_seconds(num_bytes(params), model_config.num_layers)
        steps = 1 if is_cpu or speculates else fitting_loop_steps(seconds)
    config = replace(config, max_num_seqs=max_rows(config), decode_loop_steps=steps)
    tokens, mixed = max_batched_tokens(config), max_mixed_tokens(config)
    return replace(config, max_num_batched_tokens=tokens, max_mixed_tokens=mixed)


def describe_limits(config: EngineConfig, placement: Placement = DEFAULT_DEVICE) -> str:
    """Returns a line with the limits of a configuration that `fit_limits` has returned, and of each replica."""
    steps = loop_steps(config)
    loops = f"decode loops of {steps} steps" if steps > 1 else "single decode steps"
    sizes = f"up to {max_rows(config)} requests and {max_batched_tokens(config)} tokens in a step"
    cache = "" if config.cache_dtype is None else f", keys and values in {config.cache_dtype}"
    each = f"{placement.num_devices} x " if placement.num_devices > 1 else ""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    memory = "" if limit is None else f" with {limit / 2**30:.1f} GiB for JAX"
    replicas = f"{config.num_replicas} replicas, each on " if config.num_replicas > 1 else ""
    return f"{replicas}{each}{jax.devices()[0].device_kind}{memory}: {sizes}, {loops}{cache}"


def predicted_step_seconds(param_bytes: int, num_layers: int) -> float:
    """Returns about the seconds of a decode step of few rows, without long contexts."""
    sheet = data_sheet(jax.devices()[0].device_kind)
    bandwidth = OTHER_BANDWIDTH if sheet is None else sheet.bandwidth
    return param_bytes / bandwidth + num_layers * LAYER_SECONDS.get(jax.default_backend(), 0.0)


def fitting_loop_steps(step_seconds: float) -> int:
    """Returns the largest power of two of steps, at most MAX_LOOP_STEPS, that take at most LOOP_SECONDS."""
    steps = 1
    while 2 * steps <= MAX_LOOP_STEPS and 2 * steps * step_seconds <= LOOP_SECONDS:
        steps *= 2
    return steps


def fitting_rows(
    config: EngineConfig,
    model_config: ModelConfig,
    dtype: str,
    placement: Placement,
    room: float,
    layout: str | None = None,
) -> int:
    """Returns the rows of which each has pages for TOKENS_PER_ROW tokens, from ACCELERATOR_ROWS down to MAX_ROWS.

    `room`: bytes of a device for pages. `layout`: that of pages, as in `abstract_cache`.
    """
    max_model_len = resolve_max_model_len(model_config, config)
    pages_per_row = -(-min(TOKENS_PER_ROW, max_model_len) // config.page_size)
    page = one_page(config, dtype)
    rows = rows_within_tokens(config, ACCELERATOR_ROWS)
    while rows > MAX_ROWS:
        kinds = plan_further_kinds(model_config, replace(config, max_num_seqs=rows), max_model_len)
        bounded = replace(page, num_bounded_pages=tuple(kind.num_pages for kind in kinds))
        needed = rows * pages_per_row * page_bytes(model_config, page, layout, kind=0, mesh=placement.mesh)
        too_few = config.num_pages is not None and config.num_pages < rows * pages_per_row
        if needed + bytes_of_bounded(model_config, bounded, placement, layout) <= room and not too_few:
            break
        rows = max(rows // 2, MAX_ROWS)
    return rows


def _room(config: EngineConfig, param_bytes: int, placement: Placement) -> float:
    """Returns the bytes for pages; infinite if neither the configuration nor the device says."""
    if config.cache_bytes is not None:
        return config.cache_bytes
    total = config.memory_bytes if config.memory_bytes is not None else placement.free_bytes()
    return float("inf") if total is None else PAGES_PART * (total - param_bytes)
