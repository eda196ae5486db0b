"""The paged KV cache: one flat pool of pages per stack of layers, and its pure verbs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.config import CacheConfig
from jaxinfer.model.batch import PADDING_SLOT, PADDING_TOKEN, Batch
from jaxinfer.model.config import LayerStack, ModelConfig
from jaxinfer.model.gated_delta_net import GatedDeltaNet, abstract_gated_delta_net
from jaxinfer.model.latent_attention import LatentAttention
from jaxinfer.model.rope import Rope, rotary_embedding, turning_angles
from jaxinfer.model.state_space import StateSpace, abstract_state_space
from jaxinfer.model.states import States
from jaxinfer.validation import require, require_name
from kernels_pallas.latent_attention import LatentPages, abstract_latents, map_rotary_keys, move_latents
from kernels_pallas.paged_attention import (
    HEADS_AXIS,
    Pages,
    abstract_pages,
    head_specs,
    map_keys,
    move_slots,
    put_pages,
    take_pages,
)
from kernels_pallas.paged_attention.layout import LAYOUTS

# Slots of a pool are counted in int32, and padding is written just past the last.
MAX_SLOTS = 2**31 - 1

# The pages of a stack of layers: of keys and values, of latents, or of states, as its mixer needs; None without one.
Pool = Pages | LatentPages | States | None


@struct.dataclass
class KVCache:
    """All pages of all layers. A step takes it donated and returns its successor.

    One pool per stack of layers (`ModelConfig.stacks`): layer i of n keeps page p of a request at index i * P + p. A
    page holds its tokens' ids beside their keys and values: penalties and n-grams need the tokens of a request so far,
    and here these are right after any chunking, preemption or sharing of pages.
    """

    pools: tuple[Pool, ...]
    tokens: Any  # i32[P, S]


# The content of some pages outside a pool: a cache of these pages only, to be stored and inserted later.
PageBundle = KVCache


def init_cache(config: ModelConfig, cache_config: CacheConfig, layout: str | None = None) -> KVCache:
    """Returns an empty cache of zeros; the content of unused slots never reaches a result."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract_cache(config, cache_config, layout))


def abstract_cache(config: ModelConfig, cache_config: CacheConfig, layout: str | None = None) -> KVCache:
    """Returns the cache as `jax.ShapeDtypeStruct`s; `layout` names the page layout, None takes this platform's."""
    require(isinstance(config, ModelConfig), "config", config, "a ModelConfig")
    require(isinstance(cache_config, CacheConfig), "cache_config", cache_config, "a CacheConfig")
    if layout is not None:
        require_name("layout", layout, LAYOUTS)

    def pool(stack: LayerStack) -> Pool:
        num_layers, mixer = stack.num_layers, stack.layer.mixer
        if mixer is None:
            return None
        num_pages = num_layers * cache_config.num_pages
        if num_pages * cache_config.page_size > MAX_SLOTS:
            raise ValueError(
                f"{num_layers} layers of {cache_config.num_pages} pages of {cache_config.page_size} slots are more"
                f" slots than a group may have ({MAX_SLOTS}); use fewer pages or smaller layer_groups"
            )
        page_size, dtype = cache_config.page_size, cache_config.dtype
        if isinstance(mixer, StateSpace):
            return abstract_state_space(mixer, num_pages)
        if isinstance(mixer, GatedDeltaNet):
            return abstract_gated_delta_net(mixer, num_pages)
        if isinstance(mixer, LatentAttention):
            return abstract_latents(num_pages, page_size, mixer.kv_lora_rank, mixer.qk_rope_head_dim, dtype)
        return abstract_pages(num_pages, page_size, mixer.num_kv_heads, mixer.head_dim, dtype, layout)

    tokens = jax.ShapeDtypeStruct((cache_config.num_pages, cache_config.page_size), jnp.int32)
    return KVCache(pools=tuple(map(pool, config.stacks)), tokens=tokens)


def cache_shardings(cache: KVCache, mesh: Mesh) -> KVCache:
    """Returns a `NamedSharding` per array: KV heads over the mesh's HEADS_AXIS, the others on every device."""
    specs = KVCache(pools=tuple(map(_pool_specs, cache.pools)), tokens=PartitionSpec())
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def _pool_specs(pool: Pool) -> Pool:
    if not isinstance(pool, Pages):  # every query head reads all latents, and recurrent layers are not split
        return jax.tree.map(lambda _: PartitionSpec(), pool)
    return head_specs(pool, HEADS_AXIS)


def page_bytes(config: ModelConfig, cache_config: CacheConfig, layout: str | None = None) -> int:
    """Returns the bytes of one page over all layers: keys and values, latents or a state, and token ids."""
    one_page = abstract_cache(config, replace(cache_config, num_pages=1), layout)
    return sum(math.prod(pool.shape) * jnp.dtype(pool.dtype).itemsize for pool in jax.tree.leaves(one_page))


def layer_offset(pages: Pool, index: Any, num_layers: int) -> Any:
    """Returns the index of the first page of layer `index` in its group's pool."""
    return 0 if pages is None else index * (pages.num_pages // num_layers)


def write_tokens(cache: KVCache, batch: Batch) -> jax.Array:
    """Returns the cache's token ids with the batch's at their slots."""
    page_size = cache.tokens.shape[1]
    pages, offsets = batch.slot_mapping // page_size, batch.slot_mapping % page_size
    return cache.tokens.at[pages, offsets].set(batch.tokens, mode="drop")


def read_tokens(cache: KVCache, batch: Batch) -> jax.Array:
    """Returns the tokens of each row's context, i32[B, M * S], and PADDING_TOKEN past its kv_lens."""
    B, M = batch.block_tables.shape
    tokens = cache.tokens[batch.block_tables].reshape(B, M * cache.tokens.shape[1])
    is_inside = jnp.arange(tokens.shape[1])[None, :] < batch.kv_lens[:, None]
    return jnp.where(is_inside, tokens, PADDING_TOKEN)


def move_tokens(cache: KVCache, sources: jax.Array, targets: jax.Array, *, config: ModelConfig) -> KVCache:
    """Returns the cache with the content of slots i32[n] copied to other slots i32[n], in every layer.

    All are read before any is written. A target past the pool is dropped. States do not move: a page
    has one for all its slots.
    """
    num_slots, page_size = cache.tokens.size, cache.tokens.shape[1]
    is_moved = targets < num_slots
    sources = jnp.where(is_moved, sources, 0)

    def in_layer(layer: Any, pool: Pool) -> Pool:
        offset = layer * num_slots
        return _move_slots(pool, sources + offset, jnp.where(is_moved, targets + offset, PADDING_SLOT))

    pairs = zip(cache.pools, config.stacks, strict=True)
    pools = tuple(jax.lax.fori_loop(0, stack.num_layers, in_layer, pool) for pool, stack in pairs)
    tokens = cache.tokens[sources // page_size, sources % page_size]
    tokens = cache.tokens.at[targets // page_size, targets % page_size].set(tokens, mode="drop")
    return KVCache(pools=pools, tokens=tokens)


def _move_slots(pool: Pool, sources: jax.Array, targets: jax.Array) -> Pool:
    if pool is None or isinstance(pool, States):
        return pool
    if isinstance(pool, LatentPages):
        return move_latents(pool, sources, targets)
    return move_slots(pool, sources, targets)


def extract_pages(cache: KVCache, page_ids: Any, *, config: ModelConfig) -> PageBundle:
    """Returns a copy of pages i32[W], in every layer. An id past the pool gives a page of zeros."""
    page_ids = jnp.asarray(page_ids)
    pairs = zip(cache.pools, config.stacks, strict=True)
    pools = tuple(take_pages(pool, _in_layers(page_ids, pool, stack.num_layers)) for pool, stack in pairs)
    return PageBundle(pools=pools, tokens=cache.tokens.at[page_ids].get(mode="fill", fill_value=0))


def insert_pages(cache: KVCache, page_ids: Any, bundle: PageBundle, *, config: ModelConfig) -> KVCache:
    """Returns the cache with a bundle's W pages on pages i32[W], in every layer; an id past the pool is dropped.

    The bundle may come from other pages and from a pool of another size; page size, heads and dtype must be the same.
    """
    page_ids = jnp.asarray(page_ids)
    triples = zip(cache.pools, bundle.pools, config.stacks, strict=True)
    pools = tuple(put_pages(pool, _in_layers(page_ids, pool, stack.num_layers), new) for pool, new, stack in triples)
    return KVCache(pools=pools, tokens=cache.tokens.at[page_ids].set(bundle.tokens, mode="drop"))


def turn_pages(cache: KVCache, sources: Any, targets: Any, num_positions: Any, *, config: ModelConfig) -> KVCache:
    """Returns the cache with pages i32[W] copied to others, their keys rotated to `num_positions` i32[] later."""
    bundle = extract_pages(cache, sources, config=config)
    pairs = zip(bundle.pools, config.stacks, strict=True)
    rotated = tuple(_turned(pages, stack.layer.rope, num_positions) for pages, stack in pairs)
    return insert_pages(cache, targets, replace(bundle, pools=rotated), config=config)


def _turned(pages: Pool, rope: Rope | None, num_positions: Any) -> Pool:
    if rope is None or pages is None or isinstance(pages, States):
        return pages
    angles = turning_angles(jnp.asarray(num_positions)[None], rope)

    def turn(keys: jax.Array) -> jax.Array:
        return rotary_embedding(keys, *angles, is_interleaved=rope.is_interleaved)

    return map_rotary_keys(pages, turn) if isinstance(pages, LatentPages) else map_keys(pages, turn)


def _in_layers(page_ids: Any, pool: Pool, num_layers: int) -> Any:
    """Returns the indices of pages i32[W] in a pool of n layers, i32[n * W]; ids past the pool stay past it."""
    if pool is None:
        return page_ids
    per_layer = pool.num_pages // num_layers
    offsets = jnp.arange(num_layers, dtype=jnp.int32)[:, None] * per_layer
    # Past the last page of its layer an id would be another layer's page.
    return jnp.where(page_ids[None] < per_layer, offsets + page_ids[None], pool.num_pages).reshape(-1)
