"""The gated delta net: its description, tensors and function."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.model.components.layers import MakeSpec, Norm, PoolSize, TensorSpec, linear
from jaxinfer.model.components.mixer_inputs import MixerInputs
from jaxinfer.model.components.recurrent.recurrence import Rule, Tokens, advance, chunk_by_products
from jaxinfer.model.components.recurrent.states import (
    States,
    abstract_states,
    convolve,
    for_heads,
    slots_of_layer,
    sum_keys,
)
from jaxinfer.validation import require, require_int
from kernels_pallas.row_products import rounded, row_sum

UNIT_EPSILON = 1e-6  # added to the square of the length by which keys and queries are divided


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet:
    """Heads with a matrix that maps keys to values; a token corrects the value of its key (Yang et al. 2024).

    state = decay * state, then state += k (beta * (v - kᵀ state))ᵀ, and the output is qᵀ state. Keys and queries are
    made unit vectors, and consecutive value heads share those of a key head. Each head of the output is normalised
    and multiplied by silu(gate).
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_size: int  # inputs of the convolution before it, the token's own included

    def __post_init__(self) -> None:
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
            require_int(name, getattr(self, name), 1)
        require_int("conv_size", self.conv_size, 2)
        is_multiple = f"a multiple of num_key_heads={self.num_key_heads}"
        require(self.num_value_heads % self.num_key_heads == 0, "num_value_heads", self.num_value_heads, is_multiple)

    @property
    def values_per_key(self) -> int:
        """The value heads that share a key head, R."""
        return self.num_value_heads // self.num_key_heads

    @property
    def rope(self) -> None:
        """The layer knows no positions, only their order."""
        return None

    @property
    def window(self) -> None:
        """A state depends on all tokens before it."""
        return None

    @property
    def width(self) -> int:
        """The numbers per token of the first products."""
        return self.num_channels + self.num_value_heads * self.value_head_dim

    @property
    def num_channels(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


@struct.dataclass
class GatedDeltaNetParams:
    """Tensors of n stacked layers; G key heads of K numbers, R value heads of V numbers for each, C channels."""

    # Names that no attention has: a family with both tells them apart by these.
    query: Any  # [n, G, K, D]
    key: Any  # [n, G, K, D]
    value: Any  # [n, G, R, V, D]
    z: Any  # [n, G, R, V, D]  gates
    beta: Any  # [n, G, R, D]
    dt: Any  # [n, G, R, D]  time steps
    conv: Any  # [n, C, W]  all queries, then all keys, then all values
    dt_bias: Any  # [n, G R]
    a_log: Any  # [n, G R]
    norm: Any  # [n, V]
    out_proj: Any  # [n, D, G R V]


def declare_gated_delta_net(config: GatedDeltaNet, hidden_size: int, spec: MakeSpec) -> GatedDeltaNetParams:
    """Returns a `TensorSpec` per tensor; `spec(sizes, axes, scale)` makes one of n layers."""
    D, G, R, K, V = _sizes(hidden_size, config)
    heads, values = ("key_heads", "channels", "embed"), ("key_heads", "state_heads", "channels", "embed")
    tensors: dict[str, TensorSpec] = {
        "query": spec((G, K, D), heads, num_inputs=1),
        "key": spec((G, K, D), heads, num_inputs=1),
        "value": spec((G, R, V, D), values, num_inputs=1),
        "z": spec((G, R, V, D), values, num_inputs=1),
        "beta": spec((G, R, D), ("key_heads", "state_heads", "embed"), num_inputs=1),
        "dt": spec((G, R, D), ("key_heads", "state_heads", "embed"), num_inputs=1),
        "conv": spec((config.num_channels, config.conv_size), ("channels", "conv")),
        "dt_bias": spec((G * R,), ("state_heads",)),
        "a_log": spec((G * R,), ("state_heads",)),
        "norm": spec((V,), ("head_dim",), None),
        "out_proj": spec((D, G * R * V), ("embed", "channels"), num_inputs=1),
    }
    return GatedDeltaNetParams(**tensors)


def _sizes(hidden_size: int, config: GatedDeltaNet) -> tuple[int, int, int, int, int]:
    return hidden_size, config.num_key_heads, config.values_per_key, config.key_head_dim, config.value_head_dim


def abstract_gated_delta_net(config: GatedDeltaNet, size: PoolSize) -> States:
    """Returns the pool of states as `jax.ShapeDtypeStruct`s."""
    state = (config.num_value_heads, config.key_head_dim, config.value_head_dim)
    return abstract_states(size, (config.conv_size - 1, config.num_channels), state)


def gated_delta_net(
    params: GatedDeltaNetParams,
    states: States,
    x: jax.Array,
    inputs: MixerInputs,
    *,
    config: GatedDeltaNet,
    norm: Norm,
) -> tuple[jax.Array, States]:
    """Returns the layer's output [T, D] for x [T, D], and the states with those that the step stores."""
    assert inputs.step.slots is not None
    (T, D), slots = x.shape, slots_of_layer(inputs.step.slots, inputs.page_offset)
    _, G, R, K, V = _sizes(D, config)
    H = G * R

    def project(w: Any, *sizes: int) -> jax.Array:
        return linear(x, w, None, inputs.tokens).reshape(T, *sizes)

    channels = jnp.concatenate([project(w, -1) for w in (params.query, params.key, params.value)], axis=-1)
    channels, conv = convolve(channels, states.conv, params.conv, None, slots, inputs.step.batch)
    channels = jax.nn.silu(channels)
    dt = project(params.dt, H).astype(jnp.float32) + jnp.broadcast_to(params.dt_bias.astype(jnp.float32), (T, H))
    decay_rates = jnp.broadcast_to(jnp.exp(params.a_log.astype(jnp.float32)), (T, H))
    log_decay = -rounded(jax.nn.softplus(dt) * decay_rates)
    tokens = Tokens(
        decay=jnp.exp(log_decay),
        log_decay=log_decay,
        rates=jax.nn.sigmoid(project(params.beta, H).astype(jnp.float32)),
        keys=_unit(channels[:, G * K : 2 * G * K].reshape(T, G, K)),
        queries=rounded(_unit(channels[:, : G * K].reshape(T, G, K)) * K**-0.5),
        values=channels[:, 2 * G * K :].reshape(T, H, V),
    )
    y, recurrent = advance(RULE, tokens, states.recurrent, slots, inputs)
    y = y * jax.lax.rsqrt(row_sum(rounded(y * y)) / V + norm.epsilon)[..., None]
    y = y * jnp.broadcast_to(params.norm.astype(jnp.float32), y.shape)
    gate = jax.nn.silu(project(params.z, H, V).astype(jnp.float32))
    y = (y * gate).astype(x.dtype).reshape(T, H * V)
    return linear(y, params.out_proj, None, inputs.tokens), States(conv=conv, recurrent=recurrent)


def _unit(x: jax.Array) -> jax.Array:
    """Returns vectors f32[..., K] as divided by their lengths."""
    return rounded(x * jax.lax.rsqrt(row_sum(rounded(x * x)) + UNIT_EPSILON)[..., None])


def _advance(state: jax.Array, token: Tokens, shared: None) -> tuple[jax.Array, jax.Array]:
    """Returns the states f32[b, H, K, V] after a token of each of b rows, and the outputs f32[b, H, V]."""
    # Products are rounded before something is added: one compiled step may fuse what another does not.
    keys = for_heads(token.keys, state)
    state = rounded(state * jnp.broadcast_to(token.decay[..., None, None], state.shape))
    errors = token.values - sum_keys(rounded(state * keys))
    corrections = rounded(errors * jnp.broadcast_to(token.rates[..., None], errors.shape))
    state = state + rounded(keys * jnp.broadcast_to(corrections[:, :, None], state.shape))
    return state, sum_keys(rounded(state * for_heads(token.queries, state)))


RULE = Rule(_advance, functools.partial(chunk_by_products, corrects=True))
