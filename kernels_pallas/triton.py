"""What the GPU kernels need of Pallas-Triton, in one place: it is deprecated since jax 0.11, and may go.

Works from jax 0.10 to 0.12. Kernels index whole arrays by integer vectors, which the interpreter on CPU can run too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels_pallas.device import AMPERE, CAPABILITIES, device_at_hand

# Tensor cores take no matrix smaller than this in any direction.
MIN_DOT = 16
FP8_CAPABILITY = 8.9
FP8_FACTOR = 2.0**8  # of `floats_of_fp8`


class Target(NamedTuple):
    """The GPU that a program is compiled for."""

    kind: str  # as the driver names it, e.g. "NVIDIA H200"
    num_cores: int  # multiprocessors
    capability: float  # e.g. 8.9


# Sizes of arrays of single bytes that kernels do not get: up to 2**32 bytes Triton adds a signed offset of 32 bits,
# whose reach they exceed.
MISADDRESSED = range(2**31 + 1, 2**32 + 1)

# What the interpreter stands for.
INTERPRETED = Target("interpreter", 1, AMPERE)


def target() -> Target:
    """Returns the GPU that a program is compiled for.

    Raises:
      NotImplementedError: when that is no GPU, or one that Triton does not compile for.
    """
    device = device_at_hand()
    if device.platform != "gpu" or device.capability is None or device.num_cores is None:
        raise NotImplementedError(
            f"device={device.kind!r} of platform {device.platform!r} is not supported by the GPU kernels; supported are"
            f" NVIDIA GPUs of compute capability {AMPERE} and up, ahead of time {sorted(CAPABILITIES)}"
        )
    if device.is_before_ampere:
        raise NotImplementedError(
            f"compute capability {device.capability} of {device.kind!r} is not supported by the GPU kernels; supported"
            f" are {AMPERE} and up"
        )
    return Target(device.kind, device.num_cores, device.capability)


def require_block_sizes(sizes: Any, *, blocks: Sequence[str], counts: Sequence[str]) -> None:
    """Raises ValueError unless the fields `blocks` are sizes that `dot` takes, and `counts` are positive."""
    for name in blocks:
        value = getattr(sizes, name)
        if value < MIN_DOT or value & (value - 1):
            raise ValueError(f"{name}={value} must be a power of two of at least {MIN_DOT}")
    for name in counts:
        if getattr(sizes, name) < 1:
            raise ValueError(f"{name}={getattr(sizes, name)} must be at least 1")


def launch(
    kernel: Callable[..., None],
    *arrays: jax.Array,
    grid: tuple[int, ...],
    out: Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int,
    name: str,
    interpret: bool,
    aliases: Mapping[int, int] | None = None,
) -> Any:
    """Runs kernel(*refs of arrays, *refs of out) once per point of the grid; every ref is a whole array.

    `aliases` says which array becomes which output, in place.
    """
    for array in arrays:
        if array.dtype.itemsize == 1 and array.size in MISADDRESSED:
            raise NotImplementedError(
                f"an array {array.shape} of {array.dtype} is not supported by the GPU kernels: between 2**31 and 2**32"
                " bytes it would be addressed wrongly; make it smaller or larger than that (of an engine by"
                " EngineConfig.num_pages, or without it)"
            )
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[pl.BlockSpec()] * len(arrays),
        out_specs=[pl.BlockSpec()] * len(out),
        out_shape=list(out),
        input_output_aliases=dict(aliases or {}),
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*arrays)


def load(ref: Any, indices: tuple, mask: jax.Array | None = None) -> jax.Array:
    """Returns ref[indices], zero where the mask is false; nothing is read there, whatever the index."""
    if mask is None:
        return triton.load(ref.at[_as_arrays(indices)])
    return triton.load(ref.at[_as_arrays(indices)], mask=mask, other=jnp.zeros((), ref.dtype))


def store(ref: Any, indices: tuple, value: jax.Array, mask: jax.Array) -> None:
    """Writes value to ref[indices] where the mask is true."""
    triton.store(ref.at[_as_arrays(indices)], value.astype(ref.dtype), mask=mask)


def as_loaded(weights: jax.Array, target: Target) -> tuple[jax.Array, bool]:
    """Returns the weights for a kernel, and True if they are the bits i8 of FP8, which the GPU does not convert."""
    if weights.dtype != jnp.float8_e4m3fn or target.capability >= FP8_CAPABILITY:
        return weights, False
    return jax.lax.bitcast_convert_type(weights, jnp.int8), True


def floats_of_fp8(bits: jax.Array) -> jax.Array:
    """Returns the numbers f16 of float8_e4m3fn, given as i8, divided by FP8_FACTOR; each is finite.

    Both types have a sign, an exponent and a mantissa; moved to where float16 has them, the exponent is less by 8.
    """
    moved = (bits.astype(jnp.int16) << jnp.int16(7)) & jnp.int16(-0x4001)  # without the second copy of the sign
    return jax.lax.bitcast_convert_type(moved, jnp.float16)


def _as_arrays(indices: tuple) -> tuple:
    """The interpreter knows no Python integers as indices."""
    return tuple(jnp.asarray(index, jnp.int32) for index in indices)


def dot(a: jax.Array, b: jax.Array, transpose_b: bool = False) -> jax.Array:
    """Returns a b or a bᵀ, added up in float32.

    Tensor cores round float32 operands to TensorFloat-32 unless `jax_default_matmul_precision` forbids it.
    """
    contract = 1 if transpose_b else 0
    return jax.lax.dot_general(a, b, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)
