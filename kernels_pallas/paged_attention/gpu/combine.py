"""The GPU kernel that combines the partial results of split contexts (Flash-Decoding, Dao et al. 2023).

It reads the parts that there are, and leaves the tiles alone that one program attended to.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import triton
from kernels_pallas.paged_attention.gpu.parts import Cut, Part, find_part, keys_of, load_rows
from kernels_pallas.paged_attention.gpu.sum_order import (
    PartSums,
    SumOrder,
    add_part,
    attended,
    empty_sums,
    sums_of_sinks,
)
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
        functools.partial(_kernel, cut=cut, **sizes),
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


class _Places(NamedTuple):
    """The part of a tile whose sums a program adds. W = num_places queries and heads."""

    tile: Part
    heads: jax.Array  # i32[W]
    queries: jax.Array  # i32[W]  of the row
    is_query: jax.Array  # bool[W]
    columns: jax.Array  # i32[num_columns]


def _kernel(
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
    """One program: piece `program_id(2)` of tile `program_id(1)` of split rows, of the heads `program_id(0)`."""
    *sinks, out_ref = sinks_and_out
    rows = load_rows(SimpleNamespace(kv_lens=kv_lens, cu_q_lens=cu_q_lens), cut)
    split_tiles = jnp.where(rows.parts > 1, rows.tiles, 0)
    part = find_part(rows, split_tiles, pl.program_id(1), cut, per_tile=1)
    columns = jnp.arange(num_columns, dtype=jnp.int32)
    places = pl.program_id(2) * num_places + jnp.arange(num_places, dtype=jnp.int32)  # of queries and heads in the tile
    head, query = pl.program_id(0) * heads + places % heads, part.chunk.offset + places // heads
    is_query = (places < queries * heads) & (query < part.chunk.num_queries)
    own = _Places(part, head, query, is_query, columns)
    if cut.order is None:
        sums = _add_parts(partial_out, maxima, totals, own)
    else:
        sums = _add_parts_in_order(partial_out, maxima, totals, own, sinks, cut, cut.order)
    index = ((part.chunk.first_token + query)[:, None], head[:, None], columns[None])
    triton.store(out_ref, index, attended(sums), is_query[:, None] & (columns < out_ref.shape[2])[None])


def _add_parts(partial_out, maxima, totals, own: _Places) -> PartSums:
    """Returns the sums of all parts, of which several are added at once."""
    part, columns = own.tile, own.columns
    W, V = own.heads.size, partial_out.shape[2]
    parts_at_once = max(1, COMBINED_NUMBERS // (W * columns.size))

    def add_parts(i: jax.Array, sums: PartSums) -> PartSums:
        maximum, total, out = sums
        index = i * parts_at_once + jnp.arange(parts_at_once, dtype=jnp.int32)
        slots = part.first_slot + index[:, None] * part.chunk.num_queries + own.queries[None]  # [parts, places]
        at = (slots, jnp.broadcast_to(own.heads[None], slots.shape))
        mask = (index < part.num_parts)[:, None] & own.is_query[None]
        found = jnp.where(mask, triton.load(maxima, at, mask), MASKED)
        new_maximum = jnp.maximum(maximum, found.max(0))
        weights, rescale = jnp.exp2(found - new_maximum[None]), jnp.exp2(maximum - new_maximum)
        total = total * rescale + (triton.load(totals, at, mask) * weights).sum(0)
        all_columns = (at[0][:, :, None], at[1][:, :, None], columns[None, None])
        values = triton.load(partial_out, all_columns, mask[:, :, None] & (columns < V)[None, None])
        return PartSums(new_maximum, total, out * rescale[:, None] + (values * weights[:, :, None]).sum(0))

    return jax.lax.fori_loop(0, pl.cdiv(part.num_parts, parts_at_once), add_parts, empty_sums((W, columns.size)))


def _add_parts_in_order(partial_out, maxima, totals, own: _Places, sinks: list, cut: Cut, order: SumOrder) -> PartSums:
    """Returns the sums of the sinks and of all parts, one after another."""
    part, is_column = own.tile, (own.columns < partial_out.shape[2])[None]
    keys = keys_of(part.chunk, cut, has_tree=False)
    num_parts = pl.cdiv(keys.end, order.split_keys) - keys.start // order.split_keys

    def load_part(index: jax.Array) -> PartSums:
        slots = part.first_slot + index * part.chunk.num_queries + own.queries
        mask = own.is_query & (index < num_parts)
        values = (slots[:, None], own.heads[:, None], own.columns[None])
        return PartSums(
            jnp.where(mask, triton.load(maxima, (slots, own.heads), mask), MASKED),
            triton.load(totals, (slots, own.heads), mask),
            triton.load(partial_out, values, mask[:, None] & is_column),
        )

    def add_parts(i: jax.Array, sums: PartSums) -> PartSums:
        parts = [load_part(i * ORDERED_PARTS + n) for n in range(ORDERED_PARTS)]
        return functools.reduce(add_part, parts, sums)

    of_heads = triton.load(sinks[0], (own.heads,), own.is_query) if sinks else None
    sums = sums_of_sinks(of_heads, True, (own.heads.size, own.columns.size))
    return jax.lax.fori_loop(0, pl.cdiv(num_parts, ORDERED_PARTS), add_parts, sums)
