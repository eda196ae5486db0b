"""The model's tensors, each declared once, for the abstract tree, random parameters and shardings."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from jaxinfer.model.components.dense_and_experts import DenseAndExpertsParams
from jaxinfer.model.components.experts import MESH_AXES
from jaxinfer.model.components.layer_embedding import (
    EmbeddingTables,
    LayerEmbeddingParams,
    declare_embedding_tables,
    declare_layer_embedding,
)
from jaxinfer.model.components.layers import KV_HEADS, VOCABULARY, TensorSpec
from jaxinfer.model.components.mlp import MLPParams
from jaxinfer.model.components.moe import MoEParams
from jaxinfer.model.config import LayerStack, ModelConfig
from jaxinfer.model.layer_parts import FEED_FORWARDS, functions_of
from jaxinfer.quantization import QuantizedArray
from kernels_pallas.mesh_axes import HEADS_AXES, STAGES_AXIS, Axes, dividing_axes, num_parts


@struct.dataclass
class LayerParams:
    """A stack of n equal layers, each tensor stacked on its first axis."""

    mixer: Any  # the tensors that its component declares; a tuple of those of branches; None without a mixer
    feed_forward: MLPParams | MoEParams | DenseAndExpertsParams | None
    mixer_norm: Any = None  # [n, D]  before the mixer
    mixer_post_norm: Any = None  # [n, D]  after the mixer
    feed_forward_norm: Any = None  # [n, D]
    feed_forward_post_norm: Any = None  # [n, D]
    embedding: LayerEmbeddingParams | None = None
    scale: Any = None  # [n, 1]


@dataclass(frozen=True)
class LogitOptions:
    """The changes that the model itself makes to its logits: times `scale`, then bounded by `softcap`.

    The last `num_padding` logits become -inf, for they are of no token.
    """

    scale: float = 1.0
    softcap: float | None = None
    num_padding: int = 0


@struct.dataclass
class Params:
    """All tensors of a decoder. `unembedding` is None if the embedding is tied, and if there are no logits.

    Parameters of the first layers only may have a `lens`, which maps the state after them to the model's last state.
    """

    embedding: Any  # [V, D]
    layers: tuple[LayerParams, ...]  # one per stack of `ModelConfig.stacks`
    final_norm: Any  # [D]
    unembedding: Any = None  # [V, D]
    layer_embedding: EmbeddingTables | None = None
    lens: Any = None  # [D, D]
    # None: the model has no logits.
    logits: LogitOptions | None = struct.field(pytree_node=False, default=LogitOptions())


LAYERS = "layers"  # the axis of stacked layers: stages share those that they divide

# Logical axis -> the mesh axes that split it: all of them, or the last ones, as far as they divide its size and split
# no earlier axis of the tensor. Axes that are not named here are replicated.
TENSOR_PARALLEL_RULES: Mapping[str, tuple[str, ...]] = {
    LAYERS: (STAGES_AXIS,),
    VOCABULARY: HEADS_AXES,
    "heads": HEADS_AXES,
    KV_HEADS: HEADS_AXES,
    **MESH_AXES,
}


def declare(config: ModelConfig) -> Params:
    """Returns `Params` with a `TensorSpec` in the place of every array."""
    vocab = declare_vocabulary(config)
    of_layers = config.layers[0].embedding
    return Params(
        embedding=replace(vocab, num_inputs=0),
        layers=tuple(declare_stack(stack, config.hidden_size) for stack in config.stacks),
        final_norm=TensorSpec((config.hidden_size,), ("embed",), None),
        unembedding=vocab if config.has_logits and not config.has_tied_embeddings else None,
        layer_embedding=None
        if of_layers is None
        else declare_embedding_tables(of_layers, config.num_layers, config.hidden_size),
        logits=LogitOptions(config.logit_scale, config.logit_softcap, config.vocab_padding)
        if config.has_logits
        else None,
    )


def declare_vocabulary(config: ModelConfig) -> TensorSpec:
    """Returns the `TensorSpec` of the unembedding. That of the embedding has no inputs, for its rows are taken."""
    shape, axes = (config.padded_vocab_size, config.hidden_size), (VOCABULARY, "embed")
    return TensorSpec(shape, axes, 0.02, num_inputs=1, num_padding=config.vocab_padding)


def declare_stack(stack: LayerStack, hidden_size: int) -> LayerParams:
    """Returns the `LayerParams` of a stack of layers with a `TensorSpec` in the place of every array."""
    layer = stack.layer

    def spec(
        sizes: tuple[int, ...],
        axes: tuple[str, ...],
        scale: float | None = 0.02,
        num_inputs: int = 0,
        num_together: int = 1,
    ) -> TensorSpec:
        shape, axes = (stack.num_layers, *sizes), (LAYERS, *axes)
        return TensorSpec(shape, axes, scale, num_inputs, num_together=num_together)

    norm = spec((hidden_size,), ("embed",), None)
    pre, post = norm if layer.has_pre_norms else None, norm if layer.has_post_norms else None
    network, has_mixer, has_feed_forward = layer.feed_forward, layer.mixer is not None, layer.feed_forward is not None
    mixers = tuple(functions_of(mixer).declare(mixer, hidden_size, spec) for mixer in layer.mixers)
    return LayerParams(
        mixer=mixers if len(mixers) > 1 else next(iter(mixers), None),
        feed_forward=None if network is None else FEED_FORWARDS[type(network)].declare(network, hidden_size, spec),
        mixer_norm=pre if has_mixer else None,
        mixer_post_norm=post if has_mixer else None,
        feed_forward_norm=pre if has_feed_forward else None,
        feed_forward_post_norm=post if has_feed_forward else None,
        embedding=None if layer.embedding is None else declare_layer_embedding(layer.embedding, hidden_size, spec),
        scale=spec((1,), ("one",), None) if layer.has_scale else None,
    )


def is_spec(node: Any) -> bool:
    """True for the leaves of `declare`."""
    return isinstance(node, TensorSpec)


def over_mesh(config: ModelConfig, mesh: Mesh | AbstractMesh | None) -> ModelConfig:
    """Returns the same model with KV heads and a vocabulary that the devices of a mesh can split.

    See `ModelConfig.for_devices`. Without a mesh it is the model for one device.
    """
    if mesh is None:
        return config.for_devices(1)
    present = [axis for axis in TENSOR_PARALLEL_RULES[KV_HEADS] if axis in mesh.axis_names]
    return config.for_devices(*(num_parts(mesh, tuple(present[first:])) for first in range(len(present))), 1)


def fit_params(params: Params, config: ModelConfig) -> Params:
    """Returns parameters with the copies of KV heads and the padding of the vocabulary that `config` declares.

    Tensors that have them already, or that have another shape than the model's own, stay as they are.
    """
    leaves = tree_leaves_with_path(declare(config), is_leaf=is_spec)
    specs = {keystr(path): spec for path, spec in leaves if spec.shape != spec.own_shape}

    def fit(path: Any, w: Any) -> Any:
        spec = specs.get(keystr(path))
        if spec is None:
            return w
        if isinstance(w, QuantizedArray):
            parts = {name: getattr(w, name) for name in ("values", "scales", "zeros")}
            return replace(w, **{name: None if part is None else _fitted(part, spec) for name, part in parts.items()})
        return _fitted(w, spec)

    fitted = tree_map_with_path(fit, params, is_leaf=lambda node: isinstance(node, QuantizedArray))
    if params.logits is None:
        return fitted
    return replace(fitted, logits=replace(params.logits, num_padding=config.vocab_padding))


def _fitted(array: Any, spec: TensorSpec) -> Any:
    for axis, places in spec.places().items():
        if getattr(array, "ndim", 0) <= axis or array.shape[axis] != spec.own_shape[axis]:
            return array
        beyond = np.where(places < 0, array.shape[axis], places)  # -1 would be the last row
        array = jnp.take(array, beyond, axis=axis, mode="fill", fill_value=0)
    return array


def shardings(config: ModelConfig, mesh: Mesh, rules: Mapping[str, tuple[str, ...]] = TENSOR_PARALLEL_RULES) -> Params:
    """Returns a `NamedSharding` per tensor.

    Raises ValueError, with the name of the tensor's axis, if the last mesh axis of its rule cannot divide it. Layers
    that stages cannot divide are whole on each.
    """

    def sharding(spec: TensorSpec) -> NamedSharding:
        names = _mesh_axes(spec, mesh, rules)
        for axis, size, found in zip(spec.axes, spec.units, names, strict=True):
            last = rules[axis][-1] if axis in rules and axis != LAYERS else None
            if found is None and last in mesh.axis_names and size % mesh.shape[last]:
                raise ValueError(
                    f"axis {axis!r} of size {size} cannot be split over the {mesh.shape[last]} devices of mesh axis"
                    f" {last!r}; use a number of devices that divides it, or rules without {axis!r}"
                )
        return NamedSharding(mesh, PartitionSpec(*names))

    return jax.tree.map(sharding, declare(config), is_leaf=is_spec)


def usual_sharding(spec: TensorSpec, mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a tensor by TENSOR_PARALLEL_RULES; an axis that the mesh cannot divide stays whole."""
    return NamedSharding(mesh, PartitionSpec(*_mesh_axes(spec, mesh, TENSOR_PARALLEL_RULES)))


def check_mesh(mesh: Mesh | AbstractMesh) -> None:
    """Raises ValueError for a mesh with an axis that no tensor is split over, or that is not automatic."""
    known = sorted({axis for axes in TENSOR_PARALLEL_RULES.values() for axis in axes})
    if unknown := [axis for axis in mesh.axis_names if axis not in known]:
        raise ValueError(
            f"mesh has the axis {unknown[0]!r}, over which nothing is split; axes of a mesh are {' and '.join(known)}"
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(f"mesh has axes of types {mesh.axis_types}; use automatic ones: Mesh(devices, axis_names)")


def _mesh_axes(spec: TensorSpec, mesh: Mesh, rules: Mapping[str, tuple[str, ...]]) -> list[Axes]:
    names: list[Axes] = []
    taken: set[str] = set()
    for axis, size in zip(spec.axes, spec.units, strict=True):
        free = [name for name in rules.get(axis, ()) if name not in taken]
        names.append(dividing_axes(size, mesh, free))
        taken.update(free)
    return names


def abstract_params(config: ModelConfig, dtype: Any, placement: Params | None = None) -> Params:
    """Returns a `jax.ShapeDtypeStruct` per tensor: for lowering, planning and as a restore target."""
    if placement is None:
        return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), declare(config), is_leaf=is_spec)
    return jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding),
        declare(config),
        placement,
        is_leaf=is_spec,
    )


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def init_params(key: jax.Array, config: ModelConfig, dtype: str = "float32") -> Params:
    """Returns random parameters: weights normal with their declared scale, norms 1. The key is consumed."""
    leaves, treedef = jax.tree.flatten(declare(config), is_leaf=is_spec)
    keys = jax.random.split(key, len(leaves))

    def init(spec: TensorSpec, key: jax.Array) -> jax.Array:
        if spec.scale is None:
            return jnp.ones(spec.shape, dtype)
        return (spec.scale * jax.random.normal(key, spec.shape, jnp.float32)).astype(dtype)

    return jax.tree.unflatten(treedef, [init(spec, key) for spec, key in zip(leaves, keys, strict=True)])
