"""The machine as `jaxinfer doctor` describes it: devices, versions, cache, kernels, extras, and what is slow there."""

from __future__ import annotations

import functools
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.checkpoint import abstract_checkpoint
from jaxinfer.config import EngineConfig
from jaxinfer.device import describe_cpu, enable_compilation_cache
from jaxinfer.engine.execution.executable_cache import cache_bytes, cache_folder
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.latent_attention import LatentAttention
from jaxinfer.model.components.layers import TensorSpec
from jaxinfer.model.quantized_params import quantize_weight
from kernels_pallas.choices import ROWS, has_tuned_table, own_choice, trace_attention, trace_latent_attention
from kernels_pallas.device import AMPERE, device_at_hand
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.quantized_matmul import quantized_matmul

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
# Files by which the kernel of the host shows accelerators, and the extra that lets JAX use them.
DEVICE_FILES = {"/dev/nvidia0": "cuda", "/dev/accel0": "tpu"}
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
    yield from (f"extra: {line}" for line in extras())
    yield from (f"slow: {line}" for line in slow_parts(dtype))


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
    folder = cache_folder()
    if folder is None:
        return "not kept on disk"
    used, limit = cache_bytes(folder)
    return f"{folder}, {used / GIGABYTE:.2f} of {limit / GIGABYTE:.2f} GB used"


def kernel_choices(model: str | Path, config: EngineConfig, dtype: str) -> Iterator[str]:
    """Yields a line per operation: its kernel on this device, or the reason for plain JAX."""
    _, model_config = abstract_checkpoint(model, dtype)
    calls = {_attention_call(mixer, config.page_size, dtype) for mixer in model_config.mixers}
    for call in sorted(call for call in calls if call is not None):
        yield f"{call[0]}: {_attention_choice(call, config)}"
    for quantization in ("int8", "int4"):
        yield f"products by {quantization} weights: {own_choice(functools.partial(_multiply, quantization, dtype))}"
    yield f"products by experts: {own_choice(functools.partial(_multiply_experts, dtype))}"


def _attention_call(mixer: Any, page_size: int, dtype: str) -> tuple[Any, ...] | None:
    """Returns the name of a layer's attention and its sizes, equal for equal calls; None for a recurrent layer."""
    if isinstance(mixer, Attention):
        sizes = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
        return "attention of {} query and {} KV heads of {}".format(*sizes), sizes, page_size, dtype
    if isinstance(mixer, LatentAttention):
        sizes = mixer.num_heads, mixer.kv_lora_rank, mixer.qk_rope_head_dim
        return "latent attention of {} heads to {} + {} numbers".format(*sizes), sizes, page_size, dtype
    return None


def _attention_choice(call: tuple[Any, ...], config: EngineConfig) -> str:
    """Describes the implementation of attention, which unlike a product's is never replaced silently."""
    name, sizes, page_size, dtype = call
    attend = trace_latent_attention if name.startswith("latent") else trace_attention
    trace = functools.partial(attend, *sizes, page_size, dtype)
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


def slow_parts(dtype: str) -> Iterator[str]:
    """Yields a line for each thing that is slow on this machine, with its reason and the way out."""
    device = device_at_hand()
    if cache_folder() is None:
        yield "each start compiles anew: compiled steps are not kept on disk (JAX_COMPILATION_CACHE_DIR)"
    if device.platform == "cpu":
        for path, extra in DEVICE_FILES.items():
            if Path(path).exists():
                yield f"JAX computes on the CPU though {path} is there: pip install 'jaxinfer[{extra}]', or see its log"
        if platform.machine() in ("x86_64", "AMD64") and "avx512f" not in describe_cpu():
            yield "products: this CPU has no AVX-512, whose vectors are twice as long"
        if dtype != "float32":
            yield f"products in {dtype}: few CPUs multiply it natively, and steps of few rows gain nothing; use float32"
        return
    if device.is_before_ampere:
        yield f"attention and quantized products: Triton compiles for no GPU below compute capability {AMPERE}"
        if dtype == "bfloat16":
            yield f"products in bfloat16: {device.kind} does not multiply it natively; use --dtype float16"
    if dtype == "float32":
        yield "float32: each step reads twice the bytes of bfloat16; use --dtype bfloat16"
    if not has_tuned_table():
        yield f"attention perhaps: {device.kind} has no tuned table, so block sizes come from rules"
