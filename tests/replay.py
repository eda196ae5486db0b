"""Runs sequences through `forward` in any split of the work, over a hostile cache, and collects every token's logits."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch import Row, make_batch
from jaxinfer.cache import KVCache, init_cache
from jaxinfer.config import CacheConfig, ModelConfig
from jaxinfer.decoder import forward, unembed
from jaxinfer.params import Params, abstract_params

# The part of each sequence that one step computes: (sequence, number of tokens), in row order.
Chunks = Sequence[tuple[int, int]]


@functools.partial(jax.jit, static_argnames=("config", "q_len"), donate_argnames="cache")
def all_logits(params, cache, batch, *, config, q_len=None):
    """Returns the logits [T, V] of every token of a step, padding included, and the cache."""
    hidden, cache = forward(params, cache, batch, config=config, q_len=q_len)
    return unembed(params, hidden), cache


def lively_params(config: ModelConfig, seed: int = 0) -> Params:
    """Returns random parameters in which every norm differs from 1 and attention is far from uniform."""
    generator = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        noise = generator.standard_normal(leaf.shape)
        is_norm = jax.tree_util.keystr(path[-1:]).endswith("norm")
        return jnp.asarray(1 + 0.3 * noise if is_norm else noise / config.hidden_size**0.5, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config, jnp.float32))


def nan_cache(config: ModelConfig, cache_config: CacheConfig) -> KVCache:
    """Returns a cache in which every slot is NaN, so that reading one that was not written shows."""
    return jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), init_cache(config, cache_config))


def deal_pages(num_sequences: int, pages_each: int, seed: int = 0) -> np.ndarray:
    """Returns page ids [sequence, page], shuffled: the page after one's own is a neighbour's."""
    ids = np.random.default_rng(seed).permutation(num_sequences * pages_each)
    return ids.reshape(pages_each, num_sequences).T


class Replay:
    """The state of sequences of equal or different lengths while steps of one cache compute them."""

    def __init__(
        self, params: Params, sequences: Sequence[np.ndarray], *, config: ModelConfig, page_size: int = 16
    ) -> None:
        self.logits: list[list[np.ndarray]] = [[] for _ in sequences]
        self._params, self._config, self._sequences = params, config, sequences
        self._page_size = page_size
        self._table_width = -(-max(map(len, sequences)) // page_size)
        self._pages = deal_pages(len(sequences), self._table_width)
        self._starts = [0] * len(sequences)
        self._cache = nan_cache(config, CacheConfig(num_pages=self._pages.size, page_size=page_size))

    def step(self, chunks: Chunks, num_tokens: int, num_rows: int, q_len: int | None = None) -> None:
        """Computes the chunks in a step of the given shape and keeps the logits of their tokens."""
        batch = make_batch(
            [self._row(*chunk) for chunk in chunks],
            page_size=self._page_size,
            num_tokens=num_tokens,
            num_rows=num_rows,
            table_width=self._table_width,
        )
        logits, self._cache = all_logits(self._params, self._cache, batch, config=self._config, q_len=q_len)
        ends = np.cumsum([length for _, length in chunks])
        for (sequence, length), end in zip(chunks, ends, strict=True):
            self.logits[sequence].append(np.asarray(logits[end - length : end]))
            self._starts[sequence] += length

    def _row(self, sequence: int, length: int) -> Row:
        start = self._starts[sequence]
        end = start + length
        pages = self._pages[sequence, : -(-end // self._page_size)]
        return Row(self._sequences[sequence][start:end].tolist(), start, pages.tolist())

    def sequence_logits(self, sequence: int) -> np.ndarray:
        """Returns the logits [length, V] of what has been computed of a sequence."""
        return np.concatenate(self.logits[sequence])


def replay(
    params: Params,
    sequences: Sequence[np.ndarray],
    steps: Iterable[Chunks],
    *,
    config: ModelConfig,
    num_tokens: int,
    num_rows: int,
    page_size: int = 16,
) -> list[np.ndarray]:
    """Returns each sequence's logits [length, V] after steps that all have the same shape."""
    state = Replay(params, sequences, config=config, page_size=page_size)
    for chunks in steps:
        state.step(chunks, num_tokens, num_rows)
    return [np.concatenate(parts) if parts else np.zeros((0,)) for parts in state.logits]
