"""A decoder layer by layer: the states of texts between layers, and the moments of the inputs of a layer's products."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.model.batch import Batch, step_tokens, whole_rows
from jaxinfer.model.cache import abstract_cache
from jaxinfer.model.components.layer_embedding import embed_for_layers
from jaxinfer.model.components.observed import Moments, ObservedArray
from jaxinfer.model.components.recurrent.states import state_slots
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.decoder import angles_of, embed, ropes_of, run_group
from jaxinfer.model.mixers import Pool
from jaxinfer.model.params import LayerParams, Params


@struct.dataclass
class Activations:
    """The states of B texts of equally many tokens after some layers, and all that the next layers need beside them."""

    batch: Batch
    x: Any  # f[T, D]
    numbers: Any  # [L, T, d]  of all layers, if they have embeddings of their own
    pools: Mapping[int, Pool]  # by their places in the cache, those that later layers read


@functools.partial(jax.jit, static_argnames="config")
def embed_texts(params: Params, tokens: jax.Array, *, config: ModelConfig) -> Activations:
    """Returns the activations of texts i32[B, T] before the first layer. No layer of `params` is read."""
    batch, _ = whole_rows(tokens, EngineConfig.page_size)
    x = embed(params, batch.tokens, config=config)
    numbers = None
    if params.layer_embedding is not None:
        numbers = embed_for_layers(params.layer_embedding, batch.tokens, x, step_tokens(batch), config.norm)
    return Activations(batch, x, numbers, {})


def run_layer(params: LayerParams, activations: Activations, *, config: ModelConfig, index: int) -> Activations:
    """Returns the activations after layer `index` of a `config` with a group for each layer.

    `params` are those of a stack of this one layer.
    """
    call = _call(activations, config, index)
    x, new = run_group((params,), *call.arguments, **call.statics)
    kept = {pool: pages for pool, pages in zip(call.pools, new, strict=True) if pool in call.shared}
    return replace(activations, x=x, pools={**activations.pools, **kept})


def input_moments(
    params: LayerParams,
    activations: Activations,
    observed: tuple[tuple[int, int], ...],
    *,
    config: ModelConfig,
    index: int,
) -> dict[int, Moments]:
    """Returns the moments of the inputs of products in layer `index`, for the activations before it.

    `observed` has, for each observed weight, its place among the leaves of `params`, which is its key in the result,
    and the number of its leading axes, which the moments have too: 1, or 2 for experts.
    """
    call = _call(activations, config, index)
    return _moments(params, call.arguments, observed=observed, **call.statics)


_STATICS = ("layers", "places", "stacks", "repeats", "q_len", "implementation", "mesh", "num_whole_rows")


# Layers of equal shape are compiled once.
@functools.partial(jax.jit, static_argnames=("observed", *_STATICS))
def _moments(
    params: LayerParams, arguments: tuple[Any, ...], *, observed: tuple[tuple[int, int], ...], **statics: Any
) -> dict[int, Moments]:
    leaves, structure = jax.tree.flatten(params)

    def run(moments: dict[int, Moments]) -> jax.Array:
        nodes = [ObservedArray(w, moments[i]) if i in moments else w for i, w in enumerate(leaves)]
        return run_group((jax.tree.unflatten(structure, nodes),), *arguments, **statics)[0]

    zeros = {}
    for i, num_leading in observed:
        leading, size = leaves[i].shape[:num_leading], leaves[i].shape[-1]
        zeros[i] = Moments(jnp.zeros((*leading, size, size)), jnp.zeros(leading))
    x, derivative = jax.vjp(run, zeros)
    return derivative(jnp.zeros_like(x))[0]


class _Call(NamedTuple):
    """A call of `run_group`, without the parameters."""

    arguments: tuple[Any, ...]
    statics: dict[str, Any]
    pools: list[int]  # the places in the cache of those among the arguments
    shared: set[int]  # those that other layers read


def _call(activations: Activations, config: ModelConfig, index: int) -> _Call:
    batch, x, numbers, page_size = activations.batch, activations.x, activations.numbers, EngineConfig.page_size
    num_rows, num_pages = batch.kv_lens.shape[0], batch.block_tables.size
    group, first = config.groups[index], sum(len(group.mixers) for group in config.groups[:index])
    places = config.page_places[first : first + len(group.mixers)]
    pools = sorted({place.pool for place in places})
    empty = abstract_cache(config, CacheConfig(num_pages=num_pages, page_size=page_size, dtype=x.dtype.name)).pools
    angles = angles_of(group.mixers, batch.positions)
    arguments = (
        tuple(activations.pools.get(i) or jax.tree.map(jnp.zeros_like, empty[i]) for i in pools),
        (batch,) * len(config.page_kinds),
        x,
        tuple(angles[rope] for rope in ropes_of(group.mixers)),
        None,
        state_slots(batch, page_size) if config.is_recurrent else None,
        None if numbers is None else numbers[None, index : index + 1],
    )
    statics = {
        "layers": group.layers,
        "places": tuple(place._replace(pool=pools.index(place.pool)) for place in places),
        "stacks": tuple(config.mixer_stacks[i] for i in pools),
        "repeats": 1,
        "q_len": None,
        "implementation": None,
        "mesh": None,
        "num_whole_rows": num_rows,
    }
    return _Call(arguments, statics, pools, {place.pool for place in places if place.is_shared})
