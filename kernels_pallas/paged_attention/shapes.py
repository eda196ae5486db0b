"""Where the tokens of a ragged batch stand, and what a call's arrays must look like."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.call import AttentionCall
from kernels_pallas.paged_attention.layout import Pages


class Paged(Protocol):
    """A pool of pages of any content."""

    @property
    def num_pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...


def token_rows(cu_q_lens: jax.Array, num_tokens: int) -> jax.Array:
    """Returns the row of each token, i32[T]; padding gets the last: cu_q_lens 0 3 4 6 -> rows 0 0 0 1 2 2."""
    ends = cu_q_lens[1:]
    return jnp.minimum((ends[None] <= jnp.arange(num_tokens)[:, None]).sum(-1), ends.shape[0] - 1)


def token_slots(num_tokens: int, pages: Paged, call: AttentionCall) -> jax.Array:
    """Returns the slot of each query's own key, i32[T]; past the pool for padding.

    q_lens 3, 1 and kv_lens 3, 20 -> rows 0 0 0 1, positions 0 1 2 19.
    """
    block_tables, kv_lens, cu_q_lens = call.block_tables, call.kv_lens, call.cu_q_lens
    S, token, row = pages.page_size, jnp.arange(num_tokens), token_rows(cu_q_lens, num_tokens)
    position = kv_lens[row] - cu_q_lens[row + 1] + token
    is_real = (token < cu_q_lens[-1]) & (kv_lens[row] > 0)
    page = block_tables[row, jnp.clip(position // S, 0, block_tables.shape[1] - 1)] + call.page_offset
    return jnp.where(is_real, page * S + position % S, pages.num_pages * S)


def expected_rows(call: AttentionCall, num_tokens: int) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Returns the arrays of a call's rows by name, each with the shape that it must have for `num_tokens` tokens."""
    B, mask = call.kv_lens.shape[0], call.tree_mask
    return {
        "block_tables": (call.block_tables, (B, *call.block_tables.shape[1:2])),
        "cu_q_lens": (call.cu_q_lens, (B + 1,)),
        "tree_mask": (mask, (num_tokens, *(() if mask is None else mask.shape[1:2]))),
    }


def check_call(q, k, v, pages: Pages, call: AttentionCall, sinks, k_scale, v_scale) -> None:
    """Raises ValueError for a window of nothing, and with every shape where the arrays do not fit together."""
    if call.window is not None and call.window < 1:
        raise ValueError(f"window={call.window} is not allowed: a query sees at least itself; use None for no window")
    (T, N, H), K = q.shape, pages.num_kv_heads
    expected = {
        "k": (k, (T, K, H)),
        "v": (v, (T, K, H)),
        **expected_rows(call, T),
        "sinks": (sinks, (N,)),
        "k_scale": (k_scale, (K,)),
        "v_scale": (v_scale, (K,)),
    }
    wrong = [name for name, (array, shape) in expected.items() if array is not None and array.shape != shape]
    if N % K:
        wrong.append("q (heads are not a multiple of the KV heads)")
    if pages.head_dim != H:
        wrong.append("q (head dimension)")
    if wrong:
        given = {"q": q} | {name: array for name, (array, _) in expected.items() if array is not None}
        listed = ", ".join(f"{name} {array.shape}" for name, array in given.items())
        raise ValueError(
            f"shapes do not fit together: {listed}, kv_lens {call.kv_lens.shape}, pages of {K} KV heads and head_dim"
            f" {pages.head_dim}; wrong: {', '.join(wrong)}; see paged_attention"
        )
    if (k is None) != (v is None):
        raise ValueError("k and v must both be given, or both be None where nothing is to be written")
    if pages.scales is not None and (k_scale is not None or v_scale is not None):
        raise ValueError("these pages have a scale for each token; leave out k_scale and v_scale, which are of heads")
    has_none = pages.scales is None and (k_scale is None or v_scale is None)
    if has_none and jnp.issubdtype(pages.dtype, jnp.integer):
        raise ValueError(f"pages of {pages.dtype} hold multiples of k_scale and v_scale; give both")
