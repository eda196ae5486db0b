"""How probable the tokens of prompts are, each given those before it: computed in the step that computes these."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, Sharding

from jaxinfer.model.batch import StepTokens, padded
from jaxinfer.model.decoder import unembed
from jaxinfer.model.params import Params
from jaxinfer.sampling.batch import on_devices
from jaxinfer.sampling.sample import log_probs_of

# Tokens whose logits exist at a time: with a vocabulary of 128,000 they take 33 MB.
MAX_ROWS = 64


@struct.dataclass
class PromptBatch:
    """The tokens of prompts whose log-probabilities a prefill step of T tokens is to give, by the state before each."""

    places: Any  # i32[T]  of the token before, in the batch; padded with 0
    token_ids: Any  # i32[T]
    count: Any  # i32[]  how many there are, before the padding
    wants_top: Any  # bool[]  whether alternatives are wanted of any


@struct.dataclass
class PromptOutput:
    """What a step gives for a `PromptBatch`; past its count it means nothing."""

    log_probs: Any  # f32[T]
    top_tokens: Any  # i32[T, A]  most probable first; zeros unless wanted
    top_log_probs: Any  # f32[T, A]


def make_prompt(
    places: Sequence[int], token_ids: Sequence[int], num_tokens: int, wants_top: bool = False
) -> PromptBatch:
    """Lays out what is asked of prompts in a step of `num_tokens` tokens, on the host."""
    return PromptBatch(
        places=padded(np.array(places, np.int32), num_tokens, 0),
        token_ids=padded(np.array(token_ids, np.int32), num_tokens, 0),
        count=np.array(len(places), np.int32),
        wants_top=np.array(wants_top),
    )


@functools.cache
def no_prompt(num_tokens: int, sharding: Sharding | None = None) -> PromptBatch:
    """Returns the arrays of a step in which no request asks for prompt log-probs, put on the device once.

    `sharding` is that of `shared_no_processors`.
    """
    return on_devices(make_prompt([], [], num_tokens=num_tokens), sharding)


def describe_prompt(
    params: Params, hidden: jax.Array, prompt: PromptBatch, max_log_probs: int, *, mesh: Mesh | None = None
) -> PromptOutput:
    """Returns the log-probabilities of prompt tokens from the step's hidden states [T, D], and of alternatives.

    There are never logits of more than MAX_ROWS tokens, and none where nothing is asked. `mesh` is that of
    the parameters, if any.
    """
    T, A = prompt.places.shape[0], max_log_probs
    size = min(MAX_ROWS, T)

    def describe_rows(i: jax.Array, output: PromptOutput) -> PromptOutput:
        first = jnp.minimum(i * size, T - size)  # the last of them may overlap the one before
        places, token_ids = (
            jax.lax.dynamic_slice_in_dim(field, first, size) for field in (prompt.places, prompt.token_ids)
        )
        rows = StepTokens(jnp.minimum(prompt.count - first, size))
        logits = unembed(params, hidden[places], rows, mesh=mesh)
        part = PromptOutput(*log_probs_of(logits, token_ids, prompt.wants_top, A, mesh=mesh))
        return jax.tree.map(lambda all_, new: jax.lax.dynamic_update_slice_in_dim(all_, new, first, 0), output, part)

    empty = PromptOutput(jnp.zeros(T), jnp.zeros((T, A), jnp.int32), jnp.zeros((T, A)))
    return jax.lax.fori_loop(0, (prompt.count + size - 1) // size, describe_rows, empty)
