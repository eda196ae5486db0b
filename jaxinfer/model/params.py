"""The model's tensors, each declared once, for the abstract tree, random parameters and shardings."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.config import ModelConfig


@struct.dataclass
class LayerParams:
    """One group of n layers, stacked on the first axis. Weights are [out..., in] as checkpoints store them."""

    attention_norm: Any  # [n, D]
    q: Any  # [n, N, H, D]
    k: Any  # [n, K, H, D]
    v: Any  # [n, K, H, D]
    o: Any  # [n, D, N, H]
    mlp_norm: Any  # [n, D]
    gate: Any  # [n, F, D]
    up: Any  # [n, F, D]
    down: Any  # [n, D, F]
    q_bias: Any = None  # [n, N, H]
    k_bias: Any = None  # [n, K, H]
    v_bias: Any = None  # [n, K, H]
    o_bias: Any = None  # [n, D]
    q_norm: Any = None  # [n, H]
    k_norm: Any = None  # [n, H]
    gate_bias: Any = None  # [n, F]
    up_bias: Any = None  # [n, F]
    down_bias: Any = None  # [n, D]


@struct.dataclass
class Params:
    """All tensors of a decoder. `unembedding` is None if the embedding is tied.

    Parameters of the first layers only may have a `lens`, which maps the state after them to the model's last state.
    """

    embedding: Any  # [V, D]
    layers: tuple[LayerParams, ...]
    final_norm: Any  # [D]
    unembedding: Any = None  # [V, D]
    lens: Any = None  # [D, D]


@dataclass(frozen=True)
class TensorSpec:
    """The declaration of a tensor: its shape, the meaning of each axis, and the scale of random values.

    `scale` is the standard deviation around 0 for a weight; None stands for a norm weight, which starts at 1.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    scale: float | None


# Logical axis -> mesh axis. Axes that are not named here are replicated.
TENSOR_PARALLEL_RULES: Mapping[str, str] = {
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
}


def declare(config: ModelConfig) -> Params:
    """Returns `Params` with a `TensorSpec` in the place of every array."""
    vocab = TensorSpec((config.vocab_size, config.hidden_size), ("vocab", "embed"), 0.02)
    return Params(
        embedding=vocab,
        layers=tuple(_declare_group(config, n) for n in config.layer_groups),
        final_norm=TensorSpec((config.hidden_size,), ("embed",), None),
        unembedding=None if config.has_tied_embeddings else vocab,
    )


def _declare_group(config: ModelConfig, n: int) -> LayerParams:
    sizes = {
        "layers": n,
        "embed": config.hidden_size,
        "mlp": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
    }

    def spec(*axes: str, scale: float | None = 0.02) -> TensorSpec:
        axes = ("layers", *axes)
        return TensorSpec(tuple(sizes[a] for a in axes), axes, scale)

    tensors = {
        "attention_norm": spec("embed", scale=None),
        "q": spec("heads", "head_dim", "embed"),
        "k": spec("kv_heads", "head_dim", "embed"),
        "v": spec("kv_heads", "head_dim", "embed"),
        "o": spec("embed", "heads", "head_dim"),
        "mlp_norm": spec("embed", scale=None),
        "gate": spec("mlp", "embed"),
        "up": spec("mlp", "embed"),
        "down": spec("embed", "mlp"),
    }
    if config.has_qkv_bias:
        tensors |= {"q_bias": spec("heads", "head_dim")}
        tensors |= {name: spec("kv_heads", "head_dim") for name in ("k_bias", "v_bias")}
    if config.has_output_bias:
        tensors |= {"o_bias": spec("embed")}
    if config.has_qk_norm:
        tensors |= {name: spec("head_dim", scale=None) for name in ("q_norm", "k_norm")}
    if config.has_mlp_bias:
        tensors |= {"gate_bias": spec("mlp"), "up_bias": spec("mlp"), "down_bias": spec("embed")}
    return LayerParams(**tensors)


def _is_spec(node: Any) -> bool:
    return isinstance(node, TensorSpec)


def shardings(config: ModelConfig, mesh: Mesh, rules: Mapping[str, str] = TENSOR_PARALLEL_RULES) -> Params:
    """Returns a `NamedSharding` per tensor; an axis the mesh cannot divide is a ValueError naming it."""

    def sharding(spec: TensorSpec) -> NamedSharding:
        names = [rules.get(axis) if rules.get(axis) in mesh.axis_names else None for axis in spec.axes]
        for axis, size, name in zip(spec.axes, spec.shape, names, strict=True):
            if name is not None and size % mesh.shape[name]:
                raise ValueError(
                    f"axis {axis!r} of size {size} cannot be split over the {mesh.shape[name]} devices of mesh axis"
                    f" {name!r}; use a number of devices that divides it, or rules without {axis!r}"
                )
        return NamedSharding(mesh, PartitionSpec(*names))

    return jax.tree.map(sharding, declare(config), is_leaf=_is_spec)


def abstract_params(config: ModelConfig, dtype: Any, placement: Params | None = None) -> Params:
    """Returns a `jax.ShapeDtypeStruct` per tensor: for lowering, planning and as a restore target."""
    if placement is None:
        return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), declare(config), is_leaf=_is_spec)
    return jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding),
        declare(config),
        placement,
        is_leaf=_is_spec,
    )


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def init_params(key: jax.Array, config: ModelConfig, dtype: str = "float32") -> Params:
    """Returns random parameters: weights normal with their declared scale, norms 1. The key is consumed."""
    leaves, treedef = jax.tree.flatten(declare(config), is_leaf=_is_spec)
    keys = jax.random.split(key, len(leaves))

    def init(spec: TensorSpec, key: jax.Array) -> jax.Array:
        if spec.scale is None:
            return jnp.ones(spec.shape, dtype)
        return (spec.scale * jax.random.normal(key, spec.shape, jnp.float32)).astype(dtype)

    return jax.tree.unflatten(treedef, [init(spec, key) for spec, key in zip(leaves, keys, strict=True)])
