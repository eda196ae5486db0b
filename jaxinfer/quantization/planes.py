"""Integers of 2 to 7 bits in bytes: each plane has some bits of all of them, as in the blocks of a GGUF.

    3 bits, 8 integers   ->   two bytes with the two low bits of each, one byte with the high bits

A plane of p bits has in byte i of n the bits of integers i, i + n, i + 2 n, …, the first lowest.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.gguf.blocks import fields

# The bits of each plane, the lowest first. 4 bits lie as in `kernels_pallas.quantized_matmul.pack_int4`.
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}


def fit_planes(bits: int, group_size: int) -> bool:
    """True if the planes of a group of integers are whole bytes."""
    return bits in PLANES and all(group_size * plane % 8 == 0 for plane in PLANES[bits])


def pack_planes(integers: np.ndarray, bits: int, num_groups: int) -> np.ndarray:
    """Returns the planes u8[..., n bits / 8] of integers [..., n], signed or not, group after group."""
    groups = integers.astype(np.uint8).reshape(*integers.shape[:-1], num_groups, -1)
    packed, shift = [], 0
    for plane in PLANES[bits]:
        parts = (groups >> shift & 2**plane - 1).reshape(*groups.shape[:-1], 8 // plane, -1)
        shifts = np.arange(0, 8, plane, dtype=np.uint8)[:, None]
        packed.append(np.bitwise_or.reduce(parts << shifts, axis=-2))
        shift += plane
    return np.concatenate(packed, axis=-1).reshape(*integers.shape[:-1], -1)


def split_planes(packed: jax.Array, bits: int, num_groups: int) -> tuple[jax.Array, ...]:
    """Returns the bits of each plane in bytes u8[..., groups, 8 / p, n p / 8], of planes u8[..., n bits / 8].

    They keep the axes of their bytes: with others a CPU's compiler unpacks integers one at a time.
    """
    groups = packed.reshape(*packed.shape[:-1], num_groups, -1)
    size = groups.shape[-1] * 8 // bits
    planes, start, shift = [], 0, 0
    for plane in PLANES[bits]:
        end = start + size * plane // 8
        planes.append(fields(groups[..., start:end], plane) << np.uint8(shift))
        start, shift = end, shift + plane
    return tuple(planes)


def join_planes(planes: tuple[jax.Array, ...], bits: int) -> jax.Array:
    """Returns the signed integers plus 2^(bits - 1), u8[..., groups, n], of planes that `split_planes` has made."""
    first, *others = (plane.reshape(*plane.shape[:-2], -1) for plane in planes)
    for other in others:
        first = first | other
    return first ^ np.uint8(2 ** (bits - 1))


def unpack_planes(packed: jax.Array, bits: int, num_groups: int) -> jax.Array:
    """Returns signed integers i8[..., n] of their planes u8[..., n bits / 8]."""
    integers = join_planes(split_planes(packed, bits, num_groups), bits).astype(jnp.int8) - np.int8(2 ** (bits - 1))
    return integers.reshape(*integers.shape[:-2], -1)
