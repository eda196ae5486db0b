"""The pass of a recurrent layer over the tokens of a step: one after another, or many at a time.

On CPU tokens are computed one after another, so that their bits are the same in any step. Other devices compute chunks
of up to CHUNK tokens. A `Rule` says how both is done.

In most layers a head has a matrix S of keys and values. Token t makes it fade, adds its key with a value to it, and
asks for a query:

    S_t = decay_t * S_(t-1) + k_t u_tᵀ        y_t = S_tᵀ q_t

u_t is the token's value times its rate. A delta net subtracts from the value what the faded matrix has for the key:
u_t = rate_t * (v_t - decay_t * S_(t-1)ᵀ k_t). Chunks of such layers are products of matrices (Yang et al. 2024; Dao &
Gu 2024).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from jaxinfer.model.batch import PADDING_SLOT
from jaxinfer.model.components.mixer_inputs import MixerInputs
from jaxinfer.model.components.recurrent.states import StateSlots, read_states, write_state, write_states
from kernels_pallas.paged_attention.call import token_rows

# Tokens of a chunk. More make its products larger and its triangular system, which is solved row by row, longer.
CHUNK = 64


class AnyTokens(Protocol):
    """The changes of a layer's states by its tokens: a NamedTuple of arrays f32[T, ...]."""

    @property
    def values(self) -> jax.Array:
        """f32[T, H, V]"""
        ...


TokensT = TypeVar("TokensT", bound=AnyTokens)


class Rule(NamedTuple):
    """The functions of a kind of recurrent layer, from states to states; `shared` is an array that all tokens share."""

    # (states f32[b, H, K, V], a token of each of b rows, shared) -> (the states after them, outputs f32[b, H, V])
    step: Callable[..., tuple[jax.Array, jax.Array]]
    # (state f32[H, K, V], n tokens, shared) -> (the state after them, outputs f32[n, H, V]); it has a derivative.
    # Tokens that are all zeros leave the state as it is.
    chunk: Callable[..., tuple[jax.Array, jax.Array]]


class Tokens(NamedTuple):
    """The tokens of heads with a matrix each; H heads share the keys and queries of G groups."""

    decay: jax.Array  # f32[T, H]  exp(log_decay), which chunks do not read
    log_decay: jax.Array  # f32[T, H]
    rates: jax.Array  # f32[T, H]
    keys: jax.Array  # f32[T, G, K]
    queries: jax.Array  # f32[T, G, K]
    values: jax.Array  # f32[T, H, V]


class Places(NamedTuple):
    """The slots, rows and positions of a step's tokens."""

    slots: StateSlots
    cu_q_lens: jax.Array  # i32[B + 1]
    positions: jax.Array  # i32[T]
    num_tokens: jax.Array  # i32[]  that are not padding


def advance(
    rule: Rule,
    tokens: Any,
    pool: jax.Array,
    slots: StateSlots,
    inputs: MixerInputs,
    shared: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs f32[T, H, V] of a step's tokens, and the pool f32[N, H, K, V] of states."""
    q_len, make = inputs.step.q_len, type(tokens)
    in_turn = functools.partial(_advance_in_turn, rule)
    in_chunks = functools.partial(_advance_in_chunks, rule)

    def compute(*operands: Any) -> tuple[jax.Array, jax.Array]:
        *numbers, shared, pool, places = operands
        if q_len == 1:
            return _advance_rows(rule, make(*numbers), shared, pool, places)
        return jax.lax.platform_dependent(make(*numbers), shared, pool, places, cpu=in_turn, default=in_chunks)

    def plain(*operands: Any) -> jax.Array:
        return outputs_of_row(rule, make(*operands[:-1]), operands[-1], pool.shape[2])

    places = Places(slots, inputs.step.batch.cu_q_lens, inputs.step.batch.positions, inputs.tokens.count)
    return inputs.run(compute, plain, tuple(tokens), shared, pool, places)


def _advance_rows(
    rule: Rule, tokens: AnyTokens, shared: jax.Array | None, pool: jax.Array, places: Places
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs f32[B, H, V] of one token of each row, and the pool of states."""
    slots = places.slots

    def advance_all(_: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        pool, _ = carry
        # Together with the states, or the compiler multiplies keys by values before the loop: it writes as much as the
        # states hold, and computes the activation of each value again for each key.
        operands = jax.lax.optimization_barrier((read_states(pool, slots.reads), tokens, shared))
        after, y = rule.step(*operands)
        return write_states(pool, slots.writes, after), y

    # A loop of one turn, which the compiler cannot know. Without it, the compiler fuses the exponentials of tokens with
    # the states, and rounds them otherwise than in the loop over tokens.
    y = jnp.zeros((slots.reads.shape[0], pool.shape[1], pool.shape[3]), jnp.float32)
    pool, y = jax.lax.fori_loop(0, jnp.minimum(places.num_tokens, 1), advance_all, (pool, y))
    return y, pool


def _advance_in_turn(
    rule: Rule, tokens: AnyTokens, shared: jax.Array | None, pool: jax.Array, places: Places
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs f32[T, H, V] of rows of any lengths, one token after another, and the pool of states."""
    T, (slots, cu_q_lens, _, num_tokens) = tokens.values.shape[0], places
    rows = token_rows(cu_q_lens, T)
    is_first = jnp.arange(T) == cu_q_lens[rows]

    def advance_one(
        t: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        pool, state, y = carry
        state = _state_before(is_first[t], pool, slots.reads[rows[t]], state)
        token = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, t, 1), tokens)
        state, own = rule.step(state, token, shared)
        pool = write_state(pool, slots.writes[t], state)
        return pool, state, jax.lax.dynamic_update_slice_in_dim(y, own, t, axis=0)

    state = jnp.zeros((1, *pool.shape[1:]), jnp.float32)
    y = jnp.zeros((T, pool.shape[1], pool.shape[3]), jnp.float32)
    pool, _, y = jax.lax.fori_loop(0, num_tokens, advance_one, (pool, state, y))
    return y, pool


def _state_before(is_first: jax.Array, pool: jax.Array, slot: jax.Array, state: jax.Array) -> jax.Array:
    return jax.lax.cond(is_first, lambda: pool.at[slot].get(mode="fill", fill_value=0)[None], lambda: state)


def _advance_in_chunks(
    rule: Rule, tokens: AnyTokens, shared: jax.Array | None, pool: jax.Array, places: Places
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs f32[T, H, V] of rows of any lengths, and the pool of states.

    A chunk ends with a token whose state is stored, so with each row, and at multiples of CHUNK.
    """
    T, (slots, cu_q_lens, positions, num_tokens) = tokens.values.shape[0], places
    rows, index = token_rows(cu_q_lens, T), jnp.arange(T)
    is_end = (slots.writes < PADDING_SLOT) | (positions % CHUNK == CHUNK - 1) & (index < num_tokens)
    ends = jnp.nonzero(is_end, size=T, fill_value=0)[0]
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, CHUNK), *[(0, 0)] * (x.ndim - 1)]), tokens)

    def advance_chunk(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        pool, state, y = carry
        start, end = jnp.where(i == 0, 0, ends[jnp.maximum(i - 1, 0)] + 1), ends[i]
        state = _state_before(start == cu_q_lens[rows[start]], pool, slots.reads[rows[start]], state)
        own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, CHUNK), padded)

        def one() -> tuple[jax.Array, jax.Array]:
            after, y = rule.step(state, jax.tree.map(lambda x: x[:1], own), shared)
            return after, jnp.pad(y, ((0, CHUNK - 1), (0, 0), (0, 0)))

        def many() -> tuple[jax.Array, jax.Array]:
            after, y = rule.chunk(state[0], _first_tokens(own, end + 1 - start), shared)
            return after[None], y

        state, outputs = jax.lax.cond(start == end, one, many)
        pool = write_state(pool, slots.writes[end], state)
        # What follows the chunk's last token is overwritten by the next chunk.
        return pool, state, jax.lax.dynamic_update_slice_in_dim(y, outputs, start, axis=0)

    state = jnp.zeros((1, *pool.shape[1:]), jnp.float32)
    y = jnp.zeros((T + CHUNK, pool.shape[1], pool.shape[3]), jnp.float32)
    pool, _, y = jax.lax.fori_loop(0, is_end.sum(), advance_chunk, (pool, state, y))
    return y[:T], pool


def outputs_of_row(rule: Rule, tokens: AnyTokens, shared: jax.Array | None, num_keys: int) -> jax.Array:
    """Returns the outputs f32[T, H, V] of one row from its beginning, in chunks; it has a derivative.

    `num_keys` is the K of the states.
    """
    T, H, V = tokens.values.shape
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, -T % CHUNK), *[(0, 0)] * (x.ndim - 1)]), tokens)
    chunks = jax.tree.map(lambda x: x.reshape(-1, CHUNK, *x.shape[1:]), padded)
    state = jnp.zeros((H, num_keys, V), jnp.float32)
    # The derivative computes a chunk again, whose steps would else all be kept.
    _, y = jax.lax.scan(jax.checkpoint(lambda state, chunk: rule.chunk(state, chunk, shared)), state, chunks)
    return y.reshape(-1, H, V)[:T]


def _first_tokens(tokens: TokensT, count: jax.Array) -> TokensT:
    """Returns tokens of which all after the first `count` leave the state as it is."""

    def kept(x: jax.Array) -> jax.Array:
        is_kept = jnp.arange(x.shape[0]) < count
        return jnp.where(is_kept.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))

    return jax.tree.map(kept, tokens)


def chunk_by_products(state: jax.Array, tokens: Tokens, shared: None, *, corrects: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the state f32[H, K, V] after n tokens, and their outputs f32[n, H, V]; `corrects`: of a delta net."""
    (H, K, V), (n, G, _) = state.shape, tokens.keys.shape
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    heads = state.reshape(G, H // G, K, V)
    values, rates, log_decay = (
        x.reshape(n, G, H // G, *x.shape[2:]) for x in (tokens.values, tokens.rates, tokens.log_decay)
    )
    fading = jnp.cumsum(log_decay, axis=0).transpose(1, 2, 0)  # [G, R, n]  since before the chunk
    is_before = jnp.tri(n, dtype=bool)
    # [G, R, n, n]  what is left at one token of what another added
    left = jnp.exp(jnp.where(is_before[None, None], fading[..., None] - fading[..., None, :], -jnp.inf))
    decays = jnp.exp(fading)[..., None]
    added = values * rates[..., None]
    added = added.transpose(1, 2, 0, 3)  # [G, R, n, V]
    if corrects:
        rates = rates.transpose(1, 2, 0)[..., None]
        overlap = product("tgk,sgk->gts", tokens.keys, tokens.keys)[:, None] * left * jnp.tri(n, k=-1)[None, None]
        added = added - rates * decays * product("tgk,grkv->grtv", tokens.keys, heads)
        # Each token's correction needs those before it.
        added = jax.lax.linalg.triangular_solve(rates * overlap, added, left_side=True, lower=True, unit_diagonal=True)
    seen = product("tgk,sgk->gts", tokens.queries, tokens.keys)[:, None] * left
    y = decays * product("tgk,grkv->grtv", tokens.queries, heads) + product("grts,grsv->grtv", seen, added)
    last = jnp.exp(fading[..., -1:] - fading)[..., None]  # [G, R, n, 1]
    heads = decays[..., -1:, :] * heads + product("sgk,grsv->grkv", tokens.keys, last * added)
    return heads.reshape(H, K, V), y.transpose(2, 0, 1, 3).reshape(n, H, V)
