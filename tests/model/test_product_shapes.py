"""Every product of a token has one shape in every step, whatever the layers: the first rule of `row_products`."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import CacheConfig
from jaxinfer.model.batch import make_batch
from jaxinfer.model.cache import abstract_cache
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.dense_and_experts import DenseAndExperts
from jaxinfer.model.components.latent_attention import LatentAttention
from jaxinfer.model.components.layer_embedding import LayerEmbedding
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.components.recurrent.gated_delta_net import GatedDeltaNet
from jaxinfer.model.components.recurrent.selective_scan import SelectiveScan
from jaxinfer.model.components.recurrent.state_space import StateSpace
from jaxinfer.model.components.rope import Rope
from jaxinfer.model.config import RMS_NORM, Layer, LayerGroup, ModelConfig
from jaxinfer.model.decoder import forward
from jaxinfer.model.layer_parts import Mixer
from jaxinfer.model.params import abstract_params
from jaxinfer.plan.products import other_float_sums, product_shapes
from kernels_pallas import row_products
from kernels_pallas.row_products import ROW_BLOCK

S = 16
ROPE = Rope(dim=6, max_position=256, is_interleaved=True)
LATENT_SIZES = {"kv_lora_rank": 30, "qk_nope_head_dim": 18, "qk_rope_head_dim": 6, "v_head_dim": 26, "rope": ROPE}
# Most sizes are no multiples of the vectors of a CPU. `tests/plan/test_products.py` has attention, in engines' steps.
MIXERS: dict[str, Mixer] = {
    "latent attention": LatentAttention(num_heads=5, q_lora_rank=None, **LATENT_SIZES),
    "latent attention, queries of a rank": LatentAttention(num_heads=5, q_lora_rank=22, **LATENT_SIZES),
    "state space": StateSpace(num_heads=6, head_dim=10, num_groups=2, state_size=13, conv_size=4),
    "selective scan": SelectiveScan(inner_size=51, state_size=13, time_step_rank=3, conv_size=4, has_norms=True),
    "gated delta net": GatedDeltaNet(
        num_key_heads=3, num_value_heads=6, key_head_dim=13, value_head_dim=10, conv_size=4
    ),
}
LAYERS: dict[str, tuple[Layer, ...]] = {
    name: (Layer(mixer=mixer, feed_forward=MLP(intermediate_size=44)),) for name, mixer in MIXERS.items()
}
ATTENTION = Attention(num_heads=6, num_kv_heads=3, head_dim=10, qk_norm="head")
OF_GEMMA_4 = Layer(
    mixer=replace(ATTENTION, has_values=False, has_value_norm=True),
    feed_forward=DenseAndExperts(
        dense=MLP(intermediate_size=44),
        experts=MoE(
            num_experts=5,
            expert=MLP(intermediate_size=27),
            router=Router(num_chosen=2, has_expert_scales=True, norm=RMS_NORM),
        ),
    ),
    embedding=LayerEmbedding(vocab_size=61, size=7),
    has_post_norms=True,
    has_scale=True,
)
LAYERS["shared keys and values, embeddings for each layer, experts beside a dense network"] = (
    OF_GEMMA_4,
    replace(OF_GEMMA_4, mixer=replace(ATTENTION, source=0)),
)
# tokens, rows, tokens in a row at most, a tree of drafts where layers can see one
STEPS = [(1, 1, 1, False), (64, 4, None, False), (40, 40, 1, False), (10, 2, 5, True)]


@pytest.mark.parametrize("name", LAYERS)
def test_every_product_of_a_token_has_one_shape_in_every_step(monkeypatch, name):
    monkeypatch.setattr(row_products, "equal_row_counts", lambda *_: frozenset())
    config = ModelConfig(vocab_size=61, hidden_size=36, max_position=256, groups=(LayerGroup(LAYERS[name], 2),))
    cache = abstract_cache(config, CacheConfig(num_pages=8, page_size=S))
    found = set()
    for num_tokens, num_rows, q_len, is_tree in STEPS:
        batch = make_batch([], page_size=S, num_tokens=num_tokens, num_rows=num_rows, table_width=3)
        has_mask = is_tree and not config.is_recurrent
        mask = jax.ShapeDtypeStruct((num_tokens, 1), np.uint32) if has_mask else None
        run = functools.partial(forward, config=config, q_len=q_len)
        trace = jax.make_jaxpr(lambda *args, run=run: run(*args[:3], tree_mask=args[3]))(
            abstract_params(config, jnp.float32), cache, batch, mask
        )
        shapes = product_shapes(trace)
        assert {shape.num_rows for shape in shapes} == {ROW_BLOCK}
        assert "" not in {shape.form for shape in shapes}
        assert other_float_sums(trace) == frozenset()
        found.add(shapes)
    assert len(found) == 1
