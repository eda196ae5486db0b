"""The results of each token's experts, in a form for CPUs and one for accelerators."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.model.components.mlp import MLP, MLPParams, activate, mlp
from jaxinfer.quantization import QuantizedArray
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.row_products import ROW_BLOCK


def of_experts(params: MLPParams, x: jax.Array, experts: jax.Array, num_tokens: jax.Array, *, config: MLP) -> jax.Array:
    """Returns the results f32[T, X, D] of each token's experts i32[T, X], for x [T, D].

    `params` are tensors [E, ...] of E experts. Later tokens than the first `num_tokens` are padding.
    """
    results: Any = _of_experts(params, x, experts, num_tokens, config)
    return results


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _of_experts(params: MLPParams, x: jax.Array, experts: jax.Array, num_tokens: jax.Array, config: MLP) -> jax.Array:
    in_blocks, in_groups = functools.partial(_in_blocks, config=config), functools.partial(_in_groups, config=config)
    return jax.lax.platform_dependent(params, x, experts, num_tokens, cpu=in_blocks, default=in_groups)


def _of_experts_derivative(config: MLP, operands: tuple[Any, ...], change: jax.Array) -> tuple[Any, ...]:
    """Returns the derivative of `_in_groups`, for that of `_in_blocks` has a loop whose length is known late."""
    params, x, experts, num_tokens = operands
    _, derivative = jax.vjp(lambda params, x: _in_groups(params, x, experts, num_tokens, config=config), params, x)
    return *derivative(change), None, None


_of_experts.defvjp(lambda *operands: (_of_experts(*operands), operands[:4]), _of_experts_derivative)


def _in_blocks(params: MLPParams, x: jax.Array, experts: jax.Array, num_tokens: jax.Array, *, config: MLP) -> jax.Array:
    """Returns the results f32[T, X, D] of each token's experts, by products of ROW_BLOCK tokens, expert after expert.

    experts of 5 tokens, blocks of 2:   a b a a b  ->  a: 0 2, 3 -   b: 1 4
    """
    (T, D), X, E = x.shape, experts.shape[1], params.up.shape[0]
    by_pair = jnp.where(jnp.arange(T * X) // X < num_tokens, experts.reshape(-1), E)  # padding belongs to no expert
    order = jnp.argsort(by_pair, stable=True)
    counts = jnp.zeros((E,), jnp.int32).at[by_pair].add(1, mode="drop")
    ends, (used,) = jnp.cumsum(counts), jnp.nonzero(counts, size=E, fill_value=0)

    def compute_expert(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = used[i]
        # Taken once for all of its blocks, for this copies them.
        own = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, expert, keepdims=False), params)

        def compute_block(j: jax.Array, out: jax.Array) -> jax.Array:
            places = ends[expert] - counts[expert] + j * ROW_BLOCK + jnp.arange(ROW_BLOCK)
            pairs = jnp.where(places < ends[expert], order.at[places].get(mode="clip"), T * X)
            rows = x.at[pairs // X].get(mode="fill", fill_value=0)
            y = mlp(own, rows, jnp.asarray(ROW_BLOCK), config=config)
            return out.at[pairs].set(y.astype(jnp.float32), mode="drop")

        return jax.lax.fori_loop(0, -(-counts[expert] // ROW_BLOCK), compute_block, out)

    out = jax.lax.fori_loop(0, (counts > 0).sum(), compute_expert, jnp.zeros((T * X, D), jnp.float32))
    return out.reshape(T, X, D)


def _in_groups(params: MLPParams, x: jax.Array, experts: jax.Array, num_tokens: jax.Array, *, config: MLP) -> jax.Array:
    """Returns the results f32[T, X, D] of each token's experts, by grouped products of all experts."""
    T, X = experts.shape
    order = jnp.argsort(experts.reshape(-1), stable=True)
    expert_of = experts.reshape(-1)[order]
    counts = jnp.zeros((params.up.shape[0],), jnp.int32).at[expert_of].add(1)

    def linear(rows: jax.Array, w: Any, bias: Any) -> jax.Array:
        values, scales = (w.values, w.scales) if isinstance(w, QuantizedArray) else (w, None)
        y = grouped_matmul(rows, values, counts, scales)
        return y if bias is None else y + bias[expert_of]

    rows = x[order // X]
    gate = linear(rows, params.gate, params.gate_bias) if config.is_gated else None
    up = linear(rows, params.up, params.up_bias)
    y = linear(activate(gate, up, config=config), params.down, params.down_bias)
    return jnp.zeros(y.shape, jnp.float32).at[order].set(y.astype(jnp.float32)).reshape(T, X, -1)
