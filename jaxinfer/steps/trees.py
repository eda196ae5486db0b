"""Draft trees in a step: several guesses per position, of which the target's samples follow one path.

The tokens of a row are its last token and its drafts, each after its parent. A draft has the position of its path and
attends to its path only. So the target samples after it the token that decoding would sample after that path.

tokens   5  6  9  7  8      6 and 9 are two guesses for one position, 7 and 8 two for the position after 6
parents -1  0  0  1  1      sampled 6 after 5 and 8 after 6: the path is 5 6 8, tokens 0, 1 and 4 of the row
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from jaxinfer.model.batch import Batch, StepOutput, VerifyOutput
from jaxinfer.model.cache import KVCache, move_tokens
from jaxinfer.model.config import ModelConfig
from jaxinfer.sampling.processors import Context
from jaxinfer.steps.verify import rows_of_tokens


@struct.dataclass
class Trees:
    """The parents and paths of the tokens of a batch, at most Q in a row."""

    parents: Any  # i32[T]  index in the batch of the token before; a row's first token has its own
    sees: Any  # bool[T, Q]  true for the tokens of the same row on the path to it, itself included
    rows: Any  # i32[T]
    places: Any  # i32[B, Q]  indices of each row's tokens in the batch
    is_token: Any  # bool[B, Q]  true if the row has this token

    @property
    def depths(self) -> jax.Array:
        """Returns the number of tokens before each token on its path, i32[T]; -1 for padding."""
        return self.sees.sum(1, dtype=jnp.int32) - 1


def make_trees(batch: Batch, parents: jax.Array, q_len: int) -> Trees:
    """Returns trees of up to q_len tokens. parents i32[T]: index in its row of each token's parent, or -1."""
    T, Q = parents.shape[0], q_len
    rows, is_real = rows_of_tokens(batch)
    starts = batch.cu_q_lens[rows]
    up = jnp.where(is_real & (parents >= 0), starts + parents, jnp.arange(T))
    above, sees = up, (jnp.arange(T) - starts)[:, None] == jnp.arange(Q)[None]
    sees &= is_real[:, None]
    for _ in range((Q - 1).bit_length()):  # twice as far up each time
        sees |= sees[above]
        above = above[above]
    places = batch.cu_q_lens[:-1, None] + jnp.arange(Q)[None]
    is_token = (places < batch.cu_q_lens[1:, None]) & (batch.kv_lens > 0)[:, None]
    return Trees(up, sees, rows, jnp.minimum(places, T - 1), is_token)


def stand_in_trees(batch: Batch, trees: Trees) -> Batch:
    """Returns the batch with each token at the position that its path gives it; its slot stays."""
    first = batch.positions[trees.places[trees.rows, 0]]
    return replace(batch, positions=jnp.where(trees.depths >= 0, first + trees.depths, batch.positions))


def tree_mask(trees: Trees) -> jax.Array:
    """Returns the tokens of its row that each token attends to, as `tree_mask` of `paged_attention`, u32[T, words]."""
    T, Q = trees.sees.shape
    bits = jnp.pad(trees.sees, ((0, 0), (0, -Q % 32))).reshape(T, -1, 32).astype(jnp.uint32)
    return (bits << jnp.arange(32, dtype=jnp.uint32)[None, None]).sum(-1, dtype=jnp.uint32)


def along_paths(context: Context, batch: Batch, trees: Trees) -> Context:
    """Returns the contexts of all tokens [T, L], with each token's path in place of all tokens of its row."""
    places = trees.places[trees.rows]  # [T, Q]
    seen = batch.positions[places] - context.num_evicted_tokens[:, None]
    at = jnp.where(trees.sees, seen, context.tokens.shape[1])
    rows = jnp.arange(places.shape[0])[:, None]
    return replace(context, tokens=context.tokens.at[rows, at].set(batch.tokens[places], mode="drop"))


def accepted_paths(drawn: jax.Array, batch: Batch, trees: Trees) -> tuple[jax.Array, jax.Array]:
    """Returns the indices i32[B, Q] of the tokens that each row keeps, and their number i32[B], 0 on padding.

    drawn i32[T]: the target's sample after each token. From the row's first token on, the path goes to the draft that
    equals the sample, if there is one. Past its end, the indices are those of the row's tokens in their order.
    """
    T, Q = trees.sees.shape
    is_right = (batch.tokens == drawn[trees.parents]) | (trees.parents == jnp.arange(T))
    is_kept = (~trees.sees | is_right[trees.places[trees.rows]]).all(1)
    depths = jnp.where(is_kept, trees.depths, -1)[trees.places]
    depths = jnp.where(trees.is_token, depths, -1)
    # If a draft occurs twice in a tree, the first of the longest paths.
    last = jnp.take_along_axis(trees.places, depths.argmax(1)[:, None], axis=1)[:, 0]
    is_on_path = trees.sees[last] & trees.is_token
    at = jnp.where(is_on_path, depths, Q)
    rows = jnp.arange(at.shape[0])[:, None]
    return trees.places.at[rows, at].set(trees.places, mode="drop"), depths.max(1) + 1


def keep_paths(
    drawn: StepOutput,
    cache: KVCache,
    batch: Batch,
    trees: Trees,
    states: jax.Array,
    *,
    config: ModelConfig,
    mesh: Mesh | None,
) -> tuple[VerifyOutput, KVCache]:
    """Returns the tokens that each row emits, and the cache with the tokens of its path in the slots after its context.

    The states [T, S] have the same order: everything is as if only the path had been drafted. `mesh`: the mesh that the
    cache is split over, if any.
    """
    T = states.shape[0]
    paths, num_kept = accepted_paths(drawn.tokens, batch, trees)
    is_moved = jnp.arange(paths.shape[1])[None] < num_kept[:, None]
    sources = jnp.arange(T).at[jnp.where(is_moved, trees.places, T)].set(paths, mode="drop")
    output = VerifyOutput(
        tokens=drawn.tokens[paths],
        log_probs=drawn.log_probs[paths],
        top_tokens=drawn.top_tokens[paths],
        top_log_probs=drawn.top_log_probs[paths],
        sampling_log_probs=None if drawn.sampling_log_probs is None else drawn.sampling_log_probs[paths],
        num_emitted=num_kept,
        hidden=states[sources],
    )
    return output, move_tokens(cache, batch, sources, sources != jnp.arange(T), config=config, mesh=mesh)
