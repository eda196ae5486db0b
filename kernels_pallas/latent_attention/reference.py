"""Latent attention in plain JAX: the paged attention of N query heads to one head, with values inside its keys.

The loops are those of `kernels_pallas.paged_attention.reference`, and so is the order of every sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from kernels_pallas.latent_attention.layout import LatentPages, read_pages, read_slots, write_latents
from kernels_pallas.paged_attention.online_softmax import Scoring
from kernels_pallas.paged_attention.reference import attend_ragged
from kernels_pallas.paged_attention.shapes import token_slots
from kernels_pallas.paged_attention.tiles import Pool


def latent_attention_reference(
    q: jax.Array,
    latents: jax.Array,
    pages: LatentPages,
    *,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    scale: float,
    page_offset: jax.Array | int = 0,
    q_len: int | None = None,
    tree_mask: jax.Array | None = None,
    attend: Callable[..., jax.Array] = attend_ragged,
) -> tuple[jax.Array, LatentPages]:
    """The contract is that of `latent_attention`; `attend` takes the place of `attend_ragged`."""
    slots = token_slots(q.shape[0], pages, block_tables, kv_lens, cu_q_lens, page_offset)
    pages = write_latents(pages, latents, slots)
    pool = Pool(pages.page_size, functools.partial(read_pages, pages), functools.partial(read_slots, pages))
    out = attend(
        q[:, None],
        pool,
        block_tables=block_tables + page_offset,
        kv_lens=kv_lens,
        cu_q_lens=cu_q_lens,
        q_len=q_len,
        tree_mask=tree_mask,
        scoring=Scoring(scale),
    )
    return out[:, 0], pages
