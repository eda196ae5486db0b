"""Keys and values in 2 bits in the whole engine, beside what `test_cache_dtypes.py` shows of them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import log_probs
from jaxinfer.config import CacheConfig, SamplingParams
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request.completion import Completion
from jaxinfer.model.cache import abstract_cache
from jaxinfer.model.page_kinds import with_open_pages
from tests.engine.engines import (
    completions_of,
    content_of,
    drain,
    generate,
    run_with_arrivals,
    save_small_checkpoint,
    small_engine,
)
from tests.engine.exactness.test_families import PARAMS, PROMPTS, contents, save_small_family
from tests.engine.probe import runner_of, scheduler_of
from tests.replay import SMALL_MODEL, lively_params

SIZES: dict[str, Any] = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SAMPLES = SamplingParams(n=3, temperature=0.9, seed=7, max_tokens=20, ignore_eos=True, log_probs=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_small_checkpoint(tmp_path_factory.mktemp("heads_of_64"), **SIZES)


@pytest.fixture(scope="module")
def alone(checkpoint) -> list[Completion]:
    """Each request computed by itself, without any cached page."""
    with small_engine(checkpoint, prefix_cache=False, cache_dtype="int2") as llm:
        return [generate(llm, [prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(scope="module")
def samples(checkpoint) -> list[Completion]:
    """The samples of one prompt, whose pages the engine computes anew for each."""
    with small_engine(checkpoint, prefix_cache=False, cache_dtype="int2", max_num_seqs=1) as llm:
        return llm.generate([PROMPTS[13]], SAMPLES, show_progress=False)


def test_rounding_changes_what_is_generated(checkpoint, alone):
    with small_engine(checkpoint) as llm:
        exact = llm.generate(PROMPTS, PARAMS, show_progress=False)

    assert contents(exact) != contents(alone)


@pytest.mark.parametrize(
    "options",
    [{"decode_loop_steps": 4}, {"speculation": "ngram", "max_drafts": 5}, {"page_size": 16, "max_mixed_tokens": 8}],
    ids=["decode loops", "drafts of n-grams", "small mixed steps"],
)
def test_any_schedule_yields_the_same(checkpoint, alone, options):
    with small_engine(checkpoint, cache_dtype="int2", **options) as llm:
        completions = run_with_arrivals(llm, PROMPTS, PARAMS, mean_arrivals=1.5)

    assert contents(completions) == contents(alone)


def test_samples_of_a_prompt_are_those_of_one_row(checkpoint, samples):
    with small_engine(checkpoint, cache_dtype="int2") as llm:
        completions = llm.generate([PROMPTS[13]], SAMPLES, show_progress=False)

    assert contents(completions) == contents(samples)
    assert len({completion.token_ids for completion in completions}) > 1


def poison_unused_open_pages(llm: LLM) -> int:
    """Puts NaN into each open page that no request owns and none can find, and returns their number."""
    runner, (replica,) = runner_of(llm), scheduler_of(llm).replicas
    pool = replica.tables.pools[-1]
    assert pool.is_open
    owned = {page for request in replica.running for page in request.table.kinds[-1].owned_pages}
    unused = [page for page in range(pool.pages.num_pages) if page not in owned and not pool.pages.is_known(page)]

    def poisoned(cache: Any) -> tuple[None, Any]:
        pools = list(cache.pools)
        for i, stack in enumerate(llm.model_config.mixer_stacks):
            if stack.num_exact is not None:
                per_layer = pools[i].num_pages // stack.num_layers
                ids = np.concatenate([np.array(unused, int) + layer * per_layer for layer in range(stack.num_layers)])
                pools[i] = jax.tree.map(lambda a, ids=ids: a.at[ids].set(jnp.nan), pools[i])
        return None, dataclasses.replace(cache, pools=tuple(pools))

    if unused:
        runner.lend_cache(replica.tables.copies, poisoned)
    return len(unused)


def test_a_freed_open_page_reaches_no_result(checkpoint, alone):
    with small_engine(checkpoint, cache_dtype="int2", prefix_cache=False) as llm:
        request_ids = [llm.add(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        deltas, num_poisoned = [], 0
        while llm.has_unfinished:
            deltas += llm.step()
            num_poisoned += poison_unused_open_pages(llm)
        done = completions_of(deltas)

    assert num_poisoned > 0
    assert [content_of(done[i]) for i in request_ids] == contents(alone)


def test_a_tier_keeps_no_full_open_page(checkpoint):
    limits: dict[str, Any] = {"max_num_seqs": 2, "num_pages": 8, "host_cache_bytes": 2**22}
    with small_engine(checkpoint, cache_dtype="int2", **limits) as llm:
        stored: list[int] = []
        tables = scheduler_of(llm).replicas[0].tables
        kept = tables.copies.append

        def append(copy: Any) -> None:
            if type(copy).__name__ == "SwapOut":
                stored.append(copy.kind)
            kept(copy)

        tables.copies.append = append
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=2), show_progress=False)
        drain(llm)

    assert stored
    assert not any(stored)


REFUSED: dict[str, dict[str, Any]] = {
    "draft_trees=True; leave EngineConfig.draft_trees out": {"draft_trees": True},
    "drafts that a device makes; speculate by n-grams": {"speculation": "itself"},
}


@pytest.mark.parametrize("refusal", REFUSED)
def test_an_option_that_is_not_built_is_refused_by_name(checkpoint, refusal):
    options = dict(REFUSED[refusal])
    if "speculation" in options:
        options["speculation"] = str(checkpoint)

    with pytest.raises(ValueError, match=f"cache_dtype='int2' is not built for {re.escape(refusal)}"):
        small_engine(checkpoint, cache_dtype="int2", **options)


@pytest.mark.parametrize(
    ("family", "refusal"),
    [
        ("deepseek_v3", "latent attention"),
        ("gemma4_text", "layers that read the keys and values of another"),
        ("mamba", "no attention"),
    ],
)
def test_a_model_that_it_is_not_built_for_is_refused_by_name(tmp_path, family, refusal):
    path = save_small_family(tmp_path / family, family)

    with pytest.raises(ValueError, match=f"2 bits are not built for a model with {refusal}; use another"):
        small_engine(path, cache_dtype="int2")


def test_a_cache_in_2_bits_and_a_model_with_open_pages_belong_together():
    for config, dtype in ((SMALL_MODEL, "int2"), (with_open_pages(SMALL_MODEL, 0), "float32")):
        with pytest.raises(ValueError, match=f"dtype='{dtype}' of a CacheConfig is not for a model with num_exact="):
            abstract_cache(config, CacheConfig(num_pages=2, dtype=dtype))


def test_log_probs_compute_with_a_cache_in_the_type_of_the_weights():
    params, tokens = lively_params(SMALL_MODEL), np.arange(40, dtype=np.int32)[None]
    values = [log_probs(params, tokens, config=c, page_size=16) for c in (SMALL_MODEL, with_open_pages(SMALL_MODEL, 0))]

    np.testing.assert_array_equal(*values)
