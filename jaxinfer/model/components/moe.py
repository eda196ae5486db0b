"""Mixture of experts: its description, tensors, router and function. No token is dropped; see `experts.py`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.experts import SharedExpert, joins_sum, sum_of_experts
from jaxinfer.model.components.layers import MakeSpec, Norm, TensorSpec, product, rms_norm
from jaxinfer.model.components.mlp import MLP, MLPParams, declare_mlp, mlp
from jaxinfer.validation import require, require_bool, require_int, require_name, require_positive
from kernels_pallas.exact_sums import refuse_if_exact
from kernels_pallas.row_products import rounded, row_max, row_sum

SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class Router:
    """How a token chooses `num_chosen` experts, and the weights of their results.

    Scores are the softmax or the sigmoid of a product of the token's state. The experts with the largest scores win; if
    there are groups, only experts of the best groups. The weights are the scores of the winners, times `scale`.
    A `norm` comes before the product, and its weight is divided by sqrt(D).
    """

    num_chosen: int
    scoring: str = "softmax"
    normalizes: bool = True  # the weights of a token's experts add up to `scale`
    scale: float = 1.0
    has_bias: bool = False  # added to the product
    has_choice_bias: bool = False  # added to the scores for the choice, but not to the weights (DeepSeek-V3)
    has_expert_scales: bool = False  # one for each expert multiplies its weight
    norm: Norm | None = None  # of the state; None: there is none
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_scores_of_group: int = 2  # the best scores that add up to that of a group: 2 in DeepSeek-V3, 1 in V2

    def __post_init__(self) -> None:
        require_int("num_chosen", self.num_chosen, 1)
        require_name("scoring", self.scoring, SCORINGS)
        require_positive("scale", self.scale)
        for name in ("normalizes", "has_bias", "has_choice_bias", "has_expert_scales"):
            require_bool(name, getattr(self, name))
        require(self.norm is None or isinstance(self.norm, Norm), "norm", self.norm, "a Norm or None")
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
        for name in ("expert", "shared"):  # devices share experts with no other tensors than weights and biases
            network = getattr(self, name)
            is_plain = network is None or not network.is_learned
            require(is_plain, f"{name}.activation", network and network.activation, "one without tensors of its own")
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

    # Every device chooses among all experts, so the router's tensors are not split.
    router: Any  # [n, E, D]
    experts: MLPParams  # [n, E, ...]
    layer: Any = None  # i32[]  if `experts` are of n layers beside tensors of one: the one
    router_bias: Any = None  # [n, E]
    choice_bias: Any = None  # [n, E]
    router_norm: Any = None  # [n, D]
    expert_scales: Any = None  # [n, E]
    shared: MLPParams | None = None
    shared_gate: Any = None  # [n, 1, D]


def declare_moe(config: MoE, hidden_size: int, spec: MakeSpec) -> MoEParams:
    """Returns a `TensorSpec` per tensor; `spec(sizes, axes, scale)` makes one of n layers."""
    D, E = hidden_size, config.num_experts

    def of_experts(sizes: tuple[int, ...], axes: tuple[str, ...], **options: Any) -> TensorSpec:
        return spec((E, *sizes), ("experts", *axes), **options)

    return MoEParams(
        router=spec((E, D), ("choices", "embed")),
        experts=declare_mlp(config.expert, D, of_experts),
        router_bias=spec((E,), ("choices",)) if config.router.has_bias else None,
        choice_bias=spec((E,), ("choices",)) if config.router.has_choice_bias else None,
        router_norm=None if config.router.norm is None else spec((D,), ("embed",), None),
        expert_scales=spec((E,), ("choices",), None) if config.router.has_expert_scales else None,
        shared=None if config.shared is None else declare_mlp(config.shared, D, spec),
        shared_gate=spec((1, D), ("one", "embed")) if config.has_shared_gate else None,
    )


def moe(
    params: MoEParams,
    x: jax.Array,
    tokens: StepTokens,
    *,
    config: MoE,
    states: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Returns the weighted sum of each token's experts, and of the shared one, [T, D] for x [T, D].

    The router gets `states` [T, D], None being x. `mesh`: the mesh that the experts are split over, if any.
    """
    refuse_if_exact("a mixture of experts")
    experts, weights = route(params, x if states is None else states, tokens, config=config)
    options: dict[str, Any] = {"config": config.expert, "layer": params.layer, "mesh": mesh}
    compute = functools.partial(sum_of_experts, params.experts, x, experts, weights, tokens.count, **options)
    if params.shared is None or config.shared is None:
        return compute()
    gate = None
    if params.shared_gate is not None:
        gate = jax.nn.sigmoid(product(x, params.shared_gate, tokens))
    if joins_sum(params.shared, config.shared, config.num_experts, config.expert, mesh):
        return compute(shared=SharedExpert(params.shared, gate, config.shared))
    out, shared = compute(), mlp(params.shared, x, tokens, config=config.shared)
    if gate is not None:
        shared = rounded(shared * jnp.broadcast_to(gate, shared.shape).astype(x.dtype))
    return out + shared


def route(params: MoEParams, x: jax.Array, tokens: StepTokens, *, config: MoE) -> tuple[jax.Array, jax.Array]:
    """Returns the experts i32[T, X] of each token of x [T, D], the best first, and their weights f32[T, X]."""
    router = config.router
    if router.norm is not None:
        x = rms_norm(x, params.router_norm, router.norm) * jnp.asarray(x.shape[1] ** -0.5, x.dtype)
    logits = product(x, params.router, tokens)
    if params.router_bias is not None:
        logits = logits + jnp.broadcast_to(params.router_bias, logits.shape).astype(jnp.float32)
    if router.scoring == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    else:
        scores = jnp.exp(logits - row_max(logits)[..., None])
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
    if params.expert_scales is not None:
        weights = weights * params.expert_scales.astype(jnp.float32)[experts]
    return experts, weights * router.scale


def _of_best_groups(merits: jax.Array, router: Router) -> jax.Array:
    """Returns merits [T, E] with -inf for the experts outside each token's best groups."""
    T, E = merits.shape
    groups = merits.reshape(T, router.num_groups, -1)
    best, _ = jax.lax.top_k(groups, min(router.num_scores_of_group, groups.shape[-1]))
    _, chosen = jax.lax.top_k(row_sum(best), router.num_chosen_groups)
    is_chosen = (chosen[:, :, None] == jnp.arange(router.num_groups)[None, None]).any(1)
    return jnp.where(is_chosen[:, :, None], groups, -jnp.inf).reshape(T, E)
