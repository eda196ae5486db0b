"""Products by the weights of a layer, whatever stands for them: a table by type says how each is multiplied.

On CPU the bits of a token's result do not depend on the tokens computed beside it; `kernels_pallas.row_products` has
the rules that keep this so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.weights.adapted import AdaptedArray, add_changes
from jaxinfer.model.components.weights.observed import ObservedArray, observe
from jaxinfer.quantization import PackedBlocks, QuantizedArray
from jaxinfer.quantization.activations import rounded_product
from jaxinfer.quantization.packed_blocks import UnpackedBlocks
from jaxinfer.quantization.quantized_array import SplitPlanes
from kernels_pallas.device import device_at_hand
from kernels_pallas.device_sums import sum_over_devices
from kernels_pallas.mesh_axes import HEADS_AXES, dividing_axes, names_of, num_parts
from kernels_pallas.quantized_matmul import dequantize, layer_of, pack_int4, quantized_matmul, split_groups
from kernels_pallas.row_products import rows_by_integers, rows_by_packed, rows_by_weights

Weights = jax.Array | QuantizedArray | PackedBlocks | AdaptedArray | ObservedArray  # [out..., in]


def linear(
    x: jax.Array,
    w: Weights,
    bias: jax.Array | None = None,
    tokens: StepTokens | None = None,
    *,
    input_units: int = 0,
) -> jax.Array:
    """Returns x wᵀ + bias [T, out...] in x's dtype; x, w, `tokens` and `input_units` are as in `product`."""
    y = product(x, w, tokens, input_units=input_units).astype(x.dtype)
    return y if bias is None else y + bias[None]


def product(x: jax.Array, w: Weights, tokens: StepTokens | None = None, *, input_units: int = 0) -> jax.Array:
    """Returns x wᵀ f32[T, out...] for x [T, in] and w [out..., in], added up in float32.

    If `tokens` are given, rows of x past their count are padding, and a CPU skips blocks of padding. Of an AdaptedArray
    each token takes the change of its adapter, and none if the tokens have no adapters. `input_units` is the number of
    query heads or hidden units that the inputs are of, which devices share; 0 if each has all inputs.
    """
    return _PRODUCTS.get(type(w), _product_of_array)(x, w, tokens, input_units)


def _product_of_array(x: jax.Array, w: jax.Array, tokens: StepTokens | None, input_units: int) -> jax.Array:
    def multiply(x: jax.Array, w: jax.Array, num_rows: jax.Array | None, is_split: bool) -> jax.Array:
        return rows_by_weights(x, w.reshape(-1, w.shape[-1]), num_rows, is_split=is_split)

    return _product_over_devices(multiply, x, w, tokens, input_units)


def _product_of_quantized(x: jax.Array, w: QuantizedArray, tokens: StepTokens | None, input_units: int) -> jax.Array:
    return _product_over_devices(_quantized_product, x, w, tokens, input_units)


def _product_of_blocks(x: jax.Array, w: PackedBlocks, tokens: StepTokens | None, input_units: int) -> jax.Array:
    rows, num_rows = (
        replace(w, blocks=w.blocks.reshape(-1, w.blocks.shape[-1])),
        None if tokens is None else tokens.count,
    )
    y = rows_by_packed(x, rows, PackedBlocks.unpacked, UnpackedBlocks.widened, num_rows)
    return y.reshape(x.shape[0], *w.shape[:-1])


def _product_of_adapted(x: jax.Array, w: AdaptedArray, tokens: StepTokens | None, input_units: int) -> jax.Array:
    y = product(x, w.base, tokens, input_units=input_units)
    if tokens is None or tokens.adapters is None:
        return y
    return add_changes(y.reshape(x.shape[0], -1), x, w, tokens.adapters).reshape(y.shape)


def _product_of_observed(x: jax.Array, w: ObservedArray, tokens: StepTokens | None, input_units: int) -> jax.Array:
    return observe(product(x, w.base, tokens), x, w.moments)


# By the type of the weights: (x, w, tokens, input_units) -> `product(x, w, tokens, input_units=input_units)`
_PRODUCTS: Mapping[type, Callable[..., jax.Array]] = {
    QuantizedArray: _product_of_quantized,
    PackedBlocks: _product_of_blocks,
    AdaptedArray: _product_of_adapted,
    ObservedArray: _product_of_observed,
}


def _product_over_devices(
    multiply: Callable[..., jax.Array], x: jax.Array, w: Any, tokens: StepTokens | None, input_units: int
) -> jax.Array:
    """Returns the product by multiply(x, w, num_rows, is_split) f32[T, F], or by a sum of the devices' own parts."""
    if tokens is not None and tokens.summing is not None:
        axes = _summed_axes(w, x.shape[1], tokens.summing, input_units)
        if axes is not None:
            return _product_over_mesh(x, w, tokens, tokens.summing, axes)
    num_rows, is_split = (None, False) if tokens is None else (tokens.count, tokens.is_split)
    return multiply(x, w, num_rows, is_split).reshape(x.shape[0], *w.shape[:-1])


def _summed_axes(w: Weights, num_inputs: int, mesh: Mesh, num_units: int) -> tuple[str, ...] | None:
    """Returns the axes of a mesh whose devices share the inputs of a product, and add their parts in their order.

    None if devices share no inputs, or if a sum in any order has the same bits. () if parts of the weights are no
    products by themselves, because they cut a group of packed integers: then each device computes the whole product.
    """
    axes = names_of(dividing_axes(num_units, mesh, HEADS_AXES)) if num_units else ()
    if num_parts(mesh, axes) == 1:
        return None
    if not isinstance(w, QuantizedArray):
        return axes
    if w.activations is not None:  # sums of integers
        return None
    is_packed = w.values.shape[-1] < num_inputs
    return names_of(dividing_axes(w.scales.shape[-1], mesh, axes)) if is_packed else axes


def _product_over_mesh(
    x: jax.Array, w: jax.Array | QuantizedArray, tokens: StepTokens, mesh: Mesh, axes: tuple[str, ...]
) -> jax.Array:
    """Returns x wᵀ f32[T, out...] whole on every device: the sum of the devices' products by their own inputs."""

    def own_part(x: jax.Array, w: Weights, count: jax.Array) -> jax.Array:
        y = product(x, w, StepTokens(count, is_split=True))
        return sum_over_devices(y, axes, mesh) if axes else y

    outputs, whole = w.shape[:-1], PartitionSpec()
    if isinstance(w, QuantizedArray):
        x, w = _in_order(x, w.alone().with_wide_scales())
        count, of_groups = num_parts(mesh, axes), (w.scales, w.whole_zeros)
        scales, zeros = jax.tree.map(lambda a: split_groups(a, x.shape[1], count), of_groups)
        w = replace(w, scales=scales, zeros=zeros)
    split = PartitionSpec(*(None,) * (len(w.shape) - 1), axes)
    specs = PartitionSpec(None, axes), jax.tree.map(lambda _: split, w), whole
    add_up = jax.shard_map(own_part, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)
    return add_up(x, w, tokens.count).reshape(x.shape[0], *outputs)


def _in_order(x: jax.Array, w: QuantizedArray) -> tuple[jax.Array, QuantizedArray]:
    """Returns x [T, in] with its inputs in the order of the weights, and the weights without one."""
    if w.order is None:
        return x, w
    return x[:, layer_of(w.order, w.layer).reshape(-1)], replace(w, order=None)


def _quantized_product(x: jax.Array, w: QuantizedArray, num_rows: jax.Array | None, is_split: bool) -> jax.Array:
    """Returns x wᵀ f32[T, F] for x [T, D] and weights of F output channels; `is_split` as in `StepTokens`."""
    # In a shard_map each device has an array of its own, which XLA does not split.
    is_split = is_split and not jax.sharding.get_abstract_mesh().manual_axes
    x, w = _in_order(x, w)
    is_whole = w.multiplier is None and w.activations is None and w.bits is None
    if w.layer is not None and w.has_shared_scales and is_whole:  # those of the layer alone
        w = replace(w, scales=jax.lax.dynamic_index_in_dim(w.scales, w.layer)).with_wide_scales()
    if not is_whole:
        w = w.alone()
    if w.layer is None:
        w = w.with_wide_scales().flat()
        values, scales, zeros = w.values, w.scales, w.zeros
        if w.activations is not None:
            input_range = None if w.input_range is None else w.input_range.reshape(1, -1)
            return rounded_product(x, values, scales, zeros, w.activations, input_range)
        if w.bits is not None:
            return _by_planes(x, w, num_rows, is_split=is_split)
        return _by_own_integers(x, values, scales, zeros, num_rows, is_split=is_split)
    # The kernel of a TPU reads the layer in the stack. Elsewhere it is taken out, as a scan takes its inputs. Packed
    # integers are not for the kernel, so XLA splits their product over a mesh.
    sharding = w.sharding if w.values.shape[-1] == x.shape[1] else None
    multiply = functools.partial(quantized_matmul, sharding=sharding)
    return jax.lax.platform_dependent(
        x,
        (w.values, w.scales, w.zeros),
        w.layer,
        num_rows,
        tpu=lambda x, parts, layer, _: multiply(x, *parts, layer=layer).astype(jnp.float32),
        default=lambda x, parts, layer, n: _by_own_integers(x, *layer_of(parts, layer), num_rows=n, is_split=is_split),
    )


def _by_own_integers(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    num_rows: jax.Array | None,
    *,
    is_split: bool,
) -> jax.Array:
    """x wᵀ f32[T, F] for x [T, D], the parts of weights of F channels as `rows_by_integers` takes them."""
    is_fp8 = jnp.issubdtype(values.dtype, jnp.floating)
    if scales.shape[1] == 1 and values.shape[1] == x.shape[1] and zeros is None and not is_fp8:
        # Compilers fuse the conversion of integers.
        return rows_by_integers(x, values, scales, None, num_rows)
    return jax.lax.platform_dependent(
        x,
        values,
        scales,
        zeros,
        num_rows,
        cpu=rows_by_integers,
        default=lambda x, v, s, z, _: _on_accelerator(x, v, s, z, is_split=is_split),
    )


def _on_accelerator(
    x: jax.Array, values: jax.Array, scales: jax.Array, zeros: jax.Array | None, *, is_split: bool
) -> jax.Array:
    """Returns x wᵀ f32[T, F] by a kernel, or by plain JAX if XLA splits the weights over GPUs.

    A kernel's operands it would gather whole on every device, in each step.
    """
    implementation = "reference" if is_split and device_at_hand().platform == "gpu" else None
    return quantized_matmul(x, values, scales, zeros, implementation=implementation).astype(jnp.float32)


def _by_planes(x: jax.Array, w: QuantizedArray, num_rows: jax.Array | None, *, is_split: bool) -> jax.Array:
    """Returns x wᵀ f32[T, F] for x [T, D] and weights of F channels whose integers lie in planes."""

    def unpacked_product(x: jax.Array, w: QuantizedArray) -> jax.Array:
        bits, own = w.bits, w.unpacked()
        assert bits is not None
        D, groups = own.values.shape[1], own.scales.shape[1]
        values = pack_int4(own.values, D // groups) if bits < 4 and not is_split else own.values
        return _on_accelerator(x, values, own.scales, own.zeros, is_split=is_split)

    return jax.lax.platform_dependent(
        x,
        w,
        num_rows,
        cpu=lambda x, w, n: rows_by_packed(x, w, QuantizedArray.split, SplitPlanes.widened, n),
        default=lambda x, w, _: unpacked_product(x, w),
    )


def take_rows(table: jax.Array | QuantizedArray | PackedBlocks, ids: jax.Array, like: jax.Array) -> jax.Array:
    """Returns the rows [T, D] of ids i32[T] in a table [V, D]; packed ones become the dtype of `like` [D]."""
    if isinstance(table, PackedBlocks):
        return PackedBlocks(table.blocks[ids], table.type).widened().astype(like.dtype)
    if not isinstance(table, QuantizedArray):
        return table[ids]
    table, order = table.with_wide_scales(), table.order
    parts = QuantizedArray(table.values, table.scales, table.zeros, bits=table.bits)
    own = replace(jax.tree.map(lambda a: a[ids], parts), order=order)
    return widened(own, like.shape[0]).astype(like.dtype)


def widened(w: QuantizedArray, num_inputs: int) -> jax.Array:
    """Returns quantized weights [F, in] in floating point, f32[F, in], with their inputs in the usual order."""
    own = w.with_wide_scales().unpacked()
    floats = dequantize(own.values, own.scales, own.zeros, num_inputs)
    return floats if w.order is None else floats[:, jnp.argsort(w.order)]
