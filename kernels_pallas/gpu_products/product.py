"""The product of rows and the weights of a layer for NVIDIA GPUs from Ampere on, in Pallas-Triton.

Few rows wait for the weights. XLA has one tile for all products of a step, adds up parts of the inputs in a second
launch, and writes most packed weights to memory in floating point. Here each product has a tile by the shape of its
weights, which keeps enough bytes on their way, and packed numbers are widened in registers. A program adds up all
inputs of its channels in order, so that a result is the same whatever rows lie beside it.

    channels of a program x inputs: one block after another    rows x inputs: the same blocks, from the cache
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import triton
from kernels_pallas.device import device_at_hand
from kernels_pallas.exact_sums import sums_are_exact
from kernels_pallas.gpu_products.tiles import ProductTile, product_tile, takes_inputs
from kernels_pallas.gpu_products.xla_options import MAX_TILED_ROWS
from kernels_pallas.packed_numbers import dequantize, split_int4
from kernels_pallas.packed_numbers.on_gpu import load_zeros, numbers_of, scales_of_numbers

FP8 = "float8_e4m3fn"
GROUP_SIZES = (32, 64, 128, 256)
# Rows by weights with a scale per group. For each further tile the kernel would read and widen the integers again: 256
# rows by 14,336 x 4,096 weights took 200 us on an H200, and 67 by weights in bfloat16, which 36 us are enough to write
# at 4 TB/s.
MAX_GROUPED_ROWS = 64
# What makes one number of those of all parts, in float32 as rounded to the result's dtype.
Combine = Callable[..., jax.Array]


def can_multiply(x: Any, weights: Any, scales: Any = None, zeros: Any = None) -> bool:
    """Returns whether `multiply` can take rows x [T, D] by weights [..., D] or packed ones, and gains by it.

    More rows than MAX_TILED_ROWS gain nothing, but in `exact_sums` they keep to one order.
    """
    device, (T, D) = device_at_hand(), x.shape
    if device.platform != "gpu" or device.capability is None or device.is_before_ampere:
        return False
    if x.dtype not in ("bfloat16", "float16") or T == 0:
        return False
    if weights.dtype.itemsize == 1 and weights.size in triton.MISADDRESSED:
        return False
    if scales is None:
        has_type, most_rows = weights.dtype == x.dtype and weights.shape[-1] == D, MAX_TILED_ROWS
    elif scales.shape[-1] == 1:
        has_type, most_rows = weights.dtype.name in ("int8", FP8) and weights.shape[-1] == D, MAX_TILED_ROWS
        has_type = has_type and zeros is None
    else:
        has_type, most_rows = weights.dtype.name in ("int8", "uint8", FP8), MAX_GROUPED_ROWS
        has_type = has_type and D / scales.shape[-1] in GROUP_SIZES
    return has_type and takes_inputs(D) and (sums_are_exact() or most_rows >= T)


def multiply(
    x: jax.Array,
    weights: jax.Array,
    scales: jax.Array | None = None,
    zeros: jax.Array | None = None,
    *,
    dtype: Any = jnp.float32,
    combine: Combine | None = None,
    tile: ProductTile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns x wᵀ [T, F] in `dtype`, added up in float32, or what `combine` makes of it.

    Args:
      x: [T, D] in bfloat16 or float16; the interpreter takes float32.
      weights: [F, D] in x's dtype, or [P, F, D], whose P products combine(*parts) makes one. With `scales` they are
        numbers of 8 bits, or two of 4 bits to a byte, as those of `quantized_matmul`.
      scales: [F, groups] or [P, F, groups], the worth of a number by channel, or by group of inputs.
      zeros: the zero points of groups, as those of `quantized_matmul`.
      dtype: of the result, and what parts are rounded to before they are combined.
      combine: a function of P arrays f32[channels, rows]; None if there is one part.
      tile: None takes that of `product_tile`.
      interpret: run on CPU.
    """
    return _multiply(x, weights, scales, zeros, dtype, combine, tile, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _multiply(
    x: jax.Array,
    weights: jax.Array,
    scales: jax.Array | None,
    zeros: jax.Array | None,
    dtype: Any,
    combine: Combine | None,
    tile: ProductTile | None,
    interpret: bool,
) -> Any:
    weights = weights.reshape(-1, *weights.shape[-2:])
    (T, D), (P, F, width) = x.shape, weights.shape
    target = triton.INTERPRETED if interpret else triton.target()
    groups = 1 if scales is None else scales.shape[-1]
    group_size = D // groups if groups > 1 else None
    if tile is None:
        sizes = {"rows": T, "channels": F, "inputs": D, "parts": P, "itemsize": weights.dtype.itemsize * width / D}
        tile = product_tile(target, **sizes, group_size=group_size, is_exact=sums_are_exact())
    weights, has_fp8_bits = triton.as_loaded(weights, target)
    optional = {"scales": scales, "zeros": zeros}
    arrays = {"x": x, "weights": weights}
    arrays |= {name: a.reshape(P, F, a.shape[-1]) for name, a in optional.items() if a is not None}
    statics = {"tile": tile, "group_size": group_size, "combine": combine, "has_fp8_bits": has_fp8_bits}
    (out,) = triton.launch(
        functools.partial(_kernel, names=tuple(arrays), **statics),
        *arrays.values(),
        # Programs of the same channels are neighbours, so that their weights are read from memory once.
        grid=(pl.cdiv(T, tile.block_rows), pl.cdiv(F, tile.block_channels)),
        out=[jax.ShapeDtypeStruct((T, F), dtype)],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        name="dense_product" if scales is None else "packed_product",
        interpret=interpret,
    )
    return out


def _kernel(
    *refs: Any,
    names: tuple[str, ...],
    tile: ProductTile,
    group_size: int | None,
    combine: Combine | None,
    has_fp8_bits: bool,
) -> None:
    """One program: rows `program_id(0)`, channels `program_id(1)` of each part."""
    arrays = SimpleNamespace(**({"scales": None, "zeros": None} | dict(zip(names, refs, strict=False))))
    out_ref, (T, D), (P, F, _) = refs[-1], arrays.x.shape, arrays.weights.shape
    rows = pl.program_id(0) * tile.block_rows + jnp.arange(tile.block_rows, dtype=jnp.int32)
    channels = pl.program_id(1) * tile.block_channels + jnp.arange(tile.block_channels, dtype=jnp.int32)
    size = group_size or tile.block_inputs  # inputs that are multiplied at once
    at_once = tile.block_inputs // size
    add_inputs = functools.partial(_add_inputs, arrays, tile, rows, channels, size, group_size, has_fp8_bits)

    def add_block(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for j in range(at_once):
            sums = add_inputs(i * at_once + j, sums)
        return sums

    zeros = jnp.zeros((tile.block_channels, tile.block_rows), jnp.float32)
    sums = jax.lax.fori_loop(0, D // tile.block_inputs, add_block, (zeros,) * P)
    if arrays.scales is not None and group_size is None:
        sums = tuple(
            total * _scales(arrays, part, channels, 0, has_fp8_bits)[:, None] for part, total in enumerate(sums)
        )
    if combine is not None:
        sums = (combine(*(total.astype(out_ref.dtype).astype(jnp.float32) for total in sums)),)
    triton.store(out_ref, (rows[None], channels[:, None]), sums[0], (rows < T)[None] & (channels < F)[:, None])


def _add_inputs(
    arrays: Any,
    tile: ProductTile,
    rows: jax.Array,
    channels: jax.Array,
    size: int,
    group_size: int | None,
    has_fp8_bits: bool,
    i: jax.Array,
    sums: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Returns the sums f32[channels, rows] of each part with the products of inputs i * size and those after them."""
    (T, D), (_, F, stored) = arrays.x.shape, arrays.weights.shape
    width = size * stored // D  # of weights, two of 4 bits to a byte
    inputs = jnp.arange(width, dtype=jnp.int32)
    # Loads without a mask are plain.
    row_mask = None if T % tile.block_rows == 0 else _over(rows < T, width)
    channel_mask = None if F % tile.block_channels == 0 else _over(channels < F, width)
    halves = range(size // width)
    xs = [triton.load(arrays.x, (rows[:, None], (i * size + h * width + inputs)[None]), row_mask) for h in halves]
    results = []
    for part, total in enumerate(sums):
        block = triton.load(arrays.weights, (part, channels[:, None], (i * width + inputs)[None]), channel_mask)
        numbers = split_int4(block) if width < size else (block,)
        product = jnp.zeros(total.shape, jnp.float32) if group_size else total
        for x, number in zip(xs, numbers, strict=True):
            number = numbers_of(number, arrays.weights, has_fp8_bits)
            if arrays.zeros is not None:
                groups = arrays.scales.shape[-1]
                zeros = load_zeros(arrays.zeros, (part, channels), i, groups, channels < F)
                number = number.astype(jnp.float32) - zeros[:, None]
            product = product + triton.dot(number.astype(x.dtype), x, transpose_b=True)
        if group_size:
            product = total + product * _scales(arrays, part, channels, i, has_fp8_bits)[:, None]
        results.append(product)
    return tuple(results)


def _scales(arrays: Any, part: int, channels: jax.Array, group: Any, has_fp8_bits: bool) -> jax.Array:
    scales = triton.load(arrays.scales, (part, channels, group), channels < arrays.scales.shape[1])
    return scales_of_numbers(scales, arrays.weights, has_fp8_bits)


def _over(mask: jax.Array, width: int) -> jax.Array:
    return jnp.broadcast_to(mask[:, None], (mask.size, width))


def _plain(x: jax.Array, weights: jax.Array, scales: Any, zeros: Any, dtype: Any, combine: Combine | None) -> jax.Array:
    """Returns what `multiply` does, by XLA."""
    if scales is not None:
        values, worth, centres = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), (weights, scales, zeros))
        weights = dequantize(values, worth, centres, x.shape[1]).reshape(*weights.shape[:-1], -1)
    w = weights.reshape(-1, *weights.shape[-2:]).astype(x.dtype)
    parts = jnp.einsum("td,pfd->ptf", x, w, preferred_element_type=jnp.float32)
    if combine is not None:
        parts = combine(*(part.astype(dtype).astype(jnp.float32) for part in parts))[None]
    return parts[0].astype(dtype)


def _derivative(dtype: Any, combine: Combine | None, *rest: Any) -> tuple[Any, ...]:
    """The derivative by x and by weights or scales; integers have none."""
    *_, (x, weights, scales, zeros), change = rest
    if scales is None:
        back = jax.vjp(lambda x, w: _plain(x, w, None, None, dtype, combine), x, weights)[1]
        return (*back(change), None, None)
    back = jax.vjp(lambda x, scales: _plain(x, weights, scales, zeros, dtype, combine), x, scales)[1]
    of_x, of_scales = back(change)
    return of_x, None, of_scales, None


def _forward(x: jax.Array, weights: jax.Array, scales: Any, zeros: Any, *options: Any) -> tuple[Any, Any]:
    return _multiply(x, weights, scales, zeros, *options), (x, weights, scales, zeros)


_multiply.defvjp(_forward, _derivative)
