"""Prints the planned and the placed bytes of parameters and of a page on a device, for meshes of four devices."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxinfer.capacity.plan import page_bytes_of_device, params_of_device
from jaxinfer.checkpoint.families import family_of
from jaxinfer.config import EngineConfig
from jaxinfer.engine.execution.memory_plan import one_page
from jaxinfer.model.cache import abstract_cache, cache_shardings
from jaxinfer.model.params import abstract_params, shardings
from jaxinfer.plan.memory import num_bytes

SMALL = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
AXES = ("experts", "model")


def placed_bytes(tree, placement):
    """Returns the bytes of the first device's part of zeros in the place of abstract arrays."""
    arrays = jax.tree.map(lambda a, at: jax.device_put(jnp.zeros(a.shape, a.dtype), at), tree, placement)
    first = jax.devices()[0]
    shards = (shard for leaf in jax.tree.leaves(arrays) for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == first)


config, limits = family_of(SMALL).config_from_hf(SMALL), EngineConfig(page_size=16)
planned, placed = [], []
for sizes in ((1, 4), (2, 2), (4, 1)):
    abstract = AbstractMesh(sizes, AXES)
    _, params = params_of_device(config, "float32", abstract, None, "gpu")
    planned += [num_bytes(params), sum(page_bytes_of_device(config, limits, "float32", abstract, "cpu"))]
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(sizes, AXES, auto)
    cache = abstract_cache(config, one_page(limits, "float32"))
    placed += [
        placed_bytes(abstract_params(config, "float32"), shardings(config, mesh)),
        placed_bytes(cache, cache_shardings(cache, mesh, config=config)),
    ]
print(json.dumps([planned, placed]))
