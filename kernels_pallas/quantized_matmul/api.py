"""The one signature of the weight-only quantized product, and the choice among its implementations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from kernels_pallas.dispatch import call_best
from kernels_pallas.mesh_axes import over_devices
from kernels_pallas.packed_numbers import whole_zeros
from kernels_pallas.quantized_matmul.before_ampere import quantized_matmul_before_ampere
from kernels_pallas.quantized_matmul.gpu import quantized_matmul_gpu
from kernels_pallas.quantized_matmul.reference import layer_of, quantized_matmul_reference
from kernels_pallas.quantized_matmul.tpu import quantized_matmul_tpu

# In order of preference. The reference supports every call, so a search ends there; what follows must be named.
IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "gpu": quantized_matmul_gpu,
    "tpu": quantized_matmul_tpu,
    "before_ampere": quantized_matmul_before_ampere,
    "reference": quantized_matmul_reference,
    "gpu_interpret": functools.partial(quantized_matmul_gpu, interpret=True),
    "tpu_interpret": functools.partial(quantized_matmul_tpu, interpret=True),
}


def quantized_matmul(
    x: jax.Array,
    weights: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None = None,
    *,
    layer: jax.Array | None = None,
    sharding: NamedSharding | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns x wᵀ [T, F], where w[f, d] = (weights[f, d] - zeros[f, d // g]) * scales[f, d // g].

    Groups of g = D // groups inputs share a scale; one group is a scale per output channel. With a `layer`, weights,
    scales and zeros are those of a stack of n layers [n, F..., ...], and the channels F may have several axes. Scales
    and zeros may also be those of the layer alone, [1, F..., ...].

    Args:
      x: [T, D] activations, floating point.
      weights: i8[F, D], i4[F, D], f8_e4m3[F, D], or as `pack_int4` lays out 4 bits: integers i8[F, D / 2], or numbers
        of FP4 (E2M1) u8[F, D / 2].
      scales: f[F, groups], in any floating type, or u8: exponents of 2, less 127 (E8M0).
      zeros: i8[F, groups] zero points, or i4 beside weights i4; None is 0. Beside packed weights they may lie two to a
        byte, i8[F, groups / 2], rounded up. The low half of byte j has that of group 2j, the high half the next one's.
      layer: i32[] the layer of a stack; the kernel of a TPU reads its weights there, the other implementations copy
        them. None if there is no stack.
      sharding: that of `weights` over the devices of a mesh, each of which multiplies by its own part. Their sums are
        added in float32 if they have different inputs. Without it the call runs whole on every device.
      implementation: a name from `IMPLEMENTATIONS`, or None for the best that supports the call.

    Returns:
      [T, F] in x's dtype, accumulated in float32.

    Raises:
      ValueError: for an unknown implementation or arrays that do not fit together.
      NotImplementedError: when the named implementation cannot do this call, with the reason, and for packed integers
        of a group on several devices.
    """
    _check_shapes(x, weights, scales, zeros, layer)
    multiply = functools.partial(call_best, IMPLEMENTATIONS, implementation)
    if sharding is None:
        return multiply((x, weights, scales, zeros, layer))
    return _multiply_over_mesh(multiply, x, weights, scales, zeros, layer, sharding)


def split_groups(scales: jax.Array, num_inputs: int, num_parts: int) -> jax.Array:
    """Returns scales f[..., groups] of groups of which none has inputs in two of `num_parts` equal parts of the inputs.

    A group in several parts becomes several groups with the same scale.
    """
    groups = scales.shape[-1]
    if groups % num_parts == 0:
        return scales
    size = num_inputs // groups
    return jnp.repeat(scales, size // math.gcd(size, num_inputs // num_parts), axis=-1)


def _multiply_over_mesh(
    multiply: Callable[[tuple[Any, ...]], jax.Array],
    x: jax.Array,
    weights: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    layer: jax.Array | None,
    sharding: NamedSharding,
) -> jax.Array:
    (T, D), groups, channels = x.shape, scales.shape[-1], 0 if layer is None else 1  # the first axis of channels
    num_parts = weights.shape[-1] // sharding.shard_shape(weights.shape)[-1]
    of_weights = [*sharding.spec, *(None,) * (weights.ndim - len(sharding.spec))]
    of_scales, of_outputs, of_inputs = of_weights, of_weights[channels:-1], of_weights[-1]
    if groups == 1:  # of all inputs, whichever a device has
        of_scales = [*of_weights[:-1], None]
    elif groups % num_parts:
        if weights.shape[-1] < D:
            raise NotImplementedError(
                f"{groups} groups of packed integers cannot be split over {num_parts} devices; give weights of dtype"
                " int4, or a number of groups that the devices divide"
            )

        def split_own(a: jax.Array) -> jax.Array:  # of the layer alone, for this makes a copy
            own = split_groups(layer_of(a, layer), D, num_parts)
            return own.reshape(*(1,) * channels, *a.shape[channels:-1], -1)

        scales, zeros = jax.tree.map(split_own, (scales, zeros))
    elif zeros is not None and zeros.shape[-1] % num_parts:  # two devices would share a byte
        zeros = whole_zeros(zeros, groups)

    def multiply_own(x: jax.Array, weights: jax.Array, *others: jax.Array | None) -> jax.Array:
        y = multiply((x, weights, *others)).reshape(T, *weights.shape[channels:-1])
        return y if of_inputs is None else jax.lax.psum(y.astype(jnp.float32), of_inputs).astype(x.dtype)

    of_scales = PartitionSpec(*of_scales)
    split = over_devices(
        multiply_own,
        sharding.mesh,
        in_specs=(PartitionSpec(None, of_inputs), PartitionSpec(*of_weights), of_scales, of_scales, PartitionSpec()),
        out_specs=PartitionSpec(None, *of_outputs),
    )
    return split(x, weights, scales, zeros, layer).reshape(T, -1)


def widths_of(dtype: Any, num_inputs: int) -> tuple[int, ...]:
    """Returns the numbers of columns that weights of a dtype may have; none for a dtype of no such weights."""
    widths = {
        "int8": (num_inputs, num_inputs // 2),
        "uint8": (num_inputs // 2,),
        "int4": (num_inputs,),
        "float8_e4m3fn": (num_inputs,),
    }
    return widths.get(jnp.dtype(dtype).name, ())


def fit_zeros(zeros: jax.Array, weights: jax.Array, scales: jax.Array, num_inputs: int) -> bool:
    """True if zero points fit weights [..., in] of `num_inputs` inputs, and their scales."""
    *outputs, groups = scales.shape
    columns = (groups, -(-groups // 2)) if weights.shape[-1] < num_inputs else (groups,)
    is_integer = zeros.dtype == "int8" or zeros.dtype == weights.dtype == "int4"
    return is_integer and zeros.shape in [(*outputs, count) for count in columns]


def _check_shapes(x, weights, scales, zeros, layer) -> None:
    D, groups = x.shape[-1], scales.shape[-1]
    of_layer = None if layer is None else (1, *weights.shape[1:-1], groups)
    fits = (
        x.ndim == 2
        and (weights.ndim == 2 if layer is None else weights.ndim > 2)
        and weights.shape[-1] in widths_of(weights.dtype, D)
        and (jnp.issubdtype(scales.dtype, jnp.floating) or scales.dtype == "uint8")
        and scales.shape in ((*weights.shape[:-1], groups), of_layer)
        and groups > 0
        and D % groups == 0
        and (weights.shape[-1] == D or (D // groups) % 2 == 0)
        and (zeros is None or fit_zeros(zeros, weights, scales, D))
    )
    if not fits:
        parts = {"x": x, "weights": weights, "scales": scales, "zeros": zeros}
        listed = ", ".join(f"{n} {a.shape} of {a.dtype}" for n, a in parts.items() if a is not None)
        raise ValueError(f"arrays do not fit together: {listed}; see quantized_matmul")
