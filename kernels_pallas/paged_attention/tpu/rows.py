"""How a TPU kernel turns queries of tokens, as the step has them, into rows of a KV head, and results back.

A step has queries [T, N, W] and wants results in the same order, so that XLA need not copy them around the kernel. A
product needs the rows of one KV head together, row r being query head r % G of token r // G of the item. Only numbers
of 32 bits move between registers one row at a time, so both ways pass through float32.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.paged_attention.tpu.items import LANES


def take_rows(s: SimpleNamespace, slot: jax.Array) -> None:
    """Puts the queries of the tokens at `slot` into rows of KV heads, where the products read them."""
    _, Q, N, W = s.q_tokens.shape
    K = s.q.shape[1]
    G = N // K
    for c, lanes in _columns(W):
        s.by_token[c] = s.q_tokens[slot, :, :, lanes].astype(jnp.float32)

    @pl.loop(0, K)
    def _(head):
        for g, c in itertools.product(range(G), range(W // LANES)):
            s.rows[c, pl.ds(g, Q, stride=G)] = s.by_token[c, :, head * G + g]
        for c, lanes in _columns(W):
            s.q[0, head, :, lanes] = s.rows[c].astype(s.q.dtype)


def give_rows(s: SimpleNamespace, head: jax.Array, result: jax.Array) -> None:
    """Puts the results f32[R, V] of a KV head to their tokens."""
    _, Q, N, _ = s.q_tokens.shape
    K, _, V = s.acc.shape
    G = N // K
    for c, lanes in _columns(V):
        s.rows[c] = result[:, lanes]
    for g, c in itertools.product(range(G), range(V // LANES)):
        s.by_token[c, :, head * G + g] = s.rows[c, pl.ds(g, Q, stride=G)]


def give_tokens(s: SimpleNamespace, slot: jax.Array) -> None:
    """Puts the results of all tokens into the buffer at `slot`, which leaves from there."""
    for c, lanes in _columns(s.out.shape[-1]):
        s.out[slot, :, :, lanes] = s.by_token[c].astype(s.out.dtype)


def _columns(width: int) -> list[tuple[int, slice]]:
    """Returns the columns of registers in `width` lanes: the compiler moves single rows within one alone."""
    return [(c, slice(c * LANES, (c + 1) * LANES)) for c in range(width // LANES)]
