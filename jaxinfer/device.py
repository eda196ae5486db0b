"""What the device at hand wants: number format, layer groups, memory for pages, a place for compiled steps."""

from __future__ import annotations

import platform
from pathlib import Path

import jax

from jaxinfer.validation import shown

COMPILATION_CACHE = Path.home() / ".cache" / "jaxinfer" / "compilation"
# Sets of instructions that decide by which routines a CPU multiplies.
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve", "sve2")
# The formats of weights, by the names in use.
DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
}
# The page pool where neither the user nor the device sets a limit.
CPU_CACHE_BYTES = 2**30


def require_device() -> None:
    """Raises ValueError if JAX finds no device of the platforms that it is told to use."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that one of the platforms named is there
        platforms = jax.config.values["jax_platforms"]
        raise ValueError(
            f"JAX_PLATFORMS={platforms or ''} names no device that can be used ({str(error) or 'none is installed'});"
            " unset it, or install what it names: jaxinfer[cuda] or jaxinfer[tpu]"
        ) from error


def default_dtype() -> str:
    """Returns float32 on CPU (no CPU here multiplies bfloat16 natively), bfloat16 where it is native, else float16."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return "float32"
    if device.platform == "gpu" and float(device.compute_capability) < 8.0:
        return "float16"
    return "bfloat16"


def resolve_dtype(dtype: str | None) -> str:
    """Returns the one of float32, bfloat16 and float16 that is meant, `default_dtype` for None or "auto"."""
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return default_dtype()
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(
            f"dtype={shown(dtype)} is not allowed: give auto, float32 (or fp32, float), bfloat16 (or bf16) or float16"
            " (or fp16, half)"
        )
    return DTYPES[dtype]


def describe_cpu() -> str:
    """Returns the processor's name and sets of instructions, for figures and bits that depend on them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return f"{platform.processor() or platform.machine()}, unknown instruction sets"
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", fields.get("Features", "")).split()
    sets = " ".join(name for name in INSTRUCTION_SETS if name in flags) or "none of " + " ".join(INSTRUCTION_SETS)
    return f"{fields.get('model name', platform.machine())}, {sets}"


def default_layer_groups(num_layers: int, first_layers: int | None = None) -> tuple[int, ...]:
    """Returns one group on TPU, where it compiles in half the time to a tenth of the code, and groups of 1 elsewhere.

    One group ends after `first_layers`, if there are so many and more.

    On CPU unrolled layers run 1.5 times faster. On GPU a scan copies every layer's weights out of the stack before it
    multiplies by them, which triples what a decode step reads and writes; and unrolled it compiles as fast.
    """
    if jax.default_backend() != "tpu":
        return (1,) * num_layers
    first = first_layers or num_layers
    return (first, num_layers - first) if 0 < first < num_layers else (num_layers,)


def default_batched_tokens() -> int:
    """Returns how many tokens a step computes where the user sets no limit: so many that more are no faster per token.

    A CPU multiplies eight rows at a time whatever their number; an accelerator has to read the weights for several
    hundred to be busy meanwhile.
    """
    return 128 if jax.default_backend() == "cpu" else 512


def free_bytes() -> int | None:
    """Returns how many bytes the device has left, None where it has no limit of its own, as a CPU."""
    stats = jax.devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def enable_compilation_cache() -> None:
    """Keeps compiled steps on disk between runs, in `~/.cache/jaxinfer/compilation`.

    A folder the user gave to JAX (JAX_COMPILATION_CACHE_DIR, or jax_compilation_cache_dir in its configuration) is
    used instead; JAX_ENABLE_COMPILATION_CACHE=false switches the cache off. The setting is JAX's, so functions that the
    user compiles later in this process are kept there as well.
    """
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] is None and settings["jax_enable_compilation_cache"]:
        jax.config.update("jax_compilation_cache_dir", str(COMPILATION_CACHE))
        # Every step is worth keeping: a small model has many that compile in under JAX's threshold of a second.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def compiles_on_device() -> bool:
    """Whether the compiler measures candidates on the device, in memory that a cache would take: XLA does on GPUs."""
    return jax.default_backend() == "gpu"
