"""Embeddings of tokens for each layer by itself: their description, tensors and functions.

Before the first layer, a table and a product of the states give each layer d numbers of each token. A layer takes its
numbers through a gate that its own state opens, and adds the result to the state (Gemma 3n).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.layers import ACTIVATIONS, VOCABULARY, MakeSpec, Norm, TensorSpec, linear, rms_norm
from jaxinfer.validation import require_int, require_name
from kernels_pallas.row_products import rounded


@dataclass(frozen=True, kw_only=True)
class LayerEmbedding:
    """d numbers of each token for each layer: (norm(project(x) / sqrt(D)) + sqrt(d) table[token]) / sqrt(2).

    x is the token's state before the first layer. A layer adds norm(up(activation(gate(x)) * numbers)) to its state x.
    """

    vocab_size: int  # rows of the table
    size: int  # d
    activation: str = "silu"
    num_padding: int = 0  # rows after those of the vocabulary, so that devices can split the table

    def __post_init__(self) -> None:
        for name in ("vocab_size", "size"):
            require_int(name, getattr(self, name), 1)
        require_int("num_padding", self.num_padding, 0)
        require_name("activation", self.activation, ACTIVATIONS)

    @property
    def width(self) -> int:
        """The numbers per token between gate and up."""
        return self.size


@struct.dataclass
class EmbeddingTables:
    """The tensors that give the numbers of all L layers."""

    table: Any  # [V, L, d]
    projection: Any  # [L, d, D]
    norm: Any  # [d]


@struct.dataclass
class LayerEmbeddingParams:
    """The tensors by which each of n stacked layers takes its numbers."""

    gate: Any  # [n, d, D]
    up: Any  # [n, D, d]
    norm: Any  # [n, D]


def declare_embedding_tables(config: LayerEmbedding, num_layers: int, hidden_size: int) -> EmbeddingTables:
    """Returns a `TensorSpec` per tensor."""
    V, L, d, D, padding = config.vocab_size, num_layers, config.size, hidden_size, config.num_padding
    axes = (VOCABULARY, "all_layers", "layer_embedding")
    return EmbeddingTables(
        table=TensorSpec((V + padding, L, d), axes, 0.02, num_padding=padding),
        projection=TensorSpec((L, d, D), ("all_layers", "layer_embedding", "embed"), 0.02, num_inputs=1),
        norm=TensorSpec((d,), ("layer_embedding",), None),
    )


def declare_layer_embedding(config: LayerEmbedding, hidden_size: int, spec: MakeSpec) -> LayerEmbeddingParams:
    """Returns a `TensorSpec` per tensor; `spec(sizes, axes, scale)` makes one of n layers."""
    d, D = config.size, hidden_size
    return LayerEmbeddingParams(
        gate=spec((d, D), ("layer_embedding", "embed"), num_inputs=1),
        up=spec((D, d), ("embed", "layer_embedding"), num_inputs=1),
        norm=spec((D,), ("embed",), None),
    )


def embed_for_layers(
    params: EmbeddingTables, token_ids: jax.Array, x: jax.Array, tokens: StepTokens, norm: Norm
) -> jax.Array:
    """Returns the numbers [L, T, d] of token_ids i32[T], whose states before the first layer are x [T, D]."""
    D, d = x.shape[1], params.norm.shape[0]
    projected = linear(x, params.projection, None, tokens) * jnp.asarray(D**-0.5, x.dtype)
    projected = rounded(rms_norm(projected, params.norm, norm))
    looked_up = rounded(params.table[token_ids] * jnp.asarray(d**0.5, x.dtype))
    return ((projected + looked_up) * jnp.asarray(2**-0.5, x.dtype)).swapaxes(0, 1)


def add_layer_embedding(
    params: LayerEmbeddingParams,
    x: jax.Array,
    numbers: jax.Array,
    tokens: StepTokens,
    *,
    config: LayerEmbedding,
    norm: Norm,
) -> jax.Array:
    """Returns the states x [T, D] with what the layer takes of its numbers [T, d]."""
    gate = linear(x, params.gate, None, tokens)
    taken = linear(ACTIVATIONS[config.activation](gate, numbers), params.up, None, tokens)
    return x + rounded(rms_norm(taken, params.norm, norm))
