"""Runs sequences through `forward` in any split of the work, over a hostile cache, and collects all logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import CacheConfig
from jaxinfer.model.batch import Row, make_batch, step_tokens
from jaxinfer.model.cache import KVCache, init_cache
from jaxinfer.model.config import ModelConfig, uniform_decoder
from jaxinfer.model.decoder import forward, unembed
from jaxinfer.model.params import Params, abstract_params

# Layers in groups of several sizes, and a vocabulary that fills no whole word of masks.
SMALL_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position": 64,
    "layer_groups": (1, 2),
}
SMALL_MODEL = uniform_decoder(**SMALL_SIZES)
# The part of each sequence that one step computes: (sequence, number of tokens), in row order.
Chunks = Sequence[tuple[int, int]]
# Three sequences, the tokens and rows of a step that has room for them, and ways to compute them.
LENGTHS = (40, 23, 5)
SHAPE = (72, 4)
SPLITS: dict[str, Sequence[Chunks]] = {
    "whole prompts": [[(0, 40), (1, 23), (2, 5)]],
    "chunks": [[(0, 17), (1, 16)], [(1, 7), (0, 16)], [(2, 5), (0, 7)]],
    "token by token": [[(2, 1), (0, 1), (1, 1)]] * 5 + [[(0, 1), (1, 1)]] * 18 + [[(0, 1)]] * 17,
    "decoding beside prefill": [[(0, 30), (2, 4)], [(0, 1), (1, 20), (2, 1)], [(1, 1), (0, 9)], [(1, 2)]],
}


def _all_logits(params, cache, batch, *, config, q_len=None, implementation=None):
    """Returns the logits [T, V] of every token of a step, padding included, and the cache."""
    hidden, cache = forward(params, cache, batch, config=config, q_len=q_len, implementation=implementation)
    return unembed(params, hidden, step_tokens(batch)), cache


all_logits = jax.jit(_all_logits, static_argnames=("config", "q_len", "implementation"), donate_argnames="cache")


def lively_params(config: ModelConfig, seed: int = 0) -> Params:
    """Returns random parameters in which every norm differs from 1 and attention is far from uniform."""
    generator = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        noise = generator.standard_normal(leaf.shape)
        is_norm = jax.tree_util.keystr(path[-1:]).endswith("norm")
        return jnp.asarray(1 + 0.3 * noise if is_norm else noise / config.hidden_size**0.5, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config, jnp.float32))


def nan_cache(config: ModelConfig, cache_config: CacheConfig, layout: str | None = None) -> KVCache:
    """Returns a cache in which every slot is poisoned, so that reading one that was not written shows."""
    return jax.tree.map(poisoned, init_cache(config, cache_config, layout))


def poisoned(pool: jax.Array) -> jax.Array:
    """Returns NaN everywhere, or, in a pool of token ids, a token as good as any."""
    is_float = jnp.issubdtype(pool.dtype, jnp.floating)
    return jnp.asarray(np.full(pool.shape, np.nan if is_float else 7, pool.dtype))


def deal_pages(num_sequences: int, pages_each: int, seed: int = 0) -> np.ndarray:
    """Returns page ids [sequence, page], shuffled: the page after one's own is a neighbour's."""
    ids = np.random.default_rng(seed).permutation(num_sequences * pages_each)
    return ids.reshape(pages_each, num_sequences).T


def replay(
    params: Params,
    sequences: Sequence[np.ndarray],
    steps: Iterable[Chunks],
    *,
    config: ModelConfig,
    shape: tuple[int, int],
    page_size: int = 16,
    q_len: int | None = None,
    implementation: str | None = None,
    layout: str | None = None,
    cache_dtype: str = "float32",
) -> list[np.ndarray]:
    """Returns each sequence's logits [tokens, V] after `steps`, which all have `shape`: tokens, rows."""
    table_width, window = -(-max(map(len, sequences)) // page_size), config.sliding_window
    pages = deal_pages(len(sequences), table_width)
    cache = nan_cache(config, CacheConfig(num_pages=pages.size + 1, page_size=page_size, dtype=cache_dtype), layout)
    bucket = {
        "page_size": page_size,
        "num_tokens": shape[0],
        "num_rows": shape[1],
        "table_width": table_width,
    }
    logits = [[np.zeros((0, config.vocab_size), np.float32)] for _ in sequences]
    starts = [0] * len(sequences)
    for chunks in steps:
        rows = []
        for i, length in chunks:
            start, end = starts[i], starts[i] + length
            page_ids = pages[i, : -(-end // page_size)].tolist()
            num_freed = 0 if window is None else max(start - window + 1, 0) // page_size
            page_ids[:num_freed] = [pages.size] * num_freed  # nobody writes it
            rows.append(Row(sequences[i][start:end].tolist(), start, page_ids))
            starts[i] = end
        batch = make_batch(rows, **bucket)
        step_logits, cache = all_logits(params, cache, batch, config=config, q_len=q_len, implementation=implementation)
        parts = np.split(np.asarray(step_logits), np.cumsum([length for _, length in chunks]))
        for (i, _), part in zip(chunks, parts, strict=False):
            logits[i].append(part)
    return [np.concatenate(parts) for parts in logits]
