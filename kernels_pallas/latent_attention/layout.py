"""The pool of latents: one array [P, S, W], a latent of R numbers and a rotated key of r per token.

W is R + r, on a TPU rounded up to whole rows of lanes, which its memory would take anyway. `take_pages` and
`put_pages` of `kernels_pallas.paged_attention` fit it, since pages are its first axis. A pool of integers has two
scales a token beside them, for the latent and for the rotated key, whose numbers may differ much in size. Integers of 4
bits are packed two to a byte, so W is half of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.layout import (
    PACKED,
    TPU_LANES,
    as_held,
    as_stored,
    default_layout,
    from_integers,
    held_dtype,
    num_bytes_packed,
    pack_integers,
    pad_heads,
    require_wide,
    to_integers,
    to_stored,
    tpu_tile,
    unpack_integers,
)

Scales = tuple[jax.Array, ...]  # of latents and of rotated keys; () without


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentPages:
    """A pool of pages of latents. A step takes it donated and returns its successor."""

    array: Any  # [P, S, W], zeros after R + r
    latent_size: int = field(metadata={"static": True})  # R
    rotary_size: int = field(metadata={"static": True})  # r
    scales: tuple[Any, ...] | None = None  # f32[P, 1, S] of latents and of rotated keys; None without
    is_packed: bool = field(default=False, metadata={"static": True})  # a byte holds two integers of 4 bits

    @property
    def num_pages(self) -> int:
        return self.array.shape[0]

    @property
    def page_size(self) -> int:
        """The number of token slots of each page."""
        return self.array.shape[1]

    @property
    def width(self) -> int:
        """The numbers per token, R + r."""
        return self.latent_size + self.rotary_size

    @property
    def held_size(self) -> int:
        """The numbers of a token as the array holds them: bytes of two integers if the pool is packed."""
        return num_bytes_packed(self.width) if self.is_packed else self.width

    @property
    def dtype(self) -> Any:
        if self.is_packed:
            return PACKED
        return jnp.dtype(jnp.float8_e4m3fn) if self.array.dtype == jnp.uint8 else self.array.dtype


def abstract_latents(
    num_pages: int,
    page_size: int,
    latent_size: int,
    rotary_size: int,
    dtype: Any,
    layout: str | None = None,
    *,
    has_scales: bool = False,
) -> LatentPages:
    """Returns a pool as `jax.ShapeDtypeStruct`s; `layout` and `has_scales` are those of `abstract_pages`."""
    width, dtype = latent_size + rotary_size, jnp.dtype(dtype)
    layout = default_layout() if layout is None else layout
    is_packed = dtype == PACKED
    if is_packed:
        width, dtype, has_scales = num_bytes_packed(width), jnp.dtype(jnp.int8), True
    if layout == "tpu":
        tpu_tile(page_size, dtype)
        width = -(-width // TPU_LANES) * TPU_LANES
    shape = jax.ShapeDtypeStruct((num_pages, page_size, width), held_dtype(dtype, layout))
    scales = (jax.ShapeDtypeStruct((num_pages, 1, page_size), jnp.float32),) * 2 if has_scales else None
    return LatentPages(shape, latent_size, rotary_size, scales, is_packed)


def write_latents(pages: LatentPages, latents: jax.Array, slots: jax.Array) -> LatentPages:
    """Returns the pool with latents and keys [n, R + r] at slots i32[n] (page * S + offset), as it stores them.

    A slot past the pool is dropped.
    """
    return _put(pages, *stored_latents(pages, latents), slots)


def stored_latents(pages: LatentPages, latents: jax.Array) -> tuple[jax.Array, Scales]:
    """Returns latents and keys [n, R + r] as the pool stores them, and the scales f32[n] of each, if it has any."""
    if pages.scales is None:
        return to_stored(latents, None, pages.dtype), ()
    bits = 4 if pages.is_packed else 8
    parts = [to_integers(part, bits) for part in jnp.split(latents, [pages.latent_size], axis=-1)]
    integers, scales = zip(*parts, strict=True)
    stored = jnp.concatenate(integers, axis=-1)
    return pack_integers(stored) if pages.is_packed else stored, scales


def _put(pages: LatentPages, stored: jax.Array, scales: Scales, slots: jax.Array) -> LatentPages:
    S, new = pages.page_size, pad_heads(as_held(stored, pages.array), pages.array.shape[2])
    pages = replace(pages, array=pages.array.at[slots // S, slots % S].set(new, mode="drop"))
    if pages.scales is None:
        return pages
    pairs = zip(pages.scales, scales, strict=True)
    return replace(pages, scales=tuple(pool.at[slots // S, 0, slots % S].set(x, mode="drop") for pool, x in pairs))


def _take(pages: LatentPages, slots: jax.Array) -> tuple[jax.Array, Scales]:
    """Returns numbers [n, R + r] as stored at slots i32[n], or their bytes, and the scales f32[n] of each, if any."""
    S = pages.page_size
    found = as_stored(pages.array.at[slots // S, slots % S].get(mode="clip"))[:, : pages.held_size]
    return found, tuple(pool.at[slots // S, 0, slots % S].get(mode="clip") for pool in pages.scales or ())


def _worth(pages: LatentPages, stored: jax.Array, scales: Scales) -> jax.Array:
    """Returns numbers [..., R + r] of those as stored, f32 if they have scales f32[...]."""
    if not scales:
        return stored
    if pages.is_packed:
        stored = unpack_integers(stored)[..., : pages.width]
    parts = zip(jnp.split(stored, [pages.latent_size], axis=-1), scales, strict=True)
    return jnp.concatenate([from_integers(part, scale[..., None]) for part, scale in parts], axis=-1)


def read_slots(pages: LatentPages, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys [n, 1, R + r] and values [n, 1, R] of slots i32[n]; a value is the latent in its key."""
    found = _worth(pages, *_take(pages, slots))[:, None]
    return found, found[..., : pages.latent_size]


def read_pages(pages: LatentPages, page_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys [n, 1, R + r, S] and values [n, 1, S, R] of pages i32[n]."""
    found = as_stored(pages.array[page_ids])[:, None, :, : pages.held_size]
    found = _worth(pages, found, tuple(pool[page_ids] for pool in pages.scales or ()))
    # Left to itself, the compiler may turn the operand of a product in one step and not in another.
    keys = jax.lax.optimization_barrier(found.swapaxes(2, 3))
    return keys, found[..., : pages.latent_size]


def move_latents(pages: LatentPages, sources: jax.Array, targets: jax.Array) -> LatentPages:
    """Returns the pool with the content of slots i32[n] copied to other slots i32[n]; past the pool is dropped.

    All are read before any is written.
    """
    return _put(pages, *_take(pages, sources), targets)


def map_rotary_keys(pages: LatentPages, change: Callable[[jax.Array], jax.Array]) -> LatentPages:
    """Returns the pool with change(keys [P * S, 1, r]) in the place of its rotated keys, those of a page in a row.

    Raises:
      NotImplementedError: for a pool of 8 bits or fewer, in which each change would round the keys once more.
    """
    require_wide(pages)
    (P, S, _), place = pages.array.shape, slice(pages.latent_size, pages.width)
    keys = change(pages.array[..., place].reshape(P * S, 1, -1)).reshape(P, S, -1)
    return replace(pages, array=pages.array.at[..., place].set(keys.astype(pages.dtype)))
