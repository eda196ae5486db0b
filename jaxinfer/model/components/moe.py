"""Mixture of experts: its description, tensors, router and function. No token is dropped."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.model.components.layers import MakeSpec, TensorSpec, product
from jaxinfer.model.components.mlp import MLP, MLPParams, activate, declare_mlp, mlp
from jaxinfer.quantization import QuantizedArray
from jaxinfer.validation import require, require_bool, require_int, require_name, require_positive
from kernels_pallas.quantized_matmul import dequantize
from kernels_pallas.row_products import ROW_BLOCK, rounded
from kernels_pallas.row_sum import row_sum

SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class Router:
    """How a token chooses `num_chosen` experts, and the weights of their results.

    Scores are the softmax or the sigmoid of a product of the token's state. The experts with the largest scores win; if
    there are groups, only experts of the best groups. The weights are the scores of the winners, times `scale`.
    """

    num_chosen: int
    scoring: str = "softmax"
    normalizes: bool = True  # the weights of a token's experts add up to `scale`
    scale: float = 1.0
    has_bias: bool = False  # added to the product
    has_choice_bias: bool = False  # added to the scores for the choice, but not to the weights (DeepSeek-V3)
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_scores_of_group: int = 2  # the best scores that add up to that of a group: 2 in DeepSeek-V3, 1 in V2

    def __post_init__(self) -> None:
        require_int("num_chosen", self.num_chosen, 1)
        require_name("scoring", self.scoring, SCORINGS)
        require_positive("scale", self.scale)
        for name in ("normalizes", "has_bias", "has_choice_bias"):
            require_bool(name, getattr(self, name))
        require_int("num_groups", self.num_groups, 1)
        require_int("num_chosen_groups", self.num_chosen_groups, 1, self.num_groups)
        require_int("num_scores_of_group", self.num_scores_of_group, 1)


@dataclass(frozen=True, kw_only=True)
class MoE:
    """A sparse feed-forward network (Shazeer et al. 2017): the router chooses some of E experts for each token."""

    num_experts: int
    expert: MLP
    router: Router
    shared: MLP | None = None  # an expert of all tokens beside the chosen ones
    has_shared_gate: bool = False  # scales the shared expert by a sigmoid of the token's state

    def __post_init__(self) -> None:
        require_int("num_experts", self.num_experts, 1)
        require(isinstance(self.expert, MLP), "expert", self.expert, "an MLP")
        require(isinstance(self.router, Router), "router", self.router, "a Router")
        is_shared = self.shared is None or isinstance(self.shared, MLP)
        require(is_shared, "shared", self.shared, "an MLP or None")
        is_divided = self.num_experts % self.router.num_groups == 0
        require(is_divided, "num_experts", self.num_experts, f"a multiple of num_groups={self.router.num_groups}")
        num_choices = self.num_experts * self.router.num_chosen_groups // self.router.num_groups
        require_int("num_chosen", self.router.num_chosen, 1, num_choices)
        require_bool("has_shared_gate", self.has_shared_gate)
        is_whole = self.shared is not None or not self.has_shared_gate
        require(is_whole, "has_shared_gate", self.has_shared_gate, "False without a shared expert")

    @property
    def width(self) -> int:
        """The numbers per token between gate and down."""
        shared = 0 if self.shared is None else self.shared.intermediate_size
        return self.expert.intermediate_size * self.router.num_chosen + shared


@struct.dataclass
class MoEParams:
    """Tensors of n stacked layers."""

    router: Any  # [n, E, D]
    experts: MLPParams  # [n, E, ...]
    router_bias: Any = None  # [n, E]
    choice_bias: Any = None  # [n, E]
    shared: MLPParams | None = None
    shared_gate: Any = None  # [n, 1, D]


def declare_moe(config: MoE, hidden_size: int, spec: MakeSpec) -> MoEParams:
    """Returns a `TensorSpec` per tensor; `spec(sizes, axes, scale)` makes one of n layers."""
    D, E = hidden_size, config.num_experts

    def of_experts(sizes: tuple[int, ...], axes: tuple[str, ...], scale: float | None = 0.02) -> TensorSpec:
        return spec((E, *sizes), ("experts", *axes), scale)

    return MoEParams(
        router=spec((E, D), ("experts", "embed")),
        experts=declare_mlp(config.expert, D, of_experts),
        router_bias=spec((E,), ("experts",)) if config.router.has_bias else None,
        choice_bias=spec((E,), ("experts",)) if config.router.has_choice_bias else None,
        shared=None if config.shared is None else declare_mlp(config.shared, D, spec),
        shared_gate=spec((1, D), ("one", "embed")) if config.has_shared_gate else None,
    )


def moe(params: MoEParams, x: jax.Array, num_tokens: jax.Array, *, config: MoE) -> jax.Array:
    """Returns the weighted sum of each token's experts, and of the shared one, [T, D] for x [T, D]."""
    experts, weights = route(params, x, num_tokens, config=config)
    results: Any = _of_experts(params.experts, x, experts, num_tokens, config)
    # Rounded before they are added, and added in a fixed order: so a token's sum has the same bits in any step.
    weighted = rounded(results * weights[..., None])
    out = row_sum(weighted.swapaxes(1, 2)).astype(x.dtype)
    if params.shared is None or config.shared is None:
        return out
    shared = mlp(params.shared, x, num_tokens, config=config.shared)
    if params.shared_gate is not None:
        gate = jax.nn.sigmoid(product(x, params.shared_gate, num_tokens))
        shared = rounded(shared * jnp.broadcast_to(gate, shared.shape).astype(x.dtype))
    return out + shared


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _of_experts(params: MLPParams, x: jax.Array, experts: jax.Array, num_tokens: jax.Array, config: MoE) -> jax.Array:
    """Returns the results f32[T, X, D] of each token's experts i32[T, X], for x [T, D]."""
    in_blocks, in_groups = functools.partial(_in_blocks, config=config), functools.partial(_in_groups, config=config)
    return jax.lax.platform_dependent(params, x, experts, num_tokens, cpu=in_blocks, default=in_groups)


def _of_experts_derivative(config: MoE, operands: tuple[Any, ...], change: jax.Array) -> tuple[Any, ...]:
    """Returns the derivative of `_in_groups`, for that of `_in_blocks` has a loop whose length is known late."""
    params, x, experts, num_tokens = operands
    _, derivative = jax.vjp(lambda params, x: _in_groups(params, x, experts, num_tokens, config=config), params, x)
    return *derivative(change), None, None


_of_experts.defvjp(lambda *operands: (_of_experts(*operands), operands[:4]), _of_experts_derivative)


def route(params: MoEParams, x: jax.Array, num_tokens: jax.Array, *, config: MoE) -> tuple[jax.Array, jax.Array]:
    """Returns the experts i32[T, X] of each token of x [T, D], the best first, and their weights f32[T, X]."""
    router = config.router
    logits = product(x, params.router, num_tokens)
    if params.router_bias is not None:
        logits = logits + jnp.broadcast_to(params.router_bias, logits.shape).astype(jnp.float32)
    if router.scoring == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    else:
        scores = jnp.exp(logits - logits.max(-1, keepdims=True))
        scores = scores / row_sum(scores)[..., None]
    merits = scores
    if params.choice_bias is not None:
        merits = merits + jnp.broadcast_to(params.choice_bias, merits.shape).astype(jnp.float32)
    if router.num_groups > 1:
        merits = _of_best_groups(merits, router)
    _, experts = jax.lax.top_k(merits, router.num_chosen)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if router.normalizes:
        weights = weights / (row_sum(weights) + 1e-20)[..., None]
    return experts, weights * router.scale


def _of_best_groups(merits: jax.Array, router: Router) -> jax.Array:
    """Returns merits [T, E] with -inf for the experts outside each token's best groups."""
    T, E = merits.shape
    groups = merits.reshape(T, router.num_groups, -1)
    best, _ = jax.lax.top_k(groups, min(router.num_scores_of_group, groups.shape[-1]))
    _, chosen = jax.lax.top_k(row_sum(best), router.num_chosen_groups)
    is_chosen = (chosen[:, :, None] == jnp.arange(router.num_groups)[None, None]).any(1)
    return jnp.where(is_chosen[:, :, None], groups, -jnp.inf).reshape(T, E)


def _in_blocks(params: MLPParams, x: jax.Array, experts: jax.Array, num_tokens: jax.Array, *, config: MoE) -> jax.Array:
    """Returns the results f32[T, X, D] of each token's experts, by products of ROW_BLOCK tokens, expert after expert.

    experts of 5 tokens, blocks of 2:   a b a a b  ->  a: 0 2, 3 -   b: 1 4
    """
    (T, D), X, E = x.shape, experts.shape[1], config.num_experts
    by_pair = jnp.where(jnp.arange(T * X) // X < num_tokens, experts.reshape(-1), E)  # padding belongs to no expert
    order = jnp.argsort(by_pair, stable=True)
    counts = jnp.zeros((E,), jnp.int32).at[by_pair].add(1, mode="drop")
    ends, (used,) = jnp.cumsum(counts), jnp.nonzero(counts, size=E, fill_value=0)

    def compute_expert(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = used[i]
        # Taken once for all of its blocks, for this copies them.
        own = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, expert, keepdims=False), params)

        def compute_block(j: jax.Array, out: jax.Array) -> jax.Array:
            places = ends[expert] - counts[expert] + j * ROW_BLOCK + jnp.arange(ROW_BLOCK)
            pairs = jnp.where(places < ends[expert], order.at[places].get(mode="clip"), T * X)
            rows = x.at[pairs // X].get(mode="fill", fill_value=0)
            y = mlp(own, rows, jnp.asarray(ROW_BLOCK), config=config.expert)
            return out.at[pairs].set(y.astype(jnp.float32), mode="drop")

        return jax.lax.fori_loop(0, -(-counts[expert] // ROW_BLOCK), compute_block, out)

    out = jax.lax.fori_loop(0, (counts > 0).sum(), compute_expert, jnp.zeros((T * X, D), jnp.float32))
    return out.reshape(T, X, D)


def _in_groups(params: MLPParams, x: jax.Array, experts: jax.Array, num_tokens: jax.Array, *, config: MoE) -> jax.Array:
    """Returns the results f32[T, X, D] of each token's experts, by grouped products of all experts."""
    T, X = experts.shape
    order = jnp.argsort(experts.reshape(-1), stable=True)
    expert_of = experts.reshape(-1)[order]
    counts = jnp.zeros((config.num_experts,), jnp.int32).at[expert_of].add(1)

    def linear(rows: jax.Array, w: Any, bias: Any) -> jax.Array:
        w = _dequantized(w, rows) if isinstance(w, QuantizedArray) else w
        y = _grouped_product(rows, w, counts).astype(rows.dtype)
        return y if bias is None else y + bias[expert_of]

    rows = x[order // X]
    gate = linear(rows, params.gate, params.gate_bias) if config.expert.is_gated else None
    up = linear(rows, params.up, params.up_bias)
    y = linear(activate(gate, up, config=config.expert), params.down, params.down_bias)
    return jnp.zeros(y.shape, jnp.float32).at[order].set(y.astype(jnp.float32)).reshape(T, X, -1)


def _dequantized(w: QuantizedArray, rows: jax.Array) -> jax.Array:
    """Returns the weights [E, out, in] that rows [R, in] are multiplied by, in their dtype."""
    E, F = w.values.shape[:2]
    values, scales = w.values.reshape(E * F, -1), w.scales.reshape(E * F, -1)
    return dequantize(values, scales, None, rows.shape[1]).astype(rows.dtype).reshape(E, F, -1)


def _grouped_product(rows: jax.Array, w: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns rows [R, in] times the transposed weights [E, out, in] of their expert, f32[R, out].

    The first counts[0] rows are of the first expert, and so on.
    """
    axes = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    return jax.lax.ragged_dot_general(rows, w, counts, axes, preferred_element_type=jnp.float32)
