"""The derivative of attention in a step of whole rows; no implementation of paged attention has one.

A step of whole rows has rows of equally many tokens, none of them in the cache before. So each row attends to its own
tokens alone, and the derivative needs no pages: it is that of plain causal attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# (*tokens, shared, pages, arrays) -> (attended, pages): the operands are those of `attend_whole_rows`
PagedCall = Callable[..., tuple[jax.Array, Any]]
# (*tokens of one row, shared) -> attended
PlainCall = Callable[..., jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attend_whole_rows(
    compute: PagedCall,
    plain: PlainCall,
    num_rows: int,
    tokens: tuple[jax.Array, ...],
    shared: jax.Array | None,
    pages: Any,
    arrays: Any,
) -> tuple[jax.Array, Any]:
    """Returns `compute(*tokens, shared, pages, arrays)`, with the derivative of `plain(*tokens, shared)` for each row.

    `tokens` are arrays [T, ...] of `num_rows` rows one after another, such as queries, keys and values. `shared` is an
    array that all rows share, such as sinks [N]. `arrays` are integers of the step, as those of a call of attention.
    The pages have no derivative.
    """
    return compute(*tokens, shared, pages, arrays)


def _forward(
    compute: PagedCall,
    plain: PlainCall,
    num_rows: int,
    tokens: tuple[jax.Array, ...],
    shared: Any,
    pages: Any,
    arrays: Any,
) -> tuple[Any, Any]:
    return compute(*tokens, shared, pages, arrays), (tokens, shared)


def _backward(compute: PagedCall, plain: PlainCall, num_rows: int, operands: Any, change: tuple[jax.Array, Any]) -> Any:
    tokens, shared = operands

    def of_row(arrays: list[jax.Array]) -> tuple[Any, ...]:
        *own, change = arrays
        return jax.vjp(plain, *own, shared)[1](change)

    # One row at a time: the scores of a row are T x T.
    by_row = [array.reshape(num_rows, -1, *array.shape[1:]) for array in (*tokens, change[0])]
    *of_tokens, of_shared = jax.lax.map(of_row, by_row)
    joined = tuple(x.reshape(array.shape) for x, array in zip(of_tokens, tokens, strict=True))
    return joined, None if of_shared is None else of_shared.sum(0), None, None


attend_whole_rows.defvjp(_forward, _backward)


def plain_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Returns the causal attention [T, N, V] of one row, added up in float32, by its definition.

    q [T, N, H], k [T, K, H], v [T, K, V] and sinks [N]; options are as in `paged_attention`.
    """
    (T, N, H), K = q.shape, k.shape[1]
    queries = q.reshape(T, K, N // K, H)
    scores = jnp.einsum("tkgh,skh->kgts", queries, k, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    distance = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    is_seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    scores = jnp.where(is_seen[None, None], scores, -jnp.inf)
    if sinks is not None:  # one more score, without a value
        own = sinks.astype(jnp.float32).reshape(K, N // K, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(own, (K, N // K, T, 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :T].astype(v.dtype)
    attended = jnp.einsum("kgts,skv->tkgv", weights, v, preferred_element_type=jnp.float32)
    return attended.reshape(T, N, -1).astype(q.dtype)
