"""The record of a call of attention: the rows of a step, and how a layer attends in it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh

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
    scale: float = field(default=1.0, metadata=STATIC)
    window: int | None = field(default=None, metadata=STATIC)
    softcap: float | None = field(default=None, metadata=STATIC)
    q_len: int | None = field(default=None, metadata=STATIC)
    mesh: Mesh | None = field(default=None, metadata=STATIC)
    implementation: str | None = field(default=None, metadata=STATIC)

    def in_pool(self) -> AttentionCall:
        """Returns the same call with a table of the pool's own page ids, and no offset."""
        return replace(self, block_tables=self.block_tables + self.page_offset, page_offset=0)
