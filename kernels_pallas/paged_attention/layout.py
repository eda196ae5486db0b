"""The physical layout of a page pool; nobody else indexes one.

A pool is `[P, K, S, H]`: KV heads lie before slots, so that the keys of one head in one page are one contiguous
`[S, H]` matrix, which the CPU multiplies without moving it.
"""

import jax


def pages_shape(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Returns the shape of a pool of keys or of values."""
    return (num_pages, num_kv_heads, page_size, head_dim)


def page_size(pages: jax.Array) -> int:
    """Returns the number of slots of each page of a pool."""
    return pages.shape[2]


def write_tokens(pages: jax.Array, tokens: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns the pool with tokens [T, K, H] at slots i32[T] (page * S + offset).

    A slot past the pool is dropped, which is how padding is written nowhere. Negative slots would wrap: never pass them.
    """
    S = page_size(pages)
    return pages.at[slots // S, :, slots % S].set(tokens.astype(pages.dtype), mode="drop")


def copy_pages(pages: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the pool with pages `sources` i32[n] copied onto pages `targets` i32[n]; past the pool is dropped."""
    return pages.at[targets].set(pages[sources], mode="drop")
