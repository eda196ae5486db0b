"""Several decode steps in one dispatch, if no request needs its tokens sooner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxinfer.model.batch import PADDING_SLOT, PADDING_TOKEN, Batch, StepOutput, VerifyOutput, next_batch, padded
from jaxinfer.model.cache import KVCache

# One decode step: (cache, batch) -> (output, cache).
DecodeStep = Callable[[KVCache, Batch], tuple[StepOutput, KVCache]]


@struct.dataclass
class LoopBatch:
    """The limits of each row of a decode loop."""

    max_tokens: Any  # i32[B]  the most tokens to emit, for which the row has pages; 0 on padding
    stop_token_ids: Any  # i32[B, N]  after which a row emits nothing, padded with PADDING_TOKEN
    stop_at_first_finish: Any  # bool[]  the loop ends with its first row, because a waiting request needs the place


@struct.dataclass
class _Progress:
    step: jax.Array  # i32[]
    batch: Batch
    cache: KVCache
    output: VerifyOutput
    is_running: jax.Array  # bool[B]
    is_over: jax.Array  # bool[]


def make_loop(
    max_tokens: Sequence[int],
    stop_token_ids: Sequence[Collection[int]],
    *,
    num_rows: int,
    max_stop_tokens: int,
    stop_at_first_finish: bool,
) -> LoopBatch:
    """Returns the limits of a loop over the rows of a decode batch, as host arrays."""
    stops = np.full((num_rows, max_stop_tokens), PADDING_TOKEN, np.int32)
    for row, ids in enumerate(stop_token_ids):
        stops[row, : len(ids)] = list(ids)
    return LoopBatch(
        max_tokens=padded(np.array(max_tokens, np.int32), num_rows, 0),
        stop_token_ids=stops,
        stop_at_first_finish=np.array(stop_at_first_finish),
    )


def run_loop(decode: DecodeStep, cache: KVCache, batch: Batch, loop: LoopBatch, num_steps: int):
    """Decodes until every row has stopped, at most `num_steps` times; returns a `VerifyOutput` of Q = num_steps.

    A row that has stopped computes its last token again, which changes nothing, and emits no token.
    """
    page_size = cache.tokens.shape[1]

    def is_going_on(now: _Progress) -> jax.Array:
        return (now.step < num_steps) & ~now.is_over

    def advance(now: _Progress) -> _Progress:
        drawn, cache = decode(now.cache, now.batch)
        num_emitted = now.output.num_emitted + now.is_running.astype(jnp.int32)
        is_stop = (drawn.tokens[:, None] == loop.stop_token_ids).any(axis=1) | (drawn.tokens < 0)
        is_running = now.is_running & ~is_stop & (num_emitted < loop.max_tokens)
        has_stopped = (now.is_running & ~is_running).any()
        batch = next_batch(
            now.batch,
            jnp.where(is_running, drawn.tokens, now.batch.tokens),
            now.batch.kv_lens + is_running.astype(jnp.int32),
            page_size,
        )
        return _Progress(
            step=now.step + 1,
            # Keys and values would be the same again, but a state would see the token twice.
            batch=replace(batch, slot_mapping=jnp.where(is_running, batch.slot_mapping, PADDING_SLOT)),
            cache=cache,
            output=replace(_entered(now.output, drawn, now.step), num_emitted=num_emitted),
            is_running=is_running,
            is_over=~is_running.any() | (loop.stop_at_first_finish & has_stopped),
        )

    is_running = loop.max_tokens > 0
    start = _Progress(
        step=jnp.int32(0),
        batch=batch,
        cache=cache,
        output=_empty_output(jax.eval_shape(decode, cache, batch)[0], num_steps),
        is_running=is_running,
        is_over=~is_running.any(),
    )
    end = jax.lax.while_loop(is_going_on, advance, start)
    return end.output, end.cache


def _empty_output(one: StepOutput, num_steps: int) -> VerifyOutput:
    def column(field: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros((field.shape[0], num_steps, *field.shape[1:]), field.dtype)

    return VerifyOutput(**_fields(jax.tree.map(column, one)), num_emitted=jnp.zeros(one.tokens.shape, jnp.int32))


def _entered(output: VerifyOutput, drawn: StepOutput, step: jax.Array) -> VerifyOutput:
    """Returns the output with the tokens of one step as its column `step`."""
    columns = {
        name: jax.lax.dynamic_update_index_in_dim(getattr(output, name), column, step, axis=1)
        for name, column in _fields(drawn).items()
    }
    return replace(output, **columns)


def _fields(output: StepOutput) -> dict[str, Any]:
    return {name: getattr(output, name) for name in ("tokens", "log_probs", "top_tokens", "top_log_probs")}
