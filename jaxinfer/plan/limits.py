"""The numbers for the limits that a configuration leaves to the device: rows, tokens of a step, decode loops, bytes."""

from __future__ import annotations

from dataclasses import replace

import jax

from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.model.stages import num_stages
from jaxinfer.parallel.placement import DEFAULT_DEVICE, Placement
from jaxinfer.plan.cache import (
    MemoryQuestion,
    bounded_pages,
    bytes_of_bounded,
    guess_memory,
    plan_cache,
)
from jaxinfer.plan.memory import MemoryPlan
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

# Bytes per second of a device without a data sheet here.
OTHER_BANDWIDTH = 1e12
# Rows that take about as long to multiply as the weights take to read: 153 (A100) to 560 (v6e) by the data sheets.
ACCELERATOR_ROWS = 256
# Tokens of a request for which each row has pages; a request may have more if others have fewer.
TOKENS_PER_ROW = 1024
# The part of the free memory that pages may take; steps need the rest.
PAGES_PART = 0.8
# The part of a device's memory that stays free, for the gaps between arrays of different sizes.
SPARE = 0.02
# Seconds of a layer's kernels beside reading its weights. On an H200 a step of 28 layers takes 1.25 ms, of which the
# weights take 0.25; a TPU starts its operations without such gaps.
LAYER_SECONDS = {"gpu": 35e-6, "tpu": 10e-6}
# Seconds of a decode loop as planned. Long contexts add to them, up to MAX_LOOP_SECONDS. No reader notices such bursts.
LOOP_SECONDS, MAX_LOOP_SECONDS = 0.005, 0.010
MAX_LOOP_STEPS = 8


def plan_memory(question: MemoryQuestion, limit_bytes: int | None) -> tuple[MemoryQuestion, CacheConfig, MemoryPlan]:
    """Returns the question with all limits, the largest useful cache, and the plan of each device with it.

    `limit_bytes`: of a device for parameters, pages and steps; None for none. Raises ValueError for limits that do not
    fit the model.
    """
    question = replace(question, config=fit_limits(question))
    cache = plan_cache(question)
    return question, cache, guess_memory(question, cache, plan_buckets(question.config), limit_bytes)


def fit_limits(question: MemoryQuestion) -> EngineConfig:
    """Returns the configuration with a number for each limit that it leaves to the device.

    A CPU computes 32 rows at most, and no decode loops. An accelerator computes the rows that multiply in the time that
    reading the weights takes, if memory has pages for them. It loops over steps so short that the host would hold them
    up. With speculation, which helps few rows, it has the rows of a CPU. For devices that are not here, give the loops
    and the tokens of a step in the configuration.
    """
    config, platform = question.config, question.platform or jax.default_backend()
    if config.max_num_seqs is None and platform != "cpu" and not question.speculates:
        rows = fitting_rows(question, _room(question))
        config = replace(config, max_num_seqs=rows)
    steps = config.decode_loop_steps
    if steps is None:
        # Stages take turns in a step of few rows.
        num_bytes = question.param_bytes * num_stages(question.placement.mesh)
        seconds = predicted_step_seconds(num_bytes, question.model.num_layers)
        steps = 1 if platform == "cpu" or question.speculates else fitting_loop_steps(seconds)
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


def fitting_rows(question: MemoryQuestion, room: float) -> int:
    """Returns the rows of which each has pages for TOKENS_PER_ROW tokens, from ACCELERATOR_ROWS down to MAX_ROWS.

    `room`: bytes of a device for pages.
    """
    config, page, pages_per_row = question.config, question.page, pages_of_row(question)
    rows = rows_within_tokens(config, ACCELERATOR_ROWS)
    while rows > MAX_ROWS:
        bounded = bounded_pages(replace(question, config=replace(config, max_num_seqs=rows)))
        needed = rows * pages_per_row * question.page_bytes(page, 0)
        needed += bytes_of_bounded(question, replace(page, num_bounded_pages=bounded))
        too_few = config.num_pages is not None and config.num_pages < rows * pages_per_row
        if needed <= room and not too_few:
            break
        rows = max(rows // 2, MAX_ROWS)
    return rows


def pages_of_row(question: MemoryQuestion) -> int:
    """Returns the pages of a request of TOKENS_PER_ROW tokens, or of the longest one if that is shorter."""
    return -(-min(TOKENS_PER_ROW, question.max_model_len) // question.config.page_size)


def _room(question: MemoryQuestion) -> float:
    """Returns the bytes for pages; infinite if neither the configuration nor the device says."""
    config = question.config
    if config.cache_bytes is not None:
        return config.cache_bytes
    total = config.memory_bytes if config.memory_bytes is not None else question.placement.free_bytes()
    return float("inf") if total is None else PAGES_PART * (total - question.resident_bytes)


def plan_limit(question: MemoryQuestion, present_bytes: int = 0) -> int | None:
    """Returns the limit in bytes for parameters, pages and steps together on each device; None for no limit.

    `present_bytes`: those parameters that are on the device already. Raises ValueError if `memory_bytes` is more than
    the device has.
    """
    config, free = question.config, question.placement.free_bytes()
    has = None if free is None else free + present_bytes
    if config.memory_bytes is None:
        return None if has is None else has - int(SPARE * has)
    if has is not None and config.memory_bytes > has:
        raise ValueError(
            f"memory_bytes={config.memory_bytes} is more than the {has} bytes that the device has; lower it or leave it"
            " out"
        )
    return config.memory_bytes
