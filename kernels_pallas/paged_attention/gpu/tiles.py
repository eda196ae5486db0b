"""The tiles of a ragged batch, as a table: what the programs of a kernel that cannot search for their rows work on."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# The rows of the table.
FIELDS = ("row", "first token", "queries", "position of the first query")


def num_tiles(T: int, B: int, tile: int) -> int:
    """Returns how many tiles of `tile` queries T tokens in B rows take at most, the padding after them included."""
    return T // tile + B + 1


def tile_table(kv_lens: jax.Array, cu_q_lens: jax.Array, T: int, tile: int) -> jax.Array:
    """Returns i32[4, num_tiles], the values of `FIELDS`; the tiles with the longest contexts come first.

    Rows of a single token have no tile. The padding after the last row has, as row B with a context that ends at 0: its
    queries see nothing. Tiles without queries are last.

        tiles of 4, q_lens 6, 1, 3, kv_lens 10, 5, 3, T 12:   row       0  2  0  3
                                                              first     4  7  0 10
                                                              queries   2  3  4  2
                                                              position  8  0  4 -2
    """
    B, starts = kv_lens.shape[0], cu_q_lens
    q_lens = jnp.append(jnp.diff(starts), T - starts[-1])
    contexts = jnp.append(kv_lens, 0) - q_lens
    counts = -(-q_lens // tile)
    counts = jnp.where((q_lens == 1) & (jnp.arange(B + 1) < B), 0, counts)
    ends = jnp.cumsum(counts)
    index = jnp.arange(num_tiles(T, B, tile), dtype=jnp.int32)
    row = jnp.minimum((ends[None] <= index[:, None]).sum(-1), B)
    offset = (index - (ends - counts)[row]) * tile
    queries = jnp.where(index < ends[-1], jnp.minimum(q_lens[row] - offset, tile), 0)
    position = contexts[row] + offset
    work = jnp.where(queries > 0, jnp.maximum(position + queries, 0), -1)
    table = jnp.stack([row, starts[row] + offset, queries, position]).astype(jnp.int32)
    return table[:, jnp.argsort(-work, stable=True)]
