"""A selective state space with a state per channel (Mamba): its description, tensors and function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.model.components.layers import MakeSpec, Norm, PoolSize, TensorSpec, linear, product, rms_norm
from jaxinfer.model.components.mixer_inputs import MixerInputs
from jaxinfer.model.components.recurrent.recurrence import Rule, advance
from jaxinfer.model.components.recurrent.states import States, abstract_states, convolve, slots_of_layer, sum_keys
from jaxinfer.validation import require_bool, require_int
from kernels_pallas.row_products import rounded


@dataclass(frozen=True, kw_only=True)
class SelectiveScan:
    """I channels, each with N numbers that decay and take up inputs as the token decides (Mamba, Gu & Dao 2023).

    state = exp(-exp(a_log) * dt) * state + dt * B x, and the output is (C · state + d * x) * silu(gate). Each channel
    has an input x and a time step dt, and all share B and C.
    """

    inner_size: int  # channels, I
    state_size: int  # numbers of a channel's state, of B and of C, N
    time_step_rank: int  # numbers of which the time steps of all channels are made, R
    conv_size: int  # inputs of the convolution before it, the token's own included
    has_conv_bias: bool = True
    has_bias: bool = False  # of the products of inputs and outputs
    has_norms: bool = False  # of B, C and the numbers of which time steps are made

    def __post_init__(self) -> None:
        for name in ("inner_size", "state_size", "time_step_rank"):
            require_int(name, getattr(self, name), 1)
        require_int("conv_size", self.conv_size, 2)
        for name in ("has_conv_bias", "has_bias", "has_norms"):
            require_bool(name, getattr(self, name))

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
        return 2 * self.inner_size


@struct.dataclass
class SelectiveScanParams:
    """Tensors of n stacked layers; weights are [out, in]."""

    in_proj: Any  # [n, 2 I, D]  to the inputs, then the gates
    conv: Any  # [n, I, W]
    x_proj: Any  # [n, R + 2 N, I]  to the numbers of which time steps are made, B and C
    dt_proj: Any  # [n, I, R]
    dt_bias: Any  # [n, I]
    a_log: Any  # [n, N, I]
    d: Any  # [n, I]
    out_proj: Any  # [n, D, I]
    conv_bias: Any = None  # [n, I]
    in_bias: Any = None  # [n, 2 I]
    out_bias: Any = None  # [n, D]
    dt_norm: Any = None  # [n, R]
    b_norm: Any = None  # [n, N]
    c_norm: Any = None  # [n, N]


def declare_selective_scan(config: SelectiveScan, hidden_size: int, spec: MakeSpec) -> SelectiveScanParams:
    """Returns a `TensorSpec` per tensor; `spec(sizes, axes, scale)` makes one of n layers."""
    D, I, N, R = hidden_size, config.inner_size, config.state_size, config.time_step_rank
    tensors: dict[str, TensorSpec] = {
        "in_proj": spec((2 * I, D), ("channels", "embed"), num_inputs=1),
        "conv": spec((I, config.conv_size), ("channels", "conv")),
        "x_proj": spec((R + 2 * N, I), ("state", "channels"), num_inputs=1),
        "dt_proj": spec((I, R), ("channels", "state"), num_inputs=1),
        "dt_bias": spec((I,), ("channels",)),
        "a_log": spec((N, I), ("state", "channels")),
        "d": spec((I,), ("channels",), None),
        "out_proj": spec((D, I), ("embed", "channels"), num_inputs=1),
    }
    if config.has_conv_bias:
        tensors |= {"conv_bias": spec((I,), ("channels",))}
    if config.has_bias:
        tensors |= {"in_bias": spec((2 * I,), ("channels",)), "out_bias": spec((D,), ("embed",))}
    if config.has_norms:
        sizes = {"dt_norm": R, "b_norm": N, "c_norm": N}
        tensors |= {name: spec((size,), ("state",), None) for name, size in sizes.items()}
    return SelectiveScanParams(**tensors)


def abstract_selective_scan(config: SelectiveScan, size: PoolSize) -> States:
    """Returns the pool of states as `jax.ShapeDtypeStruct`s: all channels are the values of one head with N keys."""
    N, I = config.state_size, config.inner_size
    return abstract_states(size, (config.conv_size - 1, I), (1, N, I))


class ChannelTokens(NamedTuple):
    """The inputs of a layer's channels, for each token."""

    rates: jax.Array  # f32[T, I]  time steps
    keys: jax.Array  # f32[T, N]  B
    queries: jax.Array  # f32[T, N]  C
    values: jax.Array  # f32[T, 1, I]


def selective_scan(
    params: SelectiveScanParams,
    states: States,
    x: jax.Array,
    inputs: MixerInputs,
    *,
    config: SelectiveScan,
    norm: Norm,
) -> tuple[jax.Array, States]:
    """Returns the layer's output [T, D] for x [T, D], and the states with those that the step stores."""
    assert inputs.step.slots is not None
    T, I, N, R = x.shape[0], config.inner_size, config.state_size, config.time_step_rank
    slots = slots_of_layer(inputs.step.slots, inputs.page_offset)
    projected = linear(x, params.in_proj, params.in_bias, inputs.tokens)
    channels, gate = projected[:, :I], projected[:, I:]
    channels, conv = convolve(channels, states.conv, params.conv, params.conv_bias, slots, inputs.step.batch)
    channels = jax.nn.silu(channels)
    described = linear(channels.astype(x.dtype), params.x_proj, None, inputs.tokens)
    dt, keys, queries = described[:, :R], described[:, R : R + N], described[:, R + N :]
    if config.has_norms:
        dt = rms_norm(dt, params.dt_norm, norm)
        keys, queries = rms_norm(keys, params.b_norm, norm), rms_norm(queries, params.c_norm, norm)
    dt = product(dt, params.dt_proj, inputs.tokens)
    dt = dt + jnp.broadcast_to(params.dt_bias.astype(jnp.float32), (T, I))
    tokens = ChannelTokens(
        rates=jax.nn.softplus(dt),
        keys=keys.astype(jnp.float32),
        queries=queries.astype(jnp.float32),
        values=channels[:, None],
    )
    decay_rates = -jnp.exp(params.a_log.astype(jnp.float32))
    y, recurrent = advance(RULE, tokens, states.recurrent, slots, inputs, decay_rates)
    y = y[:, 0] + rounded(channels * jnp.broadcast_to(params.d.astype(jnp.float32), channels.shape))
    y = (y * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
    return linear(y, params.out_proj, params.out_bias, inputs.tokens), States(conv=conv, recurrent=recurrent)


def _decays_and_inputs(tokens: ChannelTokens, decay_rates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what n tokens multiply the state by and what they add to it, both f32[n, N, I]."""
    (n, N), I = tokens.keys.shape, tokens.rates.shape[1]

    def by_keys(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[:, None], (n, N, I))

    decays = jnp.exp(rounded(by_keys(tokens.rates) * jnp.broadcast_to(decay_rates, (n, N, I))))
    values = rounded(tokens.values[:, 0] * tokens.rates)
    return decays, rounded(jnp.broadcast_to(tokens.keys[..., None], (n, N, I)) * by_keys(values))


def _advance(state: jax.Array, token: ChannelTokens, decay_rates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the states f32[b, 1, N, I] after a token of each of b rows, and the outputs f32[b, 1, I]."""
    decays, added = (x[:, None] for x in _decays_and_inputs(token, decay_rates))
    # Rounded before they are added: one compiled step may fuse what another does not.
    state = rounded(state * decays) + added
    return state, sum_keys(rounded(state * jnp.broadcast_to(token.queries[:, None, :, None], state.shape)))


def _chunk(state: jax.Array, tokens: ChannelTokens, decay_rates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the state f32[1, N, I] after n tokens, and their outputs f32[n, 1, I].

    Each number of a channel fades at a rate of its own, so the states that a chunk adds up are no product of matrices,
    as those of heads are: all states of the chunk are computed, log2(n) times over the chunk, by an associative scan.
    Quotients of accumulated decays, with which one sum would do, overflow.
    """
    decays, added = _decays_and_inputs(tokens, decay_rates)
    added = added.at[0].add(decays[0] * state[0])

    def join(first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return first[0] * then[0], then[0] * first[1] + then[1]

    _, states = jax.lax.associative_scan(join, (decays, added))
    y = (states * jnp.broadcast_to(tokens.queries[..., None], states.shape)).sum(1)
    return states[-1:], y[:, None]


RULE = Rule(_advance, _chunk)
