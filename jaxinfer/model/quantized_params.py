"""Parameters whose products have quantized weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_map_with_path

from jaxinfer.model.params import Params
from jaxinfer.quantization.quantized_array import PRODUCT_WEIGHTS, QuantizedArray, quantize


def quantize_params(params: Params, *, group_size: int | None = None, bits: int = 8, is_packed: bool = True) -> Params:
    """Returns the parameters with the weights of all products quantized; the options are those of `quantize`.

    A tied embedding stays in floating point at both ends.
    """
    options = {"group_size": group_size, "bits": bits, "is_packed": is_packed}

    def change(path: tuple[Any, ...], w: Any) -> Any:
        return quantize(w, **options) if path[-1].name in PRODUCT_WEIGHTS else w

    return tree_map_with_path(change, params)


def quantized_shardings(params: Params, placement: Params) -> Params:
    """Returns the shardings of quantized parameters, for a placement of their tensors in floating point.

    Scales of integers that TPUs multiply are split as their weights are, for a kernel reads each device's part. If
    devices do not divide the groups of inputs, or integers are packed, each device has the scales of all inputs.
    """

    def split(w: Any, sharding: NamedSharding) -> Any:
        if not isinstance(w, QuantizedArray):
            return sharding
        *outputs, inputs = sharding.spec
        is_divided = inputs is not None and w.scales.shape[-1] % sharding.mesh.shape[inputs] == 0
        is_divided = is_divided and w.values.dtype == jnp.int4
        spec = PartitionSpec(*outputs, inputs if is_divided else None)
        return QuantizedArray(values=sharding, scales=NamedSharding(sharding.mesh, spec))

    return jax.tree.map(split, params, placement, is_leaf=lambda node: isinstance(node, QuantizedArray))
