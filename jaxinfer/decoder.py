"""The ragged decoder of the attention families: Llama, Qwen2, Qwen3 and whatever differs from them by a tensor."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxinfer.batch import Batch
from jaxinfer.cache import KVCache, at_layer, write_kv
from jaxinfer.config import ModelConfig
from jaxinfer.layers import linear, rms_norm, rotary_angles, rotary_embedding, swiglu
from jaxinfer.params import LayerParams, Params
from kernels_pallas.paged_attention import paged_attention


def forward(
    params: Params,
    cache: KVCache,
    batch: Batch,
    *,
    config: ModelConfig,
    q_len: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """Runs the batch's tokens through all layers, appending their keys and values to the cache.

    Returns the hidden states [T, D] after the final norm, and the cache. `q_len` is the number of tokens of every row
    where that is equal and known. `implementation` names a paged-attention kernel, None takes the best.
    """
    layer_step = functools.partial(
        _scan_layer,
        batch=batch,
        angles=rotary_angles(batch.positions, config),
        config=config,
        attend=functools.partial(
            paged_attention, scale=config.head_dim**-0.5, q_len=q_len, implementation=implementation
        ),
    )
    x = params.embedding[batch.tokens]
    groups = []
    for layers, group_cache in zip(params.layers, cache.groups, strict=True):
        n = layers.q.shape[0]
        # The cache is a carry: as scanned input and output it would be copied whole in every step.
        (x, group_cache), _ = jax.lax.scan(
            functools.partial(layer_step, num_layers=n), (x, group_cache), (layers, jnp.arange(n))
        )
        groups.append(group_cache)
    return rms_norm(x, params.final_norm, epsilon=config.norm_epsilon), KVCache(groups=tuple(groups))


def _scan_layer(carry, inputs, *, num_layers, batch, angles, config, attend):
    x, cache = carry
    layer, index = inputs
    slots, block_tables = at_layer(cache, index, num_layers, batch)
    h = rms_norm(x, layer.attention_norm, epsilon=config.norm_epsilon)
    q, k, v = project_qkv(layer, h, angles, config=config)
    cache = write_kv(cache, k, v, slots)
    attended = attend(q, cache.k, cache.v, block_tables, batch.kv_lens, batch.cu_q_lens)
    x = x + linear(attended.reshape(x.shape[0], -1), layer.o.reshape(x.shape[1], -1), layer.o_bias)
    h = rms_norm(x, layer.mlp_norm, epsilon=config.norm_epsilon)
    return (x + mlp(layer, h), cache), None


def project_qkv(
    layer: LayerParams, x: jax.Array, angles: tuple[jax.Array, jax.Array], *, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries [T, N, H], keys and values [T, K, H] of x [T, D], normed where the family does, and rotated."""
    q = linear(x, layer.q, layer.q_bias)
    k = linear(x, layer.k, layer.k_bias)
    v = linear(x, layer.v, layer.v_bias)
    if layer.q_norm is not None:
        q = rms_norm(q, layer.q_norm, epsilon=config.norm_epsilon)
        k = rms_norm(k, layer.k_norm, epsilon=config.norm_epsilon)
    return rotary_embedding(q, *angles), rotary_embedding(k, *angles), v


def mlp(layer: LayerParams, x: jax.Array) -> jax.Array:
    """Returns down(silu(gate(x)) * up(x)) for x [T, D]."""
    hidden = swiglu(linear(x, layer.gate, layer.gate_bias), linear(x, layer.up, layer.up_bias))
    return linear(hidden, layer.down, layer.down_bias)


def unembed(params: Params, hidden: jax.Array) -> jax.Array:
    """Returns logits f32[rows, V] of hidden states [rows, D]."""
    table = params.embedding if params.unembedding is None else params.unembedding
    return linear(hidden, table).astype(jnp.float32)
