"""A slice of the engine's tests over the TPU kernels, interpreted; `pytest tests/engine --tpu-kernels` runs all."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from kernels_pallas.paged_attention import api
from tests.engine.engines import forget_prefixes, interpret_tpu_kernels, poison_cache, random_prompts, small_engine
from tests.engine.probe import runner_of

PROMPTS = random_prompts(3, max_len=40, seed=1)
PARAMS = [SamplingParams(temperature=t, seed=7, max_tokens=3, ignore_eos=True, log_probs=2) for t in (0, 1, 0)]


@pytest.fixture(autouse=True)
def no_request_waits_for_a_compiler():
    """Not asked here: Pallas' interpreter compiles as it goes."""


@pytest.fixture(scope="module")
def expected(shared_llm):
    """Completions by the reference. Its engine compiles steps on demand, so they come before any interpreted kernel."""
    return shared_llm.generate(PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def tpu_llm(checkpoint, expected):
    """Chunks of 16 tokens, and every slot that is not written is NaN."""
    with pytest.MonkeyPatch.context() as patch:
        interpret_tpu_kernels(patch)
        llm = small_engine(checkpoint, max_num_seqs=2, max_num_batched_tokens=16)
        poison_cache(llm)
        yield llm


def test_chunks_and_single_tokens_in_one_step_yield_what_the_reference_does(tpu_llm, expected):
    assert max(map(len, PROMPTS)) > 16

    assert runner_of(tpu_llm)._cache.pools[0].layout == "tpu"
    check_same(tpu_llm.generate(PROMPTS, PARAMS), expected)


def test_a_prefix_found_in_the_cache_yields_what_computing_it_does(tpu_llm):
    (prompt,) = np.random.default_rng(2).integers(1, 96, (1, 20)).tolist()
    forget_prefixes(tpu_llm)

    computed, found = (tpu_llm.generate([prompt], PARAMS[1]) for _ in range(2))

    assert [c.num_cached_tokens for c in (*computed, *found)] == [0, 16]
    check_same(found, computed)


def test_keys_and_values_in_int8_yield_what_the_reference_does(checkpoint, expected, monkeypatch):
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "cache_dtype": "int8"}
    rounded = small_engine(checkpoint, **options).generate(PROMPTS[:1], PARAMS[:1])
    interpret_tpu_kernels(monkeypatch)
    llm = small_engine(checkpoint, **options)
    poison_cache(llm)

    check_same(llm.generate(PROMPTS[:1], PARAMS[:1]), rounded)
    assert rounded[0].log_probs != expected[0].log_probs


def test_attention_in_plain_jax_is_for_whoever_asks_where_kernels_refuse(checkpoint, expected, monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("block_tables take too much scalar memory")

    interpret_tpu_kernels(monkeypatch)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "tpu", refuse)
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "speculation": str(checkpoint)}

    with pytest.raises(NotImplementedError, match="too much scalar memory; or ask .*EngineConfig.attention"):
        small_engine(checkpoint, **limits)
    asked = small_engine(checkpoint, **limits, attention="reference")
    check_same(asked.generate(PROMPTS[::2], PARAMS[::2]), expected[::2])


def check_same(completions, expected):
    for completion, other in zip(completions, expected, strict=True):
        assert completion.token_ids == other.token_ids
        # float32 through two layers, summed in another order.
        np.testing.assert_allclose(completion.log_probs, other.log_probs, rtol=1e-4, atol=1e-4)
