"""Defaults for the present device: weight format, layer groups, tokens per step, memory, compilation cache."""

from __future__ import annotations

import glob
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.validation import shown
from kernels_pallas.device import device_at_hand

COMPILATION_CACHE = Path.home() / ".cache" / "jaxinfer" / "compilation"
# Files by which the kernel of the host shows accelerators, and the extra that lets JAX use them.
DEVICE_FILES = {"/dev/nvidia[0-9]*": "cuda", "/dev/accel[0-9]*": "tpu", "/dev/vfio/[0-9]*": "tpu"}
# Instruction sets by which a CPU's multiplication routines are chosen.
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve", "sve2")
# Weight formats by their accepted names.
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
# Tokens of a step by default; see `default_batched_tokens`.
CPU_BATCHED_TOKENS, ACCELERATOR_BATCHED_TOKENS = 512, 2048
LOCAL_SCHEMES = ("file://", "local://")
# The URL of compiled steps, if JAX cannot open it and so has another folder.
_url_of_steps: list[str] = []
# Bytes of the page pool if neither the user nor the device sets a limit.
CPU_CACHE_BYTES = 2**30


def idle_accelerators() -> list[str]:
    """Returns a line for each accelerator of this machine that JAX does not use, though it was not told to."""
    if jax.default_backend() != "cpu" or jax.config.values["jax_platforms"]:
        return []
    found = {min(files): extra for pattern, extra in DEVICE_FILES.items() if (files := glob.glob(pattern))}
    way_out = "pip install 'jaxinfer[{}]', see JAX's log, or set JAX_PLATFORMS=cpu"
    return [f"JAX computes on the CPU though {path} is there: {way_out.format(extra)}" for path, extra in found.items()]


def require_device(memory_fraction: float | None = None) -> None:
    """Raises ValueError if JAX finds no device of the configured platforms, or no GPU for --memory-fraction."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that one of the named platforms exists
        platforms = jax.config.values["jax_platforms"]
        raise ValueError(
            f"JAX_PLATFORMS={platforms or ''} names no device that can be used ({str(error) or 'none is installed'});"
            " unset it, or install what it names: jaxinfer[cuda] or jaxinfer[tpu]"
        ) from error
    if memory_fraction is not None and jax.default_backend() != "gpu":
        raise ValueError(
            f"--memory-fraction {memory_fraction} is a part of a GPU's memory, and the device here is a"
            f" {jax.default_backend()}; leave it out"
        )


def default_dtype() -> str:
    """Returns float32 on CPU, bfloat16 on other devices that multiply it natively, else float16.

    CPUs with AVX512_BF16 or AMX multiply bfloat16 natively. Steps of few rows gain nothing: on an AMD EPYC with
    AVX512_BF16 (jax 0.10.2) products of 8 rows took 0.4 to 5.6 times the time of float32, by the shape of the weights.
    Products of 32 rows took 0.5 to 1.0 times. XLA of jax 0.10.2 also copies all pages in each step, for it
    scatters bfloat16 as float32 on CPU; that of jax 0.12.0 writes them in place.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return "float32"
    if device.platform == "gpu" and float(device.compute_capability) < 8.0:
        return "float16"
    return "bfloat16"


def resolve_dtype(dtype: str | None) -> str:
    """Returns float32, bfloat16 or float16 for any accepted name; `default_dtype` for None or "auto"."""
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return default_dtype()
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(
            f"dtype={shown(dtype)} is not allowed: give auto, float32 (or fp32, float), bfloat16 (or bf16) or float16"
            " (or fp16, half)"
        )
    return DTYPES[dtype]


def describe_cpu() -> str:
    """Returns the processor's name and instruction sets, on which measurements and result bits depend."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return f"{platform.processor() or platform.machine()}, unknown instruction sets"
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", fields.get("Features", "")).split()
    sets = " ".join(name for name in INSTRUCTION_SETS if name in flags) or "none of " + " ".join(INSTRUCTION_SETS)
    return f"{fields.get('model name', platform.machine())}, {sets}"


def describe_accelerator() -> str:
    """Returns the kind of the accelerator and its multiprocessors, by which exact sums have their order."""
    device = device_at_hand()
    return f"{device.kind} of {device.num_cores} multiprocessors"


def scans_layers() -> bool:
    """True if equal layers are stacked and run by one scan: on TPU.

    There a scan compiles in half the time to a tenth of the code. On CPU unrolled layers run 1.5 times faster. On GPU a
    scan copies each layer's weights out of the stack before multiplying, which triples the memory traffic of a decode
    step. Unrolled layers compile as fast there.
    """
    return jax.default_backend() == "tpu"


def joins_products() -> bool:
    """True if weights that multiply the same inputs lie in one tensor, see `join_products`: on GPU.

    On TPU scans and kernels take a stack of each weight, and on CPU blocks of rows are chosen for each weight.
    """
    return jax.default_backend() == "gpu"


def packs_integers() -> bool:
    """True if two 4-bit integers share a byte in memory; a TPU would lay them out anew, 1.8 GB of Llama 3 8B's."""
    return jax.default_backend() != "tpu"


def default_batched_tokens() -> int:
    """Returns the default token limit of a step.

    Beyond it the time per token hardly falls. A CPU with experts needs several hundred tokens before multiplying takes
    longer than reading the weights. An accelerator needs 150 (A100) to 560 (v6e), and its host has work with each step.
    """
    return CPU_BATCHED_TOKENS if jax.default_backend() == "cpu" else ACCELERATOR_BATCHED_TOKENS


def default_mixed_tokens() -> int | None:
    """Returns the default token limit of a step with decoding requests, None if it is that of all steps.

    On CPU a step takes longer the more tokens it has, and the decoding requests wait: with 512 a job had 0.92 of the
    output tokens/s.
    """
    return 128 if jax.default_backend() == "cpu" else None


def waits_for_decode() -> bool:
    """True if an engine waits for decode steps too at its start: on accelerators, whose hosts have many cores.

    On CPU, where blocks of padding are not multiplied, a prefill step stands in for them.
    """
    return jax.default_backend() != "cpu"


def least_decode_rows() -> int:
    """Returns the rows of the smallest decode step.

    An accelerator streams the same weights for one row as for eight. A GPU before Ampere also gathers the pages of each
    row, and multiplies by packed weights row by row.
    """
    return 1 if jax.default_backend() == "cpu" or device_at_hand().is_before_ampere else 8


def draws_filtered() -> bool:
    """True if filters have a draw of their own, without conditions: on GPU, whose host waits for each condition."""
    return jax.default_backend() == "gpu"


def free_bytes(devices: Iterable[Any] | None = None) -> int | None:
    """Returns the free bytes of the device that has fewest; None if one reports no limit, like a CPU.

    Without `devices` it is the first.
    """
    stats = [device.memory_stats() for device in devices or jax.local_devices()[:1]]
    if not all(each and "bytes_limit" in each for each in stats):
        return None
    return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)


def put_everywhere(array: Any, sharding: Any) -> jax.Array:
    """Returns an array of the host on the devices of a sharding, of all processes if they are there.

    `jax.device_put` would compare the arrays of several processes, by a collective.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    own = np.asarray(array)
    return jax.make_array_from_callback(own.shape, sharding, lambda index: own[index])


def enable_compilation_cache() -> None:
    """Keeps compiled steps on disk between runs, in `~/.cache/jaxinfer/compilation`.

    If the user gave JAX a folder (JAX_COMPILATION_CACHE_DIR, or jax_compilation_cache_dir in its configuration), that
    folder is used. JAX_ENABLE_COMPILATION_CACHE=false switches the cache off, and JAX_COMPILATION_CACHE_MAX_SIZE sets
    its limit in bytes. The setting is JAX's own, so JAX also keeps the user's functions there if they compile later in
    this process. Of a URL that JAX cannot open, it keeps them in the default folder, and only steps go to the URL.
    """
    settings = jax.config.values
    place = settings["jax_compilation_cache_dir"]
    if not settings["jax_enable_compilation_cache"]:
        return
    if place is not None and "://" in place and not _opens(place):
        _url_of_steps.append(place)
    elif place is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(COMPILATION_CACHE))
    # Keep every step: many steps of a small model compile in under JAX's threshold of a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def compilation_cache() -> str | None:
    """Returns the folder or URL of compiled steps; None if the cache is off. A URL of local files is a folder."""
    settings = jax.config.values
    place = settings["jax_compilation_cache_dir"]
    if not place or not settings["jax_enable_compilation_cache"]:
        return None
    if _url_of_steps and place == str(COMPILATION_CACHE):
        place = _url_of_steps[-1]
    return next((place[len(scheme) :] for scheme in LOCAL_SCHEMES if place.startswith(scheme)), place)


def _opens(url: str) -> bool:
    """True if JAX can open a URL; otherwise it would fail at the first function that it compiles."""
    try:
        from etils import epath

        epath.Path(url)
    except (ImportError, KeyError):
        return False
    return True
