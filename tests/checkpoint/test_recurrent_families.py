"""Families with recurrent layers against `transformers` on small random checkpoints, for any split of the work."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint import load_params, read_config
from jaxinfer.checkpoint.families import family_of
from tests.model.test_decoder import LENGTHS, SHAPE, SPLITS
from tests.oracles import FAMILY_SIZES, SIZES, load_reference, reference_logits, save_random_checkpoint
from tests.replay import replay

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2, groups": ("mamba2", {}),
    "mamba2, one group, biases, tied": (
        "mamba2",
        {"n_groups": 1, "use_bias": True, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-2},
    ),
    "mamba2, a group per head, no bias of a wide convolution, bounded time steps": (
        "mamba2",
        {"n_groups": 6, "use_conv_bias": False, "conv_kernel": 7, "time_step_limit": (0.3, 0.8)},
    ),
    "qwen3_next, delta nets, then attention, of experts": ("qwen3_next", {}),
    "qwen3_next, dense layers among them, biases, other heads, tied": (
        "qwen3_next",
        {"mlp_only_layers": [1], "decoder_sparse_step": 2, "attention_bias": True, "tie_word_embeddings": True}
        | {
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_value_head_dim": 14,
            "norm_topk_prob": False,
        },
    ),
    "qwen3_next, layers in another order, no experts, a narrow convolution, half of each head rotated": (
        "qwen3_next",
        {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_hidden_layers": 3}
        | {"num_experts": 0, "linear_conv_kernel_dim": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-2},
    ),
    "granitemoehybrid, experts and a shared one, no positions": ("granitemoehybrid", {}),
    "granitemoehybrid, the shared MLP alone, rotated, groups, tied": (
        "granitemoehybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 2, "tie_word_embeddings": True}
        | {"logits_scaling": 2.0, "residual_multiplier": 0.5},
    ),
    "granitemoehybrid, state spaces alone, biases, other heads": (
        "granitemoehybrid",
        {"layer_types": None, "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_expand": 3}
        | {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_conv": 3},
    ),
    "nemotron_h, every kind of layer": ("nemotron_h", {}),
    "nemotron_h, MLPs with biases, a group": (
        "nemotron_h",
        {"layers_block_type": ["mlp", "linear_attention", "full_attention", "mlp"], "mlp_bias": True, "n_groups": 1}
        | {"use_bias": True, "layer_norm_epsilon": 1e-2},
    ),
    "nemotron_h, groups of experts, weights as they are, no attention": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "moe"] * 2, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
        | {"norm_topk_prob": False, "routed_scaling_factor": 1.5, "use_conv_bias": False},
    ),
}
NUM_GENERATED = 12


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A random checkpoint: its parameters and configuration, its model in transformers, and three sequences.

    The sequences end with the tokens that transformers generates greedily.
    """
    family, overrides = CASES[request.param]
    path = save_random_checkpoint(tmp_path_factory.mktemp(family), family, **overrides)
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


@pytest.mark.parametrize("split", SPLITS)
def test_logits_and_greedy_tokens_are_those_of_transformers_for_any_split(case, split):
    params, config, sequences, expected = case

    logits = replay(params, sequences, SPLITS[split], config=config, shape=SHAPE, is_exact=False)

    for ours, theirs, sequence in zip(logits, expected, sequences, strict=True):
        # Logits of order 1 after some thousand float32 operations, added in another order.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
        first = max(len(sequence) - NUM_GENERATED, 3)
        np.testing.assert_array_equal(ours[first - 1 : -1].argmax(-1), sequence[first:])


REFUSED = [
    ("mamba2", {"hidden_act": "relu"}, "hidden_act='relu'"),
    ("mamba2", {"expand": 3}, "expand=3"),
    ("mamba2", {"n_groups": 4}, "n_groups=4"),
    ("mamba2", {"conv_kernel": 1}, "conv_kernel=1"),
    ("mamba2", {"time_step_limit": [1.0, 0.0]}, r"time_step_limit=\[1.0, 0.0\]"),
    ("qwen3_next", {"hidden_act": "relu"}, "hidden_act='relu'"),
    ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_value_heads=4 is not a multiple of linear_num_key_heads=3"),
    ("qwen3_next", {"rope_scaling": {"rope_type": "ntk_by_parts"}}, "rope_type='ntk_by_parts'"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
    ("granitemoehybrid", {"mamba_d_head": 7}, "mamba_d_head=7"),
    ("granitemoehybrid", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
    ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'"),
    ("nemotron_h", {"attention_bias": True}, "attention_bias=True"),
    ("nemotron_h", {"sliding_window": 9}, "sliding_window=9"),
    ("nemotron_h", {"moe_latent_size": 16}, "moe_latent_size=16"),
    ("nemotron_h", {"layers_block_type": ["mamba", "hyena"]}, "layers_block_type"),
    ("nemotron_h", {"n_group": 4}, "n_group=4"),
    ("mamba2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
]


FORMER = [
    (
        "nemotron_h",
        {"hybrid_override_pattern": "M-*ME"},
        {"layers_block_type": ["mamba", "mlp", "attention", "mamba", "moe"]},
    ),
    ("nemotron_h", {"mamba_n_groups": 3, "mamba_conv_bias": False}, {"n_groups": 3, "use_conv_bias": False}),
    ("granitemoehybrid", {"layers_block_type": ["mamba", "attention", "mamba"]}, {}),
]


@pytest.mark.parametrize(("family", "former", "present"), FORMER, ids=repr)
def test_former_keys_and_names_are_read(family, former, present):
    hf = {"model_type": family, **SIZES, **FAMILY_SIZES[family]}
    replaced = ("layer_types", "layers_block_type") if "layers" in str(former) or "hybrid" in str(former) else ()
    old = {key: value for key, value in hf.items() if key not in replaced}

    assert family_of(hf).config_from_hf({**old, **former}) == family_of(hf).config_from_hf({**hf, **present})


@pytest.mark.parametrize(("family", "keys", "message"), REFUSED, ids=repr)
def test_a_setting_that_would_change_the_function_is_refused_by_its_name(family, keys, message):
    hf = {"model_type": family, **SIZES, **FAMILY_SIZES[family], **keys}

    with pytest.raises(ValueError, match=message):
        family_of(hf).config_from_hf(hf)


def test_layers_that_predict_several_tokens_are_left_out_with_a_warning(tmp_path, caplog):
    path = save_random_checkpoint(tmp_path, "nemotron_h")
    tensors = load_file(path / "model.safetensors")
    config = read_config(path)
    expected = load_params(path, config, "float32")
    save_file({**tensors, "mtp.fc.weight": np.zeros((3, 4), np.float32)}, path / "model.safetensors")

    params = load_params(path, config, "float32")

    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert "without 1 tensors of mtp" in caplog.text
