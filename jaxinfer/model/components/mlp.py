"""The feed-forward network, gated or not: its description, tensors and function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.layers import (
    ACTIVATIONS,
    UNGATED_ACTIVATIONS,
    MakeSpec,
    combined_product,
    linear,
    linears,
    scaled,
)
from jaxinfer.validation import require, require_bool, require_int, require_name, require_positive
from kernels_pallas.row_products import rounded


@struct.dataclass
class CurveParams:
    """The numbers of a learned activation, of n stacked layers."""

    alpha_p: Any  # [n, 1]
    alpha_n: Any  # [n, 1]
    beta: Any  # [n]
    eps: Any  # [n]


def xielu(up: jax.Array, curve: CurveParams) -> jax.Array:
    """Returns xIELU of up [T, F] (Huang & Schlag 2024), a parabola and an exponential with learned factors.

    The factors of `curve`, that of one layer, are softplus(alpha_p) and softplus(alpha_n) + beta.
    """
    x = up.astype(jnp.float32)
    beta, least = (jnp.broadcast_to(a.astype(jnp.float32), x.shape) for a in (curve.beta, curve.eps))
    rise, fall = (jax.nn.softplus(a.astype(jnp.float32)) for a in (curve.alpha_p, curve.alpha_n))
    linear_part = rounded(beta * x)
    positive = rounded(jnp.broadcast_to(rise, x.shape) * rounded(x * x))
    negative = rounded((jnp.broadcast_to(fall, x.shape) + beta) * (jnp.expm1(jnp.minimum(x, least)) - x))
    return (jnp.where(x > 0, positive, negative) + linear_part).astype(up.dtype)


# The function of up and its own tensors of an MLP without a gate, by its name in a configuration.
LEARNED_ACTIVATIONS: Mapping[str, Callable[[jax.Array, CurveParams], jax.Array]] = {"xielu": xielu}


@dataclass(frozen=True, kw_only=True)
class MLP:
    """down(activation(gate(x)) * up(x)), with F numbers between (Shazeer 2020).

    By some activations it is down(activation(up(x))) without a gate, and by some of these with tensors of its own.
    """

    intermediate_size: int
    activation: str = "silu"
    has_bias: bool = False
    gate_scale: float = 1.0  # multiplies gate(x)
    output_scale: float = 1.0  # multiplies the output

    def __post_init__(self) -> None:
        require_int("intermediate_size", self.intermediate_size, 1)
        require_name("activation", self.activation, (*ACTIVATIONS, *UNGATED_ACTIVATIONS, *LEARNED_ACTIVATIONS))
        require_bool("has_mlp_bias", self.has_bias)
        for name in ("gate_scale", "output_scale"):
            require_positive(name, getattr(self, name))
        is_right = self.is_gated or self.gate_scale == 1.0
        require(is_right, "gate_scale", self.gate_scale, f"1.0, for activation={self.activation!r} has no gate")

    @property
    def is_gated(self) -> bool:
        return self.activation in ACTIVATIONS

    @property
    def is_learned(self) -> bool:
        """True if the activation has tensors of its own."""
        return self.activation in LEARNED_ACTIVATIONS

    @property
    def width(self) -> int:
        """The numbers per token between gate and down."""
        return self.intermediate_size


@struct.dataclass
class MLPParams:
    """Tensors of n stacked layers."""

    gate: Any  # [n, F, D]  None without a gate
    up: Any  # [n, F, D]
    down: Any  # [n, D, F]
    gate_bias: Any = None  # [n, F]
    up_bias: Any = None  # [n, F]
    down_bias: Any = None  # [n, D]
    curve: CurveParams | None = None  # if the activation is learned
    up_gate: Any = None  # [n, P, 2 F / P, D]  up and gate, which are None then, in parts for P devices


def declare_mlp(config: MLP, hidden_size: int, spec: MakeSpec) -> MLPParams:
    """Returns a `TensorSpec` per tensor; `spec(sizes, axes, scale)` makes one of n layers."""
    D, F = hidden_size, config.intermediate_size
    names = ("gate", "up") if config.is_gated else ("up",)
    weights: dict[str, Any] = {
        "gate": spec((F, D), ("mlp", "embed"), num_inputs=1) if config.is_gated else None,
        "up": spec((F, D), ("mlp", "embed"), num_inputs=1),
        "down": spec((D, F), ("embed", "mlp"), num_inputs=1),
    }
    if config.has_bias:
        weights |= {f"{name}_bias": spec((F,), ("mlp",)) for name in names}
        weights |= {"down_bias": spec((D,), ("embed",))}
    if config.is_learned:
        alpha, constant = spec((1,), ("one",), None), spec((), (), None)
        weights |= {"curve": CurveParams(alpha_p=alpha, alpha_n=alpha, beta=constant, eps=constant)}
    return MLPParams(**weights)


def hidden_sizes(config: MLP) -> dict[str, int]:
    """Returns the weights that multiply the network's input, by name, with F, in the order of `params.up_gate`."""
    return dict.fromkeys(("up", "gate") if config.is_gated else ("up",), config.intermediate_size)


def mlp(params: MLPParams, x: jax.Array, tokens: StepTokens, *, config: MLP) -> jax.Array:
    """Returns down(activation(gate(x)) * up(x)) [T, D] for x [T, D]."""
    hidden = _in_one(params, x, tokens, config)
    if hidden is None:
        up, *gate = linears(x, params, hidden_sizes(config), params.up_gate, tokens)
        hidden = activate(gate[0] if gate else None, up, config=config, curve=params.curve)
    y = linear(hidden, params.down, params.down_bias, tokens, input_units=config.intermediate_size)
    return scaled(y, config.output_scale)


def _in_one(params: MLPParams, x: jax.Array, tokens: StepTokens, config: MLP) -> jax.Array | None:
    """Returns the numbers [T, F] between up and down by one launch of a GPU, None if it takes several.

    Biases, a scale, and adapters, which change the products, take several.
    """
    between = (params.up, params.gate, params.up_bias, params.gate_bias)
    if params.up_gate is None or not config.is_gated or config.gate_scale != 1.0 or any(a is not None for a in between):
        return None
    return combined_product(x, params.up_gate, tokens, 2, _gated(config.activation))


@functools.cache
def _gated(activation: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda up, gate: ACTIVATIONS[activation](gate, up)


def activate(gate: jax.Array | None, up: jax.Array, *, config: MLP, curve: CurveParams | None = None) -> jax.Array:
    """Returns the numbers [T, F] between up and down; `gate` is None if the network has none.

    `curve` has the numbers of a learned activation, those of one layer.
    """
    if curve is not None:
        return LEARNED_ACTIVATIONS[config.activation](up, curve)
    if gate is None:
        return UNGATED_ACTIVATIONS[config.activation](up)
    return ACTIVATIONS[config.activation](scaled(gate, config.gate_scale), up)
