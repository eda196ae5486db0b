"""Paged attention in plain JAX: the oracle of every kernel, and the production path on CPU and old GPUs.

The queries of each row are cut into tiles. One loop walks over all tiles of the batch, an inner loop over the pages that
the tile can see, with an online softmax (Milakov & Gimelshein 2018), so the cache is never gathered whole and nothing
past a row's length is read. The result of a query depends on its row alone, bit for bit on CPU, because

* pages are visited one at a time from the first, whatever the tile, so sums always add up in the same order;
* the running maximum is rounded up to an integer and exponentials are base 2, so rescaling is by powers of two, exact;
* no matrix product has a single row, which XLA would hand to another routine with another order of summation.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.layout import page_size
from kernels_pallas.row_sum import row_sum

LOG2_E = 1.4426950408889634
# Finite, so that a row of masked scores gives zeros and not NaN.
MASKED = -1e30
# Queries per tile in prefill: wide enough for the products, small enough that a short row wastes little.
Q_TILE = 32


def paged_attention_reference(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    scale: float,
    q_len: int | None = None,
) -> jax.Array:
    """The contract is that of `paged_attention`."""
    T, N, H = q.shape
    K = k_pages.shape[1]
    queries = q.reshape(T, K, N // K, H) * jnp.asarray(scale * LOG2_E, q.dtype)
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]

    def attend(out: jax.Array, tile: int, has_rows: jax.Array) -> jax.Array:
        num_tiles = jnp.where(has_rows & (kv_lens > 0), (q_lens + tile - 1) // tile, 0)
        tile_ends = jnp.cumsum(num_tiles)  # tiles per row 2, 1, 0, 3 -> tile_ends 2 3 3 6; tile 4 is in row 3
        # `tile` more positions, so that the last tile of the last row may hang over the end.
        padded = jnp.pad(queries, ((0, tile), (0, 0), (0, 0), (0, 0)))

        def attend_tile(i: jax.Array, out: jax.Array) -> jax.Array:
            row = jnp.sum(tile_ends <= i)
            first = (i - tile_ends[row] + num_tiles[row]) * tile  # the tile's first query, counted inside its row
            start = cu_q_lens[row] + first
            q_tile = jax.lax.dynamic_slice_in_dim(padded, start, tile)
            positions = kv_lens[row] - q_lens[row] + first + jnp.arange(tile)
            num_tokens = jnp.minimum(positions[-1] + 1, kv_lens[row])
            o_tile = _attend_row(q_tile, k_pages, v_pages, block_tables[row], positions, num_tokens)
            # A tile hanging over its row's end writes into the next row, which is computed later and puts it right.
            return jax.lax.dynamic_update_slice_in_dim(out, o_tile.astype(out.dtype), start, axis=0)

        return jax.lax.fori_loop(0, tile_ends[-1], attend_tile, out)

    wide = min(T, Q_TILE)
    out = jnp.zeros((T + wide, *queries.shape[1:]), q.dtype)
    if q_len is not None:
        out = attend(out, min(q_len, wide), q_lens > 0)
    else:
        # Rows of one token, the decoding ones of a mixed step, would waste a wide tile; they come last because a
        # wide tile may hang over onto them.
        out = attend(out, wide, q_lens > 1)
        out = attend(out, 1, q_lens == 1)
    return out[:T].reshape(T, N, H)


def _attend_row(q_tile, k_pages, v_pages, block_table, positions, num_tokens) -> jax.Array:
    """q_tile [Q, K, G, H] at positions i32[Q] over the first num_tokens of one row -> [Q, K, G, H] float32."""
    Q, K, G, H = q_tile.shape
    S = page_size(k_pages)
    R = max(Q * G, 2)
    # Rows of the products: every query of every head of the group, [K, R, H]; a single one is doubled.
    rows = jnp.broadcast_to(q_tile.transpose(1, 0, 2, 3).reshape(K, Q * G, H), (K, R, H))
    row_positions = jnp.broadcast_to(positions[:, None], (Q, G)).reshape(Q * G)
    row_positions = jnp.broadcast_to(row_positions, (R,))

    def attend_page(i: jax.Array, carry: tuple) -> tuple:
        maximum, total, out = carry
        token_ids = i * S + jnp.arange(S)
        k = jax.lax.dynamic_index_in_dim(k_pages, block_table[i], keepdims=False)  # [K, S, H]
        v = jax.lax.dynamic_index_in_dim(v_pages, block_table[i], keepdims=False)
        # A masked weight is 0, but 0 * NaN is NaN: what lies in unused slots must go as well.
        v = jnp.where((token_ids < num_tokens)[None, :, None], v, jnp.zeros_like(v))
        scores = jnp.einsum("krh,ksh->krs", rows, k, preferred_element_type=jnp.float32)
        is_visible = token_ids[None, :] <= row_positions[:, None]
        scores = jnp.where(is_visible[None], scores, MASKED)
        new_maximum = jnp.maximum(maximum, jnp.ceil(scores.max(-1)))
        weights = jnp.where(is_visible[None], jnp.exp2(scores - new_maximum[..., None]), 0.0)
        rescale = jnp.exp2(maximum - new_maximum)
        update = jnp.einsum("krs,ksh->krh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_maximum, total * rescale + row_sum(weights), out * rescale[..., None] + update

    start = (jnp.full((K, R), MASKED, jnp.float32), jnp.zeros((K, R), jnp.float32), jnp.zeros((K, R, H), jnp.float32))
    _, total, out = jax.lax.fori_loop(0, (num_tokens + S - 1) // S, attend_page, start)
    out = (out / jnp.where(total > 0, total, 1.0)[..., None])[:, : Q * G]
    return out.reshape(K, Q, G, H).transpose(1, 0, 2, 3)
