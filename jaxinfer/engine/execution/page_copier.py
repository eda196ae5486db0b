"""Copies pages out of the cache, into it and within it, by a few compiled functions; contents are bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.execution.executable_cache import compile_or_load
from jaxinfer.engine.kv_cache.page_transfers import Content
from jaxinfer.model.cache import KVCache, PageBundle, extract_pages, head_copies, insert_pages, turn_pages
from jaxinfer.model.config import ModelConfig
from jaxinfer.parallel.placement import DEFAULT_DEVICE, Placement
from jaxinfer.plan.memory import step_bytes
from jaxinfer.plan.step_shapes import fitting_size

LEAF_WEIGHT = 31  # odd, so that a checksum keeps all bits of earlier arrays'
NO_PAGE = 2**30  # padding id past every pool: reads give zeros, writes are dropped


class SealedBundle(NamedTuple):
    """Contents of pages on devices, with their checksum."""

    bundle: PageBundle
    checksum: jax.Array  # u32[2]
    width: int  # the pages that it has room for

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in jax.tree.leaves(self.bundle))


class PageCopier:
    """Copies pages of one kind of a cache. The constructor compiles everything, so no request waits for it."""

    def __init__(
        self,
        cache: KVCache,
        config: ModelConfig,
        widths: Sequence[int],
        num_sinks: int = 0,
        kind: int = 0,
        placement: Placement = DEFAULT_DEVICE,
        hand_over_widths: Sequence[int] = (),
    ) -> None:
        """Compiles the copies of pages of a kind. `cache` may be abstract.

        Over a mesh, a copy on a device has the device's heads, and the content on the host has all of them, each once.
        `widths`: the numbers of pages that one call can copy, ascending. `num_sinks`: the number of sink pages that one
        call of `turn` rotates; 0 if sinks are not used. `hand_over_widths`: as `widths`, of `seal` and `unseal`.
        """
        cache, replicated = placement.cache(config, cache), placement.replicated
        at = jax.tree.map(lambda array: array.sharding, cache) if placement.mesh is not None else None
        insert = jax.jit(insert_pages, static_argnames=("config", "kind"), donate_argnames="cache", out_shardings=at)
        statics: dict[str, Any] = {"config": config, "kind": kind}
        self._widths, self.num_sinks = tuple(widths), num_sinks
        self._bundles: dict[int, PageBundle] = {}  # abstract
        self._extract: dict[int, jax.stages.Compiled] = {}
        self._insert: dict[int, jax.stages.Compiled] = {}
        self._seal: dict[int, jax.stages.Compiled] = {}
        self._unseal: dict[int, jax.stages.Compiled] = {}
        self._placement = placement
        for width in sorted({*widths, *hand_over_widths}):
            ids = replicated(np.zeros((width,), np.int32))
            bundle = jax.eval_shape(functools.partial(extract_pages, **statics), cache, ids)
            self._bundles[width] = bundle = placement.cache(config, bundle, kind)
            of_bundle = jax.tree.map(lambda array: array.sharding, bundle) if placement.mesh is not None else None
            if width in widths:
                extract = jax.jit(extract_pages, static_argnames=("config", "kind"), out_shardings=of_bundle)
                self._extract[width] = compile_or_load(extract, cache, ids, **statics)
                self._insert[width] = compile_or_load(insert, cache, ids, bundle, **statics)
            if width in hand_over_widths:
                checksum = replicated(np.zeros((2,), np.uint32))
                shardings: dict[str, Any] = {"static_argnames": ("config", "kind")}
                seal = jax.jit(extract_sealed, out_shardings=(of_bundle, placement.whole), **shardings)
                shardings["donate_argnames"] = "cache"
                unseal = jax.jit(insert_unsealed, out_shardings=(placement.whole, at), **shardings)
                self._seal[width] = compile_or_load(seal, cache, ids, **statics)
                self._unseal[width] = compile_or_load(unseal, cache, ids, bundle, checksum, **statics)
        self._copies = head_copies(self._bundles[self.max_width], config, kind)
        self._turn: jax.stages.Compiled | None = None
        if num_sinks:
            turn = jax.jit(turn_pages, static_argnames="config", donate_argnames="cache", out_shardings=at)
            ids = replicated(np.zeros((num_sinks,), np.int32))
            self._turn = compile_or_load(turn, cache, ids, ids, replicated(np.int32(0)), config=config)

    @property
    def num_executables(self) -> int:
        of_widths = self._extract, self._insert, self._seal, self._unseal
        return sum(map(len, of_widths)) + (self._turn is not None)

    @property
    def step_bytes(self) -> int:
        """Returns the bytes that copies need on the device beside the cache."""
        ids = np.zeros((self.max_width,), np.int32)
        inserted = step_bytes(self._insert[self.max_width], (ids, self._bundles[self.max_width]))
        rotated_sinks = 0 if self._turn is None else step_bytes(self._turn, ())
        needed = [step_bytes(self._extract[self.max_width], (ids,)), inserted, rotated_sinks]
        if self._seal:
            width = max(self._seal)
            needed += [step_bytes(self._seal[width], (np.zeros((width,), np.int32),))]
            needed += [step_bytes(self._unseal[width], (self._bundles[width],))]
        return max(needed)

    @property
    def max_width(self) -> int:
        return self._widths[-1]

    def duplicate(self, cache: KVCache, source: int, target: int) -> KVCache:
        """Returns the cache with page `source` copied to page `target`; donates the given cache."""
        width = self._widths[0]
        bundle = self._extract[width](cache, self._ids([source], width))
        return self._insert[width](cache, self._ids([target], width), bundle)

    def turn(self, cache: KVCache, sources: Sequence[int], targets: Sequence[int], num_positions: int) -> KVCache:
        """Returns the cache with `num_sinks` pages copied and their keys rotated by `num_positions` (RoPE).

        Donates the given cache.
        """
        assert self._turn is not None
        return self._turn(cache, np.asarray(sources, np.int32), np.asarray(targets, np.int32), np.int32(num_positions))

    def read(self, cache: KVCache, pages: Sequence[int]) -> list[Content]:
        """Returns the content of each page, u8[page_bytes]."""
        contents = []
        for some, width in self._split(pages):
            bundle = jax.device_get(self._extract[width](cache, self._ids(some, width)))
            pairs = zip(jax.tree.leaves(bundle), self._copies, strict=True)
            arrays = [_by_page(array if copies is None else copies.without(array), width) for array, copies in pairs]
            for i in range(len(some)):
                contents.append(np.concatenate([array[:, i].reshape(-1).view(np.uint8) for array in arrays]))
        return contents

    def insertion(self, pages: Sequence[int], contents: Sequence[Content]) -> Callable[[KVCache], KVCache]:
        """Lays out one content per page, at most `max_width`, and returns the function that writes them to a cache.

        That function donates the cache that it is given.
        """
        ((some, width),) = self._split(pages)
        ids, bundle = self._ids(some, width), self._bundle(contents, width)
        return lambda cache: self._insert[width](cache, ids, bundle)

    def seal(self, cache: KVCache, pages: Sequence[int]) -> SealedBundle:
        """Returns the contents of a run of `hand_over_runs`, on their devices, with their checksum."""
        width = fitting_size(self._seal, len(pages))
        bundle, checksum = self._seal[width](cache, self._ids(pages, width))
        return SealedBundle(bundle, checksum, width)

    def hand_over_runs(self, count: int) -> Iterator[slice]:
        """Yields the places of pages that are handed over together, so that no bundle is more than half empty."""
        start = 0
        while rest := count - start:
            size = min(rest, max(width for width in self._seal if width <= 2 * rest))
            yield slice(start, start + size)
            start += size

    def brought(self, sealed: SealedBundle) -> SealedBundle:
        """Returns a bundle of a copier of another replica on the devices of this one."""
        at = jax.tree.map(lambda leaf: leaf.sharding, self._bundles[sealed.width])
        return sealed._replace(bundle=jax.device_put(sealed.bundle, at), checksum=self._placement.put(sealed.checksum))

    def unseal(self, cache: KVCache, pages: Sequence[int], sealed: SealedBundle) -> tuple[jax.Array, KVCache]:
        """Writes a bundle on the devices of the cache to pages; donates the given cache.

        Returns True on the device if the bundle has its checksum, and the cache.
        """
        ids = self._ids(pages, sealed.width)
        return self._unseal[sealed.width](cache, ids, sealed.bundle, sealed.checksum)

    def _bundle(self, contents: Sequence[Content], width: int) -> PageBundle:
        leaves, structure = jax.tree.flatten(self._bundles[width])
        arrays, start = [], 0
        for leaf, copies in zip(leaves, self._copies, strict=True):
            array = np.zeros(leaf.shape if copies is None else copies.shape_without(leaf.shape), leaf.dtype)
            by_page = _by_page(array, width)
            end = start + by_page[:, 0].nbytes
            for i, content in enumerate(contents):
                by_page[:, i] = content[start:end].view(leaf.dtype).reshape(by_page[:, i].shape)
            arrays.append(array if copies is None else copies.made(array))
            start = end
        return jax.tree.unflatten(structure, arrays)

    def _split(self, pages: Sequence[int]) -> Iterator[tuple[Sequence[int], int]]:
        """Yields the pages in runs of at most `max_width`, each with the smallest width that holds the run."""
        for start in range(0, len(pages), self.max_width):
            some = pages[start : start + self.max_width]
            yield some, fitting_size(self._widths, len(some))

    def _ids(self, pages: Sequence[int], width: int) -> np.ndarray:
        return np.array([*pages, *[NO_PAGE] * (width - len(pages))], np.int32)


def checksum(bundle: PageBundle) -> jax.Array:
    """Returns u32[2]: the sum of all numbers' bits modulo 2**32, and the sum in which each place has another weight.

    A changed number changes the first sum, and the second too, because its weight is odd; swapped numbers change the
    second. Sums of integers are the same in any order, so devices may share them.
    """
    sums = jnp.zeros((2,), jnp.uint32)
    for array in jax.tree.leaves(bundle):
        words = array
        if not jnp.issubdtype(array.dtype, jnp.integer):
            words = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
        words, weights = words.astype(jnp.uint32), jnp.ones(array.shape, jnp.uint32)
        for axis in range(array.ndim):
            stride = np.uint32(2 * math.prod(array.shape[axis + 1 :]) % 2**32)
            weights += jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * stride
        parts = [jnp.sum(words, dtype=jnp.uint32), jnp.sum(words * weights, dtype=jnp.uint32)]
        sums = sums * np.uint32(LEAF_WEIGHT) + jnp.stack(parts)
    return sums


def extract_sealed(cache: KVCache, page_ids: Any, *, config: ModelConfig, kind: int) -> tuple[PageBundle, jax.Array]:
    """Returns `extract_pages` of pages i32[W], and its checksum."""
    bundle = extract_pages(cache, page_ids, config=config, kind=kind)
    return bundle, checksum(bundle)


def insert_unsealed(
    cache: KVCache, page_ids: Any, bundle: PageBundle, expected: jax.Array, *, config: ModelConfig, kind: int
) -> tuple[jax.Array, KVCache]:
    """Returns True if a bundle has the checksum u32[2], and `insert_pages` of it on pages i32[W]."""
    is_intact = jnp.array_equal(checksum(bundle), expected)
    return is_intact, insert_pages(cache, page_ids, bundle, config=config, kind=kind)


def _by_page(array: np.ndarray, num_pages: int) -> np.ndarray:
    """Returns a view [n, W, size] of the pages of n layers [n * W, ...], stored layer by layer."""
    return array.reshape(array.shape[0] // num_pages, num_pages, -1)
