"""The decoder of Llama, Mistral, Qwen2, Qwen3 and similar families, on ragged batches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.config import ModelConfig
from jaxinfer.model.batch import Batch, num_real_tokens
from jaxinfer.model.cache import KVCache, layer_offset, write_tokens
from jaxinfer.model.layers import linear, product, rms_norm, rotary_angles, rotary_embedding, swiglu
from jaxinfer.model.params import LayerParams, Params
from kernels_pallas.paged_attention import paged_attention


def forward(
    params: Params,
    cache: KVCache,
    batch: Batch,
    *,
    config: ModelConfig,
    q_len: int | None = None,
    tree_mask: jax.Array | None = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, KVCache]:
    """Runs the batch's tokens through all layers, appending them with their keys and values to the cache.

    Returns the hidden states [T, D] after the final norm, and the cache. `q_len` and `tree_mask` are as for
    `paged_attention`. `implementation` names a paged-attention kernel, None takes the best. `mesh`: the mesh that
    parameters and cache are split over, if any.
    """
    x = params.embedding[batch.tokens]
    angles = rotary_angles(batch.positions, config)
    groups = []
    for layers, group_cache in zip(params.layers, cache.groups, strict=True):
        x, group_cache = _run_group(
            layers,
            group_cache,
            batch,
            x,
            angles,
            tree_mask,
            config=config,
            q_len=q_len,
            implementation=implementation,
            mesh=mesh,
        )
        groups.append(group_cache)
    cache = KVCache(groups=tuple(groups), tokens=write_tokens(cache, batch))
    return rms_norm(x, params.final_norm, epsilon=config.norm_epsilon), cache


# Jitted separately, so that groups of equal shape are traced once.
@functools.partial(jax.jit, static_argnames=("config", "q_len", "implementation", "mesh"))
def _run_group(layers, cache, batch, x, angles, tree_mask, *, config, q_len, implementation, mesh):
    attend = functools.partial(
        paged_attention,
        block_tables=batch.block_tables,
        kv_lens=batch.kv_lens,
        cu_q_lens=batch.cu_q_lens,
        scale=config.head_dim**-0.5,
        q_len=q_len,
        window=config.sliding_window,
        tree_mask=tree_mask,
        implementation=implementation,
        mesh=mesh,
    )
    num_layers = layers.attention_norm.shape[0]
    num_tokens = num_real_tokens(batch)

    def run_layer(carry, inputs):
        x, cache = carry
        layer, index = inputs
        h = rms_norm(x, layer.attention_norm, epsilon=config.norm_epsilon)
        q, k, v = project_qkv(layer, h, angles, num_tokens, config=config)
        attended, cache = attend(q, k, v, cache, page_offset=layer_offset(cache, index, num_layers))
        x = x + linear(attended, layer.o, layer.o_bias, num_tokens)
        h = rms_norm(x, layer.mlp_norm, epsilon=config.norm_epsilon)
        return (x + mlp(layer, h, num_tokens), cache), None

    # The cache is a carry: as scanned input and output it would be copied whole in every step.
    (x, cache), _ = jax.lax.scan(run_layer, (x, cache), (layers, jnp.arange(num_layers)))
    return x, cache


def project_qkv(
    layer: LayerParams,
    x: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    num_tokens: jax.Array,
    *,
    config: ModelConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries [T, N, H], keys and values [T, K, H] of x [T, D], rotated, and normalised if the family does."""
    q = linear(x, layer.q, layer.q_bias, num_tokens)
    k = linear(x, layer.k, layer.k_bias, num_tokens)
    v = linear(x, layer.v, layer.v_bias, num_tokens)
    if layer.q_norm is not None:
        q = rms_norm(q, layer.q_norm, epsilon=config.norm_epsilon)
        k = rms_norm(k, layer.k_norm, epsilon=config.norm_epsilon)
    return rotary_embedding(q, *angles), rotary_embedding(k, *angles), v


def mlp(layer: LayerParams, x: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """Returns down(silu(gate(x)) * up(x)) for x [T, D]."""
    gate = linear(x, layer.gate, layer.gate_bias, num_tokens)
    up = linear(x, layer.up, layer.up_bias, num_tokens)
    return linear(swiglu(gate, up), layer.down, layer.down_bias, num_tokens)


def unembed(params: Params, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
    """Returns logits f32[rows, V] of hidden states [rows, D]; rows past num_rows, if given, are padding."""
    table = params.embedding if params.unembedding is None else params.unembedding
    if params.lens is not None:  # Belrose et al. 2023
        hidden = hidden + linear(hidden, params.lens, None, num_rows)
    return product(hidden, table, num_rows)
