"""Attention over paged latents."""

from kernels_pallas.latent_attention.api import latent_attention, plan_latent_attention
from kernels_pallas.latent_attention.layout import (
    LatentPages,
    abstract_latents,
    map_rotary_keys,
    move_latents,
)

__all__ = [
    "LatentPages",
    "abstract_latents",
    "latent_attention",
    "map_rotary_keys",
    "move_latents",
    "plan_latent_attention",
]
