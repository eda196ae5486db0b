"""Draft heads on the hidden states of the target: several tokens ahead at once, in one small dispatch.

Head k guesses the token k after the next one from the state that the next one was drawn from (Medusa, Cai et al. 2024)
and from that token itself (Ankner et al. 2024), whatever comes in between.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxinfer.decoder import unembed
from jaxinfer.layers import linear
from jaxinfer.params import Params
from jaxinfer.sampling import sample
from jaxinfer.sampling_batch import SamplingBatch


@jax.jit
def draft_from_heads(
    params: Params,
    weights: jax.Array,
    hidden: jax.Array,
    tokens: jax.Array,
    sampling: SamplingBatch,
    positions: jax.Array,
) -> jax.Array:
    """Returns a token of each of K heads, i32[B, K], for tokens i32[B] drawn from states [B, D].

    Head k unembeds h + silu(W_k [h; embedding of the token]) for weights [K, D, 2 D]. It draws with the noise of the
    target's draw at its position; `positions` i32[B] are those of the first. What of `sampling` comes before the
    temperature has no part in it.
    """
    B, D = hidden.shape
    K = weights.shape[0]
    steered = linear(jnp.concatenate([hidden, params.embedding[tokens].astype(hidden.dtype)], axis=-1), weights)
    states = hidden[:, None] + jax.nn.silu(steered)
    logits = unembed(params, states.reshape(B * K, D))
    of_heads = jax.tree.map(lambda field: jnp.repeat(field, K, axis=0), replace(sampling, processors=None))
    drawn = sample(logits, of_heads, (positions[:, None] + jnp.arange(K)[None]).reshape(-1))
    return drawn.reshape(B, K)
