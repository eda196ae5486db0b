"""Steps that take tokens from the step before them where they are, on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.batch import Batch
from jaxinfer.cache import KVCache
from jaxinfer.params import Params
from jaxinfer.sampling_batch import SamplingBatch


@functools.partial(
    jax.jit,
    static_argnames=(
        "step",
        "config",
        "implementation",
        "max_log_probs",
        "max_prompt_log_probs",
        "custom",
        "num_steps",
        "q_len",
    ),
    donate_argnames="cache",
)
def chained_step(
    params: Params,
    cache: KVCache,
    drawn: jax.Array,
    batch: Batch,
    sampling: SamplingBatch,
    *rest: Any,
    step: Callable[..., Any],
    **statics: Any,
) -> tuple[Any, jax.Array, KVCache]:
    """Runs `step(params, cache, batch, sampling, *rest, **statics)` and returns (output, drawn, cache).

    `drawn` i32[R] has what each row of the step before has drawn, R being the most rows of all steps; a token of the
    batch that is `drawn_in_row(r)` is taken from there. The cache is donated.
    """
    tokens = jnp.where(batch.tokens < 0, drawn[-1 - batch.tokens], batch.tokens)
    output, cache = step(params, cache, replace(batch, tokens=tokens), sampling, *rest, **statics)
    return output, _enter(drawn, output), cache


@functools.partial(jax.jit, static_argnames=("step", "max_log_probs", "custom", "q_len"))
def chained_draw(
    params: Params,
    cache: KVCache,
    drawn: jax.Array,
    batch: Batch,
    sampling: SamplingBatch,
    states: jax.Array,
    *,
    step: Callable[..., Any],
    **statics: Any,
) -> tuple[Any, jax.Array]:
    """Runs a `step` that draws what a chained one has left to be drawn, and returns (output, drawn) as that does."""
    output = step(params, cache, batch, sampling, states, **statics)
    return output, _enter(drawn, output)


def _enter(drawn: jax.Array, output: Any) -> jax.Array:
    # What a step draws that yields several tokens a row, no other takes from here.
    return drawn.at[: output.tokens.shape[0]].set(output.tokens) if output.tokens.ndim == 1 else drawn
