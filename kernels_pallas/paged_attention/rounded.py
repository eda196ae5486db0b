"""Keys and values in 2 bits: pages that are rounded once, when they are full, beside open pages of exact numbers.

A token at position p of page j = p // S attends to exact keys and values of pages j - R … j, and to rounded ones of all
pages before. So its result depends on its position alone, not on the chunks, steps or neighbours of its computation:

page                  |   0    |   1    |   2    |   3    |    R = 0, three rows of a step
row at token 3 S + 5  | full   | full   | full   | open   |    open: exact numbers, in open pages
row at token 2 S - 1  | full   | open   |                      full: rounded ones, written as the page ends
row at token 2 S      | full   | full   | open   |

A code is the number of steps of `scale` from `least`, 0 to 3. Keys have both for each channel and GROUP tokens, for
channels differ more than tokens do (KIVI, Liu et al. 2024); values have them for each token and head.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention.call import AttentionCall, token_slots
from kernels_pallas.paged_attention.layout import (
    LANES,
    Pages,
    as_operand,
    default_layout,
    pad_heads,
    read_pages,
    write_kv,
)
from kernels_pallas.paged_attention.online_softmax import Scoring, attended, empty_sums
from kernels_pallas.paged_attention.reference import ReadPage, add_pages, attend_in_tiles_of

BITS = 2
LARGEST = 2**BITS - 1
CODES_PER_BYTE = 8 // BITS
GROUP = 32  # tokens with one range of a key's channel, as in KIVI


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundedPages:
    """A pool of full pages. A step takes it donated and returns its successor.

    A byte holds four codes of a head: byte i of n holds codes i, i + n, i + 2 n and i + 3 n, the lowest bits first.
    """

    codes: tuple[Any, Any]  # of keys u8[P, K, H / 4, S], of values u8[P, K, S, H / 4]
    # Scale and least, the two of axis 1: of keys bf16[P, 2, K, H, S / GROUP], of values bf16[P, 2, K, S].
    ranges: tuple[Any, Any]
    head_dim: int = field(metadata={"static": True})

    @property
    def num_pages(self) -> int:
        return self.codes[0].shape[0]

    @property
    def page_size(self) -> int:
        """The number of token slots of each page."""
        return self.codes[0].shape[3]

    @property
    def num_kv_heads(self) -> int:
        return self.codes[0].shape[1]


def abstract_rounded_pages(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, layout: str | None = None
) -> RoundedPages:
    """Returns a pool as `jax.ShapeDtypeStruct`s. Raises NotImplementedError for another layout than that of a CPU."""
    layout = default_layout() if layout is None else layout
    if layout != "cpu":
        raise NotImplementedError(
            f"pages of {BITS} bits have no layout for a {layout}; use int4, int8 or float8_e4m3fn there"
        )
    P, S, K, H = num_pages, page_size, num_kv_heads, head_dim
    num_bytes, group = -(-H // CODES_PER_BYTE), min(GROUP, S)
    codes = ((P, K, num_bytes, S), (P, K, S, num_bytes))
    ranges = ((P, 2, K, H, S // group), (P, 2, K, S))
    return RoundedPages(
        (jax.ShapeDtypeStruct(codes[0], jnp.uint8), jax.ShapeDtypeStruct(codes[1], jnp.uint8)),
        (jax.ShapeDtypeStruct(ranges[0], jnp.bfloat16), jax.ShapeDtypeStruct(ranges[1], jnp.bfloat16)),
        head_dim,
    )


def read_rounded_pages(pages: RoundedPages, page_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys f32[n, K, H', S] and values f32[n, K, S, H'] of pages i32[n]; H' is as in `read_pages`."""
    H, S = pages.head_dim, pages.page_size
    k, v, of_k, of_v = (pool[page_ids] for pool in (*pages.codes, *pages.ranges))
    of_k = jnp.repeat(of_k, S // of_k.shape[-1], axis=-1)
    k = _widened(_unpacked(k, H, axis=2), of_k[:, 0], of_k[:, 1])
    v = _widened(_unpacked(v, H, axis=3), of_v[:, 0, ..., None], of_v[:, 1, ..., None])
    padding = (0, -H % LANES)
    return jnp.pad(k, ((0, 0), (0, 0), padding, (0, 0))), jnp.pad(v, ((0, 0), (0, 0), (0, 0), padding))


def _widened(codes: jax.Array, scale: jax.Array, least: jax.Array) -> jax.Array:
    # The product is exact, so compilers may fuse it with the sum or not.
    scale, least = (jnp.broadcast_to(x.astype(jnp.float32), codes.shape) for x in (scale, least))
    return codes.astype(jnp.float32) * scale + least


def to_codes(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns codes u8 of numbers f32, and the scale and least of each range along an axis, which is 1 long in both.

    Both are f32 that bfloat16 holds. Those of numbers that are not all finite are not either, so that no rounding hides
    it.
    """
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    # Compilers divide by a constant so, or not, as they like.
    scale, least = _in_bfloat16((high - low) * np.float32(1 / LARGEST)), _in_bfloat16(low)
    scale = jnp.where(scale == 0, 1.0, scale)
    steps = jnp.round((x - jnp.broadcast_to(least, x.shape)) / jnp.broadcast_to(scale, x.shape))
    return jnp.clip(steps, 0, LARGEST).astype(jnp.uint8), scale, least


def _in_bfloat16(x: jax.Array) -> jax.Array:
    # The compiler leaves out a pair of conversions.
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _packed(codes: jax.Array, axis: int) -> jax.Array:
    """Returns codes u8 in bytes along an axis."""
    padding = [(0, 0)] * codes.ndim
    padding[axis] = (0, -codes.shape[axis] % CODES_PER_BYTE)
    parts = jnp.split(jnp.pad(codes, padding), CODES_PER_BYTE, axis=axis)
    return functools.reduce(jnp.bitwise_or, (part << np.uint8(BITS * i) for i, part in enumerate(parts)))


def _unpacked(x: jax.Array, num_codes: int, axis: int) -> jax.Array:
    parts = [(x >> np.uint8(BITS * i)) & np.uint8(LARGEST) for i in range(CODES_PER_BYTE)]
    return jax.lax.slice_in_dim(jnp.concatenate(parts, axis=axis), 0, num_codes, axis=axis)


class Pieces(NamedTuple):
    """The rows of a step, cut where their pages end: all queries of a piece are in one page.

    Pages of 4, a row of tokens 2 … 8 and one of token 5:  tokens 2 3 | 4 5 6 7 | 8 | 5
    """

    rows: Any  # i32[N]  the row of each piece; any on padding
    cu_q_lens: Any  # i32[N + 1]
    kv_lens: Any  # i32[N]  tokens of the row up to the end of the piece; 0 on padding


def pieces_of(call: AttentionCall, num_tokens: int, page_size: int) -> Pieces:
    """Returns the pieces of a step of `num_tokens` tokens."""
    kv_lens, cu_q_lens, S = call.kv_lens, call.cu_q_lens, page_size
    B = kv_lens.shape[0]
    if call.q_len == 1:
        return Pieces(jnp.arange(B), cu_q_lens, kv_lens)
    # A row of n tokens crosses at most one end of a page, and one more for each S tokens after its second.
    N = min(B + min(B, num_tokens // 2) + num_tokens // S, num_tokens)
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    context = kv_lens - q_lens
    is_real = (kv_lens > 0) & (q_lens > 0)
    num_pieces = jnp.where(is_real, (kv_lens - 1) // S - context // S + 1, 0)
    ends = jnp.cumsum(num_pieces)  # pieces per row 3, 1 -> ends 3 4
    piece = jnp.arange(N + 1)
    row = jnp.minimum((ends[None] <= piece[:, None]).sum(-1), B - 1)
    page = context[row] // S + piece - ends[row] + num_pieces[row]
    starts = cu_q_lens[row] + jnp.maximum(page * S, context[row]) - context[row]
    is_piece = piece < ends[-1]
    last = jnp.where(is_real, cu_q_lens[1:], 0).max()
    cu_q_lens = jnp.where(is_piece, starts, last)
    return Pieces(row[:-1], cu_q_lens, jnp.where(is_piece, jnp.minimum((page + 1) * S, kv_lens[row]), 0)[:-1])


def rounded_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    full: RoundedPages,
    opened: Pages,
    call: AttentionCall,
    open_call: AttentionCall,
    *,
    num_exact: int,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, RoundedPages, Pages]:
    """Appends keys and values to open pages, rounds those that are full now, and attends to all of each row's pages.

    The contract is that of `paged_attention`, but for the numbers that a token attends to: see the head of this file.

    Args:
      q, k, v, sinks: as in `paged_attention`.
      full, opened: the pools, in the layout of a CPU; `opened` is in the dtype of k and v. Donate both.
      call: the rows, with their pages in `full`; its plan is that of `pieces_of`, or None.
      open_call: the same with their pages in `opened`. Of each row those from `num_exact` pages before its first token
        here on are read; others may hold anything.
      num_exact: R above.

    Returns:
      [T, N, H] in q's dtype, and the pools.

    Raises:
      NotImplementedError: for a tree of drafts, a mesh, or an implementation other than the reference.
    """
    _check_support(call)
    (T, N, H), K, S = q.shape, full.num_kv_heads, full.page_size
    opened = write_kv(opened, k, v, token_slots(T, opened, open_call))
    pieces = pieces_of(call, T, S) if call.plan is None else call.plan
    tables = call.in_pool().block_tables[pieces.rows]
    open_tables = open_call.in_pool().block_tables[pieces.rows]
    full = _close_pages(full, opened, pieces, tables, open_tables)

    width = H + -H % LANES
    queries = pad_heads(q, width).reshape(T, K, N // K, -1)
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(K, N // K)
    scoring = Scoring(call.scale, call.window, call.softcap, sinks)
    own = replace(
        call,
        block_tables=jnp.concatenate([tables, open_tables], axis=1),
        kv_lens=pieces.kv_lens,
        cu_q_lens=pieces.cu_q_lens,
        plan=None,
        page_offset=0,
    )
    attend_tile = functools.partial(_attend_tile, full, opened, num_exact)
    out = attend_in_tiles_of(attend_tile, queries, own, scoring, value_width=width)
    return out.reshape(T, N, -1)[..., :H], full, opened


def _check_support(call: AttentionCall) -> None:
    refused = {
        "a tree of drafts": (call.tree_mask is not None, "verify chains of drafts"),
        f"implementation={call.implementation!r}": (call.implementation not in (None, "reference"), "leave it out"),
        "a mesh": (call.mesh is not None and call.mesh.size > 1, "use one device"),
    }
    for what, (is_refused, way_out) in refused.items():
        if is_refused:
            raise NotImplementedError(f"attention to pages of {BITS} bits is not built for {what}; {way_out}")


def _close_pages(
    full: RoundedPages, opened: Pages, pieces: Pieces, tables: jax.Array, open_tables: jax.Array
) -> RoundedPages:
    """Returns the pool with the pages that end with a piece, rounded from the open ones.

    tables, open_tables: i32[N, M] of each piece.
    """
    S, group = full.page_size, full.page_size // full.ranges[0].shape[-1]
    closes = (pieces.kv_lens > 0) & (pieces.kv_lens % S == 0)
    order = jnp.argsort(~closes, stable=True)

    def close(i: jax.Array, full: RoundedPages) -> RoundedPages:
        piece = order[i]
        at = pieces.kv_lens[piece] // S - 1
        k, v = read_pages(opened, open_tables[piece, at][None])
        k, v = (x[0].astype(jnp.float32) for x in (k[:, :, : full.head_dim], v[..., : full.head_dim]))
        k_codes, *of_k = to_codes(k.reshape(*k.shape[:2], -1, group), axis=-1)
        v_codes, *of_v = to_codes(v, axis=-1)
        codes = _packed(k_codes.reshape(k.shape), axis=1), _packed(v_codes, axis=2)
        k_ranges, v_ranges = (jnp.stack(of)[..., 0].astype(jnp.bfloat16) for of in (of_k, of_v))
        new = RoundedPages(codes, (k_ranges, v_ranges), full.head_dim)

        def put(pool: jax.Array, page: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(pool, page, tables[piece, at], 0)

        return jax.tree.map(put, full, new)

    return jax.lax.fori_loop(0, closes.sum(), close, full)


def _attend_tile(
    full: RoundedPages, opened: Pages, num_exact: int, q_tile, tables, positions, context, scoring: Scoring
) -> jax.Array:
    """An `AttendTile` of pieces; tables i32[R, 2 M] are those of full pages, then those of open ones."""
    num_pages = tables.shape[1] // 2
    own = positions.max(-1) // full.page_size  # -1 without a query
    first_exact = jnp.maximum(own - num_exact, 0)
    sums = empty_sums(q_tile, q_tile.shape[-1], scoring)
    begin, end = jnp.where(own >= 0, first_exact, jnp.int32(2**30)).min(), own.max() + 1

    def read_full(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = read_rounded_pages(full, tables[:, i])
        return as_operand(k, q_tile.dtype), as_operand(v, q_tile.dtype)

    def read_open(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = read_pages(opened, tables[:, num_pages + i])
        return as_operand(k, q_tile.dtype), as_operand(v, q_tile.dtype)

    def read_either(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        is_exact = (i >= first_exact)[:, None, None, None]
        k, v = (
            jnp.where(jnp.broadcast_to(is_exact, a.shape), a, b)
            for a, b in zip(read_open(i), read_full(i), strict=True)
        )
        return k, v

    def add(sums: Any, read: ReadPage, pages: Any) -> Any:
        return add_pages(sums, read, q_tile, positions, context, pages, scoring)

    sums = add(sums, read_full, (0, jnp.minimum(begin, end)))
    # The queries of one row have their exact pages together.
    return attended(add(sums, read_open if len(tables) == 1 else read_either, (begin, end)), scoring)
