"""The decoder over a kernel, in its own layout of pages, computes what it does over the reference."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from jaxinfer.model.config import uniform_decoder
from tests.replay import SMALL_SIZES, lively_params, replay

CONFIG = uniform_decoder(**SMALL_SIZES | {"vocab_size": 64, "num_layers": 2, "layer_groups": (2,)})
# Steps of (sequence, number of tokens), their shape, and the tokens per row where that is fixed.
RUNS = {
    "chunks, then single tokens beside a chunk": ([[(0, 20), (1, 7)], [(0, 1), (2, 18), (1, 1)]], (32, 3), None),
    "decoding": ([[(0, 1), (1, 1)]] * 3, (3, 3), 1),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_tpu_kernels_give_the_logits_of_the_reference(name):
    steps, shape, q_len = RUNS[name]
    sequences = list(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (3, 24), dtype=np.int32))
    shapes = {"config": CONFIG, "shape": shape, "q_len": q_len}
    run = functools.partial(replay, lively_params(CONFIG), sequences, steps, **shapes, is_exact=False)

    expected = run(implementation="reference")
    actual = run(implementation="tpu_interpret", layout="tpu")

    for logits, reference in zip(actual, expected, strict=True):
        # float32 through two layers, summed in another order.
        np.testing.assert_allclose(logits, reference, rtol=1e-4, atol=1e-4)
