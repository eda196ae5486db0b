"""What layers are made of: tables of mixers and of feed-forward networks, by the types of their descriptions.

They say what the parameters, the decoder and the cache do with each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jaxinfer.model.components.attention import (
    Attention,
    abstract_keys_and_values,
    attend,
    declare_attention,
    plan_attention_of,
)
from jaxinfer.model.components.dense_and_experts import DenseAndExperts, declare_dense_and_experts, dense_and_experts
from jaxinfer.model.components.latent_attention import (
    LatentAttention,
    abstract_latents_of,
    attend_to_latents,
    declare_latent_attention,
    plan_latents_of,
)
from jaxinfer.model.components.mlp import MLP, declare_mlp, mlp
from jaxinfer.model.components.moe import MoE, declare_moe, moe
from jaxinfer.model.components.recurrent.gated_delta_net import (
    GatedDeltaNet,
    abstract_gated_delta_net,
    declare_gated_delta_net,
    gated_delta_net,
)
from jaxinfer.model.components.recurrent.selective_scan import (
    SelectiveScan,
    abstract_selective_scan,
    declare_selective_scan,
    selective_scan,
)
from jaxinfer.model.components.recurrent.state_space import (
    StateSpace,
    abstract_state_space,
    declare_state_space,
    state_space,
)
from jaxinfer.model.components.recurrent.states import States
from jaxinfer.model.components.rope import Rope
from kernels_pallas.latent_attention import LatentPages, map_rotary_keys, move_latents
from kernels_pallas.paged_attention import Pages, RoundedPages, head_specs, map_keys, move_slots

# The pages of a stack of mixers: of keys and values, exact or rounded, of latents, or of states.
Pool = Pages | RoundedPages | LatentPages | States


class Mixer(Protocol):
    """The description of a mixer: a frozen dataclass, whose type is a key of MIXERS."""

    @property
    def rope(self) -> Rope | None:
        """The rotary embedding; None for a mixer that knows no positions, only their order."""
        ...

    @property
    def window(self) -> int | None:
        """The most tokens that the output depends on; None if on all."""
        ...

    @property
    def width(self) -> int:
        """The most numbers per token between two products, where queries, keys and values do not count."""
        ...


@dataclass(frozen=True, kw_only=True)
class MixerFunctions:
    """The functions of a mixer, all of its component's file or of its pool's."""

    name: str  # of several such layers, in plain words
    # (config, hidden_size, spec) -> its tensors, a `TensorSpec` in the place of each
    declare: Callable[..., Any]
    # (params, pages, x, inputs, *, config, norm) -> (output [T, D] for x [T, D], the pages with the step's tokens)
    mix: Callable[..., tuple[Any, Any]]
    # (config, `PoolSize`) -> its pool, as `jax.ShapeDtypeStruct`s
    abstract_pages: Callable[..., Any]
    # (config, pages, inputs) -> what all layers like this one derive from a step alone, for `inputs.plan`
    plan: Callable[..., Any] | None = None
    # True if a page has one state for all its tokens, so that the two verbs of tokens below are not for it.
    is_recurrent: bool = False
    # (pages, sources, targets) -> the pages with the content of slots copied to other slots
    move_slots: Callable[..., Any] | None = None
    # (pages, change) -> the pages with change(keys) in the place of the keys that are rotated
    map_keys: Callable[..., Any] | None = None
    # (pages, axis) -> the partition of each array over a mesh axis of heads; None: each device has all of them
    split_heads: Callable[..., Any] | None = None
    # (mixer) -> the FLOPs of a query over each key, of all heads; None for a mixer without keys
    flops_per_key: Callable[..., int] | None = None


MIXERS: Mapping[type, MixerFunctions] = {
    Attention: MixerFunctions(
        name="attention",
        declare=declare_attention,
        mix=attend,
        abstract_pages=abstract_keys_and_values,
        plan=plan_attention_of,
        move_slots=move_slots,
        map_keys=map_keys,
        split_heads=head_specs,
        flops_per_key=lambda mixer: 4 * mixer.num_heads * mixer.head_dim,
    ),
    LatentAttention: MixerFunctions(
        name="latent attention",
        declare=declare_latent_attention,
        mix=attend_to_latents,
        abstract_pages=abstract_latents_of,
        plan=plan_latents_of,
        move_slots=move_latents,
        map_keys=map_rotary_keys,
        flops_per_key=lambda mixer: 2 * mixer.num_heads * (2 * mixer.kv_lora_rank + mixer.qk_rope_head_dim),
    ),
    StateSpace: MixerFunctions(
        name="state spaces",
        declare=declare_state_space,
        mix=state_space,
        abstract_pages=abstract_state_space,
        is_recurrent=True,
    ),
    SelectiveScan: MixerFunctions(
        name="selective scans",
        declare=declare_selective_scan,
        mix=selective_scan,
        abstract_pages=abstract_selective_scan,
        is_recurrent=True,
    ),
    GatedDeltaNet: MixerFunctions(
        name="gated delta nets",
        declare=declare_gated_delta_net,
        mix=gated_delta_net,
        abstract_pages=abstract_gated_delta_net,
        is_recurrent=True,
    ),
}


def functions_of(mixer: Mixer) -> MixerFunctions:
    """Returns the functions of a mixer."""
    return MIXERS[type(mixer)]


def source_of(mixer: Mixer) -> int | None:
    """Returns the number of the layer whose pages a mixer reads; None for a mixer with pages of its own."""
    return mixer.source if isinstance(mixer, Attention) else None


def has_rotated_norms(mixers: Iterable[Mixer]) -> bool:
    """Returns True if a cache has keys that got a norm after their rotation, so that no rotation moves them on."""
    return any(isinstance(mixer, Attention) and mixer.has_rotated_norm for mixer in mixers)


def can_read(reader: Mixer, other: Mixer) -> bool:
    """Returns True if the other mixer has pages of its own, whose keys and values are as the reader's would be."""
    kinds = [(a.num_kv_heads, a.head_dim, a.rope, a.window) for a in (reader, other) if isinstance(a, Attention)]
    return len(kinds) == 2 and kinds[0] == kinds[1] and source_of(other) is None


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
