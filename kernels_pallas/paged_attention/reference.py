"""Paged attention in plain JAX: the oracle of every kernel, and the production path on CPU and old GPUs.

The batch is cut into tiles: a few rows with one or a few queries each, or many queries of one row. A loop walks over
the tiles, an inner loop over the pages that the tile can see, with an online softmax (Milakov & Gimelshein 2018), so
the cache is never gathered whole and nothing past the tile's longest row is read. The result of a query depends on its
row alone, bit for bit on CPU, because

* pages are visited one at a time from the first, whatever the tile, so sums always add up in the same order;
* the running maximum is rounded up to an integer and exponentials are base 2, so rescaling is by powers of two, exact;
* no matrix product has a single row, which XLA would hand to another routine with another order of summation.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.layout import pad_heads, page_size
from kernels_pallas.row_sum import row_sum

LOG2_E = 1.4426950408889634
# Finite, so that a row of masked scores gives zeros and not NaN.
MASKED = -1e30
# Queries per tile in prefill: wide enough for the products, small enough that a short row wastes little.
WIDE_TILE = 32
# Queries per tile where rows have few: enough for both cores, few enough that rows of a tile are about equally long.
ROWS_TILE = 8


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
    T, N, head_dim = q.shape
    K = k_pages.shape[1]
    queries = pad_heads(q, v_pages).reshape(T, K, N // K, -1)
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    pool = (k_pages, v_pages, block_tables)
    out = jnp.zeros_like(queries)
    if q_len is not None and q_len <= ROWS_TILE:
        out = _attend(
            out, queries, *pool, kv_lens, cu_q_lens, num_queries=q_len, num_rows=ROWS_TILE // q_len, scale=scale
        )
    else:
        # The decoding rows of a mixed step would waste a wide tile.
        long, single = jnp.where(q_lens > 1, kv_lens, 0), jnp.where(q_lens == 1, kv_lens, 0)
        out = _attend(out, queries, *pool, long, cu_q_lens, num_queries=min(WIDE_TILE, T), num_rows=1, scale=scale)
        out = _attend(out, queries, *pool, single, cu_q_lens, num_queries=1, num_rows=ROWS_TILE, scale=scale)
    return out.reshape(T, N, -1)[..., :head_dim]


def _attend(
    out, queries, k_pages, v_pages, block_tables, kv_lens, cu_q_lens, *, num_queries: int, num_rows: int, scale: float
) -> jax.Array:
    """Returns `out` [T, K, G, H] with the rows of kv_lens > 0 filled in, in tiles of num_rows x num_queries."""
    T, B = queries.shape[0], kv_lens.shape[0]
    R, Q = min(num_rows, B), num_queries
    starts, q_lens = cu_q_lens[:-1], cu_q_lens[1:] - cu_q_lens[:-1]
    # A tile takes as long as its longest row, so rows of similar length go together.
    order = jnp.argsort(-kv_lens)
    num_parts = jnp.where(kv_lens > 0, (q_lens + Q - 1) // Q, 0)[order]
    ends = jnp.cumsum(num_parts)  # parts per row 3, 2, 1, 0 -> ends 3 5 6 6; part 4 is in row 1

    def attend_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        part = i * R + jnp.arange(R)
        place = jnp.minimum((ends[None] <= part[:, None]).sum(-1), B - 1)
        row = order[place]
        offsets = ((part - ends[place] + num_parts[place]) * Q)[:, None] + jnp.arange(Q)[None]  # [R, Q] in its row
        is_query = (part < ends[-1])[:, None] & (offsets < q_lens[row][:, None])
        tokens = jnp.where(is_query, starts[row][:, None] + offsets, T)
        positions = jnp.where(is_query, (kv_lens - q_lens)[row][:, None] + offsets, -1)
        q_tile = queries.at[tokens].get(mode="fill", fill_value=0)
        o_tile = _attend_tile(q_tile, k_pages, v_pages, block_tables[row], positions, scale)
        return out.at[tokens].set(o_tile.astype(out.dtype), mode="drop")

    return jax.lax.fori_loop(0, (ends[-1] + R - 1) // R, attend_tile, out)


def _attend_tile(q_tile, k_pages, v_pages, block_tables, positions, scale: float) -> jax.Array:
    """q_tile [R, Q, K, G, H] at positions i32[R, Q] (-1 for none) over tables i32[R, M] -> [R, Q, K, G, H] float32."""
    R, Q, K, G, H = q_tile.shape
    S = page_size(v_pages)
    W = max(Q * G, 2)  # all queries of a KV head in one product; a single one is doubled
    q = jnp.broadcast_to(q_tile.transpose(0, 2, 1, 3, 4).reshape(R, K, Q * G, H), (R, K, W, H))
    q_positions = jnp.broadcast_to(jnp.broadcast_to(positions[:, :, None], (R, Q, G)).reshape(R, Q * G), (R, W))
    last = positions.max(-1)

    def attend_page(i: jax.Array, carry: tuple) -> tuple:
        maximum, total, out = carry
        slots = i * S + jnp.arange(S)
        k, v = k_pages[block_tables[:, i]], v_pages[block_tables[:, i]]  # [R, K, H, S], [R, K, S, H]
        # A masked weight is 0, but 0 * NaN is NaN: what lies in unused slots must go as well.
        v = jnp.where((slots[None] <= last[:, None])[:, None, :, None], v, jnp.zeros_like(v))
        scores = jnp.einsum("rkwh,rkhs->rkws", q, k, preferred_element_type=jnp.float32) * (scale * LOG2_E)
        is_visible = (slots[None, None] <= q_positions[:, :, None])[:, None]
        scores = jnp.where(is_visible, scores, MASKED)
        new_maximum = jnp.maximum(maximum, jnp.ceil(scores.max(-1)))
        weights = jnp.where(is_visible, jnp.exp2(scores - new_maximum[..., None]), 0.0)
        rescale = jnp.exp2(maximum - new_maximum)
        update = jnp.einsum("rkws,rksh->rkwh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_maximum, total * rescale + row_sum(weights), out * rescale[..., None] + update

    zero = jnp.zeros((R, K, W), jnp.float32)
    start = (zero + MASKED, zero, jnp.zeros((R, K, W, H), jnp.float32))
    _, total, out = jax.lax.fori_loop(0, last.max() // S + 1, attend_page, start)
    out = (out / jnp.where(total > 0, total, 1.0)[..., None])[:, :, : Q * G]
    return out.reshape(R, K, Q, G, H).transpose(0, 2, 1, 3, 4)
