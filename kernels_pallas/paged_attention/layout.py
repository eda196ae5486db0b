"""The physical layout of a page pool; nobody else indexes one.

Keys are `[P, K, H, S]` and values `[P, K, S, H]`: in both, the axis that a matrix product sums over lies before the one
it keeps, which is how CPU kernels stream a matrix. Keys stored as `[S, H]` take 1.8 times as long to multiply. H is the
head dimension rounded up to a multiple of LANES, with zeros: for the rest of a vector the CPU has other routines, which
add up in another order with other numbers of queries.
"""

import jax
import jax.numpy as jnp

LANES = 16


def pool_shapes(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[tuple, tuple]:
    """Returns the shapes of a pool of keys and of one of values."""
    H = -(-head_dim // LANES) * LANES
    return (num_pages, num_kv_heads, H, page_size), (num_pages, num_kv_heads, page_size, H)


def pad_heads(x: jax.Array, v_pages: jax.Array) -> jax.Array:
    """Returns x [..., head_dim] with zeros up to the head dimension of a pool."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, v_pages.shape[-1] - x.shape[-1])])


def page_size(v_pages: jax.Array) -> int:
    """Returns the number of slots of each page of a pool of values."""
    return v_pages.shape[2]


def write_kv(
    k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the pools with keys and values [T, K, H] at slots i32[T] (page * S + offset).

    A slot past the pool is dropped, which is how padding is written nowhere. A negative slot would wrap.
    """
    S = page_size(v_pages)
    pages, offsets = slots // S, slots % S
    k, v = pad_heads(k, v_pages), pad_heads(v, v_pages)
    k_pages = k_pages.at[pages, :, :, offsets].set(k.astype(k_pages.dtype), mode="drop")
    v_pages = v_pages.at[pages, :, offsets].set(v.astype(v_pages.dtype), mode="drop")
    return k_pages, v_pages


def copy_pages(pages: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns a pool with pages `sources` i32[n] copied onto pages `targets` i32[n]; past the pool is dropped."""
    return pages.at[targets].set(pages[sources], mode="drop")
