"""An engine with weights in 8 or 4 bits: what it loads, what it generates, and whose pages it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.checkpoint import Checkpoint, load_checkpoint
from jaxinfer.config import CacheConfig, EngineConfig, SamplingParams
from jaxinfer.engine.frontend.page_identity import page_identity
from jaxinfer.quantization import QuantizedArray
from tests.engine.engines import (
    GREEDY,
    content_of,
    forget_prefixes,
    random_prompts,
    run_with_arrivals,
    small_engine,
)
from tests.quantization.test_quantized_array import floats_like
from tests.replay import replay


def is_quantized(node):
    return isinstance(node, QuantizedArray)


def bits(w, quantized):
    return 8 * quantized.values.size // w.size


def test_an_engine_with_weights_of_4_bits_generates_what_the_weights_they_stand_for_do(checkpoint):
    llm = small_engine(checkpoint, quantization="int4", max_num_seqs=1, max_num_batched_tokens=16, max_model_len=32)
    prompt = list(range(40, 50))

    (completion,) = llm.generate([prompt], GREEDY)

    weights, config = load_checkpoint(checkpoint, "float32", quantization="int4")
    plain, _ = load_checkpoint(checkpoint, "float32")
    stand_for = jax.tree.map(lambda w, q: floats_like(w, q, bits(w, q)) if is_quantized(q) else w, plain, weights)
    tokens = np.array([*prompt, *completion.token_ids], np.int32)
    (logits,) = replay(stand_for, [tokens], [[(0, len(tokens))]], config=config, shape=(18, 1))
    assert [*completion.token_ids] == [*logits[len(prompt) - 1 : -1].argmax(-1)]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="bit-equality is promised on CPU")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_request_has_the_same_bits_alone_and_beside_others(checkpoint, quantization):
    prompts = random_prompts(7, max_len=40, seed=2)
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "log_probs": 2}]
    params = [SamplingParams(max_tokens=3 + 2 * i, seed=i, ignore_eos=True, **kinds[i % 2]) for i in range(7)]
    llm = small_engine(checkpoint, quantization=quantization)

    together = run_with_arrivals(llm, prompts, params, seed=3, mean_arrivals=0.7)

    for one, prompt, own in zip(together, prompts, params, strict=True):
        forget_prefixes(llm)
        (alone,) = llm.generate([prompt], own, show_progress=False)
        assert content_of(alone) == content_of(one)


def test_a_page_is_of_use_to_engines_with_the_same_weights_alone(checkpoint):
    _, config = load_checkpoint(checkpoint)
    cache_config = CacheConfig(num_pages=1, page_size=16)
    engines = [EngineConfig(quantization=quantization) for quantization in (None, "int8", "int4")]
    identities = {
        str(page_identity(Checkpoint(Path(checkpoint)), "float32", config, cache_config, engine)) for engine in engines
    }

    assert len(identities) == 3


def test_an_unknown_quantization_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="quantization='int3'.*'int8', 'int4' or None"):
        EngineConfig(quantization="int3")
