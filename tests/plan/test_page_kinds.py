"""The bytes of windows and states, by hand, for the shapes of published models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers
from jax.sharding import AbstractMesh

from jaxinfer.checkpoint.families import family_of
from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.model.config import PageKind
from jaxinfer.parallel.placement import Placement
from jaxinfer.plan.cache import (
    MemoryQuestion,
    addressable_pages,
    bounded_pages,
    bytes_of_bounded,
    bytes_of_page,
    check_open_pages,
    model_of_engine,
    plan_cache,
)
from jaxinfer.plan.deployment import plan_deployment
from jaxinfer.plan.devices import parse_devices
from tests.replay import SMALL_MODEL

TOKENS, S = 32_000, 128
LIMITS = EngineConfig(max_num_seqs=1, max_model_len=TOKENS, max_num_batched_tokens=512, page_size=S, cache_bytes=2**40)
GEMMA3_27B = {
    "hidden_size": 5376,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "intermediate_size": 21504,
    "sliding_window": 1024,
    "max_position_embeddings": 131_072,
}
# Every fifth layer attends to all tokens, and the last 20 read the keys and values of two earlier ones.
GEMMA4_E2B = {
    "hidden_size": 1536,
    "num_hidden_layers": 35,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_kv_shared_layers": 20,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "sliding_window": 512,
}
# Every fourth layer attends, the others are delta nets.
QWEN3_NEXT_80B = {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


FALCON_H1_34B = {
    "num_hidden_layers": 72,
    "hidden_size": 5120,
    "intermediate_size": 21504,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "mamba_d_ssm": 4096,
    "mamba_n_heads": 32,
    "mamba_d_head": 128,
    "mamba_n_groups": 2,
    "mamba_d_state": 256,
    "max_position_embeddings": 262_144,
}


def config_of(family: str, fields: dict):
    """Returns the description of the shape that a published config.json of these fields has."""
    config_class = transformers.AutoConfig.for_model(family, **fields)
    return family_of({"model_type": family}).config_from_hf(config_class.to_dict())


def question_of(config, **limits):
    return MemoryQuestion(model=config, config=replace(LIMITS, **limits), dtype="bfloat16")


def test_a_request_of_gemma_3_at_32000_tokens_keeps_a_fifth_of_the_bytes():
    config = config_of("gemma3_text", GEMMA3_27B)

    cache_config = plan_cache(question_of(config))
    (num_windows,) = bounded_pages(question_of(config))
    per_layer = 16 * 128 * 2 * 2  # bytes of a token: keys and values of 16 heads of 128
    of_page, bounded = (size(question_of(config), cache_config) for size in (bytes_of_page, bytes_of_bounded))
    kept = cache_config.num_pages * of_page + bounded

    assert config.page_kinds == (PageKind(), PageKind(window=1024))
    assert cache_config.num_pages == TOKENS // S
    num_kept = config.page_kinds[1].num_kept(S)
    assert num_kept == 1023 // S + 1  # a token attends to 1,023 before it
    # The page of the last token, one for the tokens ahead, one to spare, and those of a step's chunk.
    assert num_windows == num_kept + 3 + 512 // S
    assert kept == per_layer * S * (10 * 250 + 52 * num_windows) + 4 * TOKENS
    assert 0.20 < kept / (per_layer * S * 62 * 250) < 0.22


@pytest.mark.parametrize(("dtype", "bytes_per_number"), [("int8", 1), ("float8_e4m3fn", 1), ("bfloat16", 2)])
def test_pools_of_bytes_stay_out_of_sizes_that_a_gpu_addresses_wrongly(dtype, bytes_per_number):
    config = config_of("gemma3_text", GEMMA3_27B)
    cache_config = CacheConfig(num_pages=1, page_size=S, dtype=dtype, num_bounded_pages=(1,))
    of_page = 10 * 16 * 128 * S  # numbers of the keys of ten layers with 16 heads of 128

    def pages(num_bytes):
        return addressable_pages(question_of(config), cache_config, num_bytes // of_page)

    assert pages(2**31 - 1) == (2**31 - 1) // of_page
    assert pages(2**32 + of_page) == 2**32 // of_page + 1
    capped = 2**31 // of_page if bytes_per_number == 1 else 2**32 // of_page
    assert pages(2**32) == capped


def test_layers_of_gemma_4_that_read_others_keep_nothing():
    config = config_of("gemma4_text", GEMMA4_E2B)

    cache_config = plan_cache(question_of(config))
    (num_windows,) = bounded_pages(question_of(config))

    assert config.page_kinds == (PageKind(), PageKind(window=512))
    assert bytes_of_page(question_of(config), cache_config) == 3 * S * (512 * 2 * 2) + 4 * S
    assert bytes_of_bounded(question_of(config), cache_config) == 12 * S * (256 * 2 * 2) * num_windows


def test_states_of_qwen3_next_take_the_same_bytes_at_any_length():
    config = config_of("qwen3_next", QWEN3_NEXT_80B)

    questions = {tokens: question_of(config, max_model_len=tokens) for tokens in (8_000, TOKENS)}
    pools = {tokens: bytes_of_bounded(question, plan_cache(question)) for tokens, question in questions.items()}
    state = 4 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))  # float32: the matrices, and three inputs of a window

    assert config.page_kinds == (PageKind(), PageKind(is_state=True))
    assert pools[8_000] == pools[TOKENS] == 36 * state * (3 + 512 // S)


def test_every_layer_of_falcon_h1_has_pages_of_keys_and_of_states():
    config = config_of("falcon_h1", FALCON_H1_34B)

    cache_config = plan_cache(question_of(config))
    state = 4 * (32 * 128 * 256 + 3 * (4096 + 2 * 2 * 256))

    assert config.page_kinds == (PageKind(), PageKind(is_state=True))
    assert bytes_of_page(question_of(config), cache_config) == 72 * S * (4 * 128 * 2 * 2) + 4 * S
    assert bytes_of_bounded(question_of(config), cache_config) == 72 * state * (3 + 512 // S)


def test_states_of_jamba_have_16_numbers_for_each_channel():
    config = config_of("jamba", {})  # Jamba-v0.1: 4 layers of 32 attend

    cache_config = plan_cache(question_of(config))

    assert bytes_of_page(question_of(config), cache_config) == 4 * S * (8 * 128 * 2 * 2) + 4 * S
    assert bytes_of_bounded(question_of(config), cache_config) == 28 * 4 * 8192 * (16 + 3) * (3 + 512 // S)


LLAMA3_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}


@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_pages_of_2_bits_and_open_pages_of_llama_3_8b_are_counted(page_size):
    limits = {"cache_dtype": "int2", "page_size": page_size, "max_num_seqs": 4, "max_drafts": 7}
    config = model_of_engine(config_of("llama", LLAMA3_8B), EngineConfig(cache_dtype="int2"))
    question = replace(question_of(config, **limits), platform="cpu")

    cache_config = plan_cache(question)

    # Codes are a quarter of a byte. A channel of keys has two numbers of bfloat16 for 32 tokens, as has each value.
    key, value = 128 / 4 + 4 * 128 / min(32, page_size), 128 / 4 + 4
    assert config.page_kinds == (PageKind(), PageKind(num_exact=0))
    assert bytes_of_page(question, cache_config) == page_size * (32 * 8 * (key + value) + 4)
    num_open = 4 * (2 + -(-8 // page_size)) + 512 // page_size
    assert cache_config.num_bounded_pages == (num_open,)
    assert bytes_of_bounded(question, cache_config) == num_open * page_size * 32 * 8 * 128 * 2 * 2


def test_open_pages_alone_may_take_more_than_the_cache_has():
    config = model_of_engine(config_of("llama", LLAMA3_8B), EngineConfig(cache_dtype="int2"))
    question = replace(question_of(config, cache_dtype="int2", cache_bytes=2**20), platform="cpu")

    with pytest.raises(ValueError, match="beside [0-9]+ bytes for windows, states and open pages; raise"):
        plan_cache(question)


TWO: Any = AbstractMesh((2,), ("model",))


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ({"platform": "gpu"}, "a GPU; use cache_dtype='int4'"),
        ({"platform": "tpu"}, "a TPU; use cache_dtype='int8' or 'fp8'"),
        ({"platform": "cpu", "placement": Placement(TWO)}, "2 devices; give EngineConfig.parallelism one device"),
    ],
)
def test_devices_that_it_is_not_built_for_are_refused_by_name(place, what):
    config = EngineConfig(cache_dtype="int2")
    question = MemoryQuestion(model=SMALL_MODEL, config=config, dtype="bfloat16", **place)

    for check in (check_open_pages, plan_cache):
        with pytest.raises(ValueError, match=f"cache_dtype='int2' is not built for {what}"):
            check(question)


def test_a_plan_for_an_accelerator_refuses_it():
    with pytest.raises(ValueError, match="cache_dtype='int2' is not built for a GPU; use"):
        plan_deployment("Qwen3-4B", parse_devices("H100"), EngineConfig(cache_dtype="int2"))
