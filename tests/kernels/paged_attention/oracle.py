"""Paged attention from its definition, in NumPy float64, and calls of it in which everything unused is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention import Pages, abstract_pages, gather_tokens, write_kv
from kernels_pallas.paged_attention.layout import AnyPages

write = jax.jit(write_kv)
gather = jax.jit(gather_tokens)
# Pools and what is written to them come in few sizes, so that most calls share what was compiled for others.
PAGES_STEP, TOKENS_STEP = 32, 512


@dataclass
class Call:
    """The arrays of one call, and the contiguous queries, keys and values that they were made of."""

    arguments: dict[str, Any]  # q, k, v, pages, block_tables, kv_lens, cu_q_lens, and what the case adds
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]]  # q [Q, N, H], k [kv_len, K, H], v likewise
    num_tokens: int  # queries that are not padding
    slots: list[np.ndarray] = field(default_factory=list)  # of each row's context

    def with_options(self, **options: Any) -> Call:
        return Call({**self.arguments, **options}, self.rows, self.num_tokens, self.slots)

    def with_freed_pages(self, window: int) -> Call:
        """The same with tables in which all pages wholly behind the window are one that nobody ever wrote."""
        tables, pages = self.arguments["block_tables"].copy(), self.arguments["pages"]
        unused = np.setdiff1d(np.arange(pages.num_pages), tables)[0]
        firsts = self.arguments["kv_lens"] - np.diff(self.arguments["cu_q_lens"]) - window + 1
        for table, num_freed in zip(tables, np.maximum(firsts, 0) // pages.page_size, strict=True):
            table[:num_freed] = unused
        return self.with_options(block_tables=tables)


def make_call(
    lens: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    table_width: int = 4,
    num_padding: int = 0,
    seed: int = 0,
    dtype: Any = jnp.float32,
    page_dtype: Any = None,
    layout: str | None = "cpu",
    scales: tuple[np.ndarray, np.ndarray] | None = None,
    has_scales: bool = False,
) -> Call:
    """Lays out rows of (q_len, kv_len) in shuffled pages, dealt in turn: the page after one's own is a neighbour's.

    The pool holds all but each row's last q_len tokens, which are to be appended. Unused slots and pages are NaN (or
    the largest number of an integer type). A row of (q_len, 0) is padding. `scales` are those of KV heads; with
    `has_scales` the pool has one for each token and head, as one of int4 must.
    """
    generator = np.random.default_rng(seed)
    B, page_dtype = len(lens), jnp.dtype(dtype if page_dtype is None else page_dtype)
    num_pages = -(-(B * table_width + 1) // PAGES_STEP) * PAGES_STEP
    block_tables = generator.permutation(num_pages)[: B * table_width].reshape(table_width, B).T.astype(np.int32)
    sizes = num_pages, page_size, num_kv_heads, head_dim
    pages = poisoned(abstract_pages(*sizes, page_dtype, layout, has_scales=has_scales))
    rows, slots = [], []
    for (q_len, kv_len), table in zip(lens, block_tables, strict=True):
        q, k, v = (
            generator.standard_normal((n, heads, head_dim), dtype=np.float32)
            for n, heads in ((q_len, num_heads), (kv_len, num_kv_heads), (kv_len, num_kv_heads))
        )
        slots.append(table[np.arange(kv_len) // page_size] * page_size + np.arange(kv_len) % page_size)
        rows.append((rounded(q, dtype), rounded(k, dtype), rounded(v, dtype)))
    old = [max(kv_len - q_len, 0) for q_len, kv_len in lens]
    keys, values = (np.concatenate([row[i][:n] for row, n in zip(rows, old, strict=True)]) for i in (1, 2))
    k_scale, v_scale = (None, None) if scales is None else scales
    stored = keys, values
    if not has_scales:
        stored = (stored_form(keys, k_scale, page_dtype), stored_form(values, v_scale, page_dtype))
    old_slots = np.concatenate([s[:n] for s, n in zip(slots, old, strict=True)])
    # Padding is for slots past the pool.
    pages = write(pages, *map(in_steps, stored), in_steps(old_slots, num_pages * page_size))

    def ragged(which: int, heads: int) -> jax.Array:
        # A padding row has queries but no keys.
        parts = [row[which][-n:] if len(row[which]) else np.full((n, heads, head_dim), np.nan) for row, n in used]
        padding = np.full((num_padding, heads, head_dim), np.nan)
        return jnp.asarray(np.concatenate([*parts, padding]).astype(dtype))

    used = [(row, q_len) for row, (q_len, _) in zip(rows, lens, strict=True) if q_len]
    arguments = {
        "q": ragged(0, num_heads),
        "k": ragged(1, num_kv_heads),
        "v": ragged(2, num_kv_heads),
        "pages": pages,
        "block_tables": block_tables,
        "kv_lens": np.array([kv_len for _, kv_len in lens], np.int32),
        "cu_q_lens": np.concatenate([[0], np.cumsum([n for n, _ in lens])]).astype(np.int32),
    }
    if scales is not None:
        arguments |= {"k_scale": jnp.asarray(k_scale), "v_scale": jnp.asarray(v_scale)}
    if has_scales:
        most = jnp.iinfo(page_dtype).max
        rows = [(q, worth_by_token(k, most), worth_by_token(v, most)) for q, k, v in rows]
    else:
        rows = [(q, worth(k, k_scale, page_dtype), worth(v, v_scale, page_dtype)) for q, k, v in rows]
    return Call(arguments, rows, sum(n for n, _ in lens), slots)


def rows_of_chunks(
    chunks: Sequence[tuple[int, int, int]], tables: np.ndarray, num_rows: int
) -> tuple[list[int], dict[str, np.ndarray]]:
    """Returns the queries of each row, and the arrays of a call, for chunks of texts that are in a pool.

    A chunk is a text, whose pages are those of its row in `tables`, the chunk's first token and its number of tokens.
    Rows past the chunks are padding.
    """
    lens = [n for *_, n in chunks] + [0] * (num_rows - len(chunks))
    kv_lens, own = np.zeros(num_rows, np.int32), np.zeros((num_rows, tables.shape[1]), np.int32)
    for row, (text, first, n) in enumerate(chunks):
        kv_lens[row], own[row] = first + n, tables[text]
    return lens, {"block_tables": own, "kv_lens": kv_lens, "cu_q_lens": np.cumsum([0, *lens], dtype=np.int32)}


def in_steps(x: np.ndarray, value: int = 0) -> np.ndarray:
    """Returns x with so many rows of `value` after it that their number is a multiple of TOKENS_STEP."""
    return np.pad(x, [(0, -len(x) % TOKENS_STEP), *[(0, 0)] * (x.ndim - 1)], constant_values=value)


def poisoned(pages: AnyPages) -> AnyPages:
    """Returns a pool in which every number is NaN, or as large as its type allows."""

    def fill(a: Any) -> jax.Array:
        is_integer = jnp.issubdtype(a.dtype, jnp.integer)
        return jnp.asarray(np.full(a.shape, jnp.iinfo(a.dtype).max if is_integer else np.nan, a.dtype))

    return jax.tree.map(fill, pages)


def rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns x f32 as it reads after a cast to dtype."""
    return x.astype(dtype).astype(np.float32)


def stored_form(x: np.ndarray, scale: np.ndarray | None, dtype: Any) -> np.ndarray:
    """Returns keys or values [n, K, H] as a pool of `dtype` should hold them."""
    y = x if scale is None else x / scale[None, :, None].astype(np.float32)
    if np.issubdtype(dtype, np.integer):
        return np.clip(np.rint(y), -127, 127).astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    return np.clip(y, -largest, largest).astype(dtype)


def worth(x: np.ndarray, scale: np.ndarray | None, dtype: Any) -> np.ndarray:
    """Returns what x [n, K, H] reads as after it was stored."""
    stored = stored_form(x, scale, dtype).astype(np.float32)
    return stored if scale is None else stored * scale[None, :, None]


def worth_by_token(x: np.ndarray, most: int = 127) -> np.ndarray:
    """Returns what x f32[..., H] reads as after it was stored as integers up to `most` with a scale for each vector."""
    scales = np.abs(x).max(-1, keepdims=True, initial=0) * (np.float32(1) / np.float32(most))
    scales = np.where(scales == 0, np.float32(1), scales)
    return np.rint(x / scales) * scales


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    tree: np.ndarray | None = None,
) -> np.ndarray:
    """softmax(scale q kᵀ) v for one row; query i sees the keys up to its own position, the q_len-th from the end.

    `tree` bool[Q, Q] tells instead which of the row's own tokens each sees.
    """
    (Q, N, H), (L, K, _) = q.shape, k.shape
    first = L - Q  # the row's own tokens are the last keys
    own = np.tri(Q, dtype=bool) if tree is None else tree
    is_seen = np.concatenate([np.ones((Q, first), bool), own], axis=1)
    if window is not None:
        positions = first + own.sum(1) - 1
        is_recent = np.arange(L) > positions[:, None] - window
        if tree is not None:
            is_recent[:, first:] = True  # a window ends no branch
        is_seen &= is_recent
    # [K, G, Q, H] times [K, 1, H, L]: query head n reads the KV head n // G.
    queries = q.astype(np.float64).reshape(Q, K, N // K, H).transpose(1, 2, 0, 3)
    scores = scale * (queries @ k.astype(np.float64).transpose(1, 2, 0)[:, None])
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(is_seen, scores, -np.inf)
    sink = np.full(N, -np.inf) if sinks is None else sinks.astype(np.float64)
    sink = sink.reshape(K, N // K, 1, 1)
    top = np.maximum(scores.max(-1, keepdims=True), sink)
    weights = np.exp(scores - top)
    sums = weights.sum(-1, keepdims=True) + np.exp(sink - top)
    out = weights @ v.astype(np.float64).transpose(1, 0, 2)[:, None] / sums
    return out.transpose(2, 0, 1, 3).reshape(Q, N, v.shape[-1])


def tree_of(parents: Sequence[int]) -> np.ndarray:
    """Which tokens each token of a tree sees: itself and its ancestors, bool[Q, Q]."""
    sees = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            sees[i] |= sees[parent]
    return sees


def tree_words(trees: Sequence[np.ndarray], num_tokens: int) -> np.ndarray:
    """The rows of the trees as words of 32 bits, u32[T, words]."""
    words = np.zeros((num_tokens, -(-max(map(len, trees)) // 32)), np.uint32)
    rows = [row for tree in trees for row in tree]
    for i, row in enumerate(rows):
        for j in np.flatnonzero(row):
            words[i, j // 32] |= np.uint32(1) << np.uint32(j % 32)
    return words


def expected_output(call: Call, scale: float, *, trees: Sequence[np.ndarray] | None = None, **options) -> np.ndarray:
    """Returns what `paged_attention` should give at the tokens that are not padding; NaN for padding rows."""
    outputs = []
    for i, (q, k, v) in enumerate(call.rows):
        tree = None if trees is None else trees[i]
        outputs.append(attention(q, k, v, scale, tree=tree, **options) if len(k) else np.full(q.shape, np.nan))
    return np.concatenate(outputs)


def check_pages(call: Call, before: Pages, after: Pages) -> None:
    """Asserts that every row's context can be read from the pool, and that pages of no row are as they were."""
    slots = np.concatenate(call.slots)
    contents = gather(after, in_steps(slots)) if len(slots) else ()
    for which, (stored, name) in enumerate(zip(contents, ("k_scale", "v_scale"), strict=False), 1):
        read = np.asarray(stored)[: len(slots)].astype(np.float32)
        scale = call.arguments.get(name)
        read = read if scale is None else read * np.asarray(scale)[None, :, None]
        np.testing.assert_array_equal(read, np.concatenate([row[which] for row in call.rows]))
    others = np.setdiff1d(np.arange(after.num_pages), slots // after.page_size)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        old, new = (np.asarray(pool)[others].astype(np.float32) for pool in (old, new))
        np.testing.assert_array_equal(new, old)
