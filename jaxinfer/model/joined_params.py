"""Weights that multiply the same inputs, in one tensor, as GPUs hold them: queries, keys and values; up and gate.

A compiler joins such products too, but reads three weights at once then, with fewer bytes of each on their way, and a
vendor's library takes no such join without a copy. Over a mesh, each device has its part of every weight in one piece.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from jaxinfer.model.components.attention import Attention, AttentionParams, projected_sizes
from jaxinfer.model.components.dense_and_experts import DenseAndExperts, DenseAndExpertsParams
from jaxinfer.model.components.mlp import MLP, MLPParams, hidden_sizes
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import LayerParams, Params
from jaxinfer.quantization import PackedBlocks, QuantizedArray
from kernels_pallas.mesh_axes import num_parts


class _Joined(NamedTuple):
    """How the tensors of a component are joined."""

    tensors: type  # of the component
    field: str  # of its tensors, which has the joined one
    # description -> the fields that are joined, in their order, with the sizes of their first axes
    sizes: Callable[[Any], dict[str, int]]


# By the type of a component's description.
_JOINED: Mapping[type, _Joined] = {
    Attention: _Joined(AttentionParams, "qkv", projected_sizes),
    MLP: _Joined(MLPParams, "up_gate", hidden_sizes),
}
# The axis of stacked weights [n, A, ..., in] that is joined.
_AXIS = 1
# Layer and place in it: of a component whose tensors may be joined.
_Place = tuple[int, int]


@dataclass(frozen=True)
class Joint:
    """Arrays [n, A, ...] that become one, [n, P, sum of A / P, ...], in parts for P devices."""

    arrays: tuple[Any, ...]
    count: int  # P

    def shape(self) -> jax.ShapeDtypeStruct:
        """Returns the joined array's shape, dtype and sharding, by those of its arrays."""
        first, sharding = self.arrays[0], None
        if (spec := _spec_of(first)) is not None:
            sharding = NamedSharding(first.sharding.mesh, PartitionSpec(*spec[: _AXIS + 1], None, *spec[_AXIS + 1 :]))
        size = sum(array.shape[_AXIS] for array in self.arrays) // self.count
        shape = (first.shape[0], self.count, size, *first.shape[_AXIS + 1 :])
        return jax.ShapeDtypeStruct(shape, first.dtype, sharding=sharding)

    def on(self, sharding: Any) -> jax.Array:
        """Returns the joined array with its sharding, for arrays on any devices or of NumPy."""
        own = sharding
        if isinstance(sharding, NamedSharding):
            spec = tuple(sharding.spec)
            own = NamedSharding(sharding.mesh, PartitionSpec(*spec[: _AXIS + 1], *spec[_AXIS + 2 :]))
        return _concatenation(self.count, sharding)(*(jax.device_put(array, own) for array in self.arrays))

    def consumed(self) -> jax.Array:
        """Returns the joined array on the devices of its arrays, and deletes these."""
        joined = _concatenation(self.count, self.shape().sharding)(*self.arrays)
        for array in self.arrays:
            array.delete()
        return joined


@functools.cache
def _concatenation(count: int, sharding: Any) -> Callable[..., jax.Array]:
    def concatenate(*arrays: jax.Array) -> jax.Array:
        parts = [a.reshape(a.shape[0], count, -1, *a.shape[_AXIS + 1 :]) for a in arrays]
        return jnp.concatenate(parts, axis=_AXIS + 1)

    return jax.jit(concatenate) if sharding is None else jax.jit(concatenate, out_shardings=sharding)


def _spec_of(array: Any) -> tuple[Any, ...] | None:
    """Returns the axes of a mesh that split each dimension of an array; None if it is on one device."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return tuple(sharding.spec) + (None,) * (array.ndim - len(sharding.spec))


def join_products(params: Params, config: ModelConfig) -> Params:
    """Returns parameters with joined tensors in place of their parts. They may be abstract; arrays are deleted.

    Weights that are packed in different ways, or whose inputs have an order or a range of their own, stay apart.
    """

    def finish(leaf: Any) -> Any:
        if not isinstance(leaf, Joint):
            return leaf
        return leaf.shape() if isinstance(leaf.arrays[0], jax.ShapeDtypeStruct) else leaf.consumed()

    def join(node: Any, _: _Place, field: str, sizes: Mapping[str, int]) -> Any:
        # One after another, so that the devices have room for one more weight of a layer at most.
        return jax.tree.map(finish, _with_joints(node, field, sizes), is_leaf=_is_joint)

    return _map_components(params, config, join)


def joints(params: Params, config: ModelConfig, like: Params) -> Params:
    """Returns parameters with a `Joint` in the place of each array that is joined in `like`."""
    others = _components(like, config)

    def join(node: Any, place: _Place, field: str, sizes: Mapping[str, int]) -> Any:
        other = getattr(others[place], field)
        return node if other is None else _with_joints(node, field, sizes, count=other.shape[_AXIS])

    return _map_components(params, config, join)


def have_same_joints(params: Params, others: Params, config: ModelConfig) -> bool:
    """Returns whether the tensors that are joined in `params` are so in `others` too, with the same shapes."""
    own, theirs = _components(params, config), _components(others, config)

    def shapes(node: Any) -> Any:
        return [(keystr(path), leaf.shape) for path, leaf in tree_leaves_with_path(_joined_of(node))]

    return all(_joined_of(node) is None or shapes(node) == shapes(theirs.get(place)) for place, node in own.items())


def _joined_of(node: Any) -> Any:
    return next((getattr(node, own.field) for own in _JOINED.values() if isinstance(node, own.tensors)), None)


def split_products(params: Params, config: ModelConfig, *, like: Params | None = None, on_host: bool = False) -> Params:
    """Returns parameters with the parts of joined tensors in their place, as `declare` has them. They may be abstract.

    KV heads may have the copies of `config`, or none. With `like`, tensors that are joined there stay as they are. With
    `on_host` the parts of arrays are arrays of NumPy.
    """
    others = {} if like is None else _components(like, config)

    def split(node: Any, place: _Place, field: str, sizes: Mapping[str, int]) -> Any:
        joined, other = getattr(node, field), others.get(place)
        if joined is None or (other is not None and getattr(other, field) is not None):
            return node
        if on_host:
            joined = jax.tree.map(np.asarray, joined)
        count, num_outputs = joined.shape[_AXIS], joined.shape[_AXIS + 1]
        parts, end = {}, 0
        for name, size in sizes.items():
            first, end = end, end + size // count

            def own(a: Any, first: int = first, end: int = end) -> Any:
                share = num_outputs // a.shape[_AXIS + 1]  # outputs that share scales have fewer of them
                return _taken(a, first // share, end // share)

            parts[name] = jax.tree.map(own, joined)
        return replace(node, **{field: None}, **parts)

    return _map_components(params, config, split)


def _taken(array: Any, first: int, end: int) -> Any:
    def take(a: Any) -> Any:
        own = a[:, :, first:end]
        return own.reshape(a.shape[0], -1, *a.shape[_AXIS + 2 :])

    if isinstance(array, np.ndarray):
        return take(array)
    spec, sharding = _spec_of(array), None
    if spec is not None:
        sharding = NamedSharding(array.sharding.mesh, PartitionSpec(*spec[: _AXIS + 1], *spec[_AXIS + 2 :]))
    if isinstance(array, jax.ShapeDtypeStruct):
        shape = jax.eval_shape(take, array)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
    return jax.jit(take)(array) if sharding is None else jax.jit(take, out_shardings=sharding)(array)


def _with_joints(node: Any, field: str, sizes: Mapping[str, int], count: int | None = None) -> Any:
    """Returns the tensors of a component with a `Joint` for each array of `field`, if its weights go together.

    `count` is that of the joints; None for that of the devices that share the weights.
    """
    weights = [getattr(node, name) for name in sizes]
    if len(weights) < 2 or any(w is None for w in weights) or getattr(node, field) is not None:
        return node
    joint = _joint_weights(weights, count)
    return node if joint is None else replace(node, **{field: joint}, **dict.fromkeys(sizes))


def _joint_weights(weights: Sequence[Any], count: int | None) -> Any:
    """Returns weights with a `Joint` for each array; None if they do not go together."""
    first = weights[0]
    if len({jax.tree.structure(w) for w in weights}) > 1:
        return None
    if isinstance(first, QuantizedArray) and not (first.order is first.multiplier is first.input_range is None):
        return None
    name = {QuantizedArray: "values", PackedBlocks: "blocks"}.get(type(first))
    numbers = [w if name is None else getattr(w, name) for w in weights]
    parts = count or _num_devices(numbers[0])
    found = []
    for arrays in zip(*map(jax.tree.leaves, weights), strict=True):
        # Where the joint's devices are given, the arrays move there from any.
        alike = {(a.dtype, count or _spec_of(a), a.shape[0], *a.shape[_AXIS + 1 :]) for a in arrays}
        # Outputs that share scales have fewer of them, and equally many in each weight.
        shares = {divmod(w.shape[_AXIS], a.shape[_AXIS]) for w, a in zip(numbers, arrays, strict=True)}
        is_divided = all(a.shape[_AXIS] % parts == 0 for a in arrays)
        if len(alike) > 1 or len(shares) > 1 or next(iter(shares))[1] or not is_divided:
            return None
        found.append(Joint(arrays, parts))
    return jax.tree.unflatten(jax.tree.structure(first), found)


def _num_devices(array: Any) -> int:
    spec = _spec_of(array)
    return 1 if spec is None else num_parts(array.sharding.mesh, spec[_AXIS])


def _is_joint(node: Any) -> bool:
    return isinstance(node, Joint)


def _components(params: Params, config: ModelConfig) -> dict[_Place, Any]:
    """Returns the tensors of each component that may be joined, by its place."""
    found: dict[_Place, Any] = {}

    def note(node: Any, place: _Place, *_: Any) -> Any:
        found[place] = node
        return node

    _map_components(params, config, note)
    return found


def _map_components(params: Params, config: ModelConfig, change: Callable[..., Any]) -> Params:
    """Returns parameters with change(tensors, place, field, sizes) for each component in `_JOINED`.

    What is not of the kind that `config` describes stays as it is.
    """
    if len(params.layers) != len(config.stacks):
        return params

    def of_layer(index: int, own: LayerParams, layer: Any) -> LayerParams:
        several = isinstance(own.mixer, tuple)
        mixers = own.mixer if several else (own.mixer,)
        if len(mixers) == len(layer.mixers):
            pairs = enumerate(zip(mixers, layer.mixers, strict=True), 1)
            mixers = tuple(_changed(node, (index, i), mixer, change) for i, (node, mixer) in pairs)
        return replace(
            own,
            mixer=mixers if several else mixers[0],
            feed_forward=_changed(own.feed_forward, (index, 0), layer.feed_forward, change),
        )

    stacks = enumerate(zip(params.layers, config.stacks, strict=True))
    return replace(params, layers=tuple(of_layer(i, own, stack.layer) for i, (own, stack) in stacks))


# Not within `_map_components`: a function that refers to itself there would keep arrays until the next collection.
def _changed(node: Any, place: _Place, description: Any, change: Callable[..., Any]) -> Any:
    if isinstance(description, DenseAndExperts) and isinstance(node, DenseAndExpertsParams):
        return replace(node, dense=_changed(node.dense, place, description.dense, change))
    own = _JOINED.get(type(description))
    if own is None or not isinstance(node, own.tensors):
        return node
    sizes, joined = own.sizes(description), getattr(node, own.field)
    is_other = joined is not None and sum(sizes.values()) != joined.shape[_AXIS] * joined.shape[_AXIS + 1]
    if is_other and isinstance(description, Attention):
        sizes = own.sizes(description.for_devices(1))  # without copies of KV heads
    return change(node, place, own.field, sizes)
