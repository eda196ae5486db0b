"""The decoder over a kernel, in its own layout of pages, computes what it does over the reference."""

from __future__ import annotations

import functools
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from jaxinfer.model.components.attention import Attention, QueryGrowth
from jaxinfer.model.components.latent_attention import LatentAttention
from jaxinfer.model.components.layers import Norm
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.rope import Rope
from jaxinfer.model.config import Layer, LayerGroup, ModelConfig, uniform_decoder
from jaxinfer.model.joined_params import join_products
from kernels_pallas.paged_attention import api
from tests.replay import SMALL_SIZES, lively_params, replay

LATENTS = LatentAttention(
    num_heads=4,
    q_lora_rank=None,
    kv_lora_rank=28,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    rope=Rope(dim=8, max_position=256),
)
LAYER = Layer(mixer=LATENTS, feed_forward=MLP(intermediate_size=44))
# As in Gemma 4: the last two layers read the keys and values of the first two, whose heads differ in size.
OWN = (
    Attention(num_heads=4, num_kv_heads=2, head_dim=16, rope=Rope(dim=16, max_position=256), window=9),
    Attention(num_heads=4, num_kv_heads=1, head_dim=40, rope=Rope(dim=40, max_position=256), has_values=False),
)
READERS = [replace(mixer, has_values=True, source=source) for source, mixer in enumerate(OWN)]
SHARING = [
    LayerGroup(tuple(Layer(mixer=mixer, feed_forward=MLP(intermediate_size=44)) for mixer in mixers))
    for mixers in (OWN, READERS)
]
CONFIGS = {
    "attention": uniform_decoder(**SMALL_SIZES | {"vocab_size": 64, "num_layers": 2, "layer_groups": (2,)}),
    "latents": ModelConfig(vocab_size=64, hidden_size=32, max_position=256, groups=(LayerGroup((LAYER,), 2),)),
    "shared keys and values": ModelConfig(vocab_size=64, hidden_size=32, max_position=256, groups=tuple(SHARING)),
}
ROTATED = Rope(dim=16, max_position=256)
JOINED: dict[str, tuple[Attention, Norm]] = {
    "plain": (Attention(num_heads=4, num_kv_heads=2, head_dim=16, rope=ROTATED), Norm()),
    "norms and biases": (
        Attention(num_heads=4, num_kv_heads=1, head_dim=16, rope=ROTATED, has_qkv_bias=True, qk_norm="head"),
        Norm(epsilon=1e-2),
    ),
    # The first 24 numbers of a head of 40 are rotated.
    "pairs of neighbours, a part of a head, weights from 1": (
        Attention(
            num_heads=6,
            num_kv_heads=2,
            head_dim=40,
            rope=Rope(dim=24, max_position=256, is_interleaved=True),
            qk_norm="head",
        ),
        Norm(adds_one=True),
    ),
    "a gate, a part of a head": (
        Attention(
            num_heads=4,
            num_kv_heads=2,
            head_dim=20,
            rope=Rope(dim=8, max_position=256),
            has_gate=True,
            has_qkv_bias=True,
            window=9,
        ),
        Norm(),
    ),
    "queries that grow": (
        Attention(
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rope=ROTATED,
            query_growth=QueryGrowth(beta=0.7, length=5),
        ),
        Norm(),
    ),
    "no positions": (Attention(num_heads=4, num_kv_heads=4, head_dim=16, qk_norm="head"), Norm()),
}
# Steps of (sequence, number of tokens), their shape, and the tokens per row where that is fixed.
RUNS = {
    "chunks, then single tokens beside a chunk": ([[(0, 20), (1, 7)], [(0, 1), (2, 18), (1, 1)]], (32, 3), None),
    "decoding": ([[(0, 1), (1, 1)]] * 3, (3, 3), 1),
}
CASES = [("attention", "tpu", name) for name in RUNS] + [
    (model, device, name)
    for model in ("latents", "shared keys and values")
    for device in ("gpu", "tpu")
    for name in RUNS
]


@pytest.mark.parametrize(("model", "device", "name"), CASES)
def test_the_kernels_give_the_logits_of_the_reference(model, device, name):
    (steps, shape, q_len), config = RUNS[name], CONFIGS[model]
    sequences = list(np.random.default_rng(0).integers(0, config.vocab_size, (3, 24), dtype=np.int32))
    shapes = {"config": config, "shape": shape, "q_len": q_len}
    run = functools.partial(replay, lively_params(config), sequences, steps, **shapes)

    expected = run(implementation="reference")
    actual = run(implementation=f"{device}_interpret", layout=device)

    for logits, reference in zip(actual, expected, strict=True):
        # float32 through a few layers, summed in another order.
        np.testing.assert_allclose(logits, reference, rtol=1e-4, atol=1e-4)


# Norms after rotation are not for that launch.
ROTATED_NORM = Attention(num_heads=4, num_kv_heads=2, head_dim=16, rope=ROTATED, qk_norm="head", has_rotated_norm=True)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", [*JOINED, "norms after rotation"])
def test_joined_products_become_queries_and_pages_in_one_launch(name, run, monkeypatch):
    mixer, norm = JOINED.get(name, (ROTATED_NORM, Norm()))
    layer = Layer(mixer=mixer, feed_forward=MLP(intermediate_size=44), norm=norm)
    config = ModelConfig(vocab_size=64, hidden_size=32, max_position=256, groups=(LayerGroup((layer,), 2),), norm=norm)
    (steps, shape, q_len), params = RUNS[run], lively_params(config)
    sequences = list(np.random.default_rng(0).integers(0, config.vocab_size, (3, 24), dtype=np.int32))
    replayed = functools.partial(replay, sequences=sequences, steps=steps, config=config, shape=shape, q_len=q_len)
    expected = replayed(params, implementation="reference")
    append = Mock(wraps=api.append_products_gpu)
    monkeypatch.setattr(api, "append_products_gpu", append)

    actual = replayed(join_products(params, config), implementation="gpu_interpret", layout="gpu")

    assert append.called == (name in JOINED)
    for logits, reference in zip(actual, expected, strict=True):
        np.testing.assert_allclose(logits, reference, rtol=1e-4, atol=1e-4)
