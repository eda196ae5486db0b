"""Each family's logits against `transformers`, by small random checkpoints with the peculiarities of the family."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.checkpoint import load_params, read_config
from tests.oracles import CONFIGS, load_reference, reference_logits, save_random_checkpoint
from tests.replay import LENGTHS, SHAPE, SPLITS, replay

THETA = {"rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 2.5, **THETA}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **THETA}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **THETA}
ONE_KV_HEAD = {"num_key_value_heads": 1}
TIED = {"tie_word_embeddings": True}
FULL, SLIDING, LINEAR_ATTENTION = "full_attention", "sliding_attention", "linear_attention"
MIXED = {"layer_types": [FULL, SLIDING, FULL]}
# Of gated delta nets, and of a rotary embedding for images too, of whose 4 pairs each position turns some.
THREE_HEADS = {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_value_head_dim": 14}
THREE_POSITIONS = {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_theta": 1e7}
NO_LAYER_EMBEDDING = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "apertus": {
        "a learned activation, llama3 by default": {},
        "biases, one KV head, tied": {"attention_bias": True, **TIED, **ONE_KV_HEAD},
        "wide heads, linear rope, another epsilon": {"head_dim": 12, "rope_parameters": LINEAR, "rms_norm_eps": 1e-2},
    },
    "arcee": {
        "a squared ReLU without a gate": {},
        "biases, one KV head, yarn": {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN, **ONE_KV_HEAD},
        "wide heads, tied, another epsilon": {"head_dim": 12, "rms_norm_eps": 1e-2, **TIED},
    },
    "deepseek_v2": {
        "groups of experts": {},
        "greedy, queries without latents, no dense layer, tied": {
            "topk_method": "greedy",
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            **TIED,
        },
        "yarn with equal mscales, biases, another epsilon": {
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    },
    "deepseek_v3": {
        "groups of experts": {},
        "halves rotated, queries without latents, weights as they are": {
            "rope_interleave": False,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
        },
        "yarn with two mscales, biases, another epsilon": {
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        },
    },
    "dots1": {
        "a dense layer, then experts, two shared ones": {},
        "windows in the last layers, groups of experts, weights that add up": {
            "sliding_window": 9,
            "max_window_layers": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        "biases, heads of another size, no dense layer, a window named by its layer, tied": {
            "attention_bias": True,
            "head_dim": 12,
            "first_k_dense_replace": 0,
            "sliding_window": 9,
            **MIXED,
            **ONE_KV_HEAD,
            **TIED,
        },
    },
    "ernie4_5": {
        "pairs of neighbours are rotated": {},
        "biases, untied, one KV head": {"use_bias": True, "tie_word_embeddings": False, **ONE_KV_HEAD},
        "heads without a size of their own, yarn, another epsilon": {
            "head_dim": None,
            "rope_parameters": YARN,
            "rms_norm_eps": 1e-2,
        },
    },
    "ernie4_5_moe": {
        "a dense layer, then experts beside two shared ones": {},
        "experts in every other layer, none shared, untied": {
            "num_hidden_layers": 4,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
        },
        "experts but in the last layer, three of five chosen, wide heads, linear rope": {
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 1,
            "moe_num_experts": 5,
            "moe_k": 3,
            "head_dim": 12,
            "rope_parameters": LINEAR,
        },
    },
    "exaone4": {
        "three windows, then a layer without positions": {},
        "no window, positions in all layers, one KV head, tied": {
            "sliding_window": None,
            "layer_types": [FULL] * 4,
            **ONE_KV_HEAD,
            **TIED,
        },
        "layers without positions alone, wide heads": {"layer_types": [FULL] * 4, "head_dim": 20},
        "every second layer full, a llama3 rope, another epsilon": {
            "sliding_window_pattern": 2,
            "sliding_window": 5,
            "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16},
            "rms_norm_eps": 1e-2,
        },
    },
    "falcon_h1": {
        "multipliers, no norm of the state space's output": {},
        "a norm before the gate, biases, tied, no multipliers": {
            "mamba_rms_norm": True,
            "attention_bias": True,
            "mlp_bias": True,
            "projectors_bias": True,
            "mlp_multipliers": None,
            "ssm_multipliers": None,
            **TIED,
        },
        "a norm after the gate, expanded, bounded steps, linear rope, one KV head": {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_d_ssm": None,
            "mamba_n_heads": 4,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "time_step_limit": [0.2, 0.9],
            "rope_parameters": LINEAR,
            "rms_norm_eps": 1e-2,
            **ONE_KV_HEAD,
        },
    },
    "gemma": {
        "heads of another size": {},
        "one KV head, biases": {**ONE_KV_HEAD, "attention_bias": True},
        "wide heads, linear rope, untied, another epsilon": {
            "head_dim": 20,
            "rope_parameters": LINEAR,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-2,
        },
    },
    "gemma2": {
        "windows in every other layer, caps": {},
        "narrow caps, other windows, another scale": {
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
            "query_pre_attn_scalar": 7,
            "sliding_window": 17,
            **MIXED,
        },
        "no caps, one KV head, biases": {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            **ONE_KV_HEAD,
        },
    },
    "gemma3_text": {
        "windows only": {},
        "a layer without window, its rope linear": {
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": {SLIDING: {"rope_type": "default", **THETA}, FULL: {**LINEAR, "rope_theta": 1e6}},
        },
        "a cap of logits, one KV head, biases, untied": {
            "final_logit_softcapping": 1.5,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": [FULL, SLIDING, FULL],
            **ONE_KV_HEAD,
        },
    },
    "gemma4_text": {
        "embeddings for each layer, shared keys and values, K = V, experts": {},
        "as E2B: no K = V, no experts": {"attention_k_eq_v": False, "enable_moe_block": False},
        "as 31B: heads of another number, a cap of logits": {
            **NO_LAYER_EMBEDDING,
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, FULL, FULL],
            "num_global_key_value_heads": 1,
            "enable_moe_block": False,
            "final_logit_softcapping": 1.5,
        },
        "as 26B-A4B: no embeddings for each layer": NO_LAYER_EMBEDDING,
        "one of each kind read by three, biases, untied, two other ropes": {
            "num_hidden_layers": 5,
            "layer_types": [FULL, SLIDING, SLIDING, SLIDING, FULL],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": False,
            "top_k_experts": 6,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                SLIDING: LINEAR,
                FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.5, **THETA},
            },
            "rms_norm_eps": 1e-2,
        },
    },
    "glm4": {
        "half of each head rotated": {},
        "biases, a quarter rotated": {
            "attention_bias": True,
            "rope_parameters": {"partial_rotary_factor": 0.25, **THETA},
        },
        "one KV head, tied, another epsilon": {**ONE_KV_HEAD, **TIED, "rms_norm_eps": 1e-2},
    },
    "glm4_moe": {
        "a dense layer, then experts": {},
        "groups of experts, weights as they are": {
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
        },
        "norms of queries and keys, biases, two shared experts": {
            "use_qk_norm": True,
            "attention_bias": True,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
        },
    },
    "glm4_moe_lite": {
        "a dense layer, then experts of one group": {},
        "a dense layer among them, queries without latents, halves rotated, weights as they are": {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            **TIED,
        },
        "groups of experts, yarn, biases, another epsilon": {
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        },
    },
    "gpt_oss": {
        "sinks, windows in every other layer, yarn": {},
        "one expert, windows in other layers": {"num_experts_per_tok": 1, "sliding_window": 5, **MIXED},
        "plain rope, one KV head, tied": {
            "rope_parameters": {"rope_type": "default", **THETA},
            **ONE_KV_HEAD,
            **TIED,
        },
    },
    "granite": {
        "multipliers": {},
        "biases, other multipliers": {
            "attention_bias": True,
            "mlp_bias": True,
            "attention_multiplier": 0.4,
            "logits_scaling": 0.5,
        },
        "one KV head, tied, llama3 rope": {
            **ONE_KV_HEAD,
            **TIED,
            "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16},
        },
    },
    "granitemoe": {
        "three of six experts": {},
        "one expert, biases": {"num_experts_per_tok": 1, "attention_bias": True, "logits_scaling": 2.0},
        "one KV head, tied, other multipliers": {
            **ONE_KV_HEAD,
            **TIED,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
    },
    "granitemoehybrid": {
        "experts and a shared one, no positions": {},
        "the shared MLP alone, rotated, groups, tied": {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
            **TIED,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
        },
        "state spaces alone, biases, other heads": {
            "layer_types": None,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_expand": 3,
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_d_conv": 3,
        },
    },
    "granitemoeshared": {
        "two experts and a shared one": {},
        "no shared expert": {"shared_intermediate_size": 0, "attention_bias": True},
        "all experts, a wide shared one, tied": {
            "num_experts_per_tok": 4,
            "shared_intermediate_size": 52,
            "embedding_multiplier": 2.0,
            **TIED,
        },
    },
    "hunyuan_v1_dense": {
        "norms after rotation": {},
        "a stretched base, biases, tied, one KV head": {
            "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, **THETA},
            "attention_bias": True,
            **TIED,
            **ONE_KV_HEAD,
        },
        # Its factor on cosine and sine changes the mean square of rotated heads.
        "yarn, another epsilon": {"rope_parameters": YARN, "rms_norm_eps": 1e-2},
    },
    "jamba": {
        "attention in the second layer, experts in two": {},
        "no experts, biases, a wide convolution, tied": {
            "num_experts": 1,
            "mamba_proj_bias": True,
            "mamba_d_conv": 6,
            **TIED,
        },
        "attention first, experts in two layers of three, a derived rank, one KV head": {
            "attn_layer_period": 4,
            "attn_layer_offset": 0,
            "expert_layer_period": 3,
            "expert_layer_offset": 0,
            "num_experts_per_tok": 1,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": False,
            "rms_norm_eps": 1e-2,
            **ONE_KV_HEAD,
        },
    },
    "kimi_k2": {
        "one group of experts": {},
        "as published: yarn with equal mscales, another base": {
            "rope_parameters": {
                **YARN,
                "rope_theta": 5e4,
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        "halves rotated, queries without latents, weights as they are, tied": {
            "rope_interleave": False,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            **TIED,
        },
    },
    "llama": {
        "G=4, llama3 rope": {
            "num_attention_heads": 8,
            "head_dim": 8,
            "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16},
        },
        "G=1, H=64, tied, linear rope": {"num_attention_heads": 2, "head_dim": 64, "rope_parameters": LINEAR, **TIED},
        "G=2, H=80, biases": {"head_dim": 80, "attention_bias": True, "mlp_bias": True},
    },
    "mamba": {
        "tied": {},
        "biases, a wide convolution without one, untied": {
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 6,
            "tie_word_embeddings": False,
        },
        "a derived rank, many channels, a narrow convolution, another epsilon": {
            "time_step_rank": "auto",
            "intermediate_size": 90,
            "state_size": 16,
            "conv_kernel": 2,
            "layer_norm_epsilon": 1e-2,
        },
    },
    "mamba2": {
        "groups": {},
        "one group, biases, tied": {"n_groups": 1, "use_bias": True, "layer_norm_epsilon": 1e-2, **TIED},
        "a group per head, no bias of a wide convolution, bounded time steps": {
            "n_groups": 6,
            "use_conv_bias": False,
            "conv_kernel": 7,
            "time_step_limit": (0.3, 0.8),
        },
    },
    "minimax_m2": {
        "half of each head rotated": {},
        "whole heads rotated, one expert, one KV head, tied": {
            "rotary_dim": None,
            "num_experts_per_tok": 1,
            **ONE_KV_HEAD,
            **TIED,
        },
        "a quarter rotated, yarn, all experts, another epsilon": {
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.25},
            "num_experts_per_tok": 6,
            "rms_norm_eps": 1e-2,
        },
    },
    "ministral3": {
        "queries that grow every 16 tokens": {},
        "a window, tied, one KV head, another growth": {
            "sliding_window": 11,
            "rope_parameters": {**YARN, "original_max_position_embeddings": 7, "llama_4_scaling_beta": 1.5},
            **TIED,
            **ONE_KV_HEAD,
        },
        "no yarn, narrow heads, another epsilon": {
            "head_dim": 8,
            "rope_parameters": {**THETA, "original_max_position_embeddings": 9, "llama_4_scaling_beta": 0.7},
            "rms_norm_eps": 1e-2,
        },
    },
    "mistral": {
        "no window": {"sliding_window": None},
        "window of 11": {"sliding_window": 11},
        "heads of another size, one KV head, yarn, tied": {
            "head_dim": 24,
            "rope_parameters": YARN,
            **ONE_KV_HEAD,
            **TIED,
        },
    },
    "mixtral": {
        "two of five experts": {},
        "window of 9, one expert": {"sliding_window": 9, "num_experts_per_tok": 1},
        "heads of another size, all experts, tied": {"head_dim": 12, "num_experts_per_tok": 5, **TIED},
    },
    "nemotron_h": {
        "every kind of layer": {},
        "MLPs with biases, a group": {
            "layers_block_type": ["mlp", LINEAR_ATTENTION, FULL, "mlp"],
            "mlp_bias": True,
            "n_groups": 1,
            "use_bias": True,
            "layer_norm_epsilon": 1e-2,
        },
        "groups of experts, weights as they are, no attention": {
            "layers_block_type": [LINEAR_ATTENTION, "moe"] * 2,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "use_conv_bias": False,
        },
    },
    "olmo2": {
        "norms after, norms of all heads": {},
        "one KV head, biases": {**ONE_KV_HEAD, "attention_bias": True},
        "yarn, tied, another epsilon": {"rope_parameters": YARN, "rms_norm_eps": 1e-2, **TIED},
    },
    "olmo3": {
        "windows only": {},
        "a layer without window": {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 5},
        "one KV head, biases, yarn": {**ONE_KV_HEAD, **MIXED, "attention_bias": True, "rope_parameters": YARN},
    },
    "olmoe": {
        "two of six experts, norms of all heads": {},
        "weights that add up, one KV head, biases": {
            "norm_topk_prob": True,
            "attention_bias": True,
            **ONE_KV_HEAD,
        },
        "all experts, as many KV heads as heads, yarn, tied, another epsilon": {
            "num_experts_per_tok": 6,
            "num_key_value_heads": None,
            "rope_parameters": YARN,
            "rms_norm_eps": 1e-2,
            **TIED,
        },
    },
    "phi3": {
        "fused weights": {},
        "window of 7, half of each head rotated": {
            "sliding_window": 7,
            "rope_parameters": {"partial_rotary_factor": 0.5, **THETA},
        },
        "one KV head, tied": {**ONE_KV_HEAD, **TIED},
    },
    "qwen2": {
        "G=7, tied, window of 17": {
            "num_attention_heads": 7,
            "hidden_size": 56,
            **ONE_KV_HEAD,
            **TIED,
            "use_sliding_window": True,
            "sliding_window": 17,
            "max_window_layers": 0,
        },
        "a window in the last layer": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
        "yarn": {"rope_parameters": YARN},
    },
    "qwen2_moe": {
        "a gated shared expert": {},
        "a dense layer among them, weights that add up": {"mlp_only_layers": [1], "norm_topk_prob": True},
        "every other layer dense, a window": {
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    },
    "qwen3": {
        "G=4, H=128, yarn": {"head_dim": 128, "rope_parameters": {**YARN, "rope_theta": 1e6}, **ONE_KV_HEAD},
        "biases, tied": {"attention_bias": True, **TIED},
        "a window in the last layer": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    },
    "qwen3_5_moe_text": {
        "delta nets, then attention, two of six experts": {},
        "biases, other heads, all experts, tied": {
            "attention_bias": True,
            "num_experts_per_tok": 6,
            **TIED,
            **THREE_HEADS,
        },
        "a rope for longer contexts, delta nets alone but one, one expert": {
            "full_attention_interval": 2,
            "num_hidden_layers": 3,
            "num_experts_per_tok": 1,
            "rope_parameters": {**YARN, **THREE_POSITIONS},
        },
    },
    "qwen3_5_text": {
        "delta nets, then attention": {},
        "biases, other heads, tied": {"attention_bias": True, **TIED, **ONE_KV_HEAD, **THREE_HEADS},
        "layers in another order, a narrow convolution, half of each head rotated, by three positions": {
            "layer_types": [FULL, LINEAR_ATTENTION, LINEAR_ATTENTION],
            "num_hidden_layers": 3,
            "linear_conv_kernel_dim": 2,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", **THREE_POSITIONS, "partial_rotary_factor": 0.5},
        },
    },
    "qwen3_moe": {
        "two of six experts": {},
        "a dense layer among them, weights that add up, biases": {
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "attention_bias": True,
        },
        "every other layer dense, one expert, a window": {
            "decoder_sparse_step": 2,
            "num_experts_per_tok": 1,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": [FULL] * 3,  # which the family does not read
        },
    },
    "qwen3_next": {
        "delta nets, then attention, of experts": {},
        "dense layers among them, biases, other heads, tied": {
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
            "attention_bias": True,
            **TIED,
            **THREE_HEADS,
            "norm_topk_prob": False,
        },
        "layers in another order, no experts, a narrow convolution, half of each head rotated": {
            "layer_types": [FULL, LINEAR_ATTENTION, LINEAR_ATTENTION],
            "num_hidden_layers": 3,
            "num_experts": 0,
            "linear_conv_kernel_dim": 2,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-2,
        },
    },
    "qwen3_vl_moe_text": {
        "two of six experts": {},
        "a dense layer among them, biases, tied, all experts": {
            "mlp_only_layers": [1],
            "attention_bias": True,
            "num_experts_per_tok": 6,
            **TIED,
        },
        "every other layer dense, yarn by three positions, heads of the hidden size, another epsilon": {
            "decoder_sparse_step": 2,
            "head_dim": None,
            "rope_parameters": {**YARN, **THREE_POSITIONS},
            "rms_norm_eps": 1e-2,
        },
    },
    "qwen3_vl_text": {
        "heads of another size": {},
        "a default rope by three positions, one KV head, tied": {
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", **THREE_POSITIONS},
            **ONE_KV_HEAD,
            **TIED,
        },
        "biases, as many KV heads as heads, yarn": {
            "attention_bias": True,
            "num_key_value_heads": None,
            "rope_parameters": YARN,
            "rms_norm_eps": 1e-2,
        },
    },
    "seed_oss": {
        "biases of queries, keys and values": {},
        "a bias of the output alone, biases of MLPs, one KV head": {
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            **ONE_KV_HEAD,
        },
        "all biases, heads of the hidden size, yarn, tied": {
            "attention_out_bias": True,
            "head_dim": None,
            "rope_parameters": YARN,
            "rms_norm_eps": 1e-2,
            **TIED,
        },
    },
    "smollm3": {
        "rope in three of four layers": {"num_hidden_layers": 4},
        "rope in the second layer alone, biases": {
            "no_rope_layers": [0, 1, 0],
            "attention_bias": True,
            "mlp_bias": True,
        },
        "a window, one KV head, untied": {
            "use_sliding_window": True,
            "sliding_window": 9,
            "tie_word_embeddings": False,
            **ONE_KV_HEAD,
        },
    },
    "solar_open": {
        "experts in every layer": {},
        "groups of experts, weights as they are, biases of queries, keys and values": {
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
        },
        "yarn, two shared experts, one KV head, tied, another epsilon": {
            "rope_parameters": {**YARN, "rope_theta": 1e6},
            "n_shared_experts": 2,
            "rms_norm_eps": 1e-2,
            **ONE_KV_HEAD,
            **TIED,
        },
    },
}
NUM_GENERATED = 8


def test_each_family_has_three_cases():
    assert {family: len(cases) >= 3 for family, cases in CASES.items()} == dict.fromkeys(CONFIGS, True)


# The first case of each family has the products of a CPU, by which bits depend on no other token. The others have those
# of accelerators, whose programs are smaller and sooner compiled.
ON_CPU = [(family, next(iter(cases))) for family, cases in CASES.items()]
ON_ACCELERATORS = [(family, name) for family, cases in CASES.items() for name in list(cases)[1:]]


@contextlib.contextmanager
def products_of_accelerators() -> Iterator[None]:
    """Steps that are traced meanwhile have the products that a platform without a choice of its own gets."""
    choose = jax.lax.platform_dependent

    def take(*operands: Any, default: Any = None, **others: Any) -> Any:
        return choose(*operands, **others) if default is None else default(*operands)

    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", take)
        yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def is_on_cpu(request):
    with contextlib.nullcontext() if request.param else products_of_accelerators():
        yield request.param


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = [*((True, case) for case in ON_CPU), *((False, case) for case in ON_ACCELERATORS)]
        ids = [", ".join(case) for _, case in cases]
        metafunc.parametrize(("is_on_cpu", "case"), cases, ids=ids, indirect=True, scope="module")


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    """A random checkpoint: its parameters and configuration, three sequences, and their logits in `transformers`.

    The sequences end with the tokens that `transformers` generates greedily.
    """
    family, name = request.param
    path = save_random_checkpoint(tmp_path_factory.mktemp(family), family, **CASES[family][name])
    config = read_config(path)
    generator = np.random.default_rng(0)
    reference = load_reference(path)
    sequences = []
    for length in LENGTHS:
        tokens = generator.integers(0, config.vocab_size, max(length - NUM_GENERATED, 3)).tolist()
        while len(tokens) < length:
            tokens.append(int(reference_logits(reference, tokens)[-1].argmax()))
        sequences.append(np.asarray(tokens))
    return load_params(path, config, "float32"), config, sequences, [reference_logits(reference, s) for s in sequences]


@pytest.mark.shows("logits")
@pytest.mark.parametrize("split", SPLITS)
def test_logits_and_greedy_tokens_are_those_of_transformers_for_any_split(is_on_cpu, case, split):
    params, config, sequences, expected = case

    logits = replay(params, sequences, SPLITS[split], config=config, shape=SHAPE)

    for ours, theirs, sequence in zip(logits, expected, sequences, strict=True):
        # Logits of order 1 after some thousand float32 operations, added in another order.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
        first = max(len(sequence) - NUM_GENERATED, 3)
        np.testing.assert_array_equal(ours[first - 1 : -1].argmax(-1), sequence[first:])
