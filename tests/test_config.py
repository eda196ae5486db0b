"""What a configuration accepts, what it refuses with which words, and that it can be a static argument."""

from __future__ import annotations

import dataclasses
import re
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import MAX_SEED, CacheConfig, EngineConfig, SamplingParams
from jaxinfer.model.components.attention import Attention, QueryGrowth
from jaxinfer.model.components.layers import Norm
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.components.rope import Rope, RopeScaling
from jaxinfer.model.config import Layer, LayerGroup, ModelConfig, uniform_decoder


def case_id(value):
    """Returns the name of a class or function, and the text of any other value: the same in every process."""
    return getattr(value, "__name__", str(value))


MODEL: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "max_position": 32,
}
YARN = {"kind": "yarn", "factor": 2.0, "original_max_position": 64}
ATTENTION: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
NOT_LAYERS = LayerGroup((5,))  # pyright: ignore[reportArgumentType]
LAYER = Layer(mixer=Attention(**ATTENTION), feed_forward=MLP(intermediate_size=16))
MINIMAL: dict[Any, dict[str, Any]] = {
    uniform_decoder: MODEL,
    ModelConfig: {"vocab_size": 10, "hidden_size": 8, "max_position": 32, "groups": (LayerGroup((LAYER,), 3),)},
    Layer: {"mixer": LAYER.mixer, "feed_forward": LAYER.feed_forward},
    Attention: ATTENTION,
    QueryGrowth: {"beta": 0.1, "length": 16},
    MLP: {"intermediate_size": 16},
    MoE: {"num_experts": 6, "expert": LAYER.feed_forward, "router": Router(num_chosen=2)},
    Router: {"num_chosen": 2},
    Norm: {},
    Rope: {"dim": 4, "max_position": 32},
    RopeScaling: YARN,
    CacheConfig: {"num_pages": 4},
    EngineConfig: {},
    SamplingParams: {},
}

NOT_SIZES = (0, -1, 1.0, True, "8", None, float("nan"))
NOT_NUMBERS = (float("nan"), float("inf"), -float("inf"), True, "1", None, 1j)
NOT_POSITIVE = (*NOT_NUMBERS, 0.0, -1.0)
NOT_BOOLS = (0, 1, "no", None)
RATIOS = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
SWITCHES = ("has_tied_embeddings", "has_qkv_bias", "has_output_bias", "has_mlp_bias", "has_qk_norm")

REFUSED = [
    *((uniform_decoder, name, value) for name in MODEL for value in NOT_SIZES),
    (uniform_decoder, "head_dim", 5),
    (uniform_decoder, "num_heads", 3),
    *((uniform_decoder, "rope_theta", value) for value in (*NOT_NUMBERS, 0.99, -1.0)),
    *((uniform_decoder, "norm_epsilon", value) for value in (*NOT_NUMBERS, -1e-9)),
    *((uniform_decoder, "sliding_window", value) for value in (0, -1, 1.0, True, "8")),
    *((uniform_decoder, "layer_groups", value) for value in ((1, 1), (4,), (3, 0), (4, -1))),
    *((ModelConfig, name, value) for name in ("vocab_size", "hidden_size", "max_position") for value in NOT_SIZES),
    *((ModelConfig, "groups", value) for value in ((), (5,), 5, None, "ab", (LayerGroup(()),), (NOT_LAYERS,))),
    *((ModelConfig, name, value) for name in ("embedding_scale", "logit_scale") for value in NOT_POSITIVE),
    *((ModelConfig, "logit_softcap", value) for value in NOT_POSITIVE if value is not None),
    *((ModelConfig, name, value) for name in ("has_tied_embeddings", "has_logits") for value in NOT_BOOLS),
    *((Layer, "mixer", value) for value in ("none", 5, Norm())),
    *((Layer, "feed_forward", value) for value in ("none", 5, Norm())),
    *((Layer, "residual_scale", value) for value in NOT_POSITIVE),
    *((Layer, name, value) for name in ("has_pre_norms", "has_post_norms") for value in NOT_BOOLS),
    *((kind, "norm", value) for kind in (ModelConfig, Layer) for value in (None, 1e-5, "rms")),
    *((Attention, "rope", value) for value in (5, "default", 10_000.0)),
    *((Attention, name, value) for name in ("scale", "softcap") for value in NOT_POSITIVE if value is not None),
    *((Attention, "qk_norm", value) for value in ("", "layer", True, 1)),
    *((Attention, name, value) for name in ("has_sinks", "has_rotated_norm") for value in NOT_BOOLS),
    (Attention, "has_rotated_norm", True),  # without a norm
    *((Attention, "query_growth", value) for value in (0.1, "linear", True)),
    *((QueryGrowth, "beta", value) for value in NOT_POSITIVE),
    *((QueryGrowth, "length", value) for value in NOT_SIZES),
    *((MLP, "activation", value) for value in ("relu", "", None, 1)),
    *((MoE, "num_experts", value) for value in NOT_SIZES),
    *((MoE, "has_shared_gate", value) for value in (True, *NOT_BOOLS)),  # True wants a shared expert
    *((Router, "num_chosen", value) for value in NOT_SIZES),
    *((Router, "scoring", value) for value in ("relu", "", None, 1)),
    *((Router, "scale", value) for value in NOT_POSITIVE),
    *((Router, name, value) for name in ("normalizes", "has_bias", "has_choice_bias") for value in NOT_BOOLS),
    *((Router, name, value) for name in ("num_groups", "num_scores_of_group") for value in NOT_SIZES),
    *((Router, "num_chosen_groups", value) for value in (*NOT_SIZES, 2)),
    *((Norm, "epsilon", value) for value in (*NOT_NUMBERS, -1e-9)),
    *((Norm, "adds_one", value) for value in NOT_BOOLS),
    *((Rope, name, value) for name in ("dim", "max_position") for value in NOT_SIZES),
    (Rope, "dim", 5),
    *((Rope, "theta", value) for value in (*NOT_NUMBERS, 0.99, -1.0)),
    *((Rope, "scaling", value) for value in (5, "linear")),
    *((Rope, "is_interleaved", value) for value in NOT_BOOLS),
    *((RopeScaling, "kind", value) for value in ("dynamic", "", None, 1)),
    *((RopeScaling, "factor", value) for value in (*NOT_NUMBERS, 0.99, -2.0)),
    *((RopeScaling, "original_max_position", value) for value in NOT_SIZES),
    *((RopeScaling, name, value) for name in RATIOS for value in (*NOT_NUMBERS, 0.0, -1.0)),
    *((RopeScaling, name, value) for name, value in (("high_freq_factor", 1.0), ("beta_fast", 0.5))),
    *((RopeScaling, "truncate", value) for value in NOT_BOOLS),
    *((uniform_decoder, name, value) for name in SWITCHES for value in NOT_BOOLS),
    *((CacheConfig, "dtype", value) for value in ("float64", "int3", "", None, 1)),
    *((CacheConfig, "num_pages", value) for value in NOT_SIZES),
    *((CacheConfig, "page_size", value) for value in (*NOT_SIZES, 8, 48, 256, 64.0)),
    *((EngineConfig, "max_num_seqs", value) for value in NOT_SIZES if value is not None),
    *((EngineConfig, "max_num_batched_tokens", value) for value in (0, -1, 64.0, True, "64")),
    *((EngineConfig, "max_model_len", value) for value in (1, 0, -1, 2.0, True, "8", float("nan"))),
    *((EngineConfig, "num_sink_tokens", value) for value in (0, -1, 16.0, True, "16")),
    *((EngineConfig, "page_size", value) for value in (*NOT_SIZES, 8, 48, 256)),
    *(
        (EngineConfig, name, value)
        for name in ("num_pages", "memory_bytes", "cache_bytes")
        for value in (0, -1, 1.0, True, "8")
    ),
    *((EngineConfig, "max_log_probs", value) for value in (-1, 1.0, True, "8", None)),
    *((EngineConfig, "max_prompt_log_probs", value) for value in (-1, 1.0, True, "8")),
    *((EngineConfig, "prefix_cache", value) for value in (0, 1, "no", None)),
    *((EngineConfig, "host_cache_bytes", value) for value in (0, -1, 1.0, True, "8")),
    (EngineConfig, "disk_cache_bytes", 0),
    (EngineConfig, "disk_cache_path", "folder without a limit"),
    *((EngineConfig, "max_mixed_tokens", value) for value in (0, 64.0, True, "64")),
    *((EngineConfig, "max_waiting", value) for value in (-1, 1.0, True, "8")),
    *((SamplingParams, "max_tokens", value) for value in NOT_SIZES if value not in (-1, None)),
    *((SamplingParams, "temperature", value) for value in (*NOT_NUMBERS, -1e-9)),
    *((SamplingParams, "top_k", value) for value in (-2, 1.0, True, "8", None)),
    *((SamplingParams, "top_p", value) for value in (*NOT_NUMBERS, 0, 0.0, -0.1, 1.0000001, 2)),
    *((SamplingParams, "min_p", value) for value in (*NOT_NUMBERS, -0.1, 1.0000001)),
    *((SamplingParams, "n", value) for value in NOT_SIZES),
    *((SamplingParams, "best_of", value) for value in (0, -1, 1.0, True, "8")),
    *((SamplingParams, "min_tokens", value) for value in (-1, 1.0, True, "8", None, 129)),
    *((SamplingParams, "typical_p", value) for value in (*NOT_NUMBERS, 0, -0.1, 1.0000001)),
    *((SamplingParams, "repetition_penalty", value) for value in (*NOT_NUMBERS, 0, -0.1)),
    *((SamplingParams, "presence_penalty", value) for value in (*NOT_NUMBERS, -2.01, 2.01)),
    *((SamplingParams, "frequency_penalty", value) for value in (*NOT_NUMBERS, -2.01, 2.01)),
    *((SamplingParams, "no_repeat_ngram_size", value) for value in (-1, 1.0, True, "8", None)),
    *((SamplingParams, "logit_bias", {5: value}) for value in (*NOT_NUMBERS, -100.1, 100.1)),
    *((SamplingParams, "logit_bias", value) for value in ({-1: 0}, {"5": 0}, ((5, 1), (5, 2)), ((5,),), (5,), 5, "5")),
    *((SamplingParams, "bad_words", value) for value in ((5,), ((),), ((-1,),), ((5, "6"),), (((True,),)), 5, "ab")),
    *((SamplingParams, "allowed_token_ids", value) for value in ((), (-1,), (1.0,), (True,), 1, "12")),
    *((SamplingParams, name, value) for name in ("json_schema", "regex", "grammar") for value in ("", 1, ["a"])),
    *((SamplingParams, "logits_processors", {"a": value}) for value in NOT_NUMBERS),
    *((SamplingParams, "logits_processors", value) for value in ({1: 1}, (("a", 1), ("a", 2)), ("ab",), 5)),
    *((SamplingParams, "choices", value) for value in ((), ("",), (1,), 1, "ab")),
    *((SamplingParams, "seed", value) for value in (-2, MAX_SEED + 1, 1.0, True, "8")),
    *((SamplingParams, "log_probs", value) for value in (-1, 1.0, True, "8", None)),
    *((SamplingParams, "prompt_log_probs", value) for value in (-1, 1.0, True, "8")),
    *((SamplingParams, name, value) for name in ("ignore_eos", "skip_special_tokens") for value in NOT_BOOLS),
    *((SamplingParams, "stop", value) for value in ("", ("",), ("a", ""), (1,), 1, None, b"a")),
    *((SamplingParams, "stop_token_ids", value) for value in ((-1,), (1.0,), (True,), ("1",), 1, None, "12")),
]

ACCEPTED = [
    (uniform_decoder, {"num_heads": 7, "num_kv_heads": 1}),
    (uniform_decoder, {"rope_theta": 1, "norm_epsilon": 0}),
    (uniform_decoder, {"layer_groups": (1, 2)}),
    (uniform_decoder, {"sliding_window": 1}),
    (ModelConfig, {"groups": (LayerGroup((LAYER, LAYER)),), "embedding_scale": 1e-3, "logit_scale": 2}),
    (ModelConfig, {"logit_softcap": 30.0, "has_tied_embeddings": True, "norm": Norm(adds_one=True)}),
    *((ModelConfig, {"has_logits": False, "has_tied_embeddings": value}) for value in (False, True)),
    (Layer, {"feed_forward": MoE(num_experts=2, expert=MLP(intermediate_size=1), router=Router(num_chosen=2))}),
    (Layer, {"residual_scale": 0.5, "has_pre_norms": False, "has_post_norms": True}),
    *((Attention, {"qk_norm": value, "softcap": 50, "scale": 1e-3}) for value in (None, "head", "all")),
    (Attention, {"rope": Rope(dim=2, max_position=1), "window": 1, "has_sinks": True}),
    (Attention, {"rope": Rope(dim=2, max_position=1), "qk_norm": "all", "has_rotated_norm": True}),
    (Attention, {"query_growth": QueryGrowth(beta=1e-3, length=1)}),
    *((MLP, {"activation": value, "has_bias": True}) for value in ("silu", "gelu_tanh", "clamped_silu", "xielu")),
    (MoE, {"num_experts": 2, "shared": MLP(intermediate_size=1), "has_shared_gate": True}),
    (Router, {"scoring": "sigmoid", "num_groups": 3, "num_chosen_groups": 3, "num_scores_of_group": 1}),
    (Norm, {"epsilon": 0, "adds_one": True}),
    (Rope, {"dim": 2, "max_position": 1, "theta": 1, "scaling": RopeScaling(kind="linear", factor=1)}),
    *((CacheConfig, {"page_size": size}) for size in (16, 32, 64, 128)),
    (EngineConfig, {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2, "num_pages": 1}),
    (EngineConfig, {"cache_bytes": 1, "max_log_probs": 0}),
    *((EngineConfig, {"max_mixed_tokens": value}) for value in (32, 512)),
    (EngineConfig, {"max_waiting": 0, "prefix_cache": False}),
    (EngineConfig, {"host_cache_bytes": 1, "disk_cache_bytes": 1, "disk_cache_path": "folder"}),
    (SamplingParams, {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 1}),
    (SamplingParams, {"temperature": np.float32(0.5), "top_p": 1e-6, "min_p": 1, "top_k": np.int64(3)}),
    (SamplingParams, {"typical_p": 1, "repetition_penalty": 1e-6, "no_repeat_ngram_size": 1}),
    *((SamplingParams, {"presence_penalty": value, "frequency_penalty": -value}) for value in (-2, 2)),
    (SamplingParams, {"min_tokens": 128, "allowed_token_ids": (0,), "logit_bias": ((0, -100.0), (1, 100.0))}),
    (SamplingParams, {"seed": MAX_SEED}),
    (SamplingParams, {"seed": 0, "log_probs": 0, "prompt_log_probs": 0}),
]


@pytest.mark.parametrize(("kind", "field", "value"), REFUSED, ids=lambda x: getattr(x, "__name__", repr(x)))
def test_a_value_out_of_bounds_is_refused_by_field_and_value(kind, field, value):
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r} ")):
        kind(**{**MINIMAL[kind], field: value})


@pytest.mark.parametrize("name", ["awq", "GPTQ", "fp8", "gguf"])
def test_the_name_of_a_packed_format_is_answered_by_leaving_it_out(name):
    with pytest.raises(ValueError, match=f"quantization='{name}' is not allowed: .* loads as it is, so leave it out"):
        EngineConfig(quantization=name)


def arguments_of(config: ModelConfig) -> dict[str, Any]:
    """The arguments of `uniform_decoder` that are kept in a part of the config."""
    (layer,) = set(config.layers)
    attention, norm = layer.mixer, layer.norm
    assert isinstance(attention, Attention)
    assert attention.rope is not None
    assert config.norm == norm
    return {
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "rope_theta": attention.rope.theta,
        "norm_epsilon": norm.epsilon,
        "sliding_window": attention.window,
        "layer_groups": config.layer_groups,
    }


@pytest.mark.parametrize(("kind", "fields"), ACCEPTED, ids=case_id)
def test_a_value_on_its_bound_is_accepted_as_it_is(kind, fields):
    config = kind(**{**MINIMAL[kind], **fields})

    kept = arguments_of(config) if kind is uniform_decoder else vars(config)
    assert {name: kept[name] for name in fields} == fields


@pytest.mark.parametrize("path", [None, ""])
def test_a_limit_of_the_disk_cache_wants_a_folder(path):
    with pytest.raises(ValueError, match=f"disk_cache_path={path!r} is not allowed.*disk_cache_bytes=7 is given"):
        EngineConfig(disk_cache_bytes=7, disk_cache_path=path)


@pytest.mark.parametrize("name", ["host_cache_bytes", "disk_cache_bytes"])
def test_tiers_of_a_prefix_cache_want_one(name):
    with pytest.raises(ValueError, match=f"{name}=7 is not allowed.*prefix_cache"):
        EngineConfig(**{"prefix_cache": False, name: 7})


@pytest.mark.parametrize("kind", MINIMAL, ids=lambda kind: kind.__name__)
def test_equal_configurations_have_equal_hashes_and_cannot_change(kind):
    first, second = kind(**MINIMAL[kind]), kind(**MINIMAL[kind])

    assert hash(first) == hash(second)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(first, dataclasses.fields(first)[0].name, 1)


@pytest.mark.parametrize("kind", MINIMAL, ids=lambda kind: kind.__name__)
def test_fields_are_given_by_name_only(kind):
    with pytest.raises(TypeError, match="positional argument"):
        kind(*MINIMAL[kind].values(), 1)


def test_all_layers_are_one_group_unless_told_otherwise():
    assert uniform_decoder(**MODEL).layer_groups == (3,)


def test_a_mixed_step_has_no_more_tokens_than_any():
    with pytest.raises(ValueError, match="max_mixed_tokens=65 is not allowed.*from 32 to 64"):
        EngineConfig(max_num_seqs=32, max_num_batched_tokens=64, max_mixed_tokens=65)
    with pytest.raises(ValueError, match="max_mixed_tokens=31 is not allowed.*from 32 to 64"):
        EngineConfig(max_num_seqs=32, max_num_batched_tokens=64, max_mixed_tokens=31)


def test_linear_rope_scaling_needs_no_original_length():
    assert RopeScaling(kind="linear", factor=1.0).original_max_position == 0


@pytest.mark.parametrize("many", [list, tuple, iter], ids=["list", "tuple", "iterator"])
def test_stops_may_come_in_any_iterable_and_stay_hashable(many):
    params = SamplingParams(stop=many(["a", "bc"]), stop_token_ids=many([3, np.int32(4)]))

    assert (params.stop, params.stop_token_ids) == (("a", "bc"), (3, 4))
    hash(params)


def test_lists_and_dictionaries_of_tokens_stay_hashable_and_equal():
    fields: dict[str, Any] = {"logit_bias": {7: 1, 5: np.float32(0.5)}, "bad_words": [[6, 7], iter([8])]}
    params = SamplingParams(**fields, allowed_token_ids=[5])

    assert (params.logit_bias, params.bad_words) == (((5, 0.5), (7, 1.0)), ((6, 7), (8,)))
    assert params == dataclasses.replace(params)
    hash(params)


@pytest.mark.parametrize("fields", [{"n": 2}, {"best_of": 2}], ids=case_id)
def test_several_samples_without_chance_are_refused(fields):
    with pytest.raises(ValueError, match=r"2 is not allowed: .*temperature=0.*the same"):
        SamplingParams(**fields, temperature=0)


def test_more_samples_than_the_best_are_taken_from_are_refused():
    with pytest.raises(ValueError, match="best_of=2 is not allowed: best_of must be an integer from 3"):
        SamplingParams(n=3, best_of=2)


def test_an_output_has_one_structure_at_most():
    with pytest.raises(ValueError, match="json_schema and regex are both given"):
        SamplingParams(json_schema={}, regex="a")


def test_a_schema_keeps_the_order_of_its_properties():
    schema = {"properties": {"b": {}, "a": {}}}

    assert SamplingParams(json_schema=schema).structure == ("json_schema", '{"properties": {"b": {}, "a": {}}}')


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [1] * 2_000_000},
        {"enum": [[] for _ in range(200_000)]},
        {"properties": {str(i): {} for i in range(200_000)}},
        {"enum": ({"a": i} for i in range(2))} | {"const": [[[0] * 1_000] * 1_000]},
    ],
)
def test_a_schema_of_more_values_than_a_structure_may_have_characters_for_is_refused(schema):
    with pytest.raises(ValueError, match="json_schema=dict is not allowed: it has more than 131,072 keys and values"):
        SamplingParams(json_schema=schema)


def test_a_schema_may_have_the_numbers_of_numpy_and_any_mapping():
    given = MappingProxyType({"const": MappingProxyType({"é": np.int64(2)}), "enum": np.array([1, 2]), "x": np.True_})

    assert SamplingParams(json_schema=given).json_schema == '{"const": {"é": 2}, "enum": [1, 2], "x": true}'


def deep_schema():
    schema = {}
    for _ in range(100_000):
        schema = {"items": schema}
    return schema


def endless_schema():
    schema = {}
    schema["items"] = schema
    return schema


BAD_STRUCTURES = [
    *(("regex", "a\ud800"), ("choices", ["a", "\udfff"]), ("grammar", 'start: "\ud800"'), ("json_schema", '"\ud800"')),
    *(
        ("json_schema", {"const": value})
        for value in ("\ud800", float("nan"), np.float32("inf"), {1, 2}, b"a", object())
    ),
    *(("json_schema", value) for value in ({("a",): 1}, deep_schema(), endless_schema())),
]


@pytest.mark.parametrize(("name", "value"), BAD_STRUCTURES, ids=range(len(BAD_STRUCTURES)))
def test_a_structure_that_is_no_text_or_no_json_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}=.* is not allowed: .*") as refusal:
        SamplingParams(**{name: value})
    assert len(str(refusal.value)) < 700


def test_layer_groups_may_come_in_a_list_and_stay_hashable():
    config = uniform_decoder(**MODEL, layer_groups=[1, 2])

    assert config.layer_groups == (1, 2)
    hash(config)


def test_one_stop_string_needs_no_list():
    assert SamplingParams(stop="end").stop == ("end",)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("field", "value"), [("temperature", 10**400), ("top_k", 2**31)])
def test_a_number_too_large_for_the_device_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_the_token_budget_must_let_every_running_request_advance():
    with pytest.raises(ValueError, match="max_num_batched_tokens=4 .*max_num_seqs=5"):
        EngineConfig(max_num_seqs=5, max_num_batched_tokens=4)


@pytest.mark.parametrize("value", [np.float16("inf"), np.float32("inf"), np.float16("nan"), 10**400], ids=range(4))
def test_a_number_that_is_not_finite_is_refused_without_a_warning(value):
    with pytest.raises(ValueError, match=r"attention_factor=.* is not allowed"):
        RopeScaling(**YARN | {"attention_factor": value})


def test_an_argument_of_a_processor_that_is_not_finite_is_refused_without_a_warning():
    infinite: Any = np.float16("inf")
    with pytest.raises(ValueError, match=r"logits_processors=.* is not allowed"):
        SamplingParams(logits_processors={"scale": infinite})
