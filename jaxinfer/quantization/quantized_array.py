"""Weights of 8 or 4 bits with a scale per output channel, or per group of inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jax.sharding import NamedSharding

from jaxinfer.quantization.activations import Activations
from jaxinfer.quantization.planes import join_planes, split_planes, unpack_planes
from kernels_pallas.packed_numbers import pack_int4, whole_zeros
from kernels_pallas.quantized_matmul import layer_of

# By bits, what the largest of a group becomes; the least integer is left out, so that the grid is symmetric.
LARGEST = {8: 127, 4: 7}
# Inputs that share a scale of 4 bits, if it divides their number. Few, because the largest of a group sets its scale.
# With these, scales of 32 bits take only a sixteenth of the bytes of the integers.
INT4_GROUP_SIZE = 128


@struct.dataclass
class QuantizedArray:
    """Weights [out..., in] in 2 to 8 bits: (value - zero) * scale, with a zero point and a scale per group of inputs.

    The inputs are cut into groups of equal size; a single group is a scale per output channel. Numbers of 4 bits lie
    two to a byte, as `pack_int4` lays them out, so that the axis of inputs is half as long; or integers have a type of
    their own, which TPUs multiply. If there is an `order`, number j of a row is that of input order[j]. With a `layer`,
    all arrays are those of n layers [n, out..., ...], and the weights are this layer's: a kernel of a TPU reads them in
    the stack. Over a mesh it also needs the `sharding` of the stack. A `multiplier` of all scales, the sum of two
    numbers, lets them have 8 bits. With `activations` the product rounds its inputs to 8 bits too. With `bits`, the
    integers of 2, 3, 5, 6 or 7 bits lie in planes (`pack_planes`), and so do zero points of u8. Those of 4 bits lie two
    to a byte, or have a type of their own, as their numbers do. Where the last axis of outputs is shorter in scales,
    neighbours share them.
    """

    values: Any  # i8 or f8_e4m3 [out..., in]; of 4 bits i4[out..., in] or i8[out..., in / 2], FP4 u8[out..., in / 2]
    scales: Any  # f[out..., groups], f8_e4m3 included, or u8: exponents of 2, less 127
    zeros: Any = None  # i8 or i4[out..., groups]; packed i8[out..., groups / 2], rounded up, or u8 of planes; None: 0
    order: Any = None  # i32[in]; None: as they are
    multiplier: Any = None  # f32[1..., 2]; None: 1
    input_range: Any = None  # f32[1..., 3] of `round_rows`; None: they are not rounded, or by their own range
    layer: Any = None  # i32[]
    activations: Activations | None = struct.field(pytree_node=False, default=None)  # None: they are not rounded
    bits: int | None = struct.field(pytree_node=False, default=None)  # of integers in planes; None: they are in none
    sharding: NamedSharding | None = struct.field(pytree_node=False, default=None)  # of values

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the integers as they are stored, of one layer."""
        return self.values.shape if self.layer is None else self.values.shape[1:]

    @property
    def has_shared_scales(self) -> bool:
        """True if outputs share scales."""
        return self.scales is not None and self.scales.shape[-2] < self.values.shape[-2]

    def alone(self) -> QuantizedArray:
        """Returns the weights [F, in] of a layer taken out of its stack; without a stack the weights themselves."""
        return layer_of(replace(self, layer=None, sharding=None), self.layer)

    def flat(self) -> QuantizedArray:
        """Returns weights of no stack, without a multiplier, with all axes of outputs as one: [F, in]."""
        parts = self.values, self.scales, self.zeros
        values, scales, zeros = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), parts)
        order = None if self.order is None else self.order.reshape(-1)
        return replace(self, values=values, scales=scales, zeros=zeros, order=order)

    def with_wide_scales(self) -> QuantizedArray:
        """Returns the same weights with a scale for each output; with a multiplier they are f32, and multiplied."""
        if self.has_shared_scales:
            count = self.values.shape[-2] // self.scales.shape[-2]
            return replace(self, scales=jnp.repeat(self.scales, count, axis=-2)).with_wide_scales()
        if self.multiplier is None:
            return self
        # The first product is exact, so that it is no matter if the compiler fuses the sum with either.
        scales, (high, low) = self.scales.astype(jnp.float32), jnp.split(self.multiplier, 2, axis=-1)
        return replace(self, scales=scales * high + scales * low, multiplier=None)

    def with_divided_zeros(self, num_parts: int) -> QuantizedArray:
        """Returns the same weights, zero points whole if `num_parts` equal parts of the groups would share a byte."""
        if self.zeros is None or self.zeros.shape[-1] % num_parts == 0:
            return self
        return replace(self, zeros=self.whole_zeros)

    def unpacked(self) -> QuantizedArray:
        """Returns the same weights with an i8 for each integer and zero point that lies in planes."""
        if self.bits is None:
            return self
        values = unpack_planes(self.values, self.bits, self.scales.shape[-1])
        return replace(self, values=values, zeros=self.whole_zeros, bits=None)

    def split(self) -> SplitPlanes:
        """Returns weights [F, in] in planes with a byte for the bits of each integer in each plane."""
        assert self.bits is not None
        planes = split_planes(self.values, self.bits, self.scales.shape[-1])
        return SplitPlanes(planes, self.scales.astype(jnp.float32), self.whole_zeros, self.bits)

    @property
    def whole_zeros(self) -> Any:
        """The zero points, an integer for each."""
        if self.bits is None or self.zeros is None or self.zeros.dtype != jnp.uint8:
            return whole_zeros(self.zeros, self.scales.shape[-1])
        return unpack_planes(self.zeros, self.bits, 1)


@struct.dataclass
class SplitPlanes:
    """Weights in planes, which a CPU would otherwise unpack again for each number that it multiplies."""

    planes: Any  # of `split_planes`, each u8[F, groups, ...]
    scales: Any  # f32[F, groups]
    zeros: Any  # i8[F, groups] or None
    bits: int = struct.field(pytree_node=False)

    def widened(self) -> jax.Array:
        """Returns the weights f32[F, in]."""
        numbers = join_planes(self.planes, self.bits).astype(jnp.float32) - np.float32(2 ** (self.bits - 1))
        if self.zeros is not None:
            numbers = numbers - self.zeros.astype(jnp.float32)[..., None]
        return (numbers * self.scales[..., None]).reshape(len(numbers), -1)


def quantize(w: Any, *, group_size: int | None = None, bits: int = 8, is_packed: bool = True) -> QuantizedArray:
    """Rounds weights [out..., in] to the nearest of 255 steps per group, or of 15 if `bits` is 4.

    The largest weight of a group is the last step. Weights of NumPy give arrays of NumPy with the bits that JAX gives.
    `group_size` is a number of inputs; None makes a group of all inputs of a channel. Raises ValueError where it does
    not divide them, or is odd with 4 bits, and for other bits. `is_packed` lays 4 bits two to a byte, and leaves 8 as
    they are.
    """
    if bits not in LARGEST:
        raise ValueError(f"bits={bits} is not supported; use one of {sorted(LARGEST)}")
    *outputs, num_inputs = w.shape
    size = num_inputs if group_size is None else group_size
    if size < 1 or num_inputs % size:
        raise ValueError(f"group_size={group_size} does not divide the {num_inputs} inputs of weights {w.shape}")
    is_packed &= bits == 4
    if is_packed and size % 2:
        raise ValueError(f"group_size={size} of weights {w.shape}: integers of 4 bits go in pairs; use even sizes")
    xp = w.__array_namespace__()
    groups = w.reshape(*outputs, num_inputs // size, size).astype(np.float32)
    largest = abs(groups).max(-1, keepdims=True)
    one = np.float32(1)
    # By products: a compiler makes them of these divisions, whose bits are others.
    scales = largest * np.float32(1 / LARGEST[bits])
    # A group of zeros has any scale. So has one with a subnormal scale, which devices take for 0, and NumPy does not.
    scales = xp.where(scales >= np.finfo(np.float32).tiny, scales, one)
    values = xp.round(groups * (one / scales)).astype(np.int8 if is_packed or bits == 8 else ml_dtypes.int4)
    if is_packed:
        values = pack_int4(values.reshape(-1, num_inputs), size)
    return QuantizedArray(values.reshape(*outputs, -1), scales[..., 0])
