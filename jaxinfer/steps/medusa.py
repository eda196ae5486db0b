"""Draft heads on the hidden states of the target: several tokens ahead at once, in one small dispatch.

Head k guesses the token k after the next one from the state that the next one was drawn from (Medusa, Cai et al. 2024)
and from that token itself (Ankner et al. 2024), whatever comes in between.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.model.decoder import unembed
from jaxinfer.model.layers import linear
from jaxinfer.model.params import Params
from jaxinfer.sampling.batch import SamplingBatch
from jaxinfer.sampling.sample import best_tokens

# A draft by the ranks of the tokens that lead to it, its own last: (0, 1) is the second best guess after the best one.
Path = tuple[int, ...]
Paths = tuple[Path, ...]  # each after the one that it goes on from
# By how often the heads that come with the package are right at each rank (scripts/measure/acceptance.py --ranks 5).
MEDUSA_TREE: Paths = (
    *((0,), (1,), (2,), (0, 0), (3,), (4,), (0, 1), (1, 0)),
    *((2, 0), (1, 1), (0, 2), (0, 3), (0, 4), (2, 1), (3, 1)),
)


def chain_of(count: int) -> Paths:
    """Returns the paths of so many drafts one after another."""
    return tuple((0,) * depth for depth in range(1, count + 1))


def parents_of_paths(paths: Paths) -> tuple[int, ...]:
    """Returns the place of the path that each goes on from, -1 where there is none before it."""
    places = {path: place for place, path in enumerate(paths)} | {(): -1}
    return tuple(places[path[:-1]] for path in paths)


def num_ranks(paths: Paths) -> int:
    """Returns how many guesses for a place the paths are made of."""
    return 1 + max(map(max, paths))


def at_paths(best: jax.Array, paths: Paths) -> jax.Array:
    """Returns the last token of each path i32[B, K] of the guesses i32[B, depth, rank] for each place."""
    depths, ranks = zip(*((len(path) - 1, path[-1]) for path in paths), strict=True)
    return best[:, jnp.array(depths), jnp.array(ranks)]


@struct.dataclass
class States:
    """The last W states of each row, newest last, and the token that was drawn from each."""

    hidden: Any  # [B, W, D]
    tokens: Any  # i32[B, W]
    num_known: Any  # i32[B]  of the W; 0 on padding, which comes last


@struct.dataclass
class MedusaHeads:
    """Weights of K heads: head k unembeds h + silu(W_k [h; embedding of the token]) for the last state h."""

    weights: Any  # [K, D, 2 D]

    @property
    def window(self) -> int:
        """How many states it begins with."""
        return 1

    @property
    def hidden_size(self) -> int:
        return self.weights.shape[1]

    @property
    def tree(self) -> Paths:
        """The drafts that are worth most, in that order."""
        return tuple(path for path in MEDUSA_TREE if len(path) <= self.weights.shape[0])

    def most_drafts(self, most: int) -> int:
        """Returns how many drafts one after another it makes where no more than `most` are wanted."""
        return min(self.weights.shape[0], most)

    def draft(
        self, params: Params, states: States, sampling: SamplingBatch, positions: jax.Array, paths: Paths
    ) -> jax.Array:
        """Returns the tokens i32[B, K] of K paths that the heads draw for `positions` i32[B] and those after."""
        num_drafts = max(map(len, paths))
        hidden, embedded = states.hidden[:, -1], params.embedding[states.tokens[:, -1]]
        B, D = hidden.shape
        both = jnp.concatenate([hidden, embedded.astype(hidden.dtype)], axis=-1)
        steered = linear(both, self.weights[:num_drafts])
        ahead = hidden[:, None] + jax.nn.silu(steered)
        of_heads = jax.tree.map(lambda field: jnp.repeat(field, num_drafts, axis=0), sampling)
        places = (positions[:, None] + jnp.arange(num_drafts)[None]).reshape(-1)
        best = best_tokens(unembed(params, ahead.reshape(-1, D)), of_heads, places, num_ranks(paths))
        return at_paths(best.reshape(B, num_drafts, -1), paths)


@functools.partial(jax.jit, static_argnames="paths")
def draft_from_states(
    params: Params,
    heads: Any,
    windows: jax.Array,
    rows: jax.Array,
    tokens: jax.Array,
    num_known: jax.Array,
    sampling: SamplingBatch,
    positions: jax.Array,
    *,
    paths: Paths,
) -> jax.Array:
    """Returns what heads draft i32[B, K], a token for each of K paths, from the windows [R, W, D] of `rows` i32[B].

    They draw with the noise of the target's draws at their positions; `positions` i32[B] are those of the first. What
    of `sampling` comes before the temperature has no part in it.
    """
    states = States(hidden=windows[rows], tokens=tokens, num_known=num_known)
    return heads.draft(params, states, replace(sampling, processors=None), positions, paths)
