"""The tiles of a ragged batch in plain JAX: a few rows of one or a few queries each, or many queries of one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.call import AttentionCall
from kernels_pallas.paged_attention.online_softmax import Scoring


class Pool(NamedTuple):
    """The pages that queries [T, K, G, H] attend to; V is the width of a value."""

    page_size: int
    # ids i32[n] -> keys [n, K, H, S] and values [n, K, S, V]
    read_pages: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    # slots i32[n] -> keys [n, K, H] and values [n, K, V]
    read_slots: Callable[[jax.Array], tuple[jax.Array, jax.Array]]

    @property
    def value_width(self) -> int:
        return jax.eval_shape(self.read_pages, jax.ShapeDtypeStruct((1,), jnp.int32))[1].shape[-1]


# (queries [R, Q, K, G, H], block tables i32[R, M], positions i32[R, Q] (-1 for no query), tokens before this step
# i32[R, 1], scoring) -> [R, Q, K, G, V] in float32
AttendTile = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, Scoring], jax.Array]


def attend_in_one_tile(attend_tile: AttendTile, queries: jax.Array, call: AttentionCall, scoring: Scoring) -> jax.Array:
    """Returns the attention [B, K, G, V] of rows of one query each, in the order that they have."""
    positions = call.kv_lens[:, None] - 1
    out = attend_tile(queries[:, None], call.block_tables, positions, positions, scoring._replace(paths=None))
    return out[:, 0].astype(queries.dtype)


def attend_in_tiles(
    attend_tile: AttendTile,
    out: jax.Array,
    queries: jax.Array,
    call: AttentionCall,
    scoring: Scoring,
    *,
    num_queries: int,
    num_rows: int,
    num_tiles: int | None = None,
) -> jax.Array:
    """Returns `out` [T, K, G, V] with the rows of kv_lens > 0 filled in, in tiles of num_rows x num_queries.

    `num_tiles` are enough for any lengths. If None, the loop ends with the tiles of these lengths.
    """
    block_tables, kv_lens, cu_q_lens = call.block_tables, call.kv_lens, call.cu_q_lens
    (T, B), (R, Q) = (queries.shape[0], kv_lens.shape[0]), (num_rows, num_queries)
    starts, q_lens = cu_q_lens[:-1], cu_q_lens[1:] - cu_q_lens[:-1]
    # A tile takes as long as its longest row, so rows of similar length go together.
    order = jnp.argsort(-kv_lens)
    num_parts = jnp.where(kv_lens > 0, (q_lens + Q - 1) // Q, 0)[order]
    ends = jnp.cumsum(num_parts)  # parts per row 3, 2, 1, 0 -> ends 3 5 6 6; part 4 is in row 1

    def fill_in_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        part = i * R + jnp.arange(R)
        place = jnp.minimum((ends[None] <= part[:, None]).sum(-1), B - 1)
        row = order[place]
        offsets = ((part - ends[place] + num_parts[place]) * Q)[:, None] + jnp.arange(Q)[None]  # [R, Q] in its row
        is_query = (part < ends[-1])[:, None] & (offsets < q_lens[row][:, None])
        tokens = jnp.where(is_query, starts[row][:, None] + offsets, T)
        context = (kv_lens - q_lens)[row][:, None]  # tokens before this step
        paths = None
        if scoring.paths is not None:
            paths = scoring.paths.at[tokens].get(mode="fill", fill_value=-1)
            offsets = (paths >= 0).sum(-1, dtype=jnp.int32) - 1
        positions = jnp.where(is_query, context + offsets, -1)
        q_tile = queries.at[tokens].get(mode="fill", fill_value=0)
        o_tile = attend_tile(q_tile, block_tables[row], positions, context, scoring._replace(paths=paths))
        return out.at[tokens].set(o_tile.astype(out.dtype), mode="drop")

    return jax.lax.fori_loop(0, (ends[-1] + R - 1) // R if num_tiles is None else num_tiles, fill_in_tile, out)


def paths_of(tree_mask: jax.Array, most: int) -> jax.Array:
    """Returns the tokens of its row that each token sees, i32[T, most], the first of them first; -1 past the last.

    A token that sees the first, the third and itself, the sixth:  0 2 5 -1 -1 …
    """
    bits = (tree_mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    bits = bits.reshape(tree_mask.shape[0], -1)
    order = jnp.argsort(1 - bits.astype(jnp.int32), axis=1, stable=True)
    return jnp.where(jnp.arange(order.shape[1])[None] < bits.sum(1, dtype=jnp.int32)[:, None], order, -1)[:, :most]
