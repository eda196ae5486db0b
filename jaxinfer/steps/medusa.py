"""Draft heads on the hidden states of the target: several tokens ahead at once, in one small dispatch.

Head k guesses the k-th token after the next one. Its inputs are the state that the next token was sampled from (Medusa,
Cai et al. 2024) and that token (Ankner et al. 2024), but not the tokens in between.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from jaxinfer.model.components.layers import linear, take_rows
from jaxinfer.model.decoder import unembed
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
    """Returns the paths of a chain of drafts."""
    return tuple((0,) * depth for depth in range(1, count + 1))


def parents_of_paths(paths: Paths) -> tuple[int, ...]:
    """Returns the index of each path's parent, -1 for paths of length 1."""
    places = {path: place for place, path in enumerate(paths)} | {(): -1}
    return tuple(places[path[:-1]] for path in paths)


def num_ranks(paths: Paths) -> int:
    """Returns the number of ranks in the paths: guesses per position."""
    return 1 + max(map(max, paths))


def at_paths(best: jax.Array, paths: Paths) -> jax.Array:
    """Returns the last token of each path, i32[B, K], from the guesses i32[B, depth, rank]."""
    depths, ranks = zip(*((len(path) - 1, path[-1]) for path in paths), strict=True)
    return best[:, jnp.array(depths), jnp.array(ranks)]


@struct.dataclass
class States:
    """The last W states of each row, newest last, and the token sampled from each."""

    hidden: Any  # [B, W, D]
    tokens: Any  # i32[B, W]
    num_known: Any  # i32[B]  of the W; 0 on padding, which comes last


@struct.dataclass
class MedusaHeads:
    """Weights of K heads: head k unembeds h + silu(W_k [h; embedding of the token]) for the last state h."""

    weights: Any  # [K, D, 2 D]
    kept_layers = ()
    reduction = None

    @property
    def window(self) -> int:
        """Returns the number of states that it takes."""
        return 1

    @property
    def hidden_size(self) -> int:
        return self.weights.shape[1]

    @property
    def tree(self) -> Paths:
        """Returns the paths with the most accepted drafts, best first."""
        return tuple(path for path in MEDUSA_TREE if len(path) <= self.weights.shape[0])

    def most_drafts(self, most: int) -> int:
        """Returns the length of its chain of drafts if at most `most` are wanted."""
        return min(self.weights.shape[0], most)

    def draft(
        self,
        params: Params,
        states: States,
        sampling: SamplingBatch,
        positions: jax.Array,
        paths: Paths,
        implementation: str | None = None,
        mesh: Mesh | None = None,
    ) -> jax.Array:
        """Returns the tokens i32[B, K] of K paths that the heads sample from `positions` i32[B] on; no attention."""
        num_drafts = max(map(len, paths))
        hidden, embedded = states.hidden[:, -1], take_rows(params.embedding, states.tokens[:, -1], params.final_norm)
        B, D = hidden.shape
        both = jnp.concatenate([hidden, embedded.astype(hidden.dtype)], axis=-1)
        steered = linear(both, self.weights[:num_drafts])
        ahead = hidden[:, None] + jax.nn.silu(steered)
        of_heads = jax.tree.map(lambda field: jnp.repeat(field, num_drafts, axis=0), sampling)
        places = (positions[:, None] + jnp.arange(num_drafts)[None]).reshape(-1)
        best = best_tokens(unembed(params, ahead.reshape(-1, D)), of_heads, places, num_ranks(paths))
        return at_paths(best.reshape(B, num_drafts, -1), paths)


@functools.partial(jax.jit, static_argnames=("paths", "implementation", "mesh"))
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
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Returns the drafts of the heads, i32[B, K] for K paths, from the windows [R, W, D] of `rows` i32[B].

    They sample with the target's noise at their positions; `positions` i32[B] are those of the first drafts. Logits
    processors, which act before the temperature, have no effect. `implementation` and `mesh` are as for `forward`; all
    but the parameters is whole on every device.
    """
    states = States(hidden=windows[rows], tokens=tokens, num_known=num_known)
    return heads.draft(params, states, replace(sampling, processors=None), positions, paths, implementation, mesh)
