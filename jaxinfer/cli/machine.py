"""The machine as `jaxinfer doctor` describes it: devices, versions, cache, kernels, extras, and what is slow there."""

from __future__ import annotations

import functools
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.checkpoint import abstract_checkpoint
from jaxinfer.config import NARROW_CACHE_DTYPES, CacheConfig, EngineConfig
from jaxinfer.device import describe_cpu, enable_compilation_cache, idle_accelerators
from jaxinfer.engine.execution.executable_files import Bucket, cache_place
from jaxinfer.model.cache import page_bytes
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.latent_attention import LatentAttention
from jaxinfer.model.components.layers import TensorSpec
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.quantized_params import quantize_weight
from jaxinfer.plan.cache import MemoryQuestion, check_open_pages, model_of_engine, one_page
from kernels_pallas.choices import (
    ROWS,
    has_tuned_table,
    layout_at_hand,
    own_choice,
    trace_attention,
    trace_latent_attention,
)
from kernels_pallas.device import AMPERE, device_at_hand
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.quantized_matmul import quantized_matmul

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
# Inputs, outputs and experts of the products for which a kernel is looked up.
WIDTH, EXPERTS = 1024, 8
GIGABYTE = 1e9


def describe_machine(model: str | Path, config: EngineConfig, dtype: str) -> Iterator[str]:
    """Yields lines about the machine, for an engine with this model, configuration and dtype."""
    enable_compilation_cache()
    yield from (f"device: {line}" for line in _devices())
    yield f"versions: python {platform.python_version()}, {', '.join(_versions())}"
    yield f"compiled steps: {_cache()}"
    yield from (f"kernel: {line}" for line in kernel_choices(model, config, dtype))
    yield from (f"cache: {line}" for line in cache_choices(model, config, dtype))
    yield from (f"extra: {line}" for line in extras())
    yield from (f"slow: {line}" for line in slow_parts(dtype, config.cache_dtype))


def _devices() -> Iterator[str]:
    found = Counter()
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            memory = f"{stats['bytes_limit'] / GIGABYTE:.1f} GB for JAX, {stats['bytes_in_use'] / GIGABYTE:.1f} in use"
        else:
            memory = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIGABYTE:.1f} GB on the host"
        found[f"{device.device_kind} ({device.platform}), {memory}"] += 1
    yield from (line if count == 1 else f"{count} x {line}" for line, count in found.items())


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def _cache() -> str:
    place = cache_place()
    if place is None:
        return "not kept on disk"
    if isinstance(place, Bucket):
        return f"{place}, without a limit of the engine's"
    used, limit = place.sizes()
    return f"{place}, {used / GIGABYTE:.2f} of {limit / GIGABYTE:.2f} GB used"


def kernel_choices(model: str | Path, config: EngineConfig, dtype: str) -> Iterator[str]:
    """Yields a line per operation: its kernel on this device, or the reason for plain JAX."""
    _, model_config = abstract_checkpoint(model, dtype)
    yield from (f"{name}: {choice}" for name, choice in _attention_choices(model_config, config, dtype))
    for quantization in ("int8", "int4"):
        yield f"products by {quantization} weights: {own_choice(functools.partial(_multiply, quantization, dtype))}"
    yield f"products by experts: {own_choice(functools.partial(_multiply_experts, dtype))}"


def cache_choices(model: str | Path, config: EngineConfig, dtype: str) -> Iterator[str]:
    """Yields a line per type of keys and values: a token's bytes, and its attention where that is another."""
    _, model_config = abstract_checkpoint(model, dtype)
    own = one_page(replace(config, cache_dtype=None), dtype)
    own_bytes = page_bytes(model_config, own, layout_at_hand(), kind=0)
    own_choices = _attention_choices(model_config, replace(config, cache_dtype=None), dtype)
    if not own_choices:
        return
    yield f"{own_bytes / config.page_size:,.0f} bytes per token in {dtype}"
    for name in NARROW_CACHE_DTYPES:
        narrow = replace(config, cache_dtype=name)
        refusal = _refusal(model_config, narrow, dtype)
        if refusal is not None:
            yield f"no {name}: {refusal}"
            continue
        form = model_of_engine(model_config, narrow)
        narrow_bytes = page_bytes(form, one_page(narrow, dtype), layout_at_hand(), kind=0)
        room = f"room for {own_bytes / narrow_bytes:.2f} times the tokens"
        room += "" if form.num_exact is None else f", beside open pages in {dtype}"
        choices = _attention_choices(model_config, narrow, dtype)
        others = (f"{call}: {choice}" for call, choice in choices if (call, choice) not in own_choices)
        yield "; ".join([f"{narrow_bytes / config.page_size:,.0f} in {name}, {room}", *others])


def _attention_choices(model_config: ModelConfig, config: EngineConfig, dtype: str) -> list[tuple[str, str]]:
    """Returns the name and the implementation of each kind of attention in a model."""
    page, refusal = one_page(config, dtype), _refusal(model_config, config, dtype)
    calls = set(filter(None, map(_attention_call, model_config.mixers)))
    if refusal is not None:
        return [(name, f"refused: {refusal}") for name, _ in sorted(calls)]
    return [(name, _attention_choice(name, sizes, page, config, dtype)) for name, sizes in sorted(calls)]


def _refusal(model_config: ModelConfig, config: EngineConfig, dtype: str) -> str | None:
    """Returns why an engine refuses the type of keys and values of a configuration, None if it does not."""
    try:
        model = model_of_engine(model_config, config)
        check_open_pages(MemoryQuestion(model=model, config=config, dtype=dtype, platform=layout_at_hand()))
    except ValueError as error:
        return str(error)
    return None


def _attention_call(mixer: Any) -> tuple[str, tuple[int, ...]] | None:
    """Returns the name of a layer's attention and its sizes, equal for equal calls; None for a recurrent layer."""
    if isinstance(mixer, Attention):
        sizes = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
        return "attention of {} query and {} KV heads of {}".format(*sizes), sizes
    if isinstance(mixer, LatentAttention):
        sizes = mixer.num_heads, mixer.kv_lora_rank, mixer.qk_rope_head_dim
        return "latent attention of {} heads to {} + {} numbers".format(*sizes), sizes
    return None


def _attention_choice(name: str, sizes: tuple[int, ...], page: CacheConfig, config: EngineConfig, dtype: str) -> str:
    """Describes the implementation of attention, which unlike a product's is never replaced silently."""
    attend = trace_latent_attention if name.startswith("latent") else trace_attention
    pages = page.open_dtype if page.dtype == "int2" else page.dtype
    trace = functools.partial(attend, *sizes, page.page_size, dtype, pages)
    if config.attention == "reference":
        return "plain JAX, as --attention reference demands"
    try:
        trace(None)
    except NotImplementedError as error:
        return f"refused: {error}"
    return own_choice(trace)


def _multiply(quantization: str, dtype: str, name: str) -> Any:
    is_tpu = device_at_hand().platform == "tpu"  # see `packs_integers` and `scans_layers`

    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        spec = TensorSpec(w.shape, ("outputs", "inputs"), None, num_inputs=1)
        stored: Any = quantize_weight(w, spec, quantization, is_packed=not is_tpu)
        values, scales, layer = stored.values, stored.scales, None
        if is_tpu:  # of a stack of one layer
            values, scales, layer = values[None], scales[None], jnp.int32(0)
        return quantized_matmul(x, values, scales, layer=layer, implementation=name)

    operands = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((ROWS, WIDTH), (WIDTH, WIDTH)))
    return jax.eval_shape(call, *operands)


def _multiply_experts(dtype: str, name: str) -> Any:
    rows, weights = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((ROWS, WIDTH), (EXPERTS, WIDTH, WIDTH)))
    counts = jax.ShapeDtypeStruct((EXPERTS,), "int32")
    return jax.eval_shape(lambda *operands: grouped_matmul(*operands, implementation=name), rows, weights, counts)


def extras() -> Iterator[str]:
    """Yields a line per extra of this package: installed, or the packages that are missing."""
    for extra in metadata("jaxinfer").get_all("Provides-Extra") or ():
        missing = sorted(missing_packages("jaxinfer", extra))
        yield f"{extra} " + (f"lacks {', '.join(missing)}" if missing else "is installed")


def missing_packages(package: str, extra: str) -> set[str]:
    """Returns the names of the packages that an installed package needs for an extra, and that are not installed."""
    missing = set()
    for requirement in requires(package) or ():
        head, _, marker = requirement.partition(";")
        found = re.match(r"\s*([\w.-]+)(?:\[([\w,\s-]+)\])?", head)
        if found is None or not re.search(rf"""extra == ['"]{re.escape(extra)}['"]""", marker):
            continue
        name, nested = found[1], found[2]
        try:
            version(name)
        except PackageNotFoundError:
            missing.add(name)
            continue
        for further in (nested or "").split(","):
            if further.strip():
                missing |= missing_packages(name, further.strip())
    return missing


def slow_parts(dtype: str, cache_dtype: str | None = None) -> Iterator[str]:
    """Yields a line for each thing that is slow on this machine, with its reason and the way out."""
    device = device_at_hand()
    if cache_place() is None:
        yield "each start compiles anew: compiled steps are not kept on disk (JAX_COMPILATION_CACHE_DIR)"
    if device.platform == "cpu":
        yield from idle_accelerators()
        if platform.machine() in ("x86_64", "AMD64") and "avx512f" not in describe_cpu():
            yield "products: this CPU has no AVX-512, whose vectors are twice as long"
        if dtype != "float32":
            yield f"products in {dtype}: few CPUs multiply it natively, and steps of few rows gain nothing; use float32"
        if cache_dtype is not None:
            yield f"keys and values in {cache_dtype}: a CPU widens them in each step; leave it out if memory suffices"
        return
    if device.is_before_ampere:
        yield f"attention and quantized products: Triton compiles for no GPU below compute capability {AMPERE}"
        if dtype == "bfloat16":
            yield f"products in bfloat16: {device.kind} does not multiply it natively; use --dtype float16"
    if dtype == "float32":
        yield "float32: each step reads twice the bytes of bfloat16; use --dtype bfloat16"
    if not has_tuned_table():
        yield f"attention perhaps: {device.kind} has no tuned table, so block sizes come from rules"
