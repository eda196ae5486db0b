"""The shapes of Llama, Qwen and Gemma as their config.json has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def sizes(*, hidden: int, mlp: int, layers: int, heads: int) -> dict[str, int]:
    """Returns the fields of config.json with a model's sizes."""
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA_8B = {**LLAMA, **sizes(hidden=4096, mlp=14336, layers=32, heads=32)}
LLAMA_70B = {**LLAMA, **sizes(hidden=8192, mlp=28672, layers=80, heads=64)}
LLAMA_LONG = {"max_position_embeddings": 131072, "rope_scaling": LLAMA_ROPE}
LLAMA_SMALL = {
    **LLAMA,
    **LLAMA_LONG,
    "rope_scaling": {**LLAMA_ROPE, "factor": 32.0},
    "tie_word_embeddings": True,
}
QWEN2 = {
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Of the models of July 2025 and later.
QWEN3_MOE_LONG = {**QWEN3_MOE, "max_position_embeddings": 262144, "rope_theta": 1e7}
QWEN3_30B = {**sizes(hidden=2048, mlp=6144, layers=48, heads=32), "moe_intermediate_size": 768}
QWEN3_235B = {**sizes(hidden=4096, mlp=12288, layers=94, heads=64), "moe_intermediate_size": 1536}
VL_LONG = {"max_position_embeddings": 262144, "rope_theta": 5e6}
QWEN3_VL = {**QWEN3, **VL_LONG, "model_type": "qwen3_vl_text"}
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
QWEN3_5_27B = {
    **QWEN3_5,
    **sizes(hidden=5120, mlp=17408, layers=64, heads=24),
    "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
}
QWEN3_5_35B = {
    **QWEN3_5,
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rms_norm_eps": 1e-6,
}
GEMMA4 = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama-3.2-1B": {**LLAMA_SMALL, **sizes(hidden=2048, mlp=8192, layers=16, heads=32), "head_dim": 64},
    "Llama-3.2-3B": {**LLAMA_SMALL, **sizes(hidden=3072, mlp=8192, layers=28, heads=24), "head_dim": 128},
    "Llama-3-8B": LLAMA_8B,
    "Llama-3.1-8B": {**LLAMA_8B, **LLAMA_LONG},
    "Llama-3-70B": LLAMA_70B,
    "Llama-3.1-70B": {**LLAMA_70B, **LLAMA_LONG},
    "Llama-3.3-70B": {**LLAMA_70B, **LLAMA_LONG},
    "Llama-3.1-405B": {**LLAMA, **LLAMA_LONG, **sizes(hidden=16384, mlp=53248, layers=126, heads=128)},
    "Qwen2.5-7B": {
        **QWEN2,
        "vocab_size": 152064,
        **sizes(hidden=3584, mlp=18944, layers=28, heads=28),
        "num_key_value_heads": 4,
    },
    "Qwen2.5-72B": {
        **QWEN2,
        "vocab_size": 152064,
        **sizes(hidden=8192, mlp=29568, layers=80, heads=64),
        "num_key_value_heads": 8,
    },
    "Qwen3-0.6B": {**QWEN3, **sizes(hidden=1024, mlp=3072, layers=28, heads=16), "tie_word_embeddings": True},
    "Qwen3-1.7B": {**QWEN3, **sizes(hidden=2048, mlp=6144, layers=28, heads=16), "tie_word_embeddings": True},
    "Qwen3-4B": {**QWEN3, **sizes(hidden=2560, mlp=9728, layers=36, heads=32), "tie_word_embeddings": True},
    "Qwen3-8B": {**QWEN3, **sizes(hidden=4096, mlp=12288, layers=36, heads=32)},
    "Qwen3-14B": {**QWEN3, **sizes(hidden=5120, mlp=17408, layers=40, heads=40)},
    "Qwen3-32B": {**QWEN3, **sizes(hidden=5120, mlp=25600, layers=64, heads=64)},
    "Qwen3-30B-A3B": {**QWEN3_MOE, **QWEN3_30B},
    "Qwen3-30B-A3B-2507": {**QWEN3_MOE_LONG, **QWEN3_30B},
    "Qwen3-Coder-30B-A3B": {**QWEN3_MOE_LONG, **QWEN3_30B},
    "Qwen3-235B-A22B": {**QWEN3_MOE, **QWEN3_235B},
    "Qwen3-235B-A22B-2507": {**QWEN3_MOE_LONG, **QWEN3_235B},
    "Qwen3-Coder-480B-A35B": {
        **QWEN3_MOE_LONG,
        **sizes(hidden=6144, mlp=8192, layers=62, heads=96),
        "num_key_value_heads": 8,
        "num_experts": 160,
        "moe_intermediate_size": 2560,
    },
    "Qwen3-VL-8B": {**QWEN3_VL, **sizes(hidden=4096, mlp=12288, layers=36, heads=32)},
    "Qwen3-VL-30B-A3B": {**QWEN3_MOE, **VL_LONG, **QWEN3_30B, "model_type": "qwen3_vl_moe_text"},
    "Qwen3-Next-80B-A3B": {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        **sizes(hidden=2048, mlp=5120, layers=48, heads=16),
        "full_attention_interval": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 262144,
        "rope_theta": 1e7,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "Qwen3.5-0.8B": {
        **QWEN3_5,
        **sizes(hidden=1024, mlp=3584, layers=24, heads=8),
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3.5-27B": QWEN3_5_27B,
    "Qwen3.6-27B": QWEN3_5_27B,
    "Qwen3.5-35B-A3B": QWEN3_5_35B,
    "Qwen3.6-35B-A3B": QWEN3_5_35B,
    "Qwen3.5-397B-A17B": {
        **QWEN3_5,
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 4096,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 64,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
    },
    "Gemma-3-4B": {
        **GEMMA3,
        **sizes(hidden=2560, mlp=10240, layers=34, heads=8),
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
    },
    "Gemma-3-12B": {
        **GEMMA3,
        **sizes(hidden=3840, mlp=15360, layers=48, heads=16),
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
    },
    "Gemma-3-27B": {
        **GEMMA3,
        **sizes(hidden=5376, mlp=21504, layers=62, heads=32),
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
    },
    "Gemma-4-E2B": {
        **GEMMA4,
        **sizes(hidden=1536, mlp=6144, layers=35, heads=8),
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "attention_k_eq_v": False,
    },
    "Gemma-4-31B": {
        **GEMMA4,
        **sizes(hidden=5376, mlp=21504, layers=60, heads=32),
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
    "Gemma-4-26B-A4B": {
        **GEMMA4,
        **sizes(hidden=2816, mlp=2112, layers=30, heads=16),
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
}
