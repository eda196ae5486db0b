"""Each family that can be read: its defaults, its tensors, and every wrong value of every key of its config.json."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.tree_util import keystr, tree_leaves_with_path

from jaxinfer.checkpoint import load_params, read_config
from jaxinfer.checkpoint.families import FAMILIES, family_of
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.dense_and_experts import DenseAndExperts
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE
from jaxinfer.model.config import Layer, ModelConfig
from jaxinfer.model.params import Params
from jaxinfer.quantization import QuantizedArray
from tests.oracles import CONFIGS, FAMILY_SIZES, NO_IDS, SIZES, load_reference, random_config, save_random_checkpoint

# test_text_models.py, test_gemma4.py, test_kimi.py, test_qwen3_5.py and test_qwen3_vl.py test their own part.
WITH_IMAGES = ("gemma3", "gemma4", "kimi_k25", "mistral3", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
# test_logits.py judges their tensors.
RECURRENT = (
    *("falcon_h1", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2")
# Of layers with `Attention`.
NAMES = [name for name in CONFIGS if name not in (*LATENT, *RECURRENT)]
# Sizes that transformers' class has no default for.
FURTHER_SIZES = {"dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}}
WRONG = [
    *(None, True, -1, 0, 7, 10**30, 0.5, -2.5, 1e300, math.nan, math.inf),
    *("", "x", [], [1], [None], ["x"], [[]], {}, {"x": 1}, {"x": {}}),
]
# Keys that a family reads and that transformers' class for its configuration does not write.
FURTHER_KEYS = {
    *("hidden_act", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "head_dim"),
    *("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "attention_bias", "mlp_bias"),
    *("original_max_position_embeddings", "sliding_window_pattern", "mlp_only_layers", "no_rope_layers"),
    *("quantization_config", "is_causal", "architectures", "use_bidirectional_attention", "swiglu_limit"),
    *(
        "use_qk_norm",
        "use_cla",
        "qk_norm",
        "post_norm",
        "use_bias",
        "moe_norm_min",
        "num_experts",
        "num_experts_per_tok",
    ),
    *("attn_output_gate", "output_gate_type", "norm_topk_prob", "decoder_sparse_step"),
    *("rotary_dim", "use_qk_norm", "qk_norm_type", "use_routing_bias", "attn_type_list", "shared_intermediate_size"),
    *("topk_method", "scoring_func", "first_k_dense_replace", "mlp_layer_types"),
}
ROPE_KEYS = (
    *("rope_type", "factor", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "truncate"),
    *("attention_factor", "beta_fast", "beta_slow", "short_factor", "low_freq_factor", "mscale", "alpha"),
    "llama_4_scaling_beta",
)
WAYS_OUT = re.compile(r"; (use|download|write|the low one)|must be|has to be")


def minimal(family: str, **keys: Any) -> dict[str, Any]:
    """Returns a config.json with the sizes and `keys` alone."""
    return {"model_type": family, **SIZES, **FAMILY_SIZES.get(family, {}), **keys}


def read(hf: dict[str, Any]) -> ModelConfig:
    return family_of(hf).config_from_hf(hf)


def test_these_tests_know_every_family():
    assert set(FAMILIES) == {*CONFIGS, *WITH_IMAGES}


@pytest.mark.parametrize("family", NAMES)
def test_a_config_of_sizes_alone_is_the_one_that_transformers_completes(family):
    sizes = {"model_type": family, **{key: SIZES[key] for key in SIZES if not key.startswith(("max_", "num_key"))}}
    sizes |= {"num_hidden_layers": 8, "num_attention_heads": 32, "hidden_size": 256, **FURTHER_SIZES.get(family, {})}
    complete = CONFIGS[family](**sizes, **NO_IDS)

    assert read(sizes) == read(json.loads(complete.to_json_string(use_diff=False)))


def written(family: str) -> dict[str, Any]:
    """Returns the config.json that transformers writes for a small model."""
    return json.loads(random_config(family).to_json_string(use_diff=False))


def outcome(hf: dict[str, Any], *names: str) -> ModelConfig | None:
    """Returns the model, or None if config.json is refused by these names and with a way out."""
    try:
        return read(hf)
    except ValueError as refusal:
        message = str(refusal)
        assert all(name in message for name in names), (names, message)
        assert WAYS_OUT.search(message), message
        return None


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("family", [*NAMES, *RECURRENT, *LATENT[1:]])
def test_a_wrong_value_is_read_or_refused_by_key_and_value(family, value):
    # A window that is switched on is read with the keys that go with it.
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    for hf in (
        minimal(family),
        minimal(family, **({} if family in ("llama", "nemotron_h") else window)),
        written(family),
    ):
        for key in (hf.keys() | FURTHER_KEYS) - {"model_type"}:
            # The switch alone is right or wrong by the window beside it.
            named = ("sliding_window",) if key == "use_sliding_window" else (key, repr(value))
            outcome({**hf, key: value}, *named)


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("family", NAMES)
def test_a_wrong_rope_parameter_is_read_or_refused_by_key_and_value(family, value):
    rope = written(family).get("rope_parameters") or {}
    is_nested = any(isinstance(child, dict) for child in rope.values())
    for key in ROPE_KEYS:
        wrong = {kind: {**child, key: value} for kind, child in rope.items()} if is_nested else {**rope, key: value}
        outcome(minimal(family, rope_parameters=wrong), key, repr(value))


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_damaged_size_is_refused_with_the_file(tmp_path, family, key):
    for value in (None, "32", 0, -1, 2.5, True, [3]):
        (tmp_path / "config.json").write_text(json.dumps(minimal(family, **{key: value})))

        with pytest.raises(ValueError, match=re.escape(f"{key}={value!r}")) as refusal:
            read_config(tmp_path)

        assert str(tmp_path / "config.json") in str(refusal.value)
        assert WAYS_OUT.search(str(refusal.value))


TWO_ROPES = ("gemma3_text", "gemma4_text", "olmo3")  # one for each kind of layer
UNKNOWN_ROPE = {"rope_theta": 1e4, "rope_type": "ntk_by_parts"}
REFUSED = [
    *((family, {"quantization_config": {"quant_method": "mxfp4"}}) for family in NAMES),
    *((family, {"architectures": ["AnyForSequenceClassification"]}) for family in NAMES),
    *((family, {"hidden_act": "relu"}) for family in NAMES if not family.startswith("gemma")),
    *((family, {"rope_scaling": UNKNOWN_ROPE}) for family in NAMES if family not in TWO_ROPES),
    *((family, {"hidden_activation": "gelu"}) for family in ("gemma", "gemma2", "gemma3_text", "gemma4_text")),
    *((family, {"is_causal": False}) for family in NAMES),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": UNKNOWN_ROPE}}),
    ("gemma4_text", {"rope_scaling": UNKNOWN_ROPE}),
    ("gemma4_text", {"use_bidirectional_attention": "all"}),
    ("olmo3", {"rope_parameters": {"sliding_attention": UNKNOWN_ROPE}}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
    ("gpt_oss", {"swiglu_limit": 5.0}),
    ("gpt_oss", {"swiglu_alpha": 1.0}),
    ("llama", {"partial_rotary_factor": 0.5}),
    ("glm4", {"partial_rotary_factor": 0.2}),
    ("olmo3", {"layer_types": ["chunked_attention"] * 3}),
    ("gemma2", {"layer_types": ["sliding_attention"] * 2}),
    ("smollm3", {"no_rope_layers": [0, 1]}),
    ("smollm3", {"no_rope_layers": [0, 1, 2]}),
    ("qwen3_moe", {"mlp_only_layers": "0"}),
    ("hunyuan_v1_dense", {"use_qk_norm": False}),
    ("hunyuan_v1_dense", {"use_cla": True}),
    ("apertus", {"mlp_bias": True}),
    ("apertus", {"qk_norm": False}),
    ("apertus", {"post_norm": True}),
    ("ernie4_5_moe", {"use_bias": True}),
    ("ernie4_5_moe", {"moe_norm_min": 0.5}),
    ("ernie4_5_moe", {"moe_k": 7}),
    ("mixtral", {"num_experts_per_tok": 6}),
    ("glm4_moe", {"n_group": 3}),
    ("glm4_moe", {"topk_group": 2}),
    ("glm4_moe_lite", {"head_dim": 8}),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse"] * 2}),
    ("glm4_moe_lite", {"partial_rotary_factor": 0.5}),
    ("glm4_moe_lite", {"topk_method": "greedy"}),
    ("dots1", {"scoring_func": "softmax"}),
    ("solar_open", {"first_k_dense_replace": 1}),
    ("solar_open", {"use_qk_norm": True}),
    ("minimax_m2", {"attn_type_list": [1, 0, 1]}),
    ("minimax_m2", {"qk_norm_type": "per_head"}),
    ("minimax_m2", {"rotary_dim": 7}),
    ("minimax_m2", {"rotary_dim": 18}),
    ("minimax_m2", {"shared_intermediate_size": 32}),
    ("minimax_m2", {"use_qk_norm": False}),
    ("minimax_m2", {"use_routing_bias": False}),
    ("qwen3_vl_moe_text", {"norm_topk_prob": False}),
    ("qwen3_vl_moe_text", {"mlp_only_layers": "0"}),
    ("olmoe", {"num_experts_per_tok": 7}),
    ("olmoe", {"clip_qkv": 8.0}),
    ("exaone4", {"sliding_window_pattern": "LLLG"}),
    ("exaone4", {"layer_types": ["sliding_attention"] * 3}),
]


@pytest.mark.parametrize(("family", "keys"), REFUSED, ids=repr)
def test_a_setting_that_would_change_the_function_is_refused_by_its_name(family, keys):
    ((key, value),) = keys.items()

    with pytest.raises(ValueError, match="not supported|not a list|more than|not fit|no pairs") as refusal:
        read(minimal(family, **keys))

    named = value.get("sliding_attention", value) if key.startswith("rope_") else keys
    key, value = list(named.items())[-1]
    assert key in str(refusal.value)
    assert repr(value) in str(refusal.value)
    assert WAYS_OUT.search(str(refusal.value))


def heads(tensor: np.ndarray, head_dim: int) -> np.ndarray:
    return tensor.reshape(-1, head_dim, *tensor.shape[1:])


OF_GEMMA_4 = {
    "layer_scalar": "scale",
    "per_layer_input_gate.weight": "embedding.gate",
    "per_layer_projection.weight": "embedding.up",
    "post_per_layer_input_norm.weight": "embedding.norm",
    "router.proj.weight": "feed_forward.experts.router",
    "router.scale": "feed_forward.experts.router_norm",
    "router.per_expert_scale": "feed_forward.experts.expert_scales",
    "post_feedforward_layernorm_1.weight": "feed_forward.dense_post_norm",
    "pre_feedforward_layernorm_2.weight": "feed_forward.experts_norm",
    "post_feedforward_layernorm_2.weight": "feed_forward.experts_post_norm",
}


def placed(name: str, tensor: np.ndarray, head_dim: int, num_kv_heads: int, names: set[str]) -> dict[str, np.ndarray]:
    """Returns one tensor of a layer's state dict under our names and in our layout, written down by hand."""
    module, _, kind = name.rpartition(".")
    part = module.rpartition(".")[2]
    bias = "_bias" if kind == "bias" else ""
    if part in ("q_proj", "k_proj", "v_proj"):
        return {f"mixer.{part[0]}{bias}": heads(tensor, head_dim)}
    if part == "qkv_proj":
        q, k, v = np.split(heads(tensor, head_dim), [-2 * num_kv_heads, -num_kv_heads])
        return {"mixer.q": q, "mixer.k": k, "mixer.v": v}
    if part == "o_proj":
        return {"mixer.o_bias": tensor} if bias else {"mixer.o": tensor}
    if part in ("q_norm", "k_norm"):
        return {f"mixer.{part}": tensor if len(tensor) == head_dim else heads(tensor, head_dim)}
    if name in OF_GEMMA_4:
        return {OF_GEMMA_4[name]: tensor}
    is_beside = "router.proj.weight" in names  # experts beside a dense network
    if kind == "sinks":
        return {"mixer.sinks": tensor}
    if part.endswith("layernorm"):
        is_after = "input_layernorm.weight" not in names or "pre_feedforward_layernorm.weight" in names
        ours = {
            "input": "mixer",
            "post_attention": "mixer_post" if is_after else "feed_forward",
            "pre_feedforward": "feed_forward",
            "post_feedforward": "feed_forward_post",
            "post_self_attn": "mixer_post",
            "post_mlp": "feed_forward_post",
            "query": "mixer.q",
            "key": "mixer.k",
            "attention": "mixer",
            "feedforward": "feed_forward",
        }
        return {f"{ours[part.removesuffix('_layernorm')]}_norm": tensor}
    if kind == "e_score_correction_bias":
        return {"feed_forward.choice_bias": tensor.reshape(-1)}  # ERNIE's are [1, E]
    if part == "act_fn":
        return {f"feed_forward.curve.{kind}": tensor}
    if part in ("gate", "router"):
        return {f"feed_forward.router{bias}": tensor}
    if part == "shared_expert_gate":
        return {"feed_forward.shared_gate": tensor}
    if part == "experts":
        where = "feed_forward.experts.experts." if is_beside else "feed_forward.experts."
        is_transposed = "self_attn.sinks" in names  # GPT-OSS
        bias = "_bias" if kind.endswith("_bias") else ""
        tensor = np.swapaxes(tensor, 1, 2) if is_transposed and not bias else tensor
        if kind.startswith("down"):
            return {f"{where}down{bias}": tensor}
        gate, up = (tensor[:, 0::2], tensor[:, 1::2]) if is_transposed else np.split(tensor, 2, axis=1)
        return {f"{where}gate{bias}": gate, f"{where}up{bias}": up}
    where = "feed_forward.dense." if is_beside else "feed_forward."
    where = "feed_forward.shared." if "shared" in module else where
    if part in ("gate_up_proj", "input_linear"):
        gate, up = np.split(tensor, 2)
        return {f"{where}gate": gate, f"{where}up": up}
    ours = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "output_linear": "down"}
    return {f"{where}{ours[part]}{bias}": tensor}


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request, tmp_path_factory):
    """Returns a family's checkpoint in several files, its model and its parameters."""
    path = save_random_checkpoint(tmp_path_factory.mktemp(request.param), request.param, shard_size="20KB")
    config = read_config(path)
    return path, config, load_params(path, config, "float32")


def test_every_tensor_of_the_state_dict_is_in_its_place(checkpoint):
    path, config, params = checkpoint
    state = {name: tensor.numpy() for name, tensor in load_reference(path).state_dict().items()}

    assert len(list(path.glob("*.safetensors"))) > 2
    np.testing.assert_array_equal(params.embedding, state["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params.final_norm, state["model.norm.weight"])
    if config.has_tied_embeddings:
        assert params.unembedding is None
    else:
        np.testing.assert_array_equal(params.unembedding, state["lm_head.weight"])
    for stack, layers in zip(params.layers, config.layers_of_stacks, strict=True):
        for place, layer in enumerate(layers):
            prefix, attention = f"model.layers.{layer}.", config.layers[layer].mixer
            own = {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}
            expected = {}
            for name, tensor in own.items():
                expected |= placed(name, tensor, attention.head_dim, attention.num_kv_heads, set(own))
            loaded = {keystr(path, simple=True, separator="."): leaf for path, leaf in tree_leaves_with_path(stack)}
            assert set(loaded) == set(expected)
            for name, tensor in expected.items():
                np.testing.assert_array_equal(loaded[name][place], tensor, err_msg=name)


def test_one_file_and_several_hold_the_same(checkpoint, tmp_path):
    several, config, params = checkpoint
    family = json.loads((several / "config.json").read_text())["model_type"]
    path = save_random_checkpoint(tmp_path, family)

    again = load_params(path, config, "float32")

    assert len(list(path.glob("*.safetensors"))) == 1
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_int8_rounds_each_weight_of_a_product_by_half_a_step_at_most(checkpoint):
    path, config, params = checkpoint

    loaded = load_params(path, config, "float32", quantization="int8")

    of_model = (params.unembedding is not None) + (params.layer_embedding is not None)
    assert num_rounded(loaded, params) == sum(num_products(stack.layer) for stack in config.stacks) + of_model


def num_products(layer: Layer) -> int:
    """Returns the number of weights of products of a layer with attention."""
    assert isinstance(layer.mixer, Attention)
    mixer = (3 + layer.mixer.has_values) if layer.mixer.source is None else 2
    has_shared = isinstance(layer.feed_forward, MoE) and layer.feed_forward.shared
    feed_forward = 6 if has_shared or isinstance(layer.feed_forward, DenseAndExperts) else 3
    feed_forward -= isinstance(layer.feed_forward, MLP) and not layer.feed_forward.is_gated
    return mixer + feed_forward + (0 if layer.embedding is None else 2)


def num_rounded(loaded: Params, params: Params) -> int:
    """Returns the number of tensors of `params` that are of 8 bits in `loaded`, each rounded by half a step at most."""
    pairs = zip(
        jax.tree.leaves(loaded, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray)),
        jax.tree.leaves(params),
        strict=True,
    )
    num_quantized = 0
    for quantized, exact in pairs:
        if not isinstance(quantized, QuantizedArray):
            np.testing.assert_array_equal(quantized, exact)
            continue
        num_quantized += 1
        steps = np.asarray(quantized.scales)
        steps = steps.reshape(*steps.shape[:-1], *[1] * (exact.ndim - steps.ndim + 1))
        error = np.abs(np.asarray(quantized.values, np.float32) * steps - np.asarray(exact))
        assert (error <= 0.5001 * steps).all()  # rounding of the product in float32
    return num_quantized
