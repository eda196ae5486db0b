"""The state of recurrent layers as the content of pages, and what all recurrent layers do with it.

A page has one slot in each layer: the state after the last computed token of its request in the page. Once the page is
full, the slot is the snapshot at the page's end, and any request with the same tokens can go on from there.

    tokens   0 1 2 3 | 4 5 6 7 | 8 9         pages of 4, tokens 5 to 9 in this step
    slots    after 3   after 7   after 9     the step reads the slot of token 4 and writes the slots of 7 and 9
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.model.batch import PADDING_SLOT, Batch
from jaxinfer.model.components.layers import PoolSize
from kernels_pallas.exact_sums import refuse_if_exact
from kernels_pallas.paged_attention.call import token_rows
from kernels_pallas.row_products import rounded, zero_after


@struct.dataclass
class States:
    """The pool of a stack of n recurrent layers, n * P slots: layer i keeps the state of page p in slot i * P + p."""

    conv: Any  # f32[n * P, W - 1, C]  the last inputs of the convolution, oldest first
    recurrent: Any  # f32[n * P, H, K, V]  a matrix per head

    @property
    def num_pages(self) -> int:
        return self.recurrent.shape[0]


@struct.dataclass
class StateSlots:
    """The slots of a step, in layer 0."""

    reads: Any  # i32[B]  holds the state before the row's first token; PADDING_SLOT: the row begins from zeros
    writes: Any  # i32[T]  takes the state after the token; PADDING_SLOT: the state is not stored


def abstract_states(size: PoolSize, conv: tuple[int, int], recurrent: tuple[int, int, int]) -> States:
    """Returns a pool as `jax.ShapeDtypeStruct`s; `conv` is (W - 1, C) and `recurrent` (H, K, V)."""
    return States(
        conv=jax.ShapeDtypeStruct((size.num_pages, *conv), jnp.float32),
        recurrent=jax.ShapeDtypeStruct((size.num_pages, *recurrent), jnp.float32),
    )


def state_slots(batch: Batch, page_size: int, kind: int) -> StateSlots:
    """Returns the slots by which each page of a kind gets the state after the last token computed in it."""
    (T, S), tables = (batch.tokens.shape[0], page_size), batch.tables_of(kind)
    firsts = batch.positions[jnp.minimum(batch.cu_q_lens[:-1], T - 1)]
    before = jnp.take_along_axis(tables, (jnp.maximum(firsts - 1, 0) // S)[:, None], axis=1)[:, 0]
    rows = token_rows(batch.cu_q_lens, T)
    is_last = (jnp.arange(T) == batch.cu_q_lens[rows + 1] - 1) | (batch.positions % S == S - 1)
    is_stored = is_last & (batch.slot_mapping < PADDING_SLOT)
    return StateSlots(
        reads=jnp.where((firsts > 0) & (batch.kv_lens > 0), before, PADDING_SLOT),
        writes=jnp.where(is_stored, tables[rows, batch.positions // S], PADDING_SLOT),
    )


def move_states(states: States, num_layers: int, sources: jax.Array, targets: jax.Array) -> States:
    """Returns the pool with the states of slots i32[n] copied to other slots i32[n], in every layer.

    A target that is PADDING_SLOT is dropped.
    """
    per_layer = states.num_pages // num_layers

    def in_layer(layer: jax.Array, states: States) -> States:
        slots = slots_of_layer(StateSlots(sources, targets), layer * per_layer)
        return jax.tree.map(lambda pool: write_states(pool, slots.writes, read_states(pool, slots.reads)), states)

    return jax.lax.fori_loop(0, num_layers, in_layer, states)


def slots_of_layer(slots: StateSlots, offset: jax.Array | int) -> StateSlots:
    """Returns the slots of a layer whose first slot is `offset`; padding stays past every pool."""
    refuse_if_exact("recurrent layers")
    return jax.tree.map(lambda ids: jnp.where(ids < PADDING_SLOT, ids + offset, PADDING_SLOT), slots)


def convolve(
    x: jax.Array, pool: jax.Array, weight: jax.Array, bias: jax.Array | None, slots: StateSlots, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Returns the causal convolution of each channel of x [T, C] along its row, f32[T, C], and the pool of windows.

    The weight is [C, W], the newest input last. pool f32[N, W - 1, C] holds the inputs before each row's first token.
    """
    (T, C), W = x.shape, weight.shape[1]
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    # After x, or a CPU reads the states of all layers when the step starts.
    rows = token_rows(batch.cu_q_lens, T) + zero_after(x).astype(jnp.int32)
    index = jnp.arange(T) - batch.cu_q_lens[rows]  # of each token in its row
    before = read_states(pool, slots.reads)

    def earlier(distance: int) -> jax.Array:
        """Returns the inputs f32[T, C] of the tokens that stand this far before each token."""
        own = jnp.pad(x, ((distance, 0), (0, 0)))[:T]
        old = before[rows, jnp.clip(W - 1 - distance + index, 0, W - 2)]
        return jnp.where(jnp.broadcast_to((index >= distance)[:, None], (T, C)), own, old)

    inputs = [*(earlier(distance) for distance in range(W - 1, 0, -1)), x]
    # Added one after another, so that a token's sum has the same bits in any step.
    y = jnp.zeros_like(x) if bias is None else jnp.broadcast_to(bias.astype(jnp.float32), x.shape)
    for place, taken in enumerate(inputs):
        y = y + rounded(taken * jnp.broadcast_to(weight[:, place], x.shape))
    # Together, or the compiler for GPUs writes the windows of several layers at once and keeps them all until then.
    return jax.lax.optimization_barrier((y, write_states(pool, slots.writes, jnp.stack(inputs[1:], axis=1))))


def read_states(pool: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns the content of slots i32[B], [B, ...]; zeros for padding."""
    return pool.at[slots].get(mode="fill", fill_value=0)


def write_states(pool: jax.Array, slots: jax.Array, new: jax.Array) -> jax.Array:
    """Returns the pool with [n, ...] in slots i32[n]; padding is dropped."""
    if slots.shape[0] == 1:
        return write_state(pool, slots[0], new)
    return pool.at[slots].set(new, mode="drop")


def write_state(pool: jax.Array, slot: jax.Array, new: jax.Array) -> jax.Array:
    """Returns the pool with [1, ...] in a slot i32[], or as it is for padding."""
    # A loop of one turn or none: the compiler of a CPU copies the pool for a branch, and for a scatter of one slot.
    return jax.lax.fori_loop(
        0,
        (slot < pool.shape[0]).astype(jnp.int32),
        lambda _, pool: jax.lax.dynamic_update_slice_in_dim(pool, new, slot, axis=0),
        pool,
    )


def for_heads(x: jax.Array, state: jax.Array) -> jax.Array:
    """Returns vectors f32[b, G, K] of groups for all heads of a state f32[b, H, K, V], in its shape."""
    (b, H, K, V), G = state.shape, x.shape[1]
    return jnp.broadcast_to(x[:, :, None, :, None], (b, G, H // G, K, V)).reshape(b, H, K, V)


def sum_keys(x: jax.Array) -> jax.Array:
    """Returns `x.sum(-2)` f32[..., V] of f32[..., K, V], on CPU added up in a fixed tree, as `row_sum` does."""
    return jax.lax.platform_dependent(x, cpu=_tree_sum, default=lambda x: x.sum(-2))


def _tree_sum(x: jax.Array) -> jax.Array:
    while (K := x.shape[-2]) > 1:
        half = K // 2
        pairs = x[..., :half, :] + x[..., half : 2 * half, :]
        x = pairs if K % 2 == 0 else jnp.concatenate([pairs, x[..., 2 * half :, :]], axis=-2)
    return x[..., 0, :]
