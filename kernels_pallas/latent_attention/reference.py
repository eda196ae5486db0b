"""Latent attention in plain JAX: the paged attention of N query heads to one head, with values inside its keys.

The loops are those of `kernels_pallas.paged_attention.reference`, and so is the order of every sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from kernels_pallas.latent_attention.layout import LatentPages, read_pages, read_slots, write_latents
from kernels_pallas.paged_attention.call import AttentionCall, token_slots
from kernels_pallas.paged_attention.online_softmax import Pool, Scoring
from kernels_pallas.paged_attention.reference import attend_ragged


def latent_attention_reference(
    q: jax.Array,
    latents: jax.Array,
    pages: LatentPages,
    call: AttentionCall,
    *,
    attend: Callable[..., jax.Array] = attend_ragged,
) -> tuple[jax.Array, LatentPages]:
    """The contract is that of `latent_attention`; `attend` takes the place of `attend_ragged`."""
    pages = write_latents(pages, latents, token_slots(q.shape[0], pages, call))
    pool = Pool(pages.page_size, functools.partial(read_pages, pages), functools.partial(read_slots, pages))
    return attend(q[:, None], pool, call.in_pool(), Scoring(call.scale))[:, 0], pages
