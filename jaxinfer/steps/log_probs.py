"""The log-probabilities of given texts, which training differentiates. No cache outlives the call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.model.batch import MAX_BATCH, Batch
from jaxinfer.model.cache import cache_shardings, init_cache
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.decoder import forward, unembed
from jaxinfer.model.params import Params
from jaxinfer.sampling.sample import chosen_logits
from jaxinfer.validation import require

# Tokens whose logits exist at a time: with a vocabulary of 128,000 they take 33 MB.
MAX_ROWS = 64


@functools.partial(jax.jit, static_argnames=("config", "page_size", "implementation", "mesh"))
def log_probs(
    params: Params,
    tokens: jax.Array,
    *,
    config: ModelConfig,
    page_size: int = EngineConfig.page_size,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Returns the log-probability of each token after those before it: f32[B, T - 1] for tokens i32[B, T].

    Pad shorter texts at their end with any token, and ignore the results there: no result depends on a later token.
    All ids must be of the vocabulary, which is not checked.
    The function is pure: `jax.grad` differentiates it with respect to `params`, inside `jax.jit` or not. The derivative
    keeps the activations of all layers.

    On CPU in float32 the results equal those of an LLM of the same `page_size` for its own tokens, bit for bit: the
    log-probabilities before temperature and filters. `mesh` is the mesh that the parameters are split over, if any.
    `implementation` names a kernel of paged attention. Raises ValueError for wrong arguments when it is traced.
    """
    _check(params, tokens, config, page_size, mesh)
    B, T = tokens.shape
    tokens = tokens.astype(jnp.int32)
    batch, num_pages = _whole_rows(tokens, page_size)
    cache_config = CacheConfig(num_pages=num_pages, page_size=page_size, dtype=str(params.final_norm.dtype))
    cache = init_cache(config, cache_config)
    if mesh is not None:
        cache = jax.lax.with_sharding_constraint(cache, cache_shardings(cache, mesh, config=config))
    statics = {"config": config, "implementation": implementation, "mesh": mesh}
    hidden, _ = forward(params, cache, batch, num_whole_rows=B, **statics)
    states = hidden.reshape(B, T, -1)[:, :-1].reshape(B * (T - 1), -1)
    return _of_next_tokens(params, states, tokens[:, 1:].reshape(-1)).reshape(B, T - 1)


def _whole_rows(tokens: jax.Array, page_size: int) -> tuple[Batch, int]:
    """Returns tokens i32[B, T] as the batch of a step with an empty cache, and the number of its pages."""
    B, T = tokens.shape
    M = -(-T // page_size)
    places = np.arange(T, dtype=np.int32)
    batch = Batch(
        tokens=tokens.reshape(-1),
        positions=np.tile(places, B),
        slot_mapping=(np.arange(B, dtype=np.int32)[:, None] * (M * page_size) + places[None]).reshape(-1),
        cu_q_lens=np.arange(B + 1, dtype=np.int32) * np.int32(T),
        kv_lens=np.full(B, T, np.int32),
        block_tables=np.arange(B * M, dtype=np.int32).reshape(B, M),
    )
    return jax.tree.map(jnp.asarray, batch), B * M


def _of_next_tokens(params: Params, states: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the log-probabilities f32[n] of tokens i32[n] after states [n, D], with logits of MAX_ROWS at a time."""
    n = tokens.shape[0]
    size = min(MAX_ROWS, n)

    @jax.checkpoint  # the derivative computes the logits again
    def describe(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        states, tokens = part
        chosen, log_total = chosen_logits(unembed(params, states), tokens)
        return chosen - log_total

    padded = jnp.pad(states, ((0, -n % size), (0, 0))), jnp.pad(tokens, (0, -n % size))
    parts = padded[0].reshape(-1, size, states.shape[1]), padded[1].reshape(-1, size)
    return jax.lax.map(describe, parts).reshape(-1)[:n]


def _check(params: Any, tokens: Any, config: Any, page_size: Any, mesh: Any) -> None:
    """Raises ValueError for an argument of another type or shape. It runs when the function is traced."""
    require(isinstance(params, Params), "params", params, "the Params of `load_checkpoint`")
    require(isinstance(config, ModelConfig), "config", config, "the ModelConfig of `load_checkpoint`")
    CacheConfig(num_pages=1, page_size=page_size)
    require(mesh is None or isinstance(mesh, Mesh), "mesh", mesh, "a jax.sharding.Mesh or None")
    require(isinstance(tokens, jax.Array), "tokens", tokens, "an array of token ids i32[B, T]")
    are_ids = tokens.ndim == 2 and tokens.size <= MAX_BATCH and jnp.issubdtype(tokens.dtype, jnp.integer)
    fits = are_ids and tokens.shape[0] > 0 and 2 <= tokens.shape[1] <= config.max_position
    limit = f"token ids i32[B, T] with T from 2 to the model's {config.max_position}, at most {MAX_BATCH:,} in all"
    require(fits, "tokens", f"{tokens.dtype}{list(tokens.shape)}", limit)
