"""The time that all programs of GPU attention take together, from the order in which a GPU starts them.

A GPU starts the programs of a launch in order. It runs a number of them at once, and starts the next when one ends.
Time is counted in blocks of keys, which a program reads and multiplies one by one.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention.gpu import parts


def program_parts(cut: parts.Cut, q_lens: Sequence[int], kv_lens: Sequence[int]) -> list[tuple[parts.Part, int, int]]:
    """Returns the part of each program in the order of the launch, its first block of keys and one past its last."""
    starts = np.full(cut.B + 1, sum(q_lens), np.int32)
    starts[: len(q_lens)] = np.cumsum([0, *q_lens[:-1]])
    contexts = np.zeros(cut.B + 1, np.int32)
    contexts[: len(kv_lens)] = kv_lens
    found = jax.tree.map(lambda array: np.asarray(array).tolist(), _find_all(starts, contexts, cut=cut))
    leaves, structure = jax.tree.flatten(found, is_leaf=lambda leaf: isinstance(leaf, list))
    return [structure.unflatten(own) for own in zip(*leaves, strict=True)]


@functools.partial(jax.jit, static_argnames="cut")
def _find_all(starts: jax.Array, contexts: jax.Array, *, cut: parts.Cut) -> tuple[parts.Part, jax.Array, jax.Array]:
    index = jnp.arange(cut.B + 1, dtype=jnp.int32)
    rows = parts.cut_rows(index, starts, jnp.append(starts[1:], jnp.int32(cut.T)), contexts, cut)

    def find(i: jax.Array) -> tuple[parts.Part, jax.Array, jax.Array]:
        part = parts.find_part(rows, rows.tiles * rows.parts, i, cut)
        return part, *parts.blocks_of(part, parts.keys_of(part.chunk, cut, has_tree=False), cut.sizes.block_k)

    return jax.vmap(find)(jnp.arange(cut.num_programs, dtype=jnp.int32))


def program_blocks(cut: parts.Cut, q_lens: Sequence[int], kv_lens: Sequence[int], head_tiles: int) -> list[int]:
    """Returns the blocks of keys of each program in the order of the launch; tiles of heads are the fast axis."""
    blocks = [max(end - first, 0) for _, first, end in program_parts(cut, q_lens, kv_lens)]
    return [count for count in blocks for _ in range(head_tiles)]


def makespan(costs: Iterable[float], places: int) -> float:
    """Returns when the last program ends, if each takes its cost and begins, in order, on the first free place."""
    free = [0.0] * places
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def against_ideal(costs: Sequence[float], places: int) -> float:
    """Returns the makespan as a multiple of the time of all costs shared equally over the places."""
    return makespan(costs, places) * places / sum(costs)
