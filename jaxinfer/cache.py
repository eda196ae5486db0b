"""The paged KV cache: one flat pool of pages per layer group, and its pure verbs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.config import CacheConfig, ModelConfig
from kernels_pallas.paged_attention import Pages, abstract_pages

# Slots of a pool are counted in int32, and padding is written just past the last.
MAX_SLOTS = 2**31 - 1


@struct.dataclass
class KVCache:
    """All pages of all layers. Steps take it donated and return its successor; its one owner rebinds it.

    One pool per layer group: layer i of n keeps page p of a request at index i * P + p.
    """

    groups: tuple[Pages, ...]


def init_cache(config: ModelConfig, cache_config: CacheConfig, layout: str | None = None) -> KVCache:
    """Returns an empty cache. What unused slots hold never reaches a result, so zeros are as good as anything."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract_cache(config, cache_config, layout))


def abstract_cache(config: ModelConfig, cache_config: CacheConfig, layout: str | None = None) -> KVCache:
    """Returns the cache as `jax.ShapeDtypeStruct`s; `layout` names that of another platform than the one at hand."""

    def group(num_layers: int) -> Pages:
        num_pages = num_layers * cache_config.num_pages
        if num_pages * cache_config.page_size > MAX_SLOTS:
            raise ValueError(
                f"{num_layers} layers of {cache_config.num_pages} pages of {cache_config.page_size} slots are more"
                f" slots than a group may have ({MAX_SLOTS}); use fewer pages or smaller layer_groups"
            )
        return _abstract_pages(config, cache_config, num_pages, layout)

    return KVCache(groups=tuple(group(n) for n in config.layer_groups))


def page_bytes(config: ModelConfig, cache_config: CacheConfig, layout: str | None = None) -> int:
    """Returns what one page takes over all layers, keys and values together."""
    arrays = _abstract_pages(config, cache_config, 1, layout).arrays
    return config.num_layers * sum(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in arrays)


def _abstract_pages(config: ModelConfig, cache_config: CacheConfig, num_pages: int, layout: str | None) -> Pages:
    return abstract_pages(
        num_pages, cache_config.page_size, config.num_kv_heads, config.head_dim, cache_config.dtype, layout
    )


def layer_offset(pages: Pages, index: Any, num_layers: int) -> Any:
    """Returns where the pages of layer `index` of its group begin."""
    return index * (pages.num_pages // num_layers)
