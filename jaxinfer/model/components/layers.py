"""What the components of a decoder share: products by weights, norms, activations and declarations of tensors.

A table says by the type that stands for weights how they are multiplied. On CPU the bits of a token's result do not
depend on the tokens computed beside it; `kernels_pallas.row_products` has the rules that keep this so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.adapted import AdaptedArray, add_changes
from jaxinfer.model.components.observed import ObservedArray, observe
from jaxinfer.quantization import PackedBlocks, QuantizedArray
from jaxinfer.quantization.activations import rounded_product
from jaxinfer.quantization.packed_blocks import UnpackedBlocks
from jaxinfer.quantization.quantized_array import SplitPlanes
from jaxinfer.validation import require_bool, require_real
from kernels_pallas.device import device_at_hand
from kernels_pallas.device_sums import sum_over_devices
from kernels_pallas.exact_sums import norm_rows, refuse_if_exact, sums_are_exact
from kernels_pallas.gpu_products import can_multiply
from kernels_pallas.gpu_products import multiply as multiply_on_gpu
from kernels_pallas.mesh_axes import HEADS_AXES, dividing_axes, is_within_device, names_of, num_parts, over_devices
from kernels_pallas.packed_numbers import dequantize, pack_int4
from kernels_pallas.quantized_matmul import layer_of, quantized_matmul, split_groups
from kernels_pallas.row_products import rounded, row_sum, rows_by_integers, rows_by_packed, rows_by_weights

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
    y = product_in_dtype(x, w, tokens, input_units)
    return y if bias is None else y + bias[None]


def linears(
    x: jax.Array, params: Any, sizes: Mapping[str, int], joined: Weights | None, tokens: StepTokens | None = None
) -> Iterator[jax.Array]:
    """Yields what `linear` returns for several weights, [T, size, ...] for each name in `sizes`.

    The weights and biases are those of `params` by their names, or `joined` [P, sizes / P, ..., in] has all weights,
    see `join_products`. Then those of `params` are None, or the changes by adapters alone.
    """
    weights = [getattr(params, name) for name in sizes]
    biases = [getattr(params, f"{name}_bias") for name in sizes]
    if joined is None:
        for w, bias in zip(weights, biases, strict=True):
            yield linear(x, w, bias, tokens)
        return
    are_adapted = any(w is not None for w in weights)
    y = product(x, joined, tokens) if are_adapted else product_in_dtype(x, joined, tokens)
    end = 0
    for size, w, bias in zip(sizes.values(), weights, biases, strict=True):
        first, end = end, end + size // joined.shape[0]
        own = y[:, :, first:end].reshape(x.shape[0], size, *y.shape[3:])
        if isinstance(w, AdaptedArray):
            own = _with_changes(own, x, w, tokens)
        own = own.astype(x.dtype)
        yield own if bias is None else own + bias[None]


def product(x: jax.Array, w: Weights, tokens: StepTokens | None = None, *, input_units: int = 0) -> jax.Array:
    """Returns x wᵀ f32[T, out...] for x [T, in] and w [out..., in], added up in float32.

    If `tokens` are given, rows of x past their count are padding, and a CPU skips blocks of padding. Of an AdaptedArray
    each token takes the change of its adapter, and none if the tokens have no adapters. `input_units` is the number of
    query heads or hidden units that the inputs are of, which devices share; 0 if each has all inputs.
    """
    return _PRODUCTS.get(type(w), _product_of_array)(x, w, tokens, input_units)


def product_in_dtype(x: jax.Array, w: Weights, tokens: StepTokens | None, input_units: int = 0) -> jax.Array:
    """Returns `product` in x's dtype. A GPU writes it so, if no devices add their parts of it.

    The compiler of a TPU joins the rounding to the product by itself.
    """
    has_parts = input_units > 0 and tokens is not None and tokens.is_split
    if not isinstance(w, jax.Array | QuantizedArray) or has_parts or device_at_hand().platform != "gpu":
        return product(x, w, tokens, input_units=input_units).astype(x.dtype)
    multiply: Callable[..., jax.Array] = _PRODUCTS.get(type(w), _product_of_array)
    return multiply(x, w, tokens, input_units, x.dtype).astype(x.dtype)


def combined_product(
    x: jax.Array, w: Weights, tokens: StepTokens, num_parts: int, combine: Callable[..., jax.Array]
) -> jax.Array | None:
    """Returns combine(*parts) [T, F] in x's dtype for products of x [T, D] by P parts of w [1, P F, D], in one launch.

    None if there is no such launch for them. `combine` is a function of P arrays of products in float32, as rounded to
    x's dtype.
    """
    parts: Any = w, None, None
    if isinstance(w, QuantizedArray):
        own = w.alone().with_wide_scales()
        if any(a is not None for a in (own.order, own.bits, own.activations, own.multiplier)):
            return None
        parts = own.values, own.scales, own.zeros
    if not isinstance(parts[0], jax.Array) or w.shape[0] != 1:
        return None
    if not _is_for_kernel(tokens.is_split) or not can_multiply(x, *parts):
        return None
    parts = jax.tree.map(lambda a: a.reshape(num_parts, -1, a.shape[-1]), parts)
    return multiply_on_gpu(x, *parts, dtype=x.dtype, combine=combine)


def _is_for_compiler(is_split: bool) -> bool:
    """Returns whether XLA splits a product over devices; in a shard_map each has an array of its own."""
    return is_split and not is_within_device()


def _is_for_kernel(is_split: bool) -> bool:
    """Returns whether a GPU computes a product by itself, so that a kernel can."""
    return device_at_hand().platform == "gpu" and not _is_for_compiler(is_split)


def _product_of_array(
    x: jax.Array, w: jax.Array, tokens: StepTokens | None, input_units: int, dtype: Any = jnp.float32
) -> jax.Array:
    def multiply(x: jax.Array, w: jax.Array, num_rows: jax.Array | None, is_split: bool) -> jax.Array:
        w = w.reshape(-1, w.shape[-1])
        if tokens is not None and _is_for_kernel(is_split) and can_multiply(x, w):
            return multiply_on_gpu(x, w, dtype=dtype)
        refuse_if_exact(f"a product of {x.dtype} {x.shape} by weights {w.shape} of {w.dtype}")
        return rows_by_weights(x, w, num_rows, is_split=is_split, dtype=dtype)

    return _product_over_devices(multiply, x, w, tokens, input_units)


def _product_of_quantized(
    x: jax.Array, w: QuantizedArray, tokens: StepTokens | None, input_units: int, dtype: Any = jnp.float32
) -> jax.Array:
    multiply = functools.partial(_quantized_product, dtype=dtype)
    return _product_over_devices(multiply, x, w, tokens, input_units)


def _product_of_blocks(x: jax.Array, w: PackedBlocks, tokens: StepTokens | None, input_units: int) -> jax.Array:
    refuse_if_exact("weights in blocks of GGUF")
    rows = replace(w, blocks=w.blocks.reshape(-1, w.blocks.shape[-1]))
    num_rows = None if tokens is None else tokens.count
    y = rows_by_packed(x, rows, PackedBlocks.unpacked, UnpackedBlocks.widened, num_rows)
    return y.reshape(x.shape[0], *w.shape[:-1])


def _product_of_adapted(x: jax.Array, w: AdaptedArray, tokens: StepTokens | None, input_units: int) -> jax.Array:
    return _with_changes(product(x, w.base, tokens, input_units=input_units), x, w, tokens)


def _with_changes(y: jax.Array, x: jax.Array, w: AdaptedArray, tokens: StepTokens | None) -> jax.Array:
    """Returns y f32[T, out...], the product of x and the weights, with the change by each token's adapter."""
    if tokens is None or tokens.adapters is None:
        return y
    refuse_if_exact("adapters")
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
    add_up = over_devices(own_part, mesh, in_specs=specs, out_specs=whole)
    return add_up(x, w, tokens.count).reshape(x.shape[0], *outputs)


def _in_order(x: jax.Array, w: QuantizedArray) -> tuple[jax.Array, QuantizedArray]:
    """Returns x [T, in] with its inputs in the order of the weights, and the weights without one."""
    if w.order is None:
        return x, w
    return x[:, layer_of(w.order, w.layer).reshape(-1)], replace(w, order=None)


def _quantized_product(
    x: jax.Array, w: QuantizedArray, num_rows: jax.Array | None, is_split: bool, *, dtype: Any
) -> jax.Array:
    """Returns x wᵀ [T, F] for x [T, D] and weights of F output channels, in float32, or in `dtype` from a GPU's kernel.

    `is_split` is as in `StepTokens`.
    """
    is_split = _is_for_compiler(is_split)
    x, w = _in_order(x, w)
    is_whole = w.multiplier is None and w.activations is None and w.bits is None
    if w.layer is not None and w.has_shared_scales and is_whole:  # those of the layer alone
        w = replace(w, scales=jax.lax.dynamic_index_in_dim(w.scales, w.layer)).with_wide_scales()
    if not is_whole or device_at_hand().platform == "gpu":
        w = w.alone()
    if w.layer is None:
        w = w.with_wide_scales().flat()
        values, scales, zeros = w.values, w.scales, w.zeros
        if w.activations is not None:
            refuse_if_exact("inputs that are rounded to integers")
            input_range = None if w.input_range is None else w.input_range.reshape(1, -1)
            return rounded_product(x, values, scales, zeros, w.activations, input_range)
        if w.bits is not None:
            refuse_if_exact("integers in planes of bits")
            return _by_planes(x, w, num_rows, is_split=is_split)
        if not is_split and can_multiply(x, values, scales, zeros):
            return multiply_on_gpu(x, values, scales, zeros, dtype=dtype)
        refuse_if_exact(f"a product of {x.dtype} {x.shape} by {values.dtype} {values.shape} with scales {scales.shape}")
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
    is_whole = scales.shape[1] == 1 and values.shape[1] == x.shape[1] and zeros is None and not is_fp8
    if is_whole and (is_split or not device_at_hand().is_before_ampere):
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


@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMSNorm (Zhang & Sennrich 2019): `epsilon` is added to the mean square."""

    epsilon: float = 1e-5
    adds_one: bool = False  # stored weights are offsets from 1, as in Gemma

    def __post_init__(self) -> None:
        require_real("norm_epsilon", self.epsilon, 0.0)
        require_bool("adds_one", self.adds_one)


def rms_norm(x: jax.Array, weight: jax.Array | None, norm: Norm) -> jax.Array:
    """Returns x / sqrt(mean(x²) + epsilon) * weight over the last axis, in float32; a weight of None is 1."""
    if sums_are_exact():
        return norm_rows(x, weight, epsilon=norm.epsilon, adds_one=norm.adds_one)
    wide = x.astype(jnp.float32)
    mean_square = row_sum(wide * wide) / x.shape[-1]
    normed = wide * jax.lax.rsqrt(mean_square + norm.epsilon)[..., None]
    if weight is None:
        return normed.astype(x.dtype)
    if norm.adds_one:  # a weight near 1 would lose its last bits in half precision
        return (normed * (1.0 + jnp.broadcast_to(weight, normed.shape).astype(jnp.float32))).astype(x.dtype)
    normed = normed.astype(x.dtype)
    return normed * jnp.broadcast_to(weight, normed.shape)


def scaled(x: jax.Array, scale: float) -> jax.Array:
    """Returns x times a number, in float32, as rounded to x's dtype."""
    return x if scale == 1.0 else rounded((x.astype(jnp.float32) * scale).astype(x.dtype))


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up (Shazeer 2020)."""
    return jax.nn.silu(gate) * up


def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns gelu(gate) * up, GELU approximated by tanh (Shazeer 2020)."""
    return jax.nn.gelu(gate, approximate=True) * up


def clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns gate * sigmoid(1.702 gate) * (up + 1), with gate and up clamped to 7 first, as in GPT-OSS."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(rounded(1.702 * gate)) * (up + 1.0)


def squared_relu(up: jax.Array) -> jax.Array:
    """Returns max(up, 0)² (So et al. 2021)."""
    positive = jnp.maximum(up, 0)
    return positive * positive


# The function of up alone of an MLP without a gate, by its name in a configuration.
UNGATED_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {"relu2": squared_relu}
# The function of an MLP's gate and up, by its name in a configuration.
ACTIVATIONS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": swiglu,
    "gelu_tanh": geglu,
    "clamped_silu": clamped_swiglu,
}


VOCABULARY = "vocab"  # the axis of token ids
KV_HEADS = "kv_heads"


@dataclass(frozen=True)
class TensorSpec:
    """The declaration of a tensor: its shape, the meaning of each axis, and the scale of random values.

    `scale` is the standard deviation around 0 for a weight; None stands for a norm weight, which starts at 1.
    `num_inputs` is the number of last axes that `linear` and `product` sum over; a tensor with 0 of them is never
    quantized. For devices that cannot split a size of the model, the tensor is larger than the model's own: it has each
    KV head `num_copies` times, one after another, and `num_padding` rows of zeros after those of the vocabulary.
    Devices share the last axis in whole runs of `num_together` entries, those of a head. If it `is_matrix`, it may be
    packed in a checkpoint: its inputs there are then its last axis, and the component widens it in each step.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    scale: float | None
    num_inputs: int = 0
    num_copies: int = 1
    num_padding: int = 0
    num_together: int = 1
    is_matrix: bool = False

    @property
    def is_of_vocabulary(self) -> bool:
        """True for the embedding, the unembedding and other tables with an entry per token id."""
        return self.axes[0] == VOCABULARY

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape without copies and padding, as in checkpoints."""
        less, fewer = {VOCABULARY: self.num_padding}, {KV_HEADS: self.num_copies}
        pairs = zip(self.axes, self.shape, strict=True)
        return tuple((size - less.get(axis, 0)) // fewer.get(axis, 1) for axis, size in pairs)

    @property
    def units(self) -> tuple[int, ...]:
        """The shape, counted on the last axis in runs of `num_together` entries."""
        return (*self.shape[:-1], self.shape[-1] // self.num_together)

    def places(self) -> dict[int, np.ndarray]:
        """Returns by axis the place i32[size] in the model's own tensor of each entry; rows of padding have -1.

        Axes without copies or padding are left out.
        """
        places = {}
        for i, (size, own) in enumerate(zip(self.shape, self.own_shape, strict=True)):
            if size != own and self.axes[i] == KV_HEADS:
                places[i] = np.arange(size, dtype=np.int32) // self.num_copies
            elif size != own:
                places[i] = np.where(np.arange(size) < own, np.arange(size), -1).astype(np.int32)
        return places


class PoolSize(NamedTuple):
    """The size of a pool of pages, for all layers of a stack together."""

    num_pages: int
    page_size: int  # tokens
    dtype: str  # of keys and values
    layout: str | None  # of pages of keys and values; None: this platform's


# (sizes, axes, scale = 0.02, num_inputs = 0) -> the declaration of a tensor of stacked layers, for one layer's sizes
MakeSpec = Callable[..., TensorSpec]
