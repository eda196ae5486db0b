"""What is particular to checkpoints of families with recurrent layers: former keys and names, and what is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.tree_util import keystr
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint import load_params, read_config
from jaxinfer.checkpoint.families import family_of
from jaxinfer.quantization import QuantizedArray
from tests.oracles import FAMILY_SIZES, SIZES, save_random_checkpoint

REFUSED = [
    ("falcon_h1", {"hidden_act": "relu"}, "hidden_act='relu'"),
    ("falcon_h1", {"mamba_d_head": 7}, "mamba_d_head=7 do not make the 60 numbers of mamba_d_ssm=60"),
    ("falcon_h1", {"mamba_d_ssm": None, "mamba_n_heads": 6}, "the 64 numbers of mamba_d_ssm=None, mamba_expand=2"),
    ("falcon_h1", {"mamba_n_groups": 4}, "mamba_n_groups=4"),
    ("falcon_h1", {"mlp_multipliers": [1.0]}, r"mlp_multipliers=\[1.0\] is not a list of 2 numbers"),
    ("falcon_h1", {"ssm_multipliers": [1.0, 1.0, 0.0, 1.0, 1.0]}, "ssm_multipliers=0.0"),
    ("falcon_h1", {"rope_scaling": {"rope_type": "ntk_by_parts"}}, "rope_type='ntk_by_parts'"),
    ("jamba", {"attn_layer_offset": 3}, "attn_layer_offset=3 is not less than attn_layer_period=3"),
    ("jamba", {"expert_layer_period": 1}, "expert_layer_offset=1 is not less than expert_layer_period=1"),
    ("jamba", {"num_experts_per_tok": 6}, "num_experts_per_tok=6 is more than num_experts=5"),
    ("jamba", {"mamba_dt_rank": "full"}, "mamba_dt_rank='full'"),
    ("jamba", {"architectures": ["JambaForTokenClassification"]}, "only JambaForCausalLM, its backbone and its"),
    ("mamba", {"hidden_act": "relu"}, "hidden_act='relu'"),
    ("mamba", {"conv_kernel": 1}, "conv_kernel=1"),
    ("mamba", {"time_step_rank": 0}, "time_step_rank=0"),
    ("mamba2", {"hidden_act": "relu"}, "hidden_act='relu'"),
    ("mamba2", {"expand": 3}, "expand=3"),
    ("mamba2", {"n_groups": 4}, "n_groups=4"),
    ("mamba2", {"conv_kernel": 1}, "conv_kernel=1"),
    ("mamba2", {"time_step_limit": [1.0, 0.0]}, r"time_step_limit=\[1.0, 0.0\]"),
    ("qwen3_next", {"hidden_act": "relu"}, "hidden_act='relu'"),
    ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_value_heads=4 is not a multiple of linear_num_key_heads=3"),
    ("qwen3_next", {"rope_scaling": {"rope_type": "ntk_by_parts"}}, "rope_type='ntk_by_parts'"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate=False"),
    ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
    ("qwen3_5_text", {"layer_types": [1] * 4}, "layer_types"),
    ("qwen3_5_moe_text", {"attn_output_gate": False}, "attn_output_gate=False"),
    ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("qwen3_5_moe_text", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ("qwen3_5_moe_text", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
    ("qwen3_5_moe_text", {"num_experts": 0}, "num_experts=0"),
    ("qwen3_5_moe_text", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
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
    ("jamba", {"num_experts": 5}, {"num_local_experts": 5}),
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


def test_an_embedding_under_its_former_name_is_found(tmp_path):
    path = save_random_checkpoint(tmp_path, "mamba")
    tensors = load_file(path / "model.safetensors")
    expected = load_params(path, read_config(path), "float32")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, path / "model.safetensors")

    params = load_params(path, read_config(path), "float32")

    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["falcon_h1", "jamba", "mamba"])
def test_the_weights_of_all_products_are_quantized_and_no_others(family, quantization, tmp_path):
    path = save_random_checkpoint(tmp_path, family)

    params = load_params(path, read_config(path), "float32", quantization=quantization)

    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))
    names = {(keystr(path[-1:], simple=True), isinstance(leaf, QuantizedArray)) for path, leaf in leaves}
    products = {"in_proj", "out_proj", "x_proj", "dt_proj", "q", "k", "v", "o", "gate", "up", "down", "unembedding"}
    assert {name for name, is_quantized in names if is_quantized} == {name for name, _ in names} & products
    assert {"in_proj", "out_proj"} <= {name for name, is_quantized in names if is_quantized}


def test_layers_that_predict_several_tokens_are_left_out_with_a_warning(tmp_path, caplog):
    path = save_random_checkpoint(tmp_path, "nemotron_h")
    tensors = load_file(path / "model.safetensors")
    config = read_config(path)
    expected = load_params(path, config, "float32")
    save_file({**tensors, "mtp.fc.weight": np.zeros((3, 4), np.float32)}, path / "model.safetensors")

    params = load_params(path, config, "float32")

    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert "without 1 tensors of mtp" in caplog.text
