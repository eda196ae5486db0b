"""The quantized product in plain JAX: the oracle of the kernels, and what runs on old GPUs and over meshes of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Packed weights that an accelerator widens in a turn: 16 MiB in bfloat16.
MAX_WIDENED = 2**23


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


def layer_of(stacks: Any, layer: jax.Array | None) -> Any:
    """Returns the arrays [F, ...] of a layer of stacks [n, F..., ...], in a tree; the arrays themselves for None.

    A stack [1, F..., ...] has those of the layer alone.
    """
    if layer is None:
        return stacks

    def own(stack: jax.Array) -> jax.Array:  # the index is bounded by the number of layers
        return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False).reshape(-1, stack.shape[-1])

    return jax.tree.map(own, stacks)


def dequantize(weights: jax.Array, scales: jax.Array, zeros: jax.Array | None, num_inputs: int) -> jax.Array:
    """Returns the weights f32[F, D]; the arguments are those of `quantized_matmul`."""
    w = _centred(weights, scales, zeros, num_inputs).astype(jnp.float32)
    w = w * wide_scales(weights, scales)[..., None]
    return w.reshape(w.shape[0], num_inputs)


def multiply_widened(x: jax.Array, weights: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> jax.Array:
    """The contract is that of `quantized_matmul`; the weights are written out once in the dtype of x."""
    return product_of_widened(x, weights, scales, zeros).astype(x.dtype)


def product_of_widened(x: jax.Array, weights: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> jax.Array:
    """Returns the same in float32, f32[T, F]."""
    w = dequantize(weights, scales, zeros, x.shape[1]).astype(x.dtype)
    return jnp.einsum("td,fd->tf", x, w, preferred_element_type=jnp.float32)


def in_turns(start: jax.Array, parts: Any, per_turn: int, compute: Callable[[Any], jax.Array]) -> jax.Array:
    """Returns f32[T, F], what `compute` returns f32[T, per_turn] for the parts of some channels at a time.

    `start` f32[T, F] is what the results replace.

    300 channels, 256 a turn ->  0-255,  44-299
    """
    F = start.shape[1]
    per_turn = min(per_turn, F)

    def add_channels(i: jax.Array, y: jax.Array) -> jax.Array:
        # A turn that would pass channel F begins earlier, and computes some channels again.
        first = jnp.minimum(i * per_turn, F - per_turn)
        own = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, per_turn), parts)
        return jax.lax.dynamic_update_slice_in_dim(y, compute(own), first, axis=1)

    return jax.lax.fori_loop(0, -(-F // per_turn), add_channels, start)


def quantized_matmul_reference(
    x: jax.Array, weights: jax.Array, scales: jax.Array, zeros: jax.Array | None, layer: jax.Array | None = None
) -> jax.Array:
    """The contract is that of `quantized_matmul`.

    Integers go into the product and scales onto its result, group by group: the compiler fuses the conversion, and the
    weights are never there in floating point. Of many rows the results per group, float32 [T, groups, F], would be
    larger than the weights in x's type; then those are made.
    """
    weights, scales, zeros = layer_of((weights, scales, zeros), layer)
    (T, D), F, groups = x.shape, weights.shape[0], scales.shape[1]
    wide = wide_scales(weights, scales)
    if groups == 1:
        w = _centred(weights, scales, zeros, D).reshape(F, D).astype(x.dtype)
        y = jnp.einsum("td,fd->tf", x, w, preferred_element_type=jnp.float32)
        return (y * wide[:, 0][None]).astype(x.dtype)
    if T * groups * 4 > D * x.dtype.itemsize:
        return multiply_widened(x, weights, scales, zeros)
    w = _centred(weights, scales, zeros, D).astype(x.dtype)
    y = jnp.einsum("tgd,fgd->tgf", x.reshape(T, groups, -1), w, preferred_element_type=jnp.float32)
    return (y * wide.T[None]).sum(1).astype(x.dtype)


def _centred(weights: jax.Array, scales: jax.Array, zeros: jax.Array | None, num_inputs: int) -> jax.Array:
    """Returns weights less zero points, as integers, [F, groups, g]: twice the numbers of FP4; FP8 as it is."""
    F, groups = scales.shape
    if weights.shape[1] < num_inputs:
        unpacked = unpack_int4(weights, num_inputs // groups)
        weights = doubled_fp4(unpacked) if weights.dtype == jnp.uint8 else unpacked
    w, zeros = weights.reshape(F, groups, -1), whole_zeros(zeros, groups)
    # Differences of bytes need nine bits, and bfloat16 holds every integer up to 256.
    return w if zeros is None else w.astype(jnp.int16) - zeros.astype(jnp.int16)[..., None]
