"""The paged KV cache: one flat pool of pages per layer group, and its pure verbs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.batch import PADDING_SLOT, Batch
from jaxinfer.config import CacheConfig, ModelConfig
from kernels_pallas.paged_attention import page_size, pool_shapes
from kernels_pallas.paged_attention import write_kv as write_pages


@struct.dataclass
class GroupCache:
    """Keys and values of one group of n layers. Layer i of the group keeps page p of a request at index i * P + p."""

    k: Any  # pages of n * P, in the layout of kernels_pallas.paged_attention
    v: Any


@struct.dataclass
class KVCache:
    """All pages of all layers. Steps take it donated and return its successor; its one owner rebinds it."""

    groups: tuple[GroupCache, ...]


def init_cache(config: ModelConfig, cache_config: CacheConfig) -> KVCache:
    """Returns an empty cache. What unused slots hold never reaches a result, so zeros are as good as anything."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract_cache(config, cache_config))


def abstract_cache(config: ModelConfig, cache_config: CacheConfig) -> KVCache:
    """Returns the cache as `jax.ShapeDtypeStruct`s."""

    def group(num_layers: int) -> GroupCache:
        num_pages = num_layers * cache_config.num_pages
        if num_pages * cache_config.page_size >= PADDING_SLOT:
            raise ValueError(
                f"{num_layers} layers of {cache_config.num_pages} pages of {cache_config.page_size} slots are more"
                f" slots than a group may have ({PADDING_SLOT}); use fewer pages or smaller layer_groups"
            )
        shapes = pool_shapes(num_pages, cache_config.page_size, config.num_kv_heads, config.head_dim)
        return GroupCache(*(jax.ShapeDtypeStruct(shape, cache_config.dtype) for shape in shapes))

    return KVCache(groups=tuple(group(n) for n in config.layer_groups))


def page_bytes(config: ModelConfig, cache_config: CacheConfig) -> int:
    """Returns what one page takes over all layers, keys and values together."""
    shapes = pool_shapes(1, cache_config.page_size, config.num_kv_heads, config.head_dim)
    return config.num_layers * sum(map(math.prod, shapes)) * jnp.dtype(cache_config.dtype).itemsize


def at_layer(cache: GroupCache, index: jax.Array, num_layers: int, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the batch's slot mapping i32[T] and block tables i32[B, M] in the pool of layer `index` of its group."""
    num_pages = cache.k.shape[0] // num_layers
    slots = batch.slot_mapping + index * (num_pages * page_size(cache.v))
    return slots, batch.block_tables + index * num_pages


def write_kv(cache: GroupCache, k: jax.Array, v: jax.Array, slots: jax.Array) -> GroupCache:
    """Returns the cache with keys and values [T, K, H] of one layer at slots i32[T], the layer's offset included."""
    return GroupCache(*write_pages(cache.k, cache.v, k, v, slots))
