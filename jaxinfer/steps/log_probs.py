"""The log-probabilities of tokens, which training differentiates. No cache outlives the call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.model.batch import MAX_BATCH, PADDING_TOKEN, whole_rows
from jaxinfer.model.cache import cache_shardings, init_cache
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.decoder import forward, unembed
from jaxinfer.model.params import Params, check_mesh
from jaxinfer.sampling.batch import SamplingBatch
from jaxinfer.sampling.processors import Context, LogitsProcessor, process_logits
from jaxinfer.sampling.sample import chosen_logits, filter_logits, scale
from jaxinfer.validation import require

# Tokens whose logits exist at a time: with a vocabulary of 128,000 they take 33 MB.
MAX_ROWS = 64
# (logits f32[m, V], tokens i32[m], their places i32[m] among all) -> the log-probabilities f32[m] of the tokens
Describe = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@functools.partial(jax.jit, static_argnames=("config", "page_size", "implementation", "mesh", "custom"))
def log_probs(
    params: Params,
    tokens: jax.Array,
    sampling: SamplingBatch | None = None,
    *,
    config: ModelConfig,
    page_size: int = EngineConfig.page_size,
    implementation: str | None = None,
    mesh: Mesh | None = None,
    custom: tuple[LogitsProcessor, ...] = (),
) -> jax.Array:
    """Returns the log-probability of each token after those before it: f32[B, T - 1] for tokens i32[B, T].

    Pad shorter texts at their end with any token, and ignore the results there: no result depends on a later token.
    All ids must be of the vocabulary, which is not checked.
    The function is pure: `jax.grad` differentiates it with respect to `params`, inside `jax.jit` or not. The derivative
    keeps the activations of all layers.

    On CPU in float32 the results equal those of an LLM of the same `page_size` for its own tokens, bit for bit: the
    log-probabilities before temperature and filters. With `sampling`, made with a row for each text, they are those of
    `sampling_log_probs`, for tokens of prompts as well. It may have no room for masks: those of structures differ from
    token to token. `custom` are the functions of its processors.

    `mesh` is the mesh that the parameters are split over, if any. `implementation` names a kernel of paged attention.
    Raises ValueError for wrong arguments when it is traced.
    """
    _check(params, tokens, sampling, config, page_size, mesh, custom)
    B, T = tokens.shape
    tokens = tokens.astype(jnp.int32)
    batch, num_pages = whole_rows(tokens, page_size)
    config = replace(config, num_exact=None)  # the cache has the type of the weights
    cache_config = CacheConfig(num_pages=num_pages, page_size=page_size, dtype=str(params.final_norm.dtype))
    cache = init_cache(config, cache_config)
    if mesh is not None:
        cache = jax.lax.with_sharding_constraint(cache, cache_shardings(cache, mesh, config=config))
    statics = {"config": config, "implementation": implementation, "mesh": mesh}
    hidden, _ = forward(params, cache, batch, num_whole_rows=B, **statics)
    states = hidden.reshape(B, T, -1)[:, :-1].reshape(B * (T - 1), -1)
    if sampling is None:
        return _of_next_tokens(params, states, tokens[:, 1:].reshape(-1), _in_model).reshape(B, T - 1)

    def in_draw(logits: jax.Array, chosen: jax.Array, places: jax.Array) -> jax.Array:
        rows, last = places // (T - 1), places % (T - 1)
        per_token = jax.tree.map(lambda field: field[rows], sampling)
        statics = {"custom": custom, "num_padding": config.vocab_padding}
        values = sampling_log_probs(logits, per_token, tokens[rows], last + 1, **statics)
        return jnp.take_along_axis(values, chosen[:, None], axis=-1)[:, 0]

    return _of_next_tokens(params, states, tokens[:, 1:].reshape(-1), in_draw).reshape(B, T - 1)


@functools.partial(jax.jit, static_argnames=("custom", "num_padding"))
def sampling_log_probs(
    logits: jax.Array,
    sampling: SamplingBatch,
    tokens: jax.Array,
    lens: jax.Array,
    *,
    custom: tuple[LogitsProcessor, ...] = (),
    num_padding: int = 0,
) -> jax.Array:
    """Returns the log-probability of each next token in the distribution that it is drawn from, f32[B, V].

    `logits` f32[B, V]: the model's. `sampling`: the rows of `make_sampling`, with `with_masks` for structures. `tokens`
    i32[B, L]: those before the next one, of which row b has the first lens[b], i32[B]; prompt and output, none evicted.
    `custom`: the functions of the processors that `sampling` names, in their order. The last `num_padding` logits of a
    row are of no token, as over a mesh: see `ModelConfig.vocab_padding`.

    The distribution is that after processors, temperature and filters, by the code of the engine's steps: on CPU the
    values of drawn tokens equal `Completion.sampling_log_probs`, bit for bit. Tokens that are ruled out have -inf. At
    temperature 0 the most probable token has 0 and all others -inf.

    The function is pure and differentiable with respect to `logits`; the choice of tokens that are ruled out counts as
    constant.
    """
    _check_rows(logits, sampling, tokens, lens, custom)
    places = jnp.arange(tokens.shape[1])[None]
    context = Context(
        tokens=jnp.where(places < lens[:, None], tokens, PADDING_TOKEN),
        lens=lens,
        num_evicted_tokens=jnp.zeros_like(lens),
    )
    processed = process_logits(logits, sampling.processors, lambda: context, custom, num_padding)
    scaled = scale(processed, sampling)
    is_kept = filter_logits(jax.lax.stop_gradient(scaled), sampling) > -jnp.inf
    kept = jnp.where(is_kept, scaled, -jnp.inf)
    greedy = jnp.argmax(processed, axis=-1).astype(jnp.int32)
    _, log_total = chosen_logits(kept, greedy)
    most_probable = jnp.where(jnp.arange(logits.shape[1])[None] == greedy[:, None], 0.0, -jnp.inf)
    return jnp.where(sampling.temperature[:, None] > 0, kept - log_total[:, None], most_probable)


def _in_model(logits: jax.Array, tokens: jax.Array, places: jax.Array) -> jax.Array:
    chosen, log_total = chosen_logits(logits, tokens)
    return chosen - log_total


def _of_next_tokens(params: Params, states: jax.Array, tokens: jax.Array, describe: Describe) -> jax.Array:
    """Returns the log-probabilities f32[n] of tokens i32[n] after states [n, D], with logits of MAX_ROWS at a time."""
    n = tokens.shape[0]
    size = min(MAX_ROWS, n)

    @jax.checkpoint  # the derivative computes the logits again
    def describe_part(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        states, tokens, places = part
        return describe(unembed(params, states), tokens, places)

    def parts(field: jax.Array) -> jax.Array:
        padded = jnp.pad(field, ((0, -n % size), *[(0, 0)] * (field.ndim - 1)))
        return padded.reshape(-1, size, *field.shape[1:])

    return jax.lax.map(describe_part, (parts(states), parts(tokens), parts(jnp.arange(n)))).reshape(-1)[:n]


def _check(params: Any, tokens: Any, sampling: Any, config: Any, page_size: Any, mesh: Any, custom: Any) -> None:
    """Raises ValueError for an argument of another type or shape. It runs when the function is traced."""
    require(isinstance(params, Params), "params", params, "the Params of `load_checkpoint`")
    require(isinstance(config, ModelConfig), "config", config, "the ModelConfig of `load_checkpoint`")
    CacheConfig(num_pages=1, page_size=page_size)
    require(mesh is None or isinstance(mesh, Mesh), "mesh", mesh, "a jax.sharding.Mesh or None")
    if mesh is not None:
        check_mesh(mesh)
    require(isinstance(tokens, jax.Array), "tokens", tokens, "an array of token ids i32[B, T]")
    are_ids = tokens.ndim == 2 and tokens.size <= MAX_BATCH and jnp.issubdtype(tokens.dtype, jnp.integer)
    fits = are_ids and tokens.shape[0] > 0 and 2 <= tokens.shape[1] <= config.max_position
    limit = f"token ids i32[B, T] with T from 2 to the model's {config.max_position}, at most {MAX_BATCH:,} in all"
    require(fits, "tokens", f"{tokens.dtype}{list(tokens.shape)}", limit)
    if sampling is not None:
        _check_sampling(sampling, tokens.shape[0], custom)
        num_words = sampling.processors.allowed_bits.shape[-1]
        no_masks = "made without vocab_size, for the masks of structures differ from token to token"
        require(num_words == 0, "sampling", f"room for masks of {num_words} words", no_masks)


def _check_sampling(sampling: Any, num_rows: int, custom: Any) -> None:
    require(isinstance(sampling, SamplingBatch), "sampling", sampling, "the SamplingBatch of `make_sampling`")
    rows = sampling.temperature.shape
    require(rows == (num_rows,), "sampling", f"temperature{list(rows)}", f"of num_rows={num_rows}, one for each row")
    require(isinstance(custom, tuple) and all(map(callable, custom)), "custom", custom, "a tuple of functions")
    num_names = sampling.processors.uses_custom.shape[-1]
    require(len(custom) == num_names, "custom", custom, f"the {num_names} functions that make_sampling was given")


def _check_rows(logits: Any, sampling: Any, tokens: Any, lens: Any, custom: Any) -> None:
    """Raises ValueError for arguments of `sampling_log_probs` of another type or shape, when it is traced."""
    are_logits = isinstance(logits, jax.Array) and logits.ndim == 2 and logits.dtype == jnp.float32
    require(are_logits, "logits", logits, "an array f32[B, V]")
    _check_sampling(sampling, logits.shape[0], custom)
    for name, array, ndim in (("tokens", tokens, 2), ("lens", lens, 1)):
        are_ids = isinstance(array, jax.Array) and array.ndim == ndim and jnp.issubdtype(array.dtype, jnp.integer)
        fits = are_ids and array.shape[0] == logits.shape[0]
        require(fits, name, array, f"an array of integers with a row for each of the {logits.shape[0]} of logits")
