"""The pool of latents: one array [P, S, R + r], a latent of R numbers and a rotated key of r per token.

It is the same on every platform and unpadded. `take_pages` and `put_pages` of `kernels_pallas.paged_attention` fit it,
since pages are its first axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentPages:
    """A pool of pages of latents. A step takes it donated and returns its successor."""

    array: Any  # [P, S, R + r]
    latent_size: int = field(metadata={"static": True})  # R

    @property
    def num_pages(self) -> int:
        return self.array.shape[0]

    @property
    def page_size(self) -> int:
        """The number of token slots of each page."""
        return self.array.shape[1]

    @property
    def width(self) -> int:
        """The numbers per token."""
        return self.array.shape[2]

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def abstract_latents(num_pages: int, page_size: int, latent_size: int, rotary_size: int, dtype: Any) -> LatentPages:
    """Returns a pool as a `jax.ShapeDtypeStruct`."""
    shape = (num_pages, page_size, latent_size + rotary_size)
    return LatentPages(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), latent_size)


def write_latents(pages: LatentPages, latents: jax.Array, slots: jax.Array) -> LatentPages:
    """Returns the pool with latents and keys [n, R + r] at slots i32[n] (page * S + offset); past it is dropped."""
    S = pages.page_size
    return replace(pages, array=pages.array.at[slots // S, slots % S].set(latents.astype(pages.dtype), mode="drop"))


def read_slots(pages: LatentPages, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys [n, 1, R + r] and values [n, 1, R] of slots i32[n]; a value is the latent in its key."""
    found = pages.array.at[slots // pages.page_size, slots % pages.page_size].get(mode="clip")[:, None]
    return found, found[..., : pages.latent_size]


def read_pages(pages: LatentPages, page_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys [n, 1, R + r, S] and values [n, 1, S, R] of pages i32[n]."""
    found = pages.array[page_ids][:, None]
    # Left to itself, the compiler may turn the operand of a product in one step and not in another.
    keys = jax.lax.optimization_barrier(found.swapaxes(2, 3))
    return keys, found[..., : pages.latent_size]


def move_latents(pages: LatentPages, sources: jax.Array, targets: jax.Array) -> LatentPages:
    """Returns the pool with the content of slots i32[n] copied to other slots i32[n]; past the pool is dropped.

    All are read before any is written.
    """
    return write_latents(pages, read_slots(pages, sources)[0][:, 0], targets)


def map_rotary_keys(pages: LatentPages, change: Callable[[jax.Array], jax.Array]) -> LatentPages:
    """Returns the pool with change(keys [P * S, 1, r]) in the place of its rotated keys, those of a page in a row."""
    P, S, R = pages.num_pages, pages.page_size, pages.latent_size
    keys = change(pages.array[..., R:].reshape(P * S, 1, -1)).reshape(P, S, -1)
    return replace(pages, array=pages.array.at[..., R:].set(keys.astype(pages.dtype)))
