"""The bytes of windows and states, by hand, for the shapes of published models."""

from __future__ import annotations

import pytest
import transformers

from jaxinfer.checkpoint.families import family_of
from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.engine.execution.memory_plan import (
    addressable_pages,
    bytes_of_bounded,
    bytes_of_page,
    plan_bounded_kinds,
    plan_cache,
)
from jaxinfer.model.config import PageKind

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
}


def config_of(family: str, fields: dict):
    """Returns the description of the shape that a published config.json of these fields has."""
    config_class = transformers.AutoConfig.for_model(family, **fields)
    return family_of({"model_type": family}).config_from_hf(config_class.to_dict())


def test_a_request_of_gemma_3_at_32000_tokens_keeps_a_fifth_of_the_bytes():
    config = config_of("gemma3_text", GEMMA3_27B)

    cache_config = plan_cache(config, LIMITS, "bfloat16", TOKENS)
    (windows,) = plan_bounded_kinds(config, LIMITS, TOKENS)
    per_layer = 16 * 128 * 2 * 2  # bytes of a token: keys and values of 16 heads of 128
    kept = cache_config.num_pages * bytes_of_page(config, cache_config, None) + bytes_of_bounded(config, cache_config)

    assert config.page_kinds == (PageKind(), PageKind(window=1024))
    assert cache_config.num_pages == TOKENS // S
    assert windows.num_kept == 1023 // S + 1  # a token attends to 1,023 before it
    # The page of the last token, one for the tokens ahead, one to spare, and those of a step's chunk.
    assert windows.num_pages == windows.num_kept + 3 + 512 // S
    assert kept == per_layer * S * (10 * 250 + 52 * windows.num_pages) + 4 * TOKENS
    assert 0.20 < kept / (per_layer * S * 62 * 250) < 0.22


@pytest.mark.parametrize(("dtype", "bytes_per_number"), [("int8", 1), ("float8_e4m3fn", 1), ("bfloat16", 2)])
def test_pools_of_bytes_stay_out_of_sizes_that_a_gpu_addresses_wrongly(dtype, bytes_per_number):
    config = config_of("gemma3_text", GEMMA3_27B)
    cache_config = CacheConfig(num_pages=1, page_size=S, dtype=dtype, num_bounded_pages=(1,))
    of_page = 10 * 16 * 128 * S  # numbers of the keys of ten layers with 16 heads of 128

    def pages(num_bytes):
        return addressable_pages(config, cache_config, num_bytes // of_page)

    assert pages(2**31 - 1) == (2**31 - 1) // of_page
    assert pages(2**32 + of_page) == 2**32 // of_page + 1
    capped = 2**31 // of_page if bytes_per_number == 1 else 2**32 // of_page
    assert pages(2**32) == capped


def test_layers_of_gemma_4_that_read_others_keep_nothing():
    config = config_of("gemma4_text", GEMMA4_E2B)

    cache_config = plan_cache(config, LIMITS, "bfloat16", TOKENS)
    (windows,) = plan_bounded_kinds(config, LIMITS, TOKENS)

    assert config.page_kinds == (PageKind(), PageKind(window=512))
    assert bytes_of_page(config, cache_config, None) == 3 * S * (512 * 2 * 2) + 4 * S
    assert bytes_of_bounded(config, cache_config) == 12 * S * (256 * 2 * 2) * windows.num_pages


def test_states_of_qwen3_next_take_the_same_bytes_at_any_length():
    config = config_of("qwen3_next", QWEN3_NEXT_80B)

    pools = {
        tokens: bytes_of_bounded(config, plan_cache(config, LIMITS, "bfloat16", tokens)) for tokens in (8_000, TOKENS)
    }
    state = 4 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))  # float32: the matrices, and three inputs of a window

    assert config.page_kinds == (PageKind(), PageKind(is_state=True))
    assert pools[8_000] == pools[TOKENS] == 36 * state * (3 + 512 // S)


def test_every_layer_of_falcon_h1_has_pages_of_keys_and_of_states():
    config = config_of("falcon_h1", FALCON_H1_34B)

    cache_config = plan_cache(config, LIMITS, "bfloat16", TOKENS)
    state = 4 * (32 * 128 * 256 + 3 * (4096 + 2 * 2 * 256))

    assert config.page_kinds == (PageKind(), PageKind(is_state=True))
    assert bytes_of_page(config, cache_config, None) == 72 * S * (4 * 128 * 2 * 2) + 4 * S
    assert bytes_of_bounded(config, cache_config) == 72 * state * (3 + 512 // S)


def test_states_of_jamba_have_16_numbers_for_each_channel():
    config = config_of("jamba", {})  # Jamba-v0.1: 4 layers of 32 attend

    cache_config = plan_cache(config, LIMITS, "bfloat16", TOKENS)

    assert bytes_of_page(config, cache_config, None) == 4 * S * (8 * 128 * 2 * 2) + 4 * S
    assert bytes_of_bounded(config, cache_config) == 28 * 4 * 8192 * (16 + 3) * (3 + 512 // S)
