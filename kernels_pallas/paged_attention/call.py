"""A call of attention: its record, where its tokens stand, and what its arrays must look like."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kernels_pallas.paged_attention.layout import Pages

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What a call has beside queries, keys, values and pages. Row b owns the tokens `cu_q_lens[b]:cu_q_lens[b + 1]`.

    Layers of a step differ in `scale`, `window`, `softcap` and `page_offset`; the rest is of the step.

    Args:
      block_tables: i32[B, M] page ids; entries past a row's length, and of pages wholly behind the window of its first
        token here, may be anything inside the pool.
      kv_lens: i32[B] context lengths in tokens, this step's included; 0 marks a padding row, which writes nothing.
      cu_q_lens: i32[B + 1] where each row's tokens start; padding rows are empty unless `q_len` is given.
      tree_mask: u32[T, words] replaces causality among a row's own tokens, for trees of drafts: all that came before
        this step is visible, and token j of the row if bit j % 32 of word j // 32 is set. A token's bits are itself
        and its ancestors; for `window` it stands where their number puts it, and sees all of its ancestors.
      page_offset: i32[] added to every page id: where a layer's pages begin in the pool of its group.
      plan: what `plan_attention` made of the same step, so that each layer need not make it.
      scale: multiplies the scores.
      window: a query at position p sees only the keys at positions above p - window; None sees all.
      softcap: bounds the scores by a tanh; None leaves them.
      q_len: the most tokens that a row has, where that is known; lets the kernel specialise. 1 says that every row has
        one, the padding rows included.
      mesh: splits heads over the devices of its HEADS_AXES: each computes its own KV heads, with the query heads that
        read them and its part of the pool. If all of these axes do not divide the KV heads, the last ones that do split
        them; devices along the others compute the same. Its axes are automatic, as those of `Mesh(…)` are and those of
        `jax.make_mesh(…)` are not by default. Without it the call runs whole on every device.
      implementation: a name from `IMPLEMENTATIONS`, or None for the device's own: the kernels of a TPU or GPU, which
        raise for a call that they cannot do, or the reference on a CPU and on GPUs of a compute capability below 8.0.
    """

    block_tables: Any
    kv_lens: Any
    cu_q_lens: Any
    tree_mask: Any = None
    page_offset: Any = 0
    plan: Any = None
    scale: float = field(metadata=STATIC)
    window: int | None = field(default=None, metadata=STATIC)
    softcap: float | None = field(default=None, metadata=STATIC)
    q_len: int | None = field(default=None, metadata=STATIC)
    mesh: Mesh | None = field(default=None, metadata=STATIC)
    implementation: str | None = field(default=None, metadata=STATIC)

    def in_pool(self) -> AttentionCall:
        """Returns the same call with a table of the pool's own page ids, and no offset."""
        return replace(self, block_tables=self.block_tables + self.page_offset, page_offset=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """What becomes of the products of queries, keys and values before they are used: bias, norm, rotation, or none.

    Args:
      q_bias, k_bias, v_bias: [N, H], [K, H], [K, H] added to the products, in their dtype.
      q_norm, k_norm: [H] the weights of an RMSNorm over each head; both or none.
      cos, sin: f32[T, 1, R / 2] by which the first R numbers of queries and keys are rotated then.
      epsilon: added to the mean square of a norm.
      adds_one: a norm's weights are offsets from 1.
      is_interleaved: a pair of numbers that is rotated is 2 i and 2 i + 1, and not i and i + R / 2.
    """

    q_bias: Any = None
    k_bias: Any = None
    v_bias: Any = None
    q_norm: Any = None
    k_norm: Any = None
    cos: Any = None
    sin: Any = None
    epsilon: float = field(default=0.0, metadata=STATIC)
    adds_one: bool = field(default=False, metadata=STATIC)
    is_interleaved: bool = field(default=False, metadata=STATIC)

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays that there are, by name."""
        names = ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "cos", "sin")
        return {name: array for name in names if (array := getattr(self, name)) is not None}


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
