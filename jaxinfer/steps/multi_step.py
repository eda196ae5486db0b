"""Several decode steps in one dispatch, of which the host need not know the tokens in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.model.batch import PADDING_SLOT, Batch, StepOutput, VerifyOutput, next_batch
from jaxinfer.model.cache import KVCache

# One decode step: (cache, batch) -> (output, cache).
DecodeStep = Callable[[KVCache, Batch], tuple[StepOutput, KVCache]]


def run_loop(
    decode: DecodeStep, cache: KVCache, batch: Batch, max_tokens: jax.Array, num_steps: int
) -> tuple[VerifyOutput, KVCache]:
    """Decodes `num_steps` times; returns a `VerifyOutput` of Q = num_steps, whose num_emitted is `max_tokens` i32[B].

    The number of turns is known to the compiler, so a GPU runs the loop without asking its host. A row that has all its
    tokens computes the last one again, which changes nothing.
    """
    page_size = cache.tokens.shape[1]

    def advance(step: jax.Array, carry: tuple[Batch, KVCache, VerifyOutput]) -> tuple[Batch, KVCache, VerifyOutput]:
        batch, cache, output = carry
        drawn, cache = decode(cache, batch)
        is_running = step + 1 < max_tokens
        # A token below 0 says that none could be drawn; the host ends the row there, and what follows has no meaning.
        tokens = jnp.where(is_running, jnp.maximum(drawn.tokens, 0), batch.tokens)
        batch = next_batch(batch, tokens, batch.kv_lens + is_running.astype(jnp.int32), page_size)
        # Keys and values would be the same again, but a state would see the token twice.
        batch = replace(batch, slot_mapping=jnp.where(is_running, batch.slot_mapping, PADDING_SLOT))
        return batch, cache, _entered(output, drawn, step)

    output = _empty_output(jax.eval_shape(decode, cache, batch)[0], num_steps, max_tokens)
    _, cache, output = jax.lax.fori_loop(0, num_steps, advance, (batch, cache, output))
    return output, cache


def _empty_output(one: StepOutput, num_steps: int, max_tokens: jax.Array) -> VerifyOutput:
    def column(field: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros((field.shape[0], num_steps, *field.shape[1:]), field.dtype)

    return VerifyOutput(**jax.tree.map(column, _fields(one)), num_emitted=max_tokens)


def _entered(output: VerifyOutput, drawn: StepOutput, step: jax.Array) -> VerifyOutput:
    """Returns the output with the tokens of one step as its column `step`."""
    columns = {
        name: jax.lax.dynamic_update_index_in_dim(getattr(output, name), column, step, axis=1)
        for name, column in _fields(drawn).items()
    }
    return replace(output, **columns)


def _fields(output: StepOutput) -> dict[str, Any]:
    names = ("tokens", "log_probs", "top_tokens", "top_log_probs", "sampling_log_probs")
    return {name: field for name in names if (field := getattr(output, name)) is not None}
