"""The paged KV cache: one flat pool of pages per stack of mixers, and its pure verbs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.config import CacheConfig
from jaxinfer.model.batch import PADDING_SLOT, PADDING_TOKEN, Batch
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.layers import PoolSize
from jaxinfer.model.components.rope import rotary_embedding, turning_angles
from jaxinfer.model.config import MixerStack, ModelConfig
from jaxinfer.model.layer_parts import Mixer, Pool, functions_of, has_rotated_norms
from jaxinfer.model.stages import in_stages
from jaxinfer.validation import require, require_name
from kernels_pallas.mesh_axes import HEADS_AXES, STAGES_AXIS, dividing_axes
from kernels_pallas.paged_attention import Pages, head_specs, put_pages, take_pages
from kernels_pallas.paged_attention.call import token_rows
from kernels_pallas.paged_attention.layout import LAYOUTS

# Slots of a pool are counted in int32, and padding is written just past the last.
MAX_SLOTS = 2**31 - 1


@struct.dataclass
class KVCache:
    """All pages of all layers. A step takes it donated and returns its successor.

    One pool per stack of mixers (`ModelConfig.mixer_stacks`): layer i of n keeps page p of a request at index
    i * P + p. A page holds its tokens' ids beside their keys and values: penalties and n-grams need the tokens of a
    request so far, and here these are right after any chunking, preemption or sharing of pages.
    """

    pools: tuple[Pool, ...]
    tokens: Any  # i32[P, S]
    num_draft_states: int = struct.field(pytree_node=False, default=0)  # at the end of each layer's states


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

    num_bounded_kinds = len(config.page_kinds) - 1
    num_bounded = cache_config.num_bounded_pages or (cache_config.num_pages,) * num_bounded_kinds
    is_right = f"{num_bounded_kinds} numbers of pages, for this model's bounded kinds of pages, or none"
    require(len(num_bounded) == num_bounded_kinds, "num_bounded_pages", cache_config.num_bounded_pages, is_right)
    if (config.num_exact is None) == (cache_config.dtype == "int2"):
        raise ValueError(
            f"dtype={cache_config.dtype!r} of a CacheConfig is not for a model with num_exact={config.num_exact}; give"
            ' "int2" to a model from `with_open_pages`, and another dtype to all others'
        )

    def pool(stack: MixerStack) -> Pool:
        mixer, num_layers, kind, num_exact = stack
        per_layer = (cache_config.num_pages, *num_bounded)[kind]
        per_layer += cache_config.num_draft_states if config.page_kinds[kind].is_state else 0
        num_pages = num_layers * per_layer
        if num_pages * cache_config.page_size > MAX_SLOTS:
            raise ValueError(
                f"{num_layers} layers of {per_layer} pages of {cache_config.page_size} slots are more"
                f" slots than a pool may have ({MAX_SLOTS}); use fewer pages (num_pages)"
            )
        dtype = cache_config.dtype if num_exact is None else cache_config.open_dtype
        size = PoolSize(num_pages, cache_config.page_size, dtype, layout)
        return functions_of(mixer).abstract_pages(mixer, size)

    tokens = jax.ShapeDtypeStruct((cache_config.num_pages, cache_config.page_size), jnp.int32)
    pools = tuple(map(pool, config.mixer_stacks))
    return KVCache(pools=pools, tokens=tokens, num_draft_states=cache_config.num_draft_states)


def cache_shardings(cache: KVCache, mesh: Mesh, *, config: ModelConfig, kind: int | None = None) -> KVCache:
    """Returns a `NamedSharding` per array: layers over stages and KV heads over HEADS_AXES, as far as they divide them.

    All else is whole.
    `kind`: that of the pages of a bundle, if it has pages of one kind only.
    """

    def specs(pool: Pool, stack: MixerStack) -> Pool:
        split_heads, own = functions_of(stack.mixer).split_heads, jax.tree.map(lambda _: PartitionSpec(None), pool)
        if split_heads is not None and config.num_exact is None:
            assert isinstance(pool, Pages)
            own = split_heads(pool, dividing_axes(pool.num_kv_heads, mesh, HEADS_AXES))
        of_layers = dividing_axes(stack.num_layers, mesh, (STAGES_AXIS,))
        return own if of_layers is None else jax.tree.map(lambda spec: PartitionSpec(of_layers, *spec[1:]), own)

    pools = tuple(map(specs, cache.pools, _stacks_of(config, kind)))
    placement = replace(cache, pools=pools, tokens=None if cache.tokens is None else PartitionSpec())
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), placement)


class HeadCopies(NamedTuple):
    """The copies of KV heads in an array of pages: on one axis each head stands several times, one after another."""

    axis: int
    num_heads: int
    num_copies: int

    def without(self, array: np.ndarray) -> np.ndarray:
        """Returns the array with each head once."""
        return self._apart(array, self.num_copies)[(slice(None),) * (self.axis + 1) + (slice(1),)].reshape(
            self.shape_without(array.shape)
        )

    def made(self, array: np.ndarray) -> np.ndarray:
        """Returns an array of each head once with its copies."""
        copied = self._apart(array, 1).repeat(self.num_copies, self.axis + 1)
        return copied.reshape(*array.shape[: self.axis], -1, *array.shape[self.axis + 1 :])

    def shape_without(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of an array of this shape with each head once."""
        return (*shape[: self.axis], shape[self.axis] // self.num_copies, *shape[self.axis + 1 :])

    def _apart(self, array: np.ndarray, num_copies: int) -> np.ndarray:
        # A head may have several entries: a plane of keys, then one of values.
        before, after = array.shape[: self.axis], array.shape[self.axis + 1 :]
        return array.reshape(*before, self.num_heads, num_copies, -1, *after)


def head_copies(cache: KVCache, config: ModelConfig, kind: int | None = None) -> list[HeadCopies | None]:
    """Returns the copies of KV heads in each array of a cache, None for an array without; kind as `cache_shardings`."""
    copies: list[HeadCopies | None] = []
    for pool, stack in zip(cache.pools, _stacks_of(config, kind), strict=True):
        mixer = stack.mixer
        if isinstance(mixer, Attention) and mixer.num_kv_copies > 1:
            assert isinstance(pool, Pages)
            specs, heads = jax.tree.leaves(head_specs(pool, "heads")), (mixer.num_kv_heads, mixer.num_kv_copies)
            copies += [HeadCopies([*spec].index("heads"), *heads) for spec in specs]
        else:
            copies += [None] * len(jax.tree.leaves(pool))
    return copies + [None] * len(jax.tree.leaves(cache.tokens))


def page_bytes(
    config: ModelConfig,
    cache_config: CacheConfig,
    layout: str | None = None,
    *,
    kind: int | None = None,
    mesh: Mesh | None = None,
) -> int:
    """Returns the bytes of one page: keys and values, latents or a state, and token ids.

    `kind` takes the layers of a kind of pages only. With a `mesh`, the bytes are those on each of its devices.
    """
    arrays = page_arrays(config, cache_config, layout, kind=kind, mesh=mesh)
    return sum(array.size * array.dtype.itemsize for array in arrays)


def page_arrays(
    config: ModelConfig,
    cache_config: CacheConfig,
    layout: str | None = None,
    *,
    kind: int | None = None,
    mesh: Mesh | None = None,
) -> list[jax.ShapeDtypeStruct]:
    """Returns the parts of one page in each array of a cache; the arguments are those of `page_bytes`."""
    one_page = abstract_cache(
        config, replace(cache_config, num_pages=1, num_bounded_pages=(), num_draft_states=0), layout
    )
    part = _part_of(one_page, config, kind)
    shapes = jax.tree.map(lambda array: array.shape, part)
    if mesh is not None:
        at = cache_shardings(part, mesh, config=config, kind=kind)
        shapes = jax.tree.map(lambda array, sharding: sharding.shard_shape(array.shape), part, at)
    return jax.tree.leaves(jax.tree.map(lambda array, shape: jax.ShapeDtypeStruct(shape, array.dtype), part, shapes))


def _stacks_of(config: ModelConfig, kind: int | None) -> list[MixerStack]:
    """Returns the stacks of mixers with pages of a kind; None is all."""
    return [stack for stack in config.mixer_stacks if kind in (None, stack.kind)]


def _part_of(cache: KVCache, config: ModelConfig, kind: int | None) -> KVCache:
    """Returns the cache with the pools of a kind only, and token ids with the first kind; None is all of it."""
    pairs = zip(cache.pools, config.mixer_stacks, strict=True)
    pools = tuple(pool for pool, stack in pairs if kind in (None, stack.kind))
    return KVCache(pools=pools, tokens=None if kind else cache.tokens)


def layer_offset(pages: Pool, index: Any, num_layers: int) -> Any:
    """Returns the index of the first page of layer `index` in its stack's pool."""
    return index * (pages.num_pages // num_layers)


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


def move_tokens(
    cache: KVCache,
    batch: Batch,
    sources: jax.Array,
    is_moved: jax.Array,
    *,
    config: ModelConfig,
    mesh: Mesh | None = None,
) -> KVCache:
    """Returns the cache with the slot of each token of a batch where `is_moved` given the content of another's slot.

    sources i32[T]: index in the batch of that other token. All slots are read before any is written. States stay: a
    page has one for all its slots. `mesh`: the mesh that the cache is split over, if any.
    """
    page_size = cache.tokens.shape[1]
    if config.num_exact is not None:
        raise NotImplementedError("tokens in rounded pages of 2 bits cannot be moved; verify chains of drafts instead")

    slots = [slots_of_kind(batch, kind, page_size) for kind in range(len(config.page_kinds))]

    def moved(pool: Pool, stack: MixerStack) -> Pool:
        mixer, num_layers, kind, _ = stack
        move_slots = functions_of(mixer).move_slots
        if move_slots is None:
            return pool
        from_slots = jnp.where(is_moved, slots[kind][sources], 0)

        def in_layers(pool: Any, num_layers: int, from_slots: Any, to_slots: Any, is_moved: Any) -> Any:
            per_layer = pool.num_pages // num_layers * page_size

            def in_layer(layer: Any, pool: Any) -> Any:
                offset = layer * per_layer
                targets = jnp.where(is_moved, to_slots + offset, PADDING_SLOT)
                return move_slots(pool, from_slots + offset, targets)

            return jax.lax.fori_loop(0, num_layers, in_layer, pool)

        return in_stages(in_layers, mesh, pool, num_layers, from_slots, slots[kind], is_moved)

    pools = tuple(map(moved, cache.pools, config.mixer_stacks))
    old, new = jnp.where(is_moved, slots[0][sources], 0), jnp.where(is_moved, slots[0], PADDING_SLOT)
    tokens = cache.tokens[old // page_size, old % page_size]
    tokens = cache.tokens.at[new // page_size, new % page_size].set(tokens, mode="drop")
    return replace(cache, pools=pools, tokens=tokens)


def slots_of_kind(batch: Batch, kind: int, page_size: int) -> jax.Array:
    """Returns the slot of each token in the pages of a kind, i32[T]; PADDING_SLOT on padding."""
    if kind == 0 or not batch.bounded_tables:
        return batch.slot_mapping
    rows = token_rows(batch.cu_q_lens, batch.tokens.shape[0])
    # Tokens of a draft tree share positions, so count from the end of the row.
    places = batch.kv_lens[rows] - batch.cu_q_lens[rows + 1] + jnp.arange(batch.tokens.shape[0])
    slots = batch.tables_of(kind)[rows, places // page_size] * page_size + places % page_size
    return jnp.where(batch.slot_mapping < PADDING_SLOT, slots, PADDING_SLOT)


def extract_pages(cache: KVCache, page_ids: Any, *, config: ModelConfig, kind: int | None = None) -> PageBundle:
    """Returns a copy of pages i32[W] of a kind, in each of its layers; None takes these pages of all kinds.

    An id past the pool gives a page of zeros.
    """
    page_ids = jnp.asarray(page_ids)
    part = _part_of(cache, config, kind)
    pairs = zip(part.pools, _stacks_of(config, kind), strict=True)
    pools = tuple(_in_layers(take_pages, stack.num_layers, page_ids, pool) for pool, stack in pairs)
    tokens = None if part.tokens is None else part.tokens.at[page_ids].get(mode="fill", fill_value=0)
    return PageBundle(pools=pools, tokens=tokens)


def insert_pages(
    cache: KVCache, page_ids: Any, bundle: PageBundle, *, config: ModelConfig, kind: int | None = None
) -> KVCache:
    """Returns the cache with a bundle's W pages on pages i32[W] of its kind; an id past the pool is dropped.

    The bundle may come from other pages and from a pool of another size; page size, heads and dtype must be the same.
    """
    page_ids = jnp.asarray(page_ids)
    new = iter(bundle.pools)

    def put(pool: Pool, stack: MixerStack) -> Pool:
        if kind not in (None, stack.kind):
            return pool
        return _in_layers(put_pages, stack.num_layers, page_ids, pool, next(new))

    pools = tuple(map(put, cache.pools, config.mixer_stacks))
    tokens = cache.tokens if bundle.tokens is None else cache.tokens.at[page_ids].set(bundle.tokens, mode="drop")
    return replace(cache, pools=pools, tokens=tokens)


def turn_pages(cache: KVCache, sources: Any, targets: Any, num_positions: Any, *, config: ModelConfig) -> KVCache:
    """Returns the cache with pages i32[W] copied to others, their keys rotated to `num_positions` i32[] later."""
    if config.num_exact is not None:
        raise NotImplementedError("keys of 2 bits would be rounded at each change; use a wider type")
    if has_rotated_norms(config.mixers):
        raise NotImplementedError("keys that get a norm after their rotation cannot be turned; leave out sinks")
    bundle = extract_pages(cache, sources, config=config)
    pairs = zip(bundle.pools, config.mixer_stacks, strict=True)
    rotated = tuple(_turned(pages, stack.mixer, num_positions) for pages, stack in pairs)
    return insert_pages(cache, targets, replace(bundle, pools=rotated), config=config)


def _turned(pages: Pool, mixer: Mixer, num_positions: Any) -> Pool:
    rope, map_keys = mixer.rope, functions_of(mixer).map_keys
    if rope is None or map_keys is None:
        return pages
    angles = turning_angles(jnp.asarray(num_positions)[None], rope)

    def turn(keys: jax.Array) -> jax.Array:
        return rotary_embedding(keys, *angles, is_interleaved=rope.is_interleaved)

    return map_keys(pages, turn)


def _in_layers(verb: Callable[..., Pool], num_layers: int, page_ids: Any, *pools: Pool) -> Pool:
    """Returns verb(pool, page_ids, *others) of each of n layers, one after another, for pools of all of them.

    No index passes a layer, so that devices may share the layers.
    """

    def apart(array: Any) -> Any:
        return array.reshape(num_layers, -1, *array.shape[1:])

    of_layers = jax.vmap(lambda pool, *others: verb(pool, page_ids, *others))(*jax.tree.map(apart, pools))
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), of_layers)
