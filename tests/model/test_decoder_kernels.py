"""The decoder over a kernel, in its own layout of pages, computes what it does over the reference."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.latent_attention import LatentAttention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.rope import Rope
from jaxinfer.model.config import Layer, LayerGroup, ModelConfig, uniform_decoder
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
