"""Calls of latent attention, as calls of paged attention to one head: the oracle of the one is that of the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from kernels_pallas.latent_attention import LatentPages
from kernels_pallas.paged_attention import Pages
from tests.kernels.paged_attention.oracle import Call, make_call


def make_latent_call(
    lens: Sequence[tuple[int, int]],
    layout: str,
    *,
    num_heads: int = 4,
    latent_size: int = 28,
    rotary_size: int = 6,
    **options: Any,
) -> Call:
    """Returns a call whose rows are those of paged attention to one head, with the latents in its keys as values."""
    width = latent_size + rotary_size
    call = make_call(lens, num_heads=num_heads, num_kv_heads=1, head_dim=width, layout="gpu", **options)
    keys = call.arguments.pop("pages").arrays[0][:, :, 0]
    call.arguments.pop("v")
    array = jnp.pad(keys, ((0, 0), (0, 0), (0, -width % 128 if layout == "tpu" else 0)))
    call.arguments |= {"latents": call.arguments.pop("k")[:, 0], "pages": LatentPages(array, latent_size, rotary_size)}
    return dataclasses.replace(call, rows=[(q, k, k) for q, k, _ in call.rows])


def as_keys(pages: LatentPages) -> Pages:
    keys = pages.array[:, :, None, : pages.width]
    return Pages((keys, keys), "gpu", pages.width)
