"""Calls of latent attention, as calls of paged attention to one head: the oracle of the one is that of the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels_pallas.latent_attention import LatentPages, abstract_latents
from kernels_pallas.latent_attention.layout import read_pages, write_latents
from kernels_pallas.paged_attention import Pages
from tests.kernels.paged_attention.oracle import Call, make_call, poisoned, worth_by_token


def make_latent_call(
    lens: Sequence[tuple[int, int]],
    layout: str,
    *,
    num_heads: int = 4,
    latent_size: int = 28,
    rotary_size: int = 6,
    scaled_dtype: str | None = None,
    **options: Any,
) -> Call:
    """Returns a call whose rows are those of paged attention to one head, with the latents in its keys as values.

    With a `scaled_dtype` the pool is one of integers, with scales for the latent and for the rotated key of each token.
    """
    width = latent_size + rotary_size
    call = make_call(lens, num_heads=num_heads, num_kv_heads=1, head_dim=width, layout="gpu", **options)
    keys = call.arguments.pop("pages").arrays[0][:, :, 0]
    call.arguments.pop("v")
    if scaled_dtype is not None:
        (P, S, _), is_written = keys.shape, ~np.isnan(keys).any(-1).reshape(-1)
        pages = abstract_latents(P, S, latent_size, rotary_size, scaled_dtype, layout, has_scales=True)
        slots = np.where(is_written, np.arange(P * S), P * S)
        pages = write_latents(poisoned(pages), keys.reshape(P * S, width), jnp.asarray(slots))
        call.arguments |= {"latents": call.arguments.pop("k")[:, 0], "pages": pages}
        parts = [np.split(k, [latent_size], axis=-1) for _, k, _ in call.rows]
        most = jnp.iinfo(scaled_dtype).max
        worths = [np.concatenate([worth_by_token(part, most) for part in pair], axis=-1) for pair in parts]
        return dataclasses.replace(call, rows=[(q, k, k) for (q, *_), k in zip(call.rows, worths, strict=True)])
    array = jnp.pad(keys, ((0, 0), (0, 0), (0, -width % 128 if layout == "tpu" else 0)))
    call.arguments |= {"latents": call.arguments.pop("k")[:, 0], "pages": LatentPages(array, latent_size, rotary_size)}
    return dataclasses.replace(call, rows=[(q, k, k) for q, k, _ in call.rows])


def as_keys(pages: LatentPages) -> Pages:
    keys = read_pages(pages, jnp.arange(pages.num_pages))[0].transpose(0, 3, 1, 2)
    return Pages((keys, keys), "gpu", pages.width)
