"""Paged attention from its definition, in NumPy float64, and calls of it in which everything unused is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention import pool_shapes, write_kv


class Call(NamedTuple):
    """The arrays of one call, and the contiguous queries, keys and values that they were made of."""

    arguments: dict[str, Any]  # q, k_pages, v_pages, block_tables, kv_lens, cu_q_lens
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]]  # q [Q, N, H], k [kv_len, K, H], v likewise
    num_tokens: int  # queries that are not padding


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
) -> Call:
    """Lays out rows of (q_len, kv_len) in shuffled pages, dealt in turn: the page after one's own is a neighbour's.

    Unused slots and pages are NaN. A row of (q_len, 0) is padding.
    """
    generator = np.random.default_rng(seed)
    B = len(lens)
    block_tables = generator.permutation(B * table_width + 1)[:-1].reshape(table_width, B).T.astype(np.int32)
    shapes = pool_shapes(B * table_width + 1, page_size, num_kv_heads, head_dim)
    pools = tuple(np.full(shape, np.nan, np.float32) for shape in shapes)
    rows, slots = [], []
    for (q_len, kv_len), table in zip(lens, block_tables, strict=True):
        q, k, v = (
            generator.standard_normal((n, heads, head_dim), dtype=np.float32)
            for n, heads in ((q_len, num_heads), (kv_len, num_kv_heads), (kv_len, num_kv_heads))
        )
        slots.append(table[np.arange(kv_len) // page_size] * page_size + np.arange(kv_len) % page_size)
        rows.append((q, k, v))
    keys, values = (np.concatenate([row[i] for row in rows]) for i in (1, 2))
    k_pages, v_pages = write_kv(*map(jnp.asarray, (*pools, keys, values, np.concatenate(slots))))
    q_lens = np.array([q_len for q_len, _ in lens])
    padding = np.full((num_padding, num_heads, head_dim), np.nan, np.float32)
    arguments = {
        "q": np.concatenate([*(q for q, _, _ in rows), padding]),
        "k_pages": k_pages,
        "v_pages": v_pages,
        "block_tables": block_tables,
        "kv_lens": np.array([kv_len for _, kv_len in lens], np.int32),
        "cu_q_lens": np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32),
    }
    return Call(arguments, rows, int(q_lens.sum()))


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """softmax(scale q kᵀ) v for one row; query i sees the keys up to its own position, the q_len-th from the end."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    (Q, N, _), (length, K, _) = q.shape, k.shape
    out = np.empty_like(q)
    for i in range(Q):
        visible = length - Q + i + 1
        for n in range(N):
            head = n // (N // K)
            scores = scale * (k[:visible, head] @ q[i, n])
            weights = np.exp(scores - scores.max())
            out[i, n] = weights @ v[:visible, head] / weights.sum()
    return out


def expected_output(call: Call, scale: float) -> np.ndarray:
    """Returns what `paged_attention` should give at the tokens that are not padding; NaN for padding rows."""
    outputs = [attention(q, k, v, scale) if len(k) else np.full(q.shape, np.nan) for q, k, v in call.rows]
    return np.concatenate(outputs)
