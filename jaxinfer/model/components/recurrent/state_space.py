"""A selective state space (Mamba-2): its description, tensors and function."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
from jaxinfer.validation import as_float, as_tuple, is_real, require, require_bool, require_int
from kernels_pallas.row_products import rounded, row_sum


@dataclass(frozen=True, kw_only=True)
class StateSpace:
    """H heads, each with a state that decays and takes up inputs as the token decides (Mamba-2, Dao & Gu 2024).

    state = exp(-exp(a_log) * dt) * state + dt * B xᵀ, and the output is Cᵀ state + d * x. B and C are shared by the
    heads of a group. The output is multiplied by silu(gate), and normalised within each group.
    """

    num_heads: int
    head_dim: int  # numbers of x
    num_groups: int
    state_size: int  # numbers of B and C
    conv_size: int  # inputs of the convolution before it, the token's own included
    has_conv_bias: bool = True
    has_in_bias: bool = False
    has_out_bias: bool = False
    time_step_limits: tuple[float, float] = (0.0, math.inf)  # of dt
    norm: str | None = "gated"  # of the output: "gated", after the gate, or "plain", before it
    scales: tuple[float, ...] = (1.0,) * 5  # multiply the gate, x, B, C and dt as the first product gives them

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "num_groups", "state_size"):
            require_int(name, getattr(self, name), 1)
        require_int("conv_size", self.conv_size, 2)
        is_multiple = f"a multiple of num_groups={self.num_groups}"
        require(self.num_heads % self.num_groups == 0, "num_heads", self.num_heads, is_multiple)
        for name in ("has_conv_bias", "has_in_bias", "has_out_bias"):
            require_bool(name, getattr(self, name))
        is_name = isinstance(self.norm, str) and self.norm in ("gated", "plain")
        require(self.norm is None or is_name, "norm", self.norm, "'gated', 'plain' or None")
        are_scales = "five positive numbers"
        scales = as_tuple("scales", self.scales, are_scales)
        require(len(scales) == 5 and all(is_real(x) and x > 0 for x in scales), "scales", scales, are_scales)
        object.__setattr__(self, "scales", tuple(map(as_float, scales)))
        are_limits = "two numbers in order, of at least 0"
        limits = as_tuple("time_step_limits", self.time_step_limits, are_limits)
        is_right = len(limits) == 2 and all(map(is_real, limits)) and 0 <= limits[0] <= limits[1]
        require(is_right, "time_step_limits", limits, are_limits)
        object.__setattr__(self, "time_step_limits", tuple(map(as_float, limits)))

    @property
    def inner_size(self) -> int:
        """The numbers of all heads, I."""
        return self.num_heads * self.head_dim

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
        """The numbers per token of the first product."""
        return self.inner_size + self.num_channels + self.num_heads

    @property
    def num_channels(self) -> int:
        """The channels of the convolution: x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size


@struct.dataclass
class StateSpaceParams:
    """Tensors of n stacked layers; weights are [out, in]. C channels are x, B and C in this order."""

    in_proj: Any  # [n, I + C + H, D]  to the gate, the channels and the time steps
    conv: Any  # [n, C, W]
    dt_bias: Any  # [n, H]
    a_log: Any  # [n, H]
    d: Any  # [n, H]
    norm: Any  # [n, I]  None without a norm
    out_proj: Any  # [n, D, I]
    conv_bias: Any = None  # [n, C]
    in_bias: Any = None  # [n, I + C + H]
    out_bias: Any = None  # [n, D]


def declare_state_space(config: StateSpace, hidden_size: int, spec: MakeSpec) -> StateSpaceParams:
    """Returns a `TensorSpec` per tensor; `spec(sizes, axes, scale)` makes one of n layers."""
    D, H, I, C = hidden_size, config.num_heads, config.inner_size, config.num_channels
    tensors: dict[str, TensorSpec | None] = {
        "in_proj": spec((I + C + H, D), ("channels", "embed"), num_inputs=1),
        "conv": spec((C, config.conv_size), ("channels", "conv")),
        "dt_bias": spec((H,), ("state_heads",)),
        "a_log": spec((H,), ("state_heads",)),
        "d": spec((H,), ("state_heads",), None),
        "norm": None if config.norm is None else spec((I,), ("channels",), None),
        "out_proj": spec((D, I), ("embed", "channels"), num_inputs=1),
    }
    if config.has_conv_bias:
        tensors |= {"conv_bias": spec((C,), ("channels",))}
    if config.has_in_bias:
        tensors |= {"in_bias": spec((I + C + H,), ("channels",))}
    if config.has_out_bias:
        tensors |= {"out_bias": spec((D,), ("embed",))}
    return StateSpaceParams(**tensors)


def abstract_state_space(config: StateSpace, size: PoolSize) -> States:
    """Returns the pool of states as `jax.ShapeDtypeStruct`s."""
    state = (config.num_heads, config.state_size, config.head_dim)
    return abstract_states(size, (config.conv_size - 1, config.num_channels), state)


def state_space(
    params: StateSpaceParams,
    states: States,
    x: jax.Array,
    inputs: MixerInputs,
    *,
    config: StateSpace,
    norm: Norm,
) -> tuple[jax.Array, States]:
    """Returns the layer's output [T, D] for x [T, D], and the states with those that the step stores."""
    assert inputs.step.slots is not None
    T, H, P, G, N = x.shape[0], config.num_heads, config.head_dim, config.num_groups, config.state_size
    I, C = config.inner_size, config.num_channels
    slots = slots_of_layer(inputs.step.slots, inputs.page_offset)
    projected = _scaled_parts(linear(x, params.in_proj, params.in_bias, inputs.tokens), config)
    gate, channels, dt = projected[:, :I], projected[:, I : I + C], projected[:, I + C :]
    channels, conv = convolve(channels, states.conv, params.conv, params.conv_bias, slots, inputs.step.batch)
    channels = jax.nn.silu(channels)
    values = channels[:, :I].reshape(T, H, P)
    dt = dt.astype(jnp.float32) + jnp.broadcast_to(params.dt_bias.astype(jnp.float32), (T, H))
    dt = jnp.clip(jax.nn.softplus(dt), *config.time_step_limits)
    rates = jnp.broadcast_to(jnp.exp(params.a_log.astype(jnp.float32)), (T, H))
    log_decay = -rounded(dt * rates)
    tokens = Tokens(
        decay=jnp.exp(log_decay),
        log_decay=log_decay,
        rates=dt,
        keys=channels[:, I : I + G * N].reshape(T, G, N),
        queries=channels[:, I + G * N :].reshape(T, G, N),
        values=values,
    )
    y, recurrent = advance(RULE, tokens, states.recurrent, slots, inputs)
    y = y + rounded(values * jnp.broadcast_to(params.d.astype(jnp.float32)[:, None], values.shape))
    y, gate = y.reshape(T, I), jax.nn.silu(gate.astype(jnp.float32))
    if config.norm == "gated":
        y = _normed(y * gate, params.norm, G, norm, x.dtype)
    elif config.norm == "plain":
        y = _normed(y, params.norm, G, norm, jnp.float32) * gate
    else:
        y = y * gate
    y = y.astype(x.dtype)
    return linear(y, params.out_proj, params.out_bias, inputs.tokens), States(conv=conv, recurrent=recurrent)


def _scaled_parts(x: jax.Array, config: StateSpace) -> jax.Array:
    """Returns the numbers [T, I + C + H] of the first product times `config.scales`, each of its part."""
    if config.scales == (1.0,) * 5:
        return x
    BC = config.num_groups * config.state_size
    sizes = (config.inner_size, config.inner_size, BC, BC, config.num_heads)
    scales = np.repeat(np.array(config.scales, np.float32), sizes)
    return rounded((x.astype(jnp.float32) * jnp.broadcast_to(scales, x.shape)).astype(x.dtype))


def _normed(x: jax.Array, weight: jax.Array, num_groups: int, norm: Norm, dtype: Any) -> jax.Array:
    """Returns x f32[T, I] divided by the length of each group, in a dtype, times the weight [I]."""
    groups = x.reshape(x.shape[0], num_groups, -1)
    mean_square = row_sum(rounded(groups * groups)) / groups.shape[-1]
    normed = (groups * jax.lax.rsqrt(mean_square + norm.epsilon)[..., None]).reshape(x.shape).astype(dtype)
    return normed * jnp.broadcast_to(weight.astype(dtype), x.shape)


def _advance(state: jax.Array, token: Tokens, shared: None) -> tuple[jax.Array, jax.Array]:
    """Returns the states f32[b, H, N, P] after a token of each of b rows, and the outputs f32[b, H, P]."""
    values = rounded(token.values * jnp.broadcast_to(token.rates[..., None], token.values.shape))
    added = for_heads(token.keys, state) * jnp.broadcast_to(values[:, :, None], state.shape)
    # Rounded before they are added: one compiled step may fuse what another does not.
    state = rounded(state * jnp.broadcast_to(token.decay[..., None, None], state.shape)) + rounded(added)
    return state, sum_keys(rounded(state * for_heads(token.queries, state)))


RULE = Rule(_advance, functools.partial(chunk_by_products, corrects=False))
