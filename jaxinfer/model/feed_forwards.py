"""The table of feed-forward networks: by the type of its description, what parameters and decoder do with each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.model.components.dense_and_experts import DenseAndExperts, declare_dense_and_experts, dense_and_experts
from jaxinfer.model.components.mlp import MLP, declare_mlp, mlp
from jaxinfer.model.components.moe import MoE, declare_moe, moe

FeedForward = MLP | MoE | DenseAndExperts


@dataclass(frozen=True, kw_only=True)
class FeedForwardFunctions:
    """The functions of a feed-forward network."""

    # (config, hidden_size, spec) -> its tensors, a `TensorSpec` in the place of each
    declare: Callable[..., Any]
    # (params, x, h, tokens, *, config, norm, mesh) -> its output [T, D] for states x [T, D], which are h [T, D] after
    # the layer's own norm
    compute: Callable[..., Any]


FEED_FORWARDS: Mapping[type, FeedForwardFunctions] = {
    MLP: FeedForwardFunctions(
        declare=declare_mlp,
        compute=lambda params, x, h, tokens, *, config, norm, mesh: mlp(params, h, tokens, config=config),
    ),
    MoE: FeedForwardFunctions(
        declare=declare_moe,
        compute=lambda params, x, h, tokens, *, config, norm, mesh: moe(params, h, tokens, config=config, mesh=mesh),
    ),
    DenseAndExperts: FeedForwardFunctions(declare=declare_dense_and_experts, compute=dense_and_experts),
}
