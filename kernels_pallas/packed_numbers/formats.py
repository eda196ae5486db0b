"""Numbers of 8 and 4 bits: how they are packed, and the floats that they stand for beside their scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def pack_int4(weights: jax.Array, group_size: int) -> jax.Array:
    """Packs integers from -8 to 7, i8[F, D], two to a byte, i8[F, D / 2]; or from 0 to 15, u8[F, D].

    Byte j of a group of g holds number j in its low half and number j + g / 2 in its high half. Unpacking gives
    two runs of neighbours, and a kernel need not interleave them.
    """
    F, D = weights.shape
    halves = weights.reshape(F, D // group_size, 2, group_size // 2)
    low, high = halves[:, :, 0], halves[:, :, 1]
    return ((low & 15) | (high << 4)).astype(weights.dtype).reshape(F, D // 2)


def unpack_int4(packed: jax.Array, group_size: int) -> jax.Array:
    """Returns [F, D] of what `pack_int4` packed, in the type of the bytes."""
    F, half = packed.shape
    halves = split_int4(packed.reshape(F, 2 * half // group_size, group_size // 2))
    return jnp.concatenate(halves, axis=-1).reshape(F, 2 * half)


def split_int4(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the low and high halves of bytes: signed those of i8, and unsigned those of u8."""
    return jnp.right_shift(jnp.left_shift(packed, 4), 4), jnp.right_shift(packed, 4)


def doubled_fp4(codes: jax.Array) -> jax.Array:
    """Returns twice the numbers i32 that 4-bit floats (E2M1 of OCP's Microscaling formats) u8 from 0 to 15 stand for.

    A code has a sign, two bits of exponent and one of mantissa: 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
    """
    codes = codes.astype(jnp.int32)
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    magnitude = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    return jnp.where(codes >= 8, -magnitude, magnitude)


def wide_scales(weights: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns the scales f32 of the integers that `weights` hold: half those of FP4, whose numbers are taken twice.

    Bytes (E8M0 of the same formats) are exponents of 2, less 127.
    """
    is_fp4 = weights.dtype == jnp.uint8
    if scales.dtype != jnp.uint8:
        wide = scales.astype(jnp.float32)
        return 0.5 * wide if is_fp4 else wide
    exponents = scales.astype(jnp.int32) - int(is_fp4)
    # 2^-127 and 2^-128 are subnormal.
    bits = jnp.where(exponents >= 1, exponents << 23, jnp.where(exponents == 0, 0x00400000, 0x00200000))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def whole_zeros(zeros: jax.Array | None, groups: int) -> jax.Array | None:
    """Returns zero points [..., groups], an integer for each, of those that may lie two to a byte."""
    if zeros is None or zeros.shape[-1] == groups:
        return zeros
    return jnp.stack(split_int4(zeros), axis=-1).reshape(*zeros.shape[:-1], -1)[..., :groups]


def dequantize(weights: jax.Array, scales: jax.Array, zeros: jax.Array | None, num_inputs: int) -> jax.Array:
    """Returns the weights f32[F, D]; the arguments are those of `quantized_matmul`."""
    w = centred(weights, scales, zeros, num_inputs).astype(jnp.float32)
    w = w * wide_scales(weights, scales)[..., None]
    return w.reshape(w.shape[0], num_inputs)


def centred(weights: jax.Array, scales: jax.Array, zeros: jax.Array | None, num_inputs: int) -> jax.Array:
    """Returns weights less zero points, as integers, [F, groups, g]: twice the numbers of FP4; FP8 as it is."""
    F, groups = scales.shape
    if weights.shape[1] < num_inputs:
        unpacked = unpack_int4(weights, num_inputs // groups)
        weights = doubled_fp4(unpacked) if weights.dtype == jnp.uint8 else unpacked
    w, zeros = weights.reshape(F, groups, -1), whole_zeros(zeros, groups)
    # Differences of bytes need nine bits, and bfloat16 holds every integer up to 256.
    return w if zeros is None else w.astype(jnp.int16) - zeros.astype(jnp.int16)[..., None]
