"""Draft heads on the hidden states of the target: several tokens ahead at once, in one small dispatch.

Head k guesses the token k after the next one from the state that the next one was drawn from (Medusa, Cai et al. 2024)
and from that token itself (Ankner et al. 2024), whatever comes in between.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.decoder import unembed
from jaxinfer.layers import linear
from jaxinfer.params import Params
from jaxinfer.sampling import sample
from jaxinfer.sampling_batch import SamplingBatch


@struct.dataclass
class States:
    """The last W states of each row, newest last, and the token that was drawn from each."""

    hidden: Any  # [B, W, D]
    tokens: Any  # i32[B, W]
    num_known: Any  # i32[B]  of the W; 0 on padding, which comes last


@struct.dataclass
class MedusaHeads:
    """Weights of K heads: head k unembeds h + silu(W_k [h; embedding of the token]) for the last state h."""

    weights: Any  # [K, D, 2 D]

    @property
    def window(self) -> int:
        """How many states it begins with."""
        return 1

    @property
    def hidden_size(self) -> int:
        return self.weights.shape[1]

    def most_drafts(self, most: int) -> int:
        """Returns how many drafts it makes where no more than `most` are wanted."""
        return min(self.weights.shape[0], most)

    def draft(
        self, params: Params, states: States, sampling: SamplingBatch, positions: jax.Array, num_drafts: int
    ) -> jax.Array:
        """Returns the tokens i32[B, num_drafts] that the first heads draw for `positions` i32[B] and those after."""
        hidden, embedded = states.hidden[:, -1], params.embedding[states.tokens[:, -1]]
        B, D = hidden.shape
        both = jnp.concatenate([hidden, embedded.astype(hidden.dtype)], axis=-1)
        steered = linear(both, self.weights[:num_drafts])
        ahead = hidden[:, None] + jax.nn.silu(steered)
        of_heads = jax.tree.map(lambda field: jnp.repeat(field, num_drafts, axis=0), sampling)
        places = (positions[:, None] + jnp.arange(num_drafts)[None]).reshape(-1)
        return sample(unembed(params, ahead.reshape(-1, D)), of_heads, places).reshape(B, num_drafts)


@functools.partial(jax.jit, static_argnames="num_drafts")
def draft_from_states(
    params: Params,
    heads: Any,
    windows: jax.Array,
    rows: jax.Array,
    tokens: jax.Array,
    num_known: jax.Array,
    sampling: SamplingBatch,
    positions: jax.Array,
    *,
    num_drafts: int,
) -> jax.Array:
    """Returns what heads draft i32[B, num_drafts] from the windows [R, W, D] of `rows` i32[B].

    They draw with the noise of the target's draws at their positions; `positions` i32[B] are those of the first. What
    of `sampling` comes before the temperature has no part in it.
    """
    states = States(hidden=windows[rows], tokens=tokens, num_known=num_known)
    return heads.draft(params, states, replace(sampling, processors=None), positions, num_drafts)
