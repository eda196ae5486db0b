"""The GPU kernel that combines the partial results of split contexts (Flash-Decoding, Dao et al. 2023).

It reads the parts that there are, and leaves the tiles alone that one program attended to.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import triton
from kernels_pallas.paged_attention.gpu.parts import Cut, find_part, keys_of, load_rows
from kernels_pallas.paged_attention.gpu.sum_order import PartSums, add_part, attended, sums_of_sinks
from kernels_pallas.paged_attention.online_softmax import MASKED

# Numbers of partial results that a program reads at once, and those of its result; they are in registers.
COMBINED_NUMBERS = 2048
# Parts of an order of sums that are on their way before the first of them is added.
ORDERED_PARTS = 4


def combine(
    out: jax.Array,
    partial_out: jax.Array,
    maximum: jax.Array,
    total: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    sinks: jax.Array | None = None,
    *,
    cut: Cut,
    queries: int,
    heads: int,
    num_warps: int,
    interpret: bool,
) -> jax.Array:
    """Returns out [T, N, V], in place, with the tokens of split rows filled in.

    Partial results are f32[slots, N, V], their maximum and total f32[slots, N]. A tile has `queries` of `heads`. With
    an order of sums they are without the sinks f32[N], which are added here, as scores in base 2.
    """
    num_columns, places = pl.next_power_of_2(out.shape[2]), pl.next_power_of_2(queries * heads)
    num_places = max(1, min(places, COMBINED_NUMBERS // num_columns))
    sizes = {"queries": queries, "heads": heads, "num_places": num_places, "num_columns": num_columns}
    (combined,) = triton.launch(
        functools.partial(_kernel if cut.order is None else _kernel_in_order, cut=cut, **sizes),
        *(out, partial_out, maximum, total, kv_lens, cu_q_lens),
        *(() if sinks is None else (sinks,)),
        grid=(out.shape[1] // heads, cut.num_split_tiles, places // num_places),
        out=[jax.ShapeDtypeStruct(out.shape, out.dtype)],
        aliases={0: 0},
        num_warps=num_warps,
        num_stages=1,
        name="combine_parts",
        interpret=interpret,
    )
    return combined


def _kernel(
    _,
    partial_out,
    maxima,
    totals,
    kv_lens,
    cu_q_lens,
    out_ref,
    *,
    cut: Cut,
    queries: int,
    heads: int,
    num_places: int,
    num_columns: int,
) -> None:
    """One program: piece `program_id(2)` of tile `program_id(1)` of split rows, of the heads `program_id(0)`."""
    rows = load_rows(SimpleNamespace(kv_lens=kv_lens, cu_q_lens=cu_q_lens), cut)
    split_tiles = jnp.where(rows.parts > 1, rows.tiles, 0)
    part = find_part(rows, split_tiles, pl.program_id(1), cut, per_tile=1)
    V, chunk = out_ref.shape[2], part.chunk
    parts_at_once = max(1, COMBINED_NUMBERS // (num_places * num_columns))
    columns = jnp.arange(num_columns, dtype=jnp.int32)
    places = pl.program_id(2) * num_places + jnp.arange(num_places, dtype=jnp.int32)  # of queries and heads in the tile
    head, query = pl.program_id(0) * heads + places % heads, chunk.offset + places // heads
    is_query = (places < queries * heads) & (query < chunk.num_queries)

    def add_parts(i: jax.Array, sums: tuple) -> tuple:
        maximum, total, out = sums
        index = i * parts_at_once + jnp.arange(parts_at_once, dtype=jnp.int32)
        slots = part.first_slot + index[:, None] * chunk.num_queries + query[None]  # [parts, places]
        at = (slots, jnp.broadcast_to(head[None], slots.shape))
        mask = (index < part.num_parts)[:, None] & is_query[None]
        found = jnp.where(mask, triton.load(maxima, at, mask), MASKED)
        new_maximum = jnp.maximum(maximum, found.max(0))
        weights, rescale = jnp.exp2(found - new_maximum[None]), jnp.exp2(maximum - new_maximum)
        total = total * rescale + (triton.load(totals, at, mask) * weights).sum(0)
        all_columns = (at[0][:, :, None], at[1][:, :, None], columns[None, None])
        values = triton.load(partial_out, all_columns, mask[:, :, None] & (columns < V)[None, None])
        return new_maximum, total, out * rescale[:, None] + (values * weights[:, :, None]).sum(0)

    zeros = jnp.zeros(places.shape, jnp.float32)
    sums = (zeros + MASKED, zeros, jnp.zeros((places.size, columns.size), jnp.float32))
    _, total, out = jax.lax.fori_loop(0, pl.cdiv(part.num_parts, parts_at_once), add_parts, sums)
    index = ((chunk.first_token + query)[:, None], head[:, None], columns[None])
    mask = is_query[:, None] & (columns < V)[None]
    triton.store(out_ref, index, out / jnp.where(total > 0, total, 1.0)[:, None], mask)


def _kernel_in_order(
    _,
    partial_out,
    maxima,
    totals,
    kv_lens,
    cu_q_lens,
    *sinks_and_out,
    cut: Cut,
    queries: int,
    heads: int,
    num_places: int,
    num_columns: int,
) -> None:
    """`_kernel` for an order of sums."""
    assert cut.order is not None
    *sinks, out_ref = sinks_and_out
    rows = load_rows(SimpleNamespace(kv_lens=kv_lens, cu_q_lens=cu_q_lens), cut)
    part = find_part(rows, jnp.where(rows.parts > 1, rows.tiles, 0), pl.program_id(1), cut, per_tile=1)
    V, chunk = out_ref.shape[2], part.chunk
    keys = keys_of(chunk, cut, has_tree=False)
    num_parts = pl.cdiv(keys.end, cut.order.split_keys) - keys.start // cut.order.split_keys
    columns = jnp.arange(num_columns, dtype=jnp.int32)
    places = pl.program_id(2) * num_places + jnp.arange(num_places, dtype=jnp.int32)  # of queries and heads in the tile
    head, query = pl.program_id(0) * heads + places % heads, chunk.offset + places // heads
    is_query = (places < queries * heads) & (query < chunk.num_queries)
    is_column = (columns < V)[None]

    def load_part(index: jax.Array) -> PartSums:
        slots, mask = part.first_slot + index * chunk.num_queries + query, is_query & (index < num_parts)
        values = (slots[:, None], head[:, None], columns[None])
        return PartSums(
            jnp.where(mask, triton.load(maxima, (slots, head), mask), MASKED),
            triton.load(totals, (slots, head), mask),
            triton.load(partial_out, values, mask[:, None] & is_column),
        )

    def add_parts(i: jax.Array, sums: PartSums) -> PartSums:
        parts = [load_part(i * ORDERED_PARTS + n) for n in range(ORDERED_PARTS)]
        return functools.reduce(add_part, parts, sums)

    of_heads = triton.load(sinks[0], (head,), is_query) if sinks else None
    sums = sums_of_sinks(of_heads, True, (num_places, num_columns))
    sums = jax.lax.fori_loop(0, pl.cdiv(num_parts, ORDERED_PARTS), add_parts, sums)
    index = ((chunk.first_token + query)[:, None], head[:, None], columns[None])
    triton.store(out_ref, index, attended(sums), is_query[:, None] & is_column)
