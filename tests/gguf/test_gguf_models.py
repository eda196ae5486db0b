"""Models in a GGUF have the logits of `transformers` on the dequantized weights, and the bytes of the file."""

import math

import jax
import numpy as np
import pytest

from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.gguf.blocks import BLOCK_TYPES
from jaxinfer.gguf.file import read_gguf
from tests.gguf.gguf_files import save_gguf
from tests.oracles import load_reference, reference_logits
from tests.replay import replay

THETA = {"rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 2.5, **THETA}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **THETA}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **THETA}
HALF = {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 256, **THETA}
LONGROPE = {
    **{"rope_type": "longrope", "original_max_position_embeddings": 64, "attention_factor": 1.2, **THETA},
    **{"short_factor": [1.0 + i / 64 for i in range(32)], "long_factor": [2.0 + i / 8 for i in range(32)]},
}
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q8_0", "output": "Q5_K", "blk.1.attn_q": "Q8_0"}
LOCAL = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
CASES = {
    **{f"llama in {block.name}": ("llama", block.name, {}) for block in BLOCK_TYPES.values()},
    "llama in types that differ by layer": (
        "llama",
        lambda name: next((kind for part, kind in MIXED.items() if part in name), "Q4_K"),
        {"num_hidden_layers": 3},
    ),
    "llama with long positions and biases": (
        "llama",
        "Q8_0",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}, "attention_bias": True},
    ),
    "llama, tied": ("llama", "Q4_0", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", "Q4_K", {}),
    "mixtral in integers": ("mixtral", "Q8_0", {}),
    "qwen2": ("qwen2", "Q5_1", {"rope_parameters": YARN}),
    "qwen3, tied": ("qwen3", "Q6_K", {"head_dim": 64, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", "Q4_0", {"head_dim": 64, "moe_intermediate_size": 64, "norm_topk_prob": True}),
    "gemma": ("gemma", "Q4_0", {"head_dim": 64}),
    "gemma2": ("gemma2", "Q8_0", {"head_dim": 64, "query_pre_attn_scalar": 64}),
    "gemma3": ("gemma3_text", "Q4_0", {"head_dim": 64, "query_pre_attn_scalar": 64, "num_hidden_layers": 6, **LOCAL}),
    "gemma3 without windows": (
        "gemma3_text",
        "Q8_0",
        {"head_dim": 64, "query_pre_attn_scalar": 64, "layer_types": ["full_attention"] * 2},
    ),
    "gpt_oss": ("gpt_oss", lambda name: "MXFP4" if "exps" in name else "Q8_0", {"hidden_size": 64, "head_dim": 32}),
    "gpt_oss in other blocks": ("gpt_oss", "Q5_1", {"hidden_size": 64, "head_dim": 32}),
    "phi3": ("phi3", "Q8_0", {"sliding_window": 9, "rope_parameters": HALF}),
    "phi3 with two lengths": ("phi3", "Q4_0", {"rope_parameters": LONGROPE}),
    "olmo2": ("olmo2", "Q4_1", {}),
    "granite": ("granite", "Q8_0", {}),
    "exaone4": (
        "exaone4",
        "Q4_0",
        {
            "num_hidden_layers": 4,
            "head_dim": 64,
            "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64},
        },
    ),
    "exaone4 without windows": ("exaone4", "Q8_0", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "olmoe": ("olmoe", "Q4_0", {}),
    "seed_oss": ("seed_oss", "Q8_0", {"head_dim": 64}),
    "smollm3": ("smollm3", "Q4_0", {"num_hidden_layers": 4}),
}


def tokens():
    return np.random.default_rng(5).integers(0, 96, 40)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers_on_the_dequantized_weights_at_the_bytes_of_the_file(tmp_path, case):
    family, kind, overrides = CASES[case]
    path, reference = save_gguf(tmp_path, family, kind, **overrides)
    expected = reference_logits(load_reference(reference), tokens())

    params, config = load_checkpoint(path, "float32")
    (logits,) = replay(params, [tokens()], [[(0, 25)], [(0, 15)]], config=config, shape=(32, 1))

    stored = read_gguf(path).tensors.values()
    num_bytes = sum(math.prod(t.shape) * 4 if t.type.is_float else t.num_bytes for t in stored)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) <= 1.02 * num_bytes
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(expected).max() > 0.5
