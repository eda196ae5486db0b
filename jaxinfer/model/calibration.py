"""A decoder layer by layer: the states of texts between layers, and the moments of the inputs of a layer's products."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.model.batch import Batch, whole_rows
from jaxinfer.model.cache import abstract_cache
from jaxinfer.model.components.mixer_inputs import StepContext
from jaxinfer.model.components.observed import Moments, ObservedArray
from jaxinfer.model.config import ModelConfig, PlacedGroup
from jaxinfer.model.decoder import Flow, begin, numbers_of, run_group, step_context
from jaxinfer.model.layer_parts import Pool
from jaxinfer.model.params import LayerParams, Params


@struct.dataclass
class Activations:
    """The flow of B texts of equally many tokens between two layers, and what the next layers need beside it."""

    batch: Batch
    flow: Flow
    pools: Mapping[int, Pool]  # by their places in the cache, those that later layers read


@functools.partial(jax.jit, static_argnames="config")
def embed_texts(params: Params, tokens: jax.Array, *, config: ModelConfig) -> Activations:
    """Returns the activations of texts i32[B, T] before the first layer. No layer of `params` is read."""
    batch, _ = whole_rows(tokens, EngineConfig.page_size)
    return Activations(batch, begin(params, StepContext(batch), config=config), {})


def run_layer(params: LayerParams, activations: Activations, *, config: ModelConfig, index: int) -> Activations:
    """Returns the activations after layer `index` of a `config` with a group for each layer.

    `params` are those of a stack of this one layer.
    """
    pools, group = config.placed_groups[index]
    x, new = run_group((params,), *_operands(activations, config, index), group=group)
    shared = {place.pool for place in group.places if place.is_shared}
    kept = {pool: pages for i, (pool, pages) in enumerate(zip(pools, new, strict=True)) if i in shared}
    return replace(activations, flow=replace(activations.flow, x=x), pools={**activations.pools, **kept})


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
    _, group = config.placed_groups[index]
    return _moments(params, _operands(activations, config, index), observed=observed, group=group)


# Layers of equal shape are compiled once.
@functools.partial(jax.jit, static_argnames=("observed", "group"))
def _moments(
    params: LayerParams, operands: tuple[Any, ...], *, observed: tuple[tuple[int, int], ...], group: PlacedGroup
) -> dict[int, Moments]:
    leaves, structure = jax.tree.flatten(params)

    def run(moments: dict[int, Moments]) -> jax.Array:
        nodes = [ObservedArray(w, moments[i]) if i in moments else w for i, w in enumerate(leaves)]
        return run_group((jax.tree.unflatten(structure, nodes),), *operands, group=group)[0]

    zeros = {}
    for i, num_leading in observed:
        leading, size = leaves[i].shape[:num_leading], leaves[i].shape[-1]
        zeros[i] = Moments(jnp.zeros((*leading, size, size)), jnp.zeros(leading))
    x, derivative = jax.vjp(run, zeros)
    return derivative(jnp.zeros_like(x))[0]


def _operands(activations: Activations, config: ModelConfig, index: int) -> tuple[Any, ...]:
    """Returns the operands of `run_group` after the parameters, for the layer of this index."""
    batch, flow, page_size = activations.batch, activations.flow, EngineConfig.page_size
    num_rows, num_pages = batch.kv_lens.shape[0], batch.block_tables.size
    sizes = CacheConfig(num_pages=num_pages, page_size=page_size, dtype=flow.x.dtype.name)
    empty, (pools, _) = abstract_cache(config, sizes).pools, config.placed_groups[index]
    context = step_context(batch, config=config, page_size=page_size, num_whole_rows=num_rows)
    return (
        tuple(activations.pools.get(i) or jax.tree.map(jnp.zeros_like, empty[i]) for i in pools),
        flow.x,
        numbers_of(flow, config, index),
        context.for_mixers(config.groups[index].mixers),
    )
