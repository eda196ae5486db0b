"""Parameters whose products have slots for adapters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import GetAttrKey, tree_map_with_path

from jaxinfer.model.components.adapted import AdaptedArray, padded_size
from jaxinfer.model.components.layers import TensorSpec
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import Params, declare, is_spec
from jaxinfer.quantization import PACKED

# A tree like `Params` with (down, up, gain) of an `AdaptedArray` for each weight that adapters may change.
Slots = Any


@dataclass(frozen=True)
class Adapter:
    """An adapter as one slot of a model takes it; on the host."""

    # (down [n, in, r], up [n, r, out], gain [n, out]) for each weight, zeros for those that it leaves alone
    tensors: Slots
    digest: str  # of the numbers, their places and the rank of the slots
    source: str  # the absolute folder that it was read from, or the id of the Hub


def adapted_weights(config: ModelConfig) -> Params:
    """Returns `Params` with the `TensorSpec` of each weight that adapters may change, and None for other tensors.

    They are the weights of products of layers, without those of experts, which no token multiplies by itself.
    """

    def find(path: tuple[Any, ...], spec: TensorSpec) -> TensorSpec | None:
        is_of_layer = path[0] == GetAttrKey("layers")
        return spec if is_of_layer and spec.num_inputs and "experts" not in spec.axes else None

    return tree_map_with_path(find, declare(config), is_leaf=is_spec)


def slots_of(spec: TensorSpec, num_slots: int, rank: int, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns (down, up, gain) of a stack of layers [n, A, ...], for adapters of up to this rank in `dtype`."""
    n, *outputs, inputs = spec.shape
    size = math.prod(outputs)
    return (
        jax.ShapeDtypeStruct((n, num_slots, padded_size(inputs), rank), dtype),
        jax.ShapeDtypeStruct((n, num_slots, padded_size(rank), size), dtype),
        jax.ShapeDtypeStruct((n, num_slots, size), np.float32),
    )


def abstract_slots(config: ModelConfig, num_adapters: int, rank: int, dtype: Any) -> Slots:
    """Returns a `jax.ShapeDtypeStruct` per array of slots, one for no adapter included; None for 0 adapters."""
    if not num_adapters:
        return None

    return jax.tree.map(
        lambda spec: slots_of(spec, 1 + num_adapters, rank, dtype), adapted_weights(config), is_leaf=is_spec
    )


def with_slots(params: Params, slots: Slots) -> Params:
    """Returns the parameters with these slots beside their weights."""

    def join(weight: Any, own: Any) -> Any:
        return weight if own is None else AdaptedArray(weight, *own)

    return jax.tree.map(join, params, slots, is_leaf=lambda node: node is None or isinstance(node, PACKED))


def insert_adapter(slots: Slots, slot: jax.Array, tensors: Slots) -> Slots:
    """Returns the slots with an adapter's `tensors` [n, ...], like `slots` without their axis, in one of them."""

    def insert(all_slots: jax.Array, own: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(all_slots, own[:, None], slot, axis=1)

    return jax.tree.map(insert, slots, tensors)
