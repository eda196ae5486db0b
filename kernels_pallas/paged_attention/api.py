"""The one signature of paged attention, and the choice among its implementations."""

from collections.abc import Callable

import jax

from kernels_pallas.paged_attention.layout import page_size, pool_shapes
from kernels_pallas.paged_attention.reference import paged_attention_reference

# In order of preference; the reference supports every call, so the search always ends.
IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {"reference": paged_attention_reference}


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    scale: float,
    q_len: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of a ragged batch of queries over keys and values that lie in pages.

    Row b owns the queries `cu_q_lens[b]:cu_q_lens[b + 1]`, which are the last tokens of its context of `kv_lens[b]`
    tokens; their keys and values are already in the pool. Query head n reads KV head n // G. The result is
    softmax(scale * q kᵀ, causal) v per row, accumulated in float32. Slots past a row's length are never read into the
    result, whatever they hold.

    Args:
      q: [T, N, H] queries, rows one after another, padding last.
      k_pages, v_pages: pools in the layout of `layout.py`.
      block_tables: i32[B, M] page ids; entries past a row's length may be anything inside the pool.
      kv_lens: i32[B] context lengths in tokens, this step's included; 0 marks a padding row.
      cu_q_lens: i32[B + 1] where each row's queries start; padding rows are empty unless `q_len` is given.
      scale: multiplies the scores.
      q_len: the number of queries of every row, where that is known and equal; lets the kernel specialise.
      implementation: a name from `IMPLEMENTATIONS`, or None for the best that supports the call.

    Returns:
      [T, N, H] in q's dtype. Values at padding positions are finite and mean nothing.

    Raises:
      ValueError: for an unknown implementation or shapes that do not fit together.
      NotImplementedError: when the named implementation cannot do this call, with the reason.
    """
    _check_shapes(q, k_pages, v_pages, block_tables, kv_lens, cu_q_lens)
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is unknown; choose from {sorted(IMPLEMENTATIONS)} or None")
    names = list(IMPLEMENTATIONS) if implementation is None else [implementation]
    for name in names:
        try:
            return IMPLEMENTATIONS[name](
                q, k_pages, v_pages, block_tables, kv_lens, cu_q_lens, scale=scale, q_len=q_len
            )
        except NotImplementedError:
            if name == names[-1]:
                raise
    raise RuntimeError("no implementation of paged attention is registered")


def _check_shapes(q, k_pages, v_pages, block_tables, kv_lens, cu_q_lens) -> None:
    N, H = q.shape[1:]
    B = kv_lens.shape[0]
    fits = (
        (k_pages.shape, v_pages.shape) == pool_shapes(k_pages.shape[0], page_size(v_pages), k_pages.shape[1], H)
        and N % k_pages.shape[1] == 0
        and block_tables.shape[:1] == (B,)
        and cu_q_lens.shape == (B + 1,)
    )
    if not fits:
        raise ValueError(
            f"shapes do not fit together: q {q.shape}, k_pages {k_pages.shape}, v_pages {v_pages.shape}, block_tables"
            f" {block_tables.shape}, kv_lens {kv_lens.shape}, cu_q_lens {cu_q_lens.shape}; see paged_attention"
        )
