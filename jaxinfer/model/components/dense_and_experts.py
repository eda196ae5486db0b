"""A dense MLP and experts side by side: their description, tensors and function (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import struct
from jax.sharding import Mesh

from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.layers import MakeSpec, Norm, rms_norm
from jaxinfer.model.components.mlp import MLP, MLPParams, declare_mlp, mlp
from jaxinfer.model.components.moe import MoE, MoEParams, declare_moe, moe
from jaxinfer.validation import require
from kernels_pallas.row_products import rounded


@dataclass(frozen=True, kw_only=True)
class DenseAndExperts:
    """norm(dense(h)) + norm(experts(norm(x))) of a token's state x, where h is x after the layer's own norm.

    The router of the experts gets x.
    """

    dense: MLP
    experts: MoE

    def __post_init__(self) -> None:
        require(isinstance(self.dense, MLP), "dense", self.dense, "an MLP")
        require(isinstance(self.experts, MoE), "experts", self.experts, "a MoE")

    @property
    def width(self) -> int:
        """The numbers per token between gate and down."""
        return self.dense.width + self.experts.width


@struct.dataclass
class DenseAndExpertsParams:
    """Tensors of n stacked layers."""

    dense: MLPParams
    experts: MoEParams
    dense_post_norm: Any  # [n, D]
    experts_norm: Any  # [n, D]  before the experts
    experts_post_norm: Any  # [n, D]


def declare_dense_and_experts(config: DenseAndExperts, hidden_size: int, spec: MakeSpec) -> DenseAndExpertsParams:
    """Returns a `TensorSpec` per tensor; `spec(sizes, axes, scale)` makes one of n layers."""
    norm = spec((hidden_size,), ("embed",), None)
    return DenseAndExpertsParams(
        dense=declare_mlp(config.dense, hidden_size, spec),
        experts=declare_moe(config.experts, hidden_size, spec),
        dense_post_norm=norm,
        experts_norm=norm,
        experts_post_norm=norm,
    )


def dense_and_experts(
    params: DenseAndExpertsParams,
    x: jax.Array,
    h: jax.Array,
    tokens: StepTokens,
    *,
    config: DenseAndExperts,
    norm: Norm,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Returns the sum [T, D] of both for states x [T, D], which are h [T, D] after the layer's own norm.

    `mesh`: the mesh that the parameters are split over, if any.
    """
    dense = rms_norm(mlp(params.dense, h, tokens, config=config.dense), params.dense_post_norm, norm)
    chosen = rms_norm(x, params.experts_norm, norm)
    chosen = moe(params.experts, chosen, tokens, states=x, config=config.experts, mesh=mesh)
    return rounded(dense) + rounded(rms_norm(chosen, params.experts_post_norm, norm))
