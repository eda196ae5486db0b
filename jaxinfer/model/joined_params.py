"""Weights that multiply the same inputs, in one tensor, as GPUs hold them: queries, keys and values; up and gate.

A compiler joins such products too, but reads three weights at once then, with fewer bytes of each on their way, and a
vendor's library takes no such join without a copy. Over a mesh, each device has its part of every weight in one piece.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.model.components.attention import Attention, projected_sizes
from jaxinfer.model.components.dense_and_experts import DenseAndExperts
from jaxinfer.model.components.mlp import MLP, hidden_sizes
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import LayerParams, Params
from jaxinfer.quantization import PackedBlocks, QuantizedArray
from kernels_pallas.mesh_axes import num_parts

# By the type of a description: the field of its tensors that has the joined one, and a function of the description,
# which returns the fields that it has, in their order, with the sizes of their first axes.
_JOINED: Mapping[type, tuple[str, Callable[[Any], dict[str, int]]]] = {
    Attention: ("qkv", projected_sizes),
    MLP: ("up_gate", hidden_sizes),
}
# The axis of stacked weights [n, A, ..., in] that is joined.
_AXIS = 1


@dataclass(frozen=True)
class Joint:
    """Arrays [n, A, ...] that become one, [n, P, sum of A / P, ...], in parts for P devices."""

    arrays: tuple[Any, ...]
    num_parts: int

    def shape(self) -> jax.ShapeDtypeStruct:
        """Returns the joined array's shape, dtype and sharding."""
        first, sharding = self.arrays[0], None
        if (spec := _spec_of(first)) is not None:
            sharding = NamedSharding(first.sharding.mesh, PartitionSpec(*spec[: _AXIS + 1], None, *spec[_AXIS + 1 :]))
        size = sum(array.shape[_AXIS] for array in self.arrays) // self.num_parts
        shape = (first.shape[0], self.num_parts, size, *first.shape[_AXIS + 1 :])
        return jax.ShapeDtypeStruct(shape, first.dtype, sharding=sharding)

    def on(self, sharding: Any) -> jax.Array:
        """Returns the joined array with its sharding, for arrays on any devices."""
        whole = sharding
        if isinstance(sharding, NamedSharding):
            spec = tuple(sharding.spec)
            whole = NamedSharding(sharding.mesh, PartitionSpec(*spec[: _AXIS + 1], *spec[_AXIS + 2 :]))
        return _concatenation(self.num_parts, sharding)(*(jax.device_put(array, whole) for array in self.arrays))

    def joined(self) -> jax.Array:
        """Returns the joined array on the devices of its arrays of jax, and frees these."""
        sharding = self.shape().sharding or self.arrays[0].sharding
        joined = _concatenation(self.num_parts, sharding)(*self.arrays)
        for array in self.arrays:
            array.delete()
        return joined


@functools.cache
def _concatenation(num_parts: int, sharding: Any) -> Callable[..., jax.Array]:
    def concatenate(*arrays: jax.Array) -> jax.Array:
        parts = [a.reshape(a.shape[0], num_parts, -1, *a.shape[_AXIS + 1 :]) for a in arrays]
        return jnp.concatenate(parts, axis=_AXIS + 1)

    return jax.jit(concatenate, out_shardings=sharding)


def _spec_of(array: Any) -> tuple[Any, ...] | None:
    """Returns the axes of a mesh that split each dimension of an array; None if it is on one device."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return tuple(sharding.spec) + (None,) * (array.ndim - len(sharding.spec))


def join_products(params: Params, config: ModelConfig) -> Params:
    """Returns parameters with joined tensors in place of their parts, which are freed. They may be abstract.

    Weights that are packed in different ways, or whose inputs have an order or a range of their own, stay apart.
    """

    def finish(leaf: Any) -> Any:
        if not isinstance(leaf, Joint):
            return leaf
        return leaf.shape() if isinstance(leaf.arrays[0], jax.ShapeDtypeStruct) else leaf.joined()

    def join(node: Any, field: str, sizes: Mapping[str, int]) -> Any:
        # One after another, so that the devices have room for one more weight of a layer at most.
        return jax.tree.map(finish, _with_joints(node, field, sizes, None), is_leaf=_is_joint)

    return _map_nodes(params, config, join)


def joints(params: Params, config: ModelConfig, like: Params) -> Params:
    """Returns parameters with a `Joint` in the place of each array that is joined in those of `like`."""
    wanted = iter(_nodes(like, config))

    def join(node: Any, field: str, sizes: Mapping[str, int]) -> Any:
        other = getattr(next(wanted), field)
        return node if other is None else _with_joints(node, field, sizes, other.shape[_AXIS])

    return _map_nodes(params, config, join)


def split_products(params: Params, config: ModelConfig, like: Params | None = None) -> Params:
    """Returns parameters with the parts of joined tensors in their place, as `declare` has them. They may be abstract.

    With `like`, tensors that are joined there stay as they are.
    """
    kept = None if like is None else iter(_nodes(like, config))

    def split(node: Any, field: str, sizes: Mapping[str, int]) -> Any:
        other, joined = None if kept is None else next(kept), getattr(node, field)
        if joined is None or (other is not None and getattr(other, field) is not None):
            return node
        num_parts, total = joined.shape[_AXIS], sum(sizes.values())
        parts, end = {}, 0
        for name, size in sizes.items():
            first, end = end, end + size // num_parts

            def own(a: Any, first: int = first, end: int = end) -> Any:
                # Outputs that share scales have fewer of them.
                share = total // num_parts // a.shape[_AXIS + 1]
                return _taken(a, first // share, end // share)

            parts[name] = jax.tree.map(own, joined)
        return replace(node, **{field: None}, **parts)

    return _map_nodes(params, config, split)


def _taken(array: Any, first: int, end: int) -> Any:
    def take(a: Any) -> Any:
        own = a[:, :, first:end]
        return own.reshape(a.shape[0], -1, *a.shape[_AXIS + 2 :])

    spec, shape = _spec_of(array), jax.eval_shape(take, array)
    sharding = None
    if spec is not None:
        sharding = NamedSharding(array.sharding.mesh, PartitionSpec(*spec[: _AXIS + 1], *spec[_AXIS + 2 :]))
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
    return jax.jit(take, out_shardings=sharding)(array)


def _with_joints(node: Any, field: str, sizes: Mapping[str, int], num_parts: int | None) -> Any:
    """Returns the tensors of a component with a `Joint` for each array of `field`, if its weights go together."""
    weights = [getattr(node, name) for name in sizes]
    if len(weights) < 2 or any(w is None for w in weights) or getattr(node, field) is not None:
        return node
    joint = _joint(weights, num_parts)
    return node if joint is None else replace(node, **{field: joint}, **dict.fromkeys(sizes))


def _joint(weights: Sequence[Any], num_parts: int | None) -> Any:
    """Returns weights with a `Joint` for each array; None if they do not go together."""
    first = weights[0]
    if len({jax.tree.structure(w) for w in weights}) > 1:
        return None
    if isinstance(first, QuantizedArray) and not (first.order is first.multiplier is first.input_range is None):
        return None
    values = {QuantizedArray: "values", PackedBlocks: "blocks"}.get(type(first))
    widths = [(w if values is None else getattr(w, values)).shape[_AXIS] for w in weights]
    numbers = num_parts or _num_parts(first if values is None else getattr(first, values))
    found = []
    for arrays in zip(*map(jax.tree.leaves, weights), strict=True):
        alike = {(a.dtype, _spec_of(a), a.shape[0], *a.shape[_AXIS + 1 :]) for a in arrays}
        # Outputs that share scales have fewer of them, and equally many in each weight.
        shares = {divmod(width, a.shape[_AXIS]) for width, a in zip(widths, arrays, strict=True)}
        is_divided = all(a.shape[_AXIS] % numbers == 0 for a in arrays)
        if len(alike) > 1 or len(shares) > 1 or next(iter(shares))[1] or not is_divided:
            return None
        found.append(Joint(arrays, numbers))
    return jax.tree.unflatten(jax.tree.structure(first), found)


def _num_parts(array: Any) -> int:
    spec = _spec_of(array)
    return 1 if spec is None else num_parts(array.sharding.mesh, spec[_AXIS])


def _is_joint(node: Any) -> bool:
    return isinstance(node, Joint)


def _nodes(params: Params, config: ModelConfig) -> list[Any]:
    """Returns the tensors of each component that may have joined ones, in the order of `_map_nodes`."""
    nodes: list[Any] = []

    def note(node: Any, *_: Any) -> Any:
        nodes.append(node)
        return node

    _map_nodes(params, config, note)
    return nodes


def _map_nodes(params: Params, config: ModelConfig, change: Callable[..., Any]) -> Params:
    """Returns parameters with change(node, field, sizes) for the tensors of each component in `_JOINED`."""

    def changed(description: Any, node: Any) -> Any:
        if isinstance(description, DenseAndExperts):
            return replace(node, dense=changed(description.dense, node.dense))
        if type(description) not in _JOINED:
            return node
        field, sizes_of = _JOINED[type(description)]
        return change(node, field, sizes_of(description))

    def of_layer(own: LayerParams, layer: Any) -> LayerParams:
        mixers = own.mixer if len(layer.mixers) > 1 else (own.mixer,)
        mixers = tuple(changed(mixer, node) for mixer, node in zip(layer.mixers, mixers, strict=False))
        return replace(
            own,
            mixer=mixers if len(mixers) > 1 else next(iter(mixers), None),
            feed_forward=changed(layer.feed_forward, own.feed_forward),
        )

    stacks = zip(params.layers, config.stacks, strict=True)
    return replace(params, layers=tuple(of_layer(own, stack.layer) for own, stack in stacks))
