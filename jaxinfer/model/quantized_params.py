"""Parameters whose products have quantized weights."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.model.components.experts import MLP_AXIS
from jaxinfer.model.components.layers import TensorSpec
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.joined_params import split_products
from jaxinfer.model.params import Params, declare, is_spec
from jaxinfer.quantization.quantized_array import INT4_GROUP_SIZE, QuantizedArray, quantize
from kernels_pallas.mesh_axes import dividing_axes, names_of, num_parts


def quantize_weight(w: Any, spec: TensorSpec, quantization: str, *, is_packed: bool = True) -> Any:
    """Returns a tensor as "int8" (a scale per channel) or "int4" (one per group), by its declaration.

    The unembedding keeps 8 bits: no layer makes up for its errors, and of all its channels sums per group would be
    larger than itself. A tensor without inputs stays as it is. `is_packed` is that of `quantize`, and `w` may be an
    array of NumPy, of some outputs alone.
    """
    if not spec.num_inputs:
        return w
    if quantization == "int8" or spec.is_of_vocabulary:
        return quantize(w)
    size = math.gcd(w.shape[-1], INT4_GROUP_SIZE)
    return quantize(w, group_size=size, bits=4, is_packed=is_packed)


def quantize_weights(params: Params, config: ModelConfig, quantization: str, *, is_packed: bool = True) -> Params:
    """Returns the parameters of a model with each tensor as `quantize_weight` returns it; joined ones come apart."""
    params = split_products(params, config)
    options: dict[str, Any] = {"quantization": quantization, "is_packed": is_packed}
    return jax.tree.map(lambda spec, w: quantize_weight(w, spec, **options), declare(config), params, is_leaf=is_spec)


def quantize_params(params: Params, config: ModelConfig, **options: Any) -> Params:
    """Returns the parameters with all that have inputs quantized alike, the unembedding too, by options of `quantize`.

    A tied embedding stays in floating point at both ends. Tensors that are joined come apart.
    """
    params = split_products(params, config)

    def change(spec: TensorSpec, w: Any) -> Any:
        return quantize(w, **options) if spec.num_inputs else w

    return jax.tree.map(change, declare(config), params, is_leaf=is_spec)


def quantized_shardings(params: Params, config: ModelConfig, placement: Params) -> Params:
    """Returns the shardings of quantized parameters, for a placement of their tensors in floating point."""

    def split(w: Any, spec: TensorSpec, sharding: NamedSharding) -> Any:
        return quantized_sharding(w, sharding, spec.shape[-1]) if isinstance(w, QuantizedArray) else sharding

    trees = params, declare(config), placement
    return jax.tree.map(split, *trees, is_leaf=lambda node: isinstance(node, QuantizedArray))


def quantized_sharding(w: QuantizedArray, sharding: NamedSharding, num_inputs: int) -> QuantizedArray:
    """Returns the shardings of a quantized weight, for that of the weight in floating point. `w` may be abstract.

    If integers lie two to a byte, fewer axes of the mesh share their inputs than the weight's, so that none cuts a
    group. Only the axis that splits every network may do so.

    Scales of integers that TPUs multiply are split as their weights are, for a kernel reads each device's part. If
    devices do not divide the groups of inputs, or integers are packed, each device has the scales of all inputs.
    """
    *outputs, inputs = sharding.spec
    if w.values.shape[-1] < num_inputs:
        names = names_of(inputs)
        whole_groups = dividing_axes(w.scales.shape[-1], sharding.mesh, names)
        inputs = MLP_AXIS if whole_groups is None and MLP_AXIS in names else whole_groups
    is_divided = inputs is not None and w.scales.shape[-1] % num_parts(sharding.mesh, inputs) == 0
    is_divided = is_divided and w.values.dtype == jnp.int4
    of_groups = NamedSharding(sharding.mesh, PartitionSpec(*outputs, inputs if is_divided else None))
    of_scales = of_groups
    if w.has_shared_scales and outputs[-1] is not None and w.scales.shape[-2] % num_parts(sharding.mesh, outputs[-1]):
        of_scales = NamedSharding(sharding.mesh, PartitionSpec(*outputs[:-1], None, None))
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return QuantizedArray(
        values=NamedSharding(sharding.mesh, PartitionSpec(*outputs, inputs)),
        scales=of_scales,
        zeros=None if w.zeros is None else of_groups,
        order=None if w.order is None else whole,
        multiplier=None if w.multiplier is None else whole,
        input_range=None if w.input_range is None else whole,
        activations=w.activations,
        bits=w.bits,
    )
