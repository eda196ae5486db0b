"""The product of rows and dense weights for NVIDIA GPUs from Ampere on, in Pallas-Triton.

Few rows wait for the weights. XLA has one tile for all products of a step, and adds up parts of the inputs in a second
launch. Here each product has a tile by the shape of its weights, which keeps enough bytes on their way. A program adds
up all inputs of its channels in order, so that a result is the same whatever rows lie beside it.

    channels of a program x inputs: one block after another    rows x inputs: the same blocks, from the cache
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import triton
from kernels_pallas.device import device_at_hand
from kernels_pallas.exact_sums import sums_are_exact
from kernels_pallas.gpu_products.tiles import ProductTile, product_tile, takes_inputs
from kernels_pallas.gpu_products.xla_options import MAX_TILED_ROWS
from kernels_pallas.quantized_matmul.gpu import FP8, numbers_of, scales_of_numbers

# What makes one number of those of all parts, in float32 as rounded to the result's dtype.
Combine = Callable[..., jax.Array]


def can_multiply(x: jax.Array, weights: Any, scales: Any = None) -> bool:
    """Returns whether `multiply` can take rows x [T, D] by weights [..., D], and gains by it.

    More rows than MAX_TILED_ROWS gain nothing, but in `exact_sums` they keep to one order.
    """
    device = device_at_hand()
    if device.platform != "gpu" or device.capability is None or device.is_before_ampere:
        return False
    has_types = x.dtype in ("bfloat16", "float16") and (
        weights.dtype == x.dtype if scales is None else weights.dtype.name in ("int8", FP8)
    )
    has_sizes = weights.shape[-1] == x.shape[1] and takes_inputs(x.shape[1])
    return has_types and has_sizes and x.shape[0] > 0 and (sums_are_exact() or x.shape[0] <= MAX_TILED_ROWS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def multiply(
    x: jax.Array,
    weights: jax.Array,
    scales: jax.Array | None = None,
    dtype: Any = jnp.float32,
    combine: Combine | None = None,
    tile: ProductTile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns x wᵀ [T, F] in `dtype`, added up in float32, or what `combine` makes of it.

    Args:
      x: [T, D] in bfloat16 or float16; the interpreter takes float32.
      weights: [F, D] in x's dtype, or [P, F, D], whose P products combine(*parts) makes one. With `scales`, i8 or
        f8_e4m3.
      scales: f[F, 1] or f[P, F, 1], the worth of a number by channel.
      dtype: of the result, and what parts are rounded to before they are combined.
      combine: a function of P arrays f32[channels, rows]; None if there is one part.
      tile: None takes that of `product_tile`.
      interpret: run on CPU.
    """
    weights = weights.reshape(-1, *weights.shape[-2:])
    (T, D), (P, F, _) = x.shape, weights.shape
    target = triton.INTERPRETED if interpret else triton.target()
    if tile is None:
        sizes = {"rows": T, "channels": F, "inputs": D, "parts": P, "itemsize": weights.dtype.itemsize}
        tile = product_tile(target, **sizes, is_exact=sums_are_exact())
    weights, has_fp8_bits = triton.as_loaded(weights, target)
    arrays = (x, weights) if scales is None else (x, weights, scales.reshape(P, F))
    (out,) = triton.launch(
        functools.partial(_kernel, tile=tile, combine=combine, has_fp8_bits=has_fp8_bits),
        *arrays,
        # Programs of the same channels are neighbours, so that their weights are read from memory once.
        grid=(pl.cdiv(T, tile.block_rows), pl.cdiv(F, tile.block_channels)),
        out=[jax.ShapeDtypeStruct((T, F), dtype)],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        name="dense_product",
        interpret=interpret,
    )
    return out


def _kernel(*refs: Any, tile: ProductTile, combine: Combine | None, has_fp8_bits: bool) -> None:
    """One program: rows `program_id(0)`, channels `program_id(1)` of each part."""
    x_ref, w_ref, *scales_ref, out_ref = refs
    (T, D), (P, F, _) = x_ref.shape, w_ref.shape
    rows = pl.program_id(0) * tile.block_rows + jnp.arange(tile.block_rows, dtype=jnp.int32)
    channels = pl.program_id(1) * tile.block_channels + jnp.arange(tile.block_channels, dtype=jnp.int32)
    is_row, is_channel = rows < T, channels < F
    # Loads without a mask are plain.
    row_mask = None if T % tile.block_rows == 0 else _over_inputs(is_row, tile)
    channel_mask = None if F % tile.block_channels == 0 else _over_inputs(is_channel, tile)

    def add_block(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        inputs = (i * tile.block_inputs + jnp.arange(tile.block_inputs, dtype=jnp.int32))[None]
        x = triton.load(x_ref, (rows[:, None], inputs), row_mask)
        blocks = [triton.load(w_ref, (part, channels[:, None], inputs), channel_mask) for part in range(P)]
        blocks = [numbers_of(block, w_ref, has_fp8_bits).astype(x.dtype) for block in blocks]
        return tuple(total + triton.dot(block, x, transpose_b=True) for total, block in zip(sums, blocks, strict=True))

    zeros = jnp.zeros((tile.block_channels, tile.block_rows), jnp.float32)
    sums = jax.lax.fori_loop(0, D // tile.block_inputs, add_block, (zeros,) * P)
    for ref in scales_ref:
        worth = [triton.load(ref, (part, channels), is_channel) for part in range(P)]
        worth = [scales_of_numbers(own, w_ref, has_fp8_bits) for own in worth]
        sums = tuple(total * own[:, None] for total, own in zip(sums, worth, strict=True))
    if combine is not None:
        sums = (combine(*(total.astype(out_ref.dtype).astype(jnp.float32) for total in sums)),)
    triton.store(out_ref, (rows[None], channels[:, None]), sums[0], is_row[None] & is_channel[:, None])


def _over_inputs(mask: jax.Array, tile: ProductTile) -> jax.Array:
    return jnp.broadcast_to(mask[:, None], (mask.size, tile.block_inputs))


def _plain(x: jax.Array, weights: jax.Array, scales: Any, dtype: Any, combine: Combine | None) -> jax.Array:
    """Returns what `multiply` does, by XLA."""
    w = weights.reshape(-1, *weights.shape[-2:]).astype(x.dtype)
    parts = jnp.einsum("td,pfd->ptf", x, w, preferred_element_type=jnp.float32)
    if scales is not None:
        parts = parts * scales.astype(jnp.float32).reshape(w.shape[0], 1, -1)
    if combine is not None:
        parts = combine(*(part.astype(dtype).astype(jnp.float32) for part in parts))[None]
    return parts[0].astype(dtype)


def _derivative(dtype: Any, combine: Combine | None, *rest: Any) -> tuple[Any, ...]:
    *_, (x, weights, scales), change = rest
    if scales is None:
        back = jax.vjp(lambda x, w: _plain(x, w, None, dtype, combine), x, weights)[1]
        return (*back(change), None)
    back = jax.vjp(lambda x, scales: _plain(x, weights, scales, dtype, combine), x, scales)[1]
    of_x, of_scales = back(change)
    return of_x, None, of_scales


multiply.defvjp(
    lambda x, weights, scales, *options: (multiply(x, weights, scales, *options), (x, weights, scales)), _derivative
)
