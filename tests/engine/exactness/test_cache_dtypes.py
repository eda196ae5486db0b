"""Keys and values in few bits: whatever happens to a request, it yields what it yields alone, to the bit.

The tests are those of every family, for engines with such caches.
"""

from __future__ import annotations

import pytest

from jaxinfer.config import NARROW_CACHE_DTYPES, EngineConfig
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request.completion import Completion
from tests.checkpoint.test_cache_scales import with_scales
from tests.engine.engines import (
    GREEDY,
    crowded_engine,
    generate,
    random_prompts,
    save_small_checkpoint,
    small_engine,
)
from tests.engine.exactness.test_families import (
    PARAMS,
    PROMPTS,
    save_small_family,
    test_a_rewound_and_a_forked_request_yield_what_they_would_have,  # noqa: F401
    test_a_saved_request_goes_on_as_if_it_had_never_stopped,  # noqa: F401
    test_no_chunk_neighbour_prefix_hit_or_preemption_changes_a_bit,  # noqa: F401
    test_no_draft_changes_a_bit,
)
from tests.exhaustive import exhaustive_but

FAMILIES = ("llama", "gemma3_text", "gemma4_text", "deepseek_v3", "gpt_oss", "falcon_h1")
# Pages of 2 bits are not built for these.
WITHOUT_INT2 = {"gemma4_text": "layers that read the keys", "deepseek_v3": "latent attention"}
CASES = [
    f"{family} {dtype}"
    for family in FAMILIES
    for dtype in NARROW_CACHE_DTYPES
    if dtype != "int2" or family not in WITHOUT_INT2
]
IN_EVERY_RUN = ("llama fp8", "gemma3_text int8", "deepseek_v3 int4", "llama int2", "gemma3_text int2")
# Steps that verify write and read such caches by the functions of other steps; the fewest bits stand for all.
WITH_DRAFTS = ("deepseek_v3 int4", "llama int2")


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        chosen = WITH_DRAFTS if metafunc.function is test_no_draft_changes_a_bit else IN_EVERY_RUN
        metafunc.parametrize("case", exhaustive_but(CASES, chosen), indirect=True, scope="module")


@pytest.fixture(scope="module")
def case(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def family(case) -> str:
    return case.split()[0]


@pytest.fixture(scope="module")
def cache_dtype(case) -> str:
    return case.split()[1]


@pytest.fixture(scope="module")
def checkpoint(case, family, tmp_path_factory):
    folder = tmp_path_factory.mktemp(case.replace(" ", "_"))
    path = save_small_family(folder, family)
    return with_scales(path) if case == "llama fp8" else path  # others have no scales of a checkpoint


@pytest.fixture(scope="module")
def alone(checkpoint, cache_dtype) -> list[Completion]:
    """Each request computed by itself, without any cached page."""
    with small_engine(checkpoint, prefix_cache=False, cache_dtype=cache_dtype) as llm:
        return [generate(llm, [prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(scope="module")
def crowded(family, checkpoint, cache_dtype) -> LLM:
    """Chunks of 5 tokens, too few pages, a host tier to swap to, and drafts, in trees where layers can see them."""
    return crowded_engine(
        checkpoint,
        host_cache_bytes=2**20,
        draft_trees=family != "falcon_h1" and cache_dtype != "int2",
        cache_dtype=cache_dtype,
    )


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory):
    return save_small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("cache_dtype", exhaustive_but(NARROW_CACHE_DTYPES, ("int4",)))
def test_a_draft_model_with_such_a_cache_changes_no_token(small_checkpoint, cache_dtype):
    prompts = random_prompts(3, max_len=40, seed=2)
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_drafts": 2, "adaptive_drafts": False}
    with small_engine(small_checkpoint, cache_dtype=cache_dtype, **sizes) as llm:
        expected = [completion.token_ids for completion in llm.generate(prompts, GREEDY, show_progress=False)]

    with small_engine(small_checkpoint, cache_dtype=cache_dtype, speculation=str(small_checkpoint), **sizes) as llm:
        completions = llm.generate(prompts, GREEDY, show_progress=False)
        metrics = llm.metrics()

    assert [completion.token_ids for completion in completions] == expected
    # The draft is the target, and sees the same rounded keys.
    assert metrics.num_accepted_tokens == metrics.num_drafted_tokens > 0


@pytest.mark.parametrize("cache_dtype", NARROW_CACHE_DTYPES)
def test_sinks_whose_keys_would_be_rounded_at_each_turn_are_refused(small_checkpoint, cache_dtype):
    refusal = f"num_sink_tokens=16 turns .* cache_dtype='{cache_dtype}' would round .*leave out one of the two"
    with pytest.raises(ValueError, match=refusal):
        small_engine(small_checkpoint, num_sink_tokens=16, cache_dtype=cache_dtype)


def test_an_engine_says_in_which_type_it_keeps_keys_and_values(small_checkpoint):
    with small_engine(small_checkpoint, cache_dtype="fp8") as llm:
        assert "float32, keys and values in fp8" in repr(llm)
    with small_engine(small_checkpoint) as llm:
        assert "keys and values" not in repr(llm)


def test_an_unknown_dtype_of_the_cache_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="cache_dtype='int3'.*'fp8'.* or None"):
        EngineConfig(cache_dtype="int3")
