"""Products by packed weights of which some channels at a time are widened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Packed weights that an accelerator widens in a turn: 16 MiB in bfloat16.
MAX_WIDENED = 2**23


def in_turns(start: jax.Array, parts: Any, per_turn: int, compute: Callable[[Any], jax.Array]) -> jax.Array:
    """Returns f32[T, F], what `compute` returns f32[T, per_turn] for the parts of some channels at a time.

    `start` f32[T, F] is what the results replace.

    300 channels, 256 a turn ->  0-255,  44-299
    """
    F = start.shape[1]
    per_turn = min(per_turn, F)

    def add_channels(i: jax.Array, y: jax.Array) -> jax.Array:
        # A turn that would pass channel F begins earlier, and computes some channels again.
        first = jnp.minimum(i * per_turn, F - per_turn)
        own = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, per_turn), parts)
        return jax.lax.dynamic_update_slice_in_dim(y, compute(own), first, axis=1)

    return jax.lax.fori_loop(0, -(-F // per_turn), add_channels, start)
