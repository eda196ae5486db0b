"""What the components of a decoder share: norms, activations and declarations of tensors.

On CPU the bits of a token's result do not depend on the tokens computed beside it; `kernels_pallas.row_products` has
the rules that keep this so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.validation import require_bool, require_real
from kernels_pallas.row_products import rounded
from kernels_pallas.row_sum import row_sum


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
