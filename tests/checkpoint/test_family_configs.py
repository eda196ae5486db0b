"""config.json becomes the `ModelConfig` that transformers' own classes describe, or an error."""

from __future__ import annotations

import re

import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxinfer.checkpoint.families import family_of
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.layers import Norm
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.rope import Rope, RopeScaling
from jaxinfer.model.config import ModelConfig
from tests.oracles import CONFIGS, FAMILY_SIZES, SIZES, random_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # of equal layers, and with the settings of Llama
SLIDING = {"use_sliding_window": True, "sliding_window": 20}
ABSENT = object()
WAYS_OUT = ("; use a checkpoint", "; use the", "; download", "; write the", "has to be", "must be")
VARIANTS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("llama", {"num_key_value_heads": None}),
    ("llama", {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}}),
    ("mistral", {}),
    ("mistral", {"sliding_window": 20, "head_dim": 24}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", {**SLIDING, "max_window_layers": 0}),
    ("qwen2", {**SLIDING, "max_window_layers": 3}),
    ("qwen2", {**SLIDING, "layer_types": ["sliding_attention"] * 3}),
    ("qwen2", {"rope_parameters": {"rope_theta": 1000000.0, **YARN}}),
    ("qwen3", {}),
    ("qwen3", {**SLIDING, "sliding_window": None, "max_window_layers": 0}),
    ("qwen3", {**SLIDING, "max_window_layers": 0, "layer_types": ["full_attention"] * 3}),
    ("qwen3", {"attention_bias": True, "head_dim": 128}),
    ("qwen3", {"num_key_value_heads": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
]


def translate(hf: dict) -> ModelConfig:
    return family_of(hf).config_from_hf(hf)


def translated_scaling(hf: dict) -> RopeScaling:
    scaling = rope_of(translate(hf)).scaling
    assert scaling is not None
    return scaling


def rope_of(config: ModelConfig) -> Rope:
    rope = config.mixers[0].rope
    assert rope is not None
    return rope


def minimal(family: str, **keys) -> dict:
    """A config.json with the sizes and `keys` alone."""
    return {"model_type": family, **SIZES, **FAMILY_SIZES.get(family, {}), **keys}


def assert_agrees(config: ModelConfig, reference) -> None:
    (layer,) = set(config.layers)
    attention, mlp, rope = layer.mixer, layer.feed_forward, rope_of(config)
    assert isinstance(attention, Attention)
    has_attention_bias = getattr(reference, "attention_bias", False)
    assert config.vocab_size == reference.vocab_size
    assert config.hidden_size == reference.hidden_size
    assert mlp == MLP(intermediate_size=reference.intermediate_size, has_bias=getattr(reference, "mlp_bias", False))
    assert config.num_layers == reference.num_hidden_layers
    assert attention.num_heads == reference.num_attention_heads
    assert attention.num_kv_heads == reference.num_key_value_heads
    # Qwen2Config has no head_dim; its attention divides the hidden size.
    head_dim = getattr(reference, "head_dim", reference.hidden_size // reference.num_attention_heads)
    assert attention.head_dim == rope.dim == head_dim
    assert config.max_position == rope.max_position == reference.max_position_embeddings
    assert config.norm == layer.norm == Norm(epsilon=reference.rms_norm_eps)
    assert rope.theta == reference.rope_parameters["rope_theta"]
    assert config.has_tied_embeddings == reference.tie_word_embeddings
    assert attention.has_qkv_bias == (has_attention_bias or reference.model_type == "qwen2")
    assert attention.has_output_bias == has_attention_bias
    assert attention.qk_norm == ("head" if reference.model_type == "qwen3" else None)
    assert attention.window == config.sliding_window == window_of(reference)


def window_of(reference) -> int | None:
    """What the modules of transformers take: Mistral the window, Qwen2 and Qwen3 that of layers which slide."""
    kinds = getattr(reference, "layer_types", None) or ["full_attention"]
    is_sliding = reference.model_type == "mistral" or set(kinds) == {"sliding_attention"}
    return reference.sliding_window if is_sliding else None


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_config_agrees_with_that_of_transformers(family, overrides):
    reference = random_config(family, **overrides)
    assert_agrees(translate(reference.to_dict()), reference)


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_config_written_by_transformers_4_gives_the_same_model(family, overrides):
    hf = random_config(family, **overrides).to_dict()
    new = translate(hf)
    rope = hf.pop("rope_parameters")
    hf["torch_dtype"] = hf.pop("dtype", None)
    hf["rope_theta"] = rope.pop("rope_theta")
    hf["rope_scaling"] = None if rope["rope_type"] == "default" else {"type": rope.pop("rope_type"), **rope}
    assert translate(hf) == new


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_get_the_defaults_of_transformers(family):
    absent = ("max_position_embeddings", "num_key_value_heads", "head_dim")
    hf = {
        key: value
        for key, value in minimal(family, hidden_size=128, num_attention_heads=32).items()
        if key not in absent
    }
    assert_agrees(translate(hf), CONFIGS[family](**hf))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])  # MistralConfig takes no null
def test_null_number_of_kv_heads_means_one_for_each_head(family):
    hf = minimal(family, num_key_value_heads=None)
    assert_agrees(translate(hf), CONFIGS[family](**hf))


@pytest.mark.parametrize(
    "scaling",
    [
        YARN,
        {**YARN, "factor": 1.0},
        {**YARN, "factor": None},
        {**YARN, "attention_factor": 1.25},
        {**YARN, "mscale": 0.7},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
        {"type": "yarn", "factor": 2.0},
    ],
)
def test_yarn_attention_factor_is_that_of_transformers(scaling):
    hf = minimal("llama", rope_scaling=dict(scaling))
    scaling = translated_scaling(hf)
    _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](CONFIGS["llama"](**hf))
    assert scaling.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "default", "factor": 8.0}, None),
        ({"type": "dynamic", "factor": 2.0}, None),
        ({"type": "linear", "factor": 2}, RopeScaling(kind="linear", factor=2)),
        (
            LLAMA3,
            RopeScaling(kind="llama3", factor=8.0, original_max_position=64, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        (
            {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.5},
            RopeScaling(
                kind="yarn",
                factor=4.0,
                original_max_position=64,
                beta_fast=16,
                beta_slow=2,
                attention_factor=1.5,
                truncate=False,
            ),
        ),
        (
            {**YARN, "beta_fast": None, "beta_slow": 0, "attention_factor": 1.0},
            RopeScaling(kind="yarn", factor=4.0, original_max_position=64, beta_fast=32.0, beta_slow=1.0),
        ),
    ],
)
def test_rope_scaling_is_translated_field_by_field(scaling, expected):
    assert rope_of(translate(minimal("llama", rope_scaling=scaling))).scaling == expected


@pytest.mark.parametrize("scaling", [LLAMA3, YARN])
@pytest.mark.parametrize(("inside", "outside"), [(64, 32), (64, ABSENT), (ABSENT, 32), (ABSENT, ABSENT)])
def test_original_max_position_is_looked_up_where_transformers_does(scaling, inside, outside):
    scaling = {**scaling, "original_max_position_embeddings": inside}
    hf = minimal("llama", rope_scaling=scaling, original_max_position_embeddings=outside)
    for place in (hf, scaling):
        if place["original_max_position_embeddings"] is ABSENT:
            del place["original_max_position_embeddings"]
    translated = translated_scaling(hf).original_max_position
    reference = CONFIGS["llama"](**hf)
    # Rotary embeddings do this before they read the parameters; only then does the outer key count.
    reference.standardize_rope_params()
    assert translated == reference.rope_parameters["original_max_position_embeddings"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
        ({"compression_config": {"format": "pack"}}, "compression_config="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"is_causal": False}, "is_causal=False"),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type='ntk'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor=None"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope_type=['linear']"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor=None"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor=4.0"),
        ({"rope_scaling": {**YARN, "beta_fast": "32"}}, "beta_fast='32'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads='2'"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings=None"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_with_a_way_out(family, keys, named):
    with pytest.raises(ValueError, match=re.escape(named)) as refusal:
        translate(minimal(family, **keys))
    assert any(way_out in str(refusal.value) for way_out in WAYS_OUT)


@pytest.mark.parametrize(
    ("family", "keys", "named"),
    [
        ("llama", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "full_attention"),
        ("qwen2", {**SLIDING, "max_window_layers": None}, "max_window_layers=None"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
        ("qwen3", {"use_sliding_window": "yes"}, "use_sliding_window='yes'"),
        ("qwen3", {**SLIDING, "sliding_window": -1, "max_window_layers": 0}, "sliding_window=-1"),
    ],
)
def test_a_wrong_window_is_refused_by_name_with_a_way_out(family, keys, named):
    with pytest.raises(ValueError, match=re.escape(named)) as refusal:
        translate(minimal(family, **keys))
    assert any(way_out in str(refusal.value) for way_out in WAYS_OUT)


@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_act": "swish"},
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1},
        {"layer_types": ["full_attention"] * 3, "sliding_window": 0},
        {"quantization_config": None},
        {"partial_rotary_factor": 1.0},
        {"architectures": None},
        {"attention_dropout": 0.1, "pretraining_tp": 2, "use_cache": False, "initializer_range": 0.5},
    ],
)
def test_settings_that_change_nothing_are_accepted(keys):
    assert translate(minimal("qwen2", **keys)) == translate(minimal("qwen2"))


@pytest.mark.parametrize("model_type", ["bert", None, ["llama"]])
def test_unknown_family_is_refused_with_those_that_are_known(model_type):
    with pytest.raises(ValueError, match="is not supported; use a checkpoint of one of these families") as refusal:
        family_of({"model_type": model_type})
    assert all(name in str(refusal.value) for name in (repr(model_type), *CONFIGS))
