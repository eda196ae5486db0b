"""The choice between the two kernels for rows of several tokens: Triton's, for every GPU, and Mosaic's, for Hopper."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from collections.abc import Mapping

import jax

from kernels_pallas.device import HOPPER
from kernels_pallas.paged_attention.layout import Pages
from kernels_pallas.paged_attention.tuned_tables import table_name, tuned_table
from kernels_pallas.triton import Target

PREFILL_KERNELS = ("triton", "mosaic")
DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)
# The queries that a warpgroup reads at once.
MIN_TOKENS = 64
PAGE_SIZES = (16, 32, 64, 128, 256)
MIN_JAX = (0, 11)
# ptxas of CUDA 12.8.0 to 12.9.0 miscompiles causal masks, as jax's own kernel of this kind says; 12.9.86 is that of
# CUDA 12.9.1.
FIRST_BAD_COMPILER, FIRST_GOOD_COMPILER = (12, 8), (12, 9, 86)
COMPILER_WHEELS = ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc-cu13", "nvidia-cuda-nvcc")


def choose_prefill(
    name: str | None,
    q: jax.Array,
    pages: Pages,
    *,
    scale: float,
    absent: Mapping[str, jax.Array | None],
    target: Target,
    interpret: bool,
) -> str:
    """Returns which of `PREFILL_KERNELS` computes a call; `name` None takes what the device's table says, or Triton's.

    `absent` are the arguments that Mosaic's needs to be None. Where a table names Mosaic's, Triton's still computes the
    calls that Mosaic's cannot; and all, with a warning, if jax or the CUDA compiler is one that it cannot be built by.

    Raises:
      ValueError: for an unknown name.
      NotImplementedError: if Mosaic's is named and cannot do this call, with the reason.
    """
    if name is not None and name not in PREFILL_KERNELS:
        raise ValueError(f"prefill={name!r:.80} is unknown; choose from {PREFILL_KERNELS} or None")
    if (name or tuned_prefill(q, pages, target)) == "triton":
        return "triton"
    against_call = reason_against_call(q, pages, scale, absent)
    against_machine = None if interpret else reason_against_machine(target, jax.__version_info__, compiler_wheels())
    if name is not None and (reason := against_call or against_machine):
        raise NotImplementedError(reason)
    if against_call:
        return "triton"
    if against_machine:
        warnings.warn(f"Triton computes prefill, though Mosaic is faster here: {against_machine}", stacklevel=2)
        return "triton"
    return "mosaic"


def tuned_prefill(q: jax.Array, pages: Pages, target: Target) -> str:
    """Returns the kernel that was the faster on this device for these heads; Triton's if none was measured."""
    (_, N, H), K = q.shape, pages.num_kv_heads
    entry = tuned_table(table_name(target.kind)).get(("ragged", pages.dtype.name, K, H, N // K))
    return "triton" if entry is None else entry["prefill"]


def reason_against_call(q: jax.Array, pages: Pages, scale: float, absent: Mapping[str, jax.Array | None]) -> str | None:
    """Returns why Mosaic's kernel cannot compute such a call on any machine; None if it can."""
    T, _, H = q.shape
    for what, value, supported in (
        ("q.dtype", q.dtype.name, DTYPES),
        ("pages.dtype", pages.dtype.name, (q.dtype.name,)),
        ("page_size", pages.page_size, PAGE_SIZES),
        ("head_dim", H, HEAD_DIMS),
        *((name, None if array is None else "an array", (None,)) for name, array in absent.items()),
    ):
        if value not in supported:
            return (
                f"{what}={value} is not supported by the Mosaic kernel; supported: {supported}; use the Triton kernel"
            )
    if T < MIN_TOKENS:
        return f"{T} tokens are fewer than the {MIN_TOKENS} that the Mosaic kernel reads at once; use the Triton kernel"
    if not scale > 0:
        return f"scale={scale} is not supported by the Mosaic kernel, which needs one above 0; use the Triton kernel"
    return None


def reason_against_machine(target: Target, jax_version: tuple[int, ...], wheels: Mapping[str, str]) -> str | None:
    """Returns why Mosaic's kernel cannot run on a GPU with a version of jax and wheels of the CUDA compiler."""
    if not HOPPER <= target.capability < HOPPER + 1:
        return (
            f"compute capability {target.capability} of {target.kind!r} is not supported by the Mosaic kernel, which"
            f" needs {HOPPER}; use the Triton kernel"
        )
    if jax_version[:2] < MIN_JAX:
        return f"the Mosaic kernel needs jax >= {_dotted(MIN_JAX)}, not {_dotted(jax_version)}; install a newer one"
    way_out = f"pip install -U 'nvidia-cuda-nvcc-cu12>={_dotted(FIRST_GOOD_COMPILER)}'"
    if not wheels:
        return (
            f"the Mosaic kernel needs to know its CUDA compiler, and none of {COMPILER_WHEELS} is installed: {way_out}"
        )
    for wheel, version in wheels.items():
        if FIRST_BAD_COMPILER <= tuple(int(part) for part in version.split(".")[:3]) < FIRST_GOOD_COMPILER:
            return (
                f"{wheel}=={version}, of CUDA 12.8.0 to 12.9.0, miscompiles the masks of the Mosaic kernel: {way_out}"
            )
    return None


@functools.cache
def compiler_wheels() -> dict[str, str]:
    """Returns the version of each of `COMPILER_WHEELS` that is installed."""
    versions = {}
    for name in COMPILER_WHEELS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
