"""Checkpoints packed by GPTQ, AWQ, compressed-tensors, FP8 and MXFP4: numbers, logits of `transformers`, refusals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from compressed_tensors.utils.match import match_targets
from jax.tree_util import tree_leaves_with_path
from safetensors.torch import load_file, save_file

from jaxinfer.checkpoint import Checkpoint, abstract_checkpoint, load_checkpoint, load_params, read_config
from jaxinfer.checkpoint.making.assemblies import plan_assembly
from jaxinfer.checkpoint.making.grouping import packed_anew
from jaxinfer.checkpoint.stored import StoredQuantized, require_even
from jaxinfer.model.params import shardings
from jaxinfer.plan.memory import num_bytes
from jaxinfer.quantization import QuantizedArray
from kernels_pallas.packed_numbers import dequantize
from tests.checkpoint.packing import WRITERS, Packed, settings_of
from tests.checkpoint.renamed import Tensors, edit_json, rewrite
from tests.compiler import layers_apart
from tests.hostile.mutations import OF_A_FORMAT, mutated_safetensors, read_mutants, with_other_entries
from tests.oracles import load_reference, reference_logits, save_random_checkpoint
from tests.replay import LENGTHS, SHAPE, SPLITS, replay

TWO_LAYERS = {"num_hidden_layers": 2}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, **TWO_LAYERS},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 32, **TWO_LAYERS},
    "deepseek_v3": {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16, **TWO_LAYERS},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, **TWO_LAYERS},
    "kimi_k2": {"moe_intermediate_size": 32, **TWO_LAYERS},
    "minimax_m2": {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, **TWO_LAYERS},
}
OTHER_THAN_EXPERTS = r"self_attn|shared_experts|mlp\.(gate|up|down)_proj"
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gptq": ("gptq", "llama", {}),
    "gptq in one group": ("gptq", "llama", {"size": -1, "has_order": True}),
    "gptq with zero points": ("gptq", "llama", {"is_symmetric": False}),
    "gptq with act-order": ("gptq", "llama", {"has_order": True}),
    "gptq v2 with both": (
        "gptq",
        "qwen3_moe",
        {"bits": 3, "has_order": True, "is_symmetric": False, "version": "gptq_v2"},
    ),
    "gptq of 2 bits": ("gptq", "llama", {"bits": 2, "is_symmetric": False}),
    "gptq of 3 bits": ("gptq", "llama", {"bits": 3}),
    "gptq of 8 bits": ("gptq", "llama", {"bits": 8, "is_symmetric": False, "has_order": True}),
    "awq": ("awq", "llama", {}),
    "awq of experts": ("awq", "qwen3_moe", {}),
    "awq in part": ("awq", "llama", {"skip": "v_proj"}),
    "compressed": ("compressed", "llama", {}),
    "compressed with zero points": ("compressed", "llama", {"is_symmetric": False}),
    "compressed by channels": ("compressed", "llama", {"bits": 8, "size": None}),
    "compressed of experts": ("compressed", "qwen3_moe", {"scale_type": torch.bfloat16}),
    "compressed as of Kimi-K2-Thinking": (
        "compressed",
        "kimi_k2",
        {"skip": OTHER_THAN_EXPERTS, "scale_type": torch.bfloat16},
    ),
    "compressed of 8 bits": ("compressed", "llama", {"bits": 8, "is_packed": False, "is_symmetric": False}),
    "compressed of 2 bits": ("compressed", "llama", {"bits": 2, "scale_type": torch.bfloat16}),
    "compressed of 3 bits": ("compressed", "llama", {"bits": 3, "scale_type": torch.bfloat16}),
    "compressed of 5 bits": ("compressed", "llama", {"bits": 5, "size": 8, "is_symmetric": False}),
    "fp8": ("fp8", "llama", {}),
    "fp8 of experts": ("fp8", "qwen3_moe", {"scale_type": torch.bfloat16}),
    "fp8 of latents": ("fp8", "deepseek_v3", {}),
    "fp8 as of MiniMax-M2": ("fp8", "minimax_m2", {"fmt": "float8_e4m3fn"}),
    "fp8 with one scale": ("fp8", "llama", {"block": None}),
    "compressed fp8": ("compressed fp8", "llama", {"strategy": "tensor"}),
    "compressed fp8 by channels": ("compressed fp8", "llama", {"strategy": "channel"}),
    "compressed fp8 in blocks": ("compressed fp8", "llama", {"strategy": "block"}),
    "nvfp4": ("compressed floats", "llama", {"kind": "NVFP4"}),
    "nvfp4 of experts": ("compressed floats", "qwen3_moe", {"kind": "NVFP4A16"}),
    "compressed mxfp4": ("compressed floats", "llama", {"kind": "MXFP4"}),
    "compressed mxfp8 of experts": ("compressed floats", "qwen3_moe", {"kind": "MXFP8"}),
    "mxfp4": ("mxfp4", "gpt_oss", {}),
    "compressed in part": ("compressed", "llama", {"skip": r"layers\.1\."}),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return {
        family: save_random_checkpoint(tmp_path_factory.mktemp(family), family, **sizes)
        for family, sizes in SIZES.items()
    }


@pytest.fixture(scope="module", params=CASES)
def case(request, sources, tmp_path_factory):
    writer, family, options = CASES[request.param]
    return WRITERS[writer](sources[family], tmp_path_factory.mktemp("case") / "both", **options)


@pytest.fixture
def packed(sources, tmp_path) -> Packed:
    return WRITERS["gptq"](sources["llama"], tmp_path / "both", is_symmetric=False, has_order=True)


def is_quantized(node: Any) -> bool:
    return isinstance(node, QuantizedArray)


def test_packed_weights_mean_the_number_less_its_zero_point_times_the_scale(case):
    _, stored = Checkpoint(case.path).plan(read_config(case.path))

    read = {name: tensor.floats() for name, tensor in stored.items() if isinstance(tensor, StoredQuantized)}
    # Experts of GPT-OSS are stored with their inputs last if they are packed.
    read = {n.removesuffix("_blocks"): np.swapaxes(w, 1, 2) if n.endswith("_blocks") else w for n, w in read.items()}
    assert read.keys() == case.weights.keys()
    for name, weight in case.weights.items():
        np.testing.assert_array_equal(read[name], weight)


@pytest.mark.parametrize("is_packed", [True, False])
def test_numbers_on_the_device_mean_the_same(case, is_packed, monkeypatch):
    monkeypatch.setattr("jaxinfer.checkpoint.checkpoint.packs_integers", lambda: is_packed)
    check_numbers(case)


def test_tensors_that_a_checkpoint_has_fused_stay_packed(tmp_path):
    sizes = {"hidden_size": 64, "linear_value_head_dim": 16, "head_dim": 32, "moe_intermediate_size": 32}
    source = save_random_checkpoint(
        tmp_path / "source", "qwen3_next", intermediate_size=96, shared_expert_intermediate_size=32, **sizes
    )

    params = check_numbers(WRITERS["fp8"](source, tmp_path / "both", block=16))

    names = ("query", "key", "value", "z", "beta", "dt"), ("q", "gate")
    mixers = [next(layer.mixer for layer in params.layers if hasattr(layer.mixer, own[0])) for own in names]
    for mixer, own in zip(mixers, names, strict=True):
        assert all(is_quantized(getattr(mixer, name)) for name in own)


def check_numbers(case: Packed) -> Any:
    """Compares the parameters of both checkpoints, and returns those of the packed one."""
    params, config = load_checkpoint(case.path)

    def check(packed: Any, exact: Any) -> None:
        if not is_quantized(packed):
            np.testing.assert_array_equal(packed, exact)
            return
        packed = packed.with_wide_scales().unpacked()
        if packed.values.shape[:-1] != exact.shape[:-1]:  # matrices from a latent have it last if they are packed
            exact = exact.swapaxes(-1, -2)
        parts = (packed.values, packed.scales, packed.zeros)
        rows: Any = [None if a is None else a.reshape(-1, a.shape[-1]) for a in parts]
        values, scales, zeros = rows
        numbers = np.asarray(dequantize(values, scales, zeros, exact.shape[-1])).reshape(exact.shape)
        exact = np.asarray(exact)
        if packed.order is not None:
            outputs = (1,) * (exact.ndim - packed.order.ndim)
            order = np.asarray(packed.order).reshape(*packed.order.shape[:-1], *outputs, -1)
            exact = np.take_along_axis(exact, np.broadcast_to(order, exact.shape), axis=-1)
        # XLA for CPU takes subnormal numbers for zero.
        np.testing.assert_allclose(numbers, exact, rtol=0, atol=1e-37)

    jax.tree.map(check, params, load_params(case.reference, config, "float32"), is_leaf=is_quantized)
    return params


def test_logits_are_those_of_transformers_on_the_weights_they_mean(case):
    params, config = load_checkpoint(case.path)
    reference, generator = load_reference(case.reference), np.random.default_rng(0)
    sequences = [generator.integers(0, config.vocab_size, length) for length in LENGTHS]

    logits = replay(params, sequences, SPLITS["chunks"], config=config, shape=SHAPE)

    for ours, sequence in zip(logits, sequences, strict=True):
        theirs = reference_logits(reference, sequence)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))


def test_weights_stay_packed_and_are_planned_as_they_are(case):
    with layers_apart():
        params, _ = load_checkpoint(case.path)
        planned, _ = abstract_checkpoint(case.path, "float32")

    def shapes(tree: Any) -> list[tuple[Any, ...]]:
        return [(jax.tree_util.keystr(path), leaf.shape, leaf.dtype) for path, leaf in tree_leaves_with_path(tree)]

    assert shapes(planned) == shapes(params)
    num_quantized = sum(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized)))
    # One tensor of `Params` has all experts of a layer.
    of_experts = {re.sub(r"experts\.\d+", "experts", name) for name in case.weights}
    of_experts |= {re.sub("gate_up|kv_b", "up", name) for name in of_experts}  # which are two tensors here
    assert num_quantized == len(of_experts)


@pytest.mark.parametrize(
    ("writer", "options"),
    [
        *(("gptq", {"bits": bits, "is_symmetric": False, "size": size}) for bits, size in ((2, 8), (3, 8), (4, 32))),
        ("awq", {}),
        ("compressed", {"is_symmetric": False}),
        *(("compressed floats", {"kind": k}) for k in ("NVFP4", "MXFP4", "MXFP8")),
        ("fp8", {"block": 16}),
    ],
)
def test_packed_weights_take_no_more_than_their_files(sources, tmp_path, writer, options):
    packed = WRITERS[writer](sources["llama"], tmp_path / "both", **options)
    params, _ = load_checkpoint(packed.path)

    in_floats = sum(weight.size for weight in packed.weights.values()) * 2
    modules = {name.rpartition(".")[0] for name in packed.weights}
    tensors = load_file(packed.path / "model.safetensors")
    # Without an order `g_idx` says nothing, and is dropped.
    own = [name for name in tensors if name.rpartition(".")[0] in modules and not name.endswith("g_idx")]
    in_file = sum(tensors[name].nbytes for name in own)
    quantized = [w for w in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(w)]
    assert num_bytes(quantized) <= 1.02 * in_file < in_floats


def test_layers_packed_in_another_way_begin_a_new_stack(tmp_path, monkeypatch):
    three_layers = save_random_checkpoint(tmp_path / "source", "llama", **{**SIZES["llama"], "num_hidden_layers": 3})
    packed = WRITERS["compressed"](three_layers, tmp_path / "both", skip=r"layers\.1\.mlp\.down_proj")
    config = read_config(packed.path)
    expected, _ = load_checkpoint(packed.path)
    sequences = [np.arange(20) % config.vocab_size]

    assert packed_anew(config.layers, Checkpoint(packed.path).packings(config)) == [1, 2]
    monkeypatch.setattr("jaxinfer.checkpoint.checkpoint.scans_layers", lambda: True)
    params, grouped = load_checkpoint(packed.path)
    assert [stack.num_layers for stack in grouped.stacks] == [1, 1, 1]
    ours = replay(params, sequences, [[(0, 20)]], config=grouped, shape=SHAPE)
    theirs = reference_logits(load_reference(packed.reference), sequences[0])
    np.testing.assert_allclose(ours[0], theirs, rtol=0, atol=1e-4)
    assert num_bytes(params) == num_bytes(expected)


def test_a_start_plans_each_stacking_of_a_packed_checkpoint_once(packed, monkeypatch):
    planned = []
    monkeypatch.setattr(
        "jaxinfer.checkpoint.checkpoint.plan_assembly", lambda *given: planned.append(given) or plan_assembly(*given)
    )
    checkpoint = Checkpoint(packed.path)

    checkpoint.abstract("float32")
    _, config = checkpoint.load("float32")
    checkpoint.plan(config)

    configs = [config for config, _ in planned]
    assert len(configs) == len({*configs}) <= 2  # stacked layers are found by a plan of single ones


def test_quantizing_a_packed_checkpoint_is_refused(packed):
    for load in (load_checkpoint, abstract_checkpoint):
        with pytest.raises(ValueError, match=r"quantization='int8' does not go with .* packed already by gptq"):
            load(packed.path, "float32", quantization="int8")


SETTINGS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gptq": [
        ({"bits": 5}, "bits=5"),
        ({"bits": "4"}, "bits='4'"),
        ({"group_size": 0}, "group_size=0"),
        ({"group_size": 40}, "groups of 40 do not divide"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic="),
        ({"dynamic": ["-:.*down.*"]}, "dynamic="),
        ({"bits": 4.0}, "bits=4.0"),
        ({"pack_dtype": "int8"}, "pack_dtype='int8'"),
        ({"desc_act": False}, "g_idx does not give each of 2 groups 32 inputs in order"),
        ({"sym": True}, "sym=true"),
        ({"quant_method": "bitsandbytes"}, "quant_method is none of awq, compressed-tensors, fp8, gptq, mxfp4"),
        ({"quant_method": ["gptq"]}, "quant_method is none of"),
    ],
    "awq": [
        ({"bits": 8}, "bits=8"),
        ({"version": "gemv"}, "version='gemv'"),
        ({"zero_point": False}, "zero_point=false"),
        ({"group_size": "all"}, "group_size='all'"),
    ],
    "fp8": [
        ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"activation_scheme": "mixed"}, "activation_scheme='mixed'"),
        ({"weight_block_size": [32]}, "weight_block_size=\\[32\\]"),
        ({"weight_block_size": [16, 32]}, "weight_scale_inv is F32"),
        ({"weight_block_size": [2**70, 2**70]}, "weight_block_size="),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
        ({"weight_block_size": None}, "weight_scale_inv is F32"),
    ],
    "compressed": [
        ({"format": "marlin-24"}, "format='marlin-24'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
        ({"transform_config": {"R1": {}}}, "transform_config="),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config="),
        ({"config_groups": {}}, "config_groups={}"),
        ({"config_groups": {"group_0": {"targets": ["Linear"]}}}, "group_0="),
    ],
}


@pytest.mark.parametrize(
    ("writer", "changes", "message"), [(writer, *each) for writer, cases in SETTINGS.items() for each in cases], ids=str
)
def test_settings_that_are_not_honoured_are_refused_by_name(sources, tmp_path, writer, changes, message):
    options = {"is_symmetric": False, "has_order": True} if writer == "gptq" else {}
    path = WRITERS[writer](sources["llama"], tmp_path / "both", **options).path
    edit_json(path, quantization_config=settings_of(path) | changes)

    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("{", r"\{")):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"input_activations": {"num_bits": 8}}, "input_activations="),
        ({"input_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": True}}, "input_activations="),
        ({"input_activations": {"num_bits": 8, "strategy": "token", "dynamic": "local"}}, "input_activations="),
        ({"input_activations": {"num_bits": 4, "strategy": "token", "dynamic": True}}, "input_activations="),
        ({"input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True}}, "weights.strategy='group'"),
        ({"input_activations": [8]}, "input_activations="),
        ({"output_activations": {"num_bits": 8}}, "output_activations="),
        ({"targets": ["Embedding"]}, "no target of quantization_config.config_groups"),
        ({"targets": ["re:("]}, "is no regular expression"),
        ({"targets": ["re:a{99999999999}"]}, "is no regular expression"),
        ({"targets": [r"re:(\w*\w*\.?)*!"]}, "repeat no group"),
        ({"targets": ["re:" + ".*" * 5]}, "repeat no group"),
        ({"targets": [3]}, "targets=3"),
        ({"targets": ["re:.*mlp.*"]}, "no target of quantization_config.config_groups"),
        ({"weights": {"num_bits": 6, "type": "float"}}, "weights.num_bits=6"),
        ({"weights": {"num_bits": 4, "type": "float"}}, "weights.strategy=None"),
        ({"weights": {"num_bits": 4, "type": "float", "strategy": "group"}}, "weight_packed is I32"),
        ({"weights": {"num_bits": 8, "type": "float", "strategy": "group"}}, "packed but has no weight;"),
        ({"weights": {"num_bits": 4, "type": "complex"}}, "weights.type='complex'"),
        ({"weights": {"num_bits": 4, "strategy": "block"}}, "weights.strategy='block'"),
        ({"weights": {"num_bits": 9, "strategy": "channel"}}, "weights.num_bits=9"),
        ({"weights": {"num_bits": 4.0, "strategy": "channel"}}, "weights.num_bits=4.0"),
        ({"weights": {"num_bits": 4, "strategy": "channel", "symmetric": None}}, "weights.symmetric=None"),
        ({"weights": {"num_bits": 4, "strategy": "channel", "actorder": "inputs"}}, "weights.actorder='inputs'"),
        ({"weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"}}, "no weight_g_idx"),
        ({"weights": {"num_bits": 8, "type": "float", "symmetric": False, "strategy": "channel"}}, "weights.symmetric"),
        ({"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 4}}, "input_activations="),
        ({"weights": {"num_bits": 4, "strategy": "group", "group_size": 7}}, "group_size=7 does not divide"),
    ],
    ids=str,
)
def test_schemes_that_are_not_honoured_are_refused_by_name(sources, tmp_path, scheme, message):
    path = WRITERS["compressed"](sources["llama"], tmp_path / "both").path
    settings = settings_of(path)
    settings["config_groups"]["group_0"] |= scheme
    edit_json(path, quantization_config=settings)

    with pytest.raises(ValueError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_that_a_scheme_denies_are_refused(sources, tmp_path, bits):
    path = WRITERS["compressed"](sources["llama"], tmp_path / "both", bits=bits, is_symmetric=False).path
    settings = settings_of(path)
    settings["config_groups"]["group_0"]["weights"]["symmetric"] = True
    edit_json(path, quantization_config=settings)

    with pytest.raises(ValueError, match="has zero points, but quantization_config says symmetric=true"):
        load_checkpoint(path)


def test_integers_of_more_bits_than_the_scheme_says_are_refused(sources, tmp_path):
    path = WRITERS["compressed"](sources["llama"], tmp_path / "both", bits=8, is_packed=False).path
    settings = settings_of(path)
    settings["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    edit_json(path, quantization_config=settings)

    with pytest.raises(ValueError, match="has integers of more than 4 bits"):
        load_checkpoint(path)


def test_zero_points_of_more_bits_than_the_scheme_says_are_refused(sources, tmp_path):
    path = WRITERS["compressed"](sources["llama"], tmp_path / "both", bits=8, is_packed=False, is_symmetric=False).path
    settings = settings_of(path)
    settings["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    edit_json(path, quantization_config=settings)
    tensors = load_file(path / "model.safetensors")
    for name, integers in tensors.items():
        if name.endswith("_proj.weight"):
            integers.zero_()
    save_file(tensors, path / "model.safetensors")

    with pytest.raises(ValueError, match="has zero points of more than 4 bits"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("writer", "changes"),
    [
        ("gptq", {"dynamic": {"lm_head": {}, "-:.*attn.*": {}}}),
        ("compressed", {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}}),
    ],
)
def test_settings_that_say_nothing_are_read(sources, tmp_path, writer, changes):
    packed = WRITERS[writer](sources["llama"], tmp_path / "both")
    edit_json(packed.path, quantization_config=settings_of(packed.path) | changes)

    with layers_apart():
        params, _ = load_checkpoint(packed.path)

    assert sum(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))) == len(packed.weights)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_of_zeros_beside_packed_weights_are_left_out(sources, tmp_path, value):
    path = WRITERS["gptq"](sources["llama"], tmp_path / "both").path
    expected, _ = load_checkpoint(path)
    rewrite(path, lambda tensors: tensors | {f"{Q}.bias": torch.full((128,), value)})

    if value:
        with pytest.raises(ValueError, match=f"unexpected: {Q}.bias"):
            load_checkpoint(path)
    else:
        jax.tree.map(np.testing.assert_array_equal, load_checkpoint(path)[0], expected)


def test_a_weight_that_is_there_twice_is_refused(packed):
    rewrite(packed.path, lambda tensors: tensors | {f"{Q}.weight": torch.zeros(128, 64)})

    with pytest.raises(ValueError, match=f"{Q} has a qweight and a weight in floating point"):
        load_checkpoint(packed.path)


def test_groups_of_odd_size_are_refused():
    require_even("q_proj", 5, 8)
    with pytest.raises(ValueError, match="q_proj has 4 bits in groups of 5 inputs, an odd number"):
        require_even("q_proj", 5, 4)


def require_weights_of(packed: Any) -> None:
    """Asserts that each packed weight is read with the floats that it was packed from."""
    _, stored = Checkpoint(packed.path).plan(read_config(packed.path))
    for name, weight in packed.weights.items():
        tensor = stored[name]
        assert isinstance(tensor, StoredQuantized)
        np.testing.assert_array_equal(tensor.floats(), weight)


def test_names_of_autofp8_are_read(sources, tmp_path):
    packed = WRITERS["fp8"](sources["llama"], tmp_path / "both", block=None)
    rewrite(packed.path, lambda tensors: {n.replace("weight_scale_inv", "weight_scale"): t for n, t in tensors.items()})

    require_weights_of(packed)


def test_a_scheme_for_a_name_comes_before_one_for_a_class(sources, tmp_path):
    packed = WRITERS["compressed"](sources["llama"], tmp_path / "both")
    settings = settings_of(packed.path)
    own = settings["config_groups"]["group_0"]
    other = own | {"targets": ["Linear"], "weights": own["weights"] | {"num_bits": 8}}
    settings["config_groups"] = {"others": other, "own": own | {"targets": ["re:.*layers.*"]}}
    edit_json(packed.path, quantization_config=settings)

    require_weights_of(packed)


@pytest.mark.parametrize(
    ("writer", "file", "settings"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
        (
            "gptq",
            "quantize_config.json",
            {"bits": 4, "group_size": 32, "damp_percent": 0.1, "model_file_base_name": "m"},
        ),
        ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
    ],
    ids=str,
)
def test_settings_of_early_files_stand_beside_config_json(sources, tmp_path, writer, file, settings):
    packed = WRITERS[writer](sources["llama"], tmp_path / "both")
    edit_json(packed.path, quantization_config=...)
    (packed.path / file).write_text(json.dumps(settings))

    require_weights_of(packed)


def test_such_a_file_beside_weights_in_floating_point_says_nothing(sources, tmp_path):
    path = Path(shutil.copytree(sources["llama"], tmp_path / "copy"))
    (path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))

    assert Checkpoint(path).packing is None


@pytest.mark.parametrize(
    ("named", "settings"),
    [
        (r"MLX \(quantization in config.json\)", {"quantization": {"group_size": 64, "bits": 4}}),
        (r"ModelOpt \(hf_quant_config.json\)", {}),
    ],
)
def test_a_format_that_is_not_read_is_named_by_the_place_of_its_settings(sources, tmp_path, named, settings):
    path = WRITERS["awq"](sources["llama"], tmp_path / "both").path
    edit_json(path, quantization_config=..., **settings)
    if not settings:
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))

    with pytest.raises(ValueError, match=rf"do not fit its config.json; .* the format of {named}, which is not read"):
        load_checkpoint(path)


GENERIC, DOWN, NAME = "re:.*proj$", "re:.*down_proj$", "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    "groups",
    [
        [(GENERIC, True), (DOWN, False)],
        [(DOWN, False), (GENERIC, True)],
        [(DOWN, True), (NAME, False), ("Linear", True)],
        [("re:model.*", True), ("re:.*mlp.*", False), ("Linear", True)],
        [(GENERIC, True), (DOWN, True), (DOWN, False)],  # one target in two groups
    ],
    ids=str,
)
def test_a_module_has_the_scheme_that_the_library_gives_it_if_several_fit(sources, tmp_path, groups):
    path = WRITERS["compressed w8a8"](sources["llama"], tmp_path / "both").path
    settings = settings_of(path)
    own = settings["config_groups"]["group_0"]
    schemes = [own | {"targets": [t]} | ({} if rounds else {"input_activations": None}) for t, rounds in groups]
    settings["config_groups"] = {f"group_{i}": scheme for i, scheme in enumerate(schemes)}
    edit_json(path, quantization_config=settings)
    by_target = {scheme["targets"][0]: scheme for scheme in schemes}
    first = match_targets(NAME, torch.nn.Linear(1, 1), list(by_target))[0]

    params, _ = load_checkpoint(path)

    down: Any = params.layers[0].feed_forward
    assert (down.down.activations is None) == (by_target[first]["input_activations"] is None)


Q = "model.layers.0.self_attn.q_proj"


def changed(name: str, **changes: Any) -> Any:
    def change(tensors: Tensors) -> Tensors:
        tensor = tensors[f"{Q}.{name}"].clone()
        if "shape" in changes:
            tensor = tensor.new_zeros(changes["shape"])
        elif "dtype" in changes:
            tensor = tensor.to(changes["dtype"])
        else:
            tensor.view(-1)[3] = changes["value"]
        return tensors | {f"{Q}.{name}": tensor}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: {n: t for n, t in tensors.items() if n != f"{Q}.scales"}, "packed but has no scales"),
        (lambda tensors: {n: t for n, t in tensors.items() if n != f"{Q}.qzeros"}, "packed but has no qzeros"),
        (changed("qzeros", shape=(3, 16)), r"qzeros is I32 \(3, 16\), not \(2, 16\) of I32"),
        (changed("scales", dtype=torch.int32), "scales is I32"),
        (changed("qweight", shape=(64,)), r"qweight is I32 \(64,\), not \(any, any\)"),
        (changed("qweight", shape=(16, 128)), r"qzeros is I32 \(2, 16\), not \(4, 16\)"),
        (changed("scales", value=float("nan")), "scales that are no finite numbers"),
        (changed("g_idx", value=9), "g_idx does not give each of 2 groups 32 inputs,"),
        (changed("g_idx", value=-1), "g_idx does not give each of 2 groups 32 inputs,"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused_by_name(packed, change, message):
    rewrite(packed.path, change)

    with pytest.raises(ValueError, match=message):
        load_checkpoint(packed.path)


W8A8: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"is_symmetric": False}),
    ("llama", {"is_dynamic": False, "is_symmetric": False}),
    ("qwen3_moe", {"is_symmetric": False}),
]


@pytest.mark.parametrize("options", [options for family, options in W8A8 if family == "llama"], ids=str)
def test_activations_of_8_bits_are_rounded_before_each_product(sources, tmp_path, options):
    packed = WRITERS["compressed w8a8"](sources["llama"], tmp_path / "both", **options)
    params, config = load_checkpoint(packed.path)
    reference, generator = load_reference(packed.reference), np.random.default_rng(0)
    stated = settings_of(packed.path)["config_groups"]["group_0"]["input_activations"]
    arguments = QuantizationArgs(**stated)

    def rounded(_: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if arguments.dynamic and arguments.symmetric:
            largest = inputs[0].abs().amax(-1, keepdim=True)
            return (inputs[0] * (127 / largest)).round() * (largest / 127)
        scale, zero = torch.tensor([0.03]), torch.tensor([-9])
        if arguments.dynamic:
            low, high = (end(inputs[0], -1, keepdim=True) for end in (torch.amin, torch.amax))
            scale, zero = calculate_qparams(low, high, arguments)
        return fake_quantize(inputs[0], scale, zero, arguments)

    sequences = [generator.integers(0, config.vocab_size, length) for length in LENGTHS]
    exact = [reference_logits(reference, sequence) for sequence in sequences]
    names = {name.removesuffix(".weight") for name in packed.weights}
    for name, module in reference.named_modules():
        if name in names:
            module.register_forward_pre_hook(rounded)

    logits = replay(params, sequences, SPLITS["chunks"], config=config, shape=SHAPE)

    for ours, sequence, unrounded in zip(logits, sequences, exact, strict=True):
        # A number between two integers may become the one or the other, which moves what follows a little.
        moved = np.abs(ours - reference_logits(reference, sequence)).mean()
        assert moved < np.abs(ours - unrounded).mean() / 3


@pytest.mark.parametrize(
    ("writer", "family", "options"),
    [
        *(("compressed w8a8", *case) for case in W8A8),
        ("gptq", "qwen3_moe", {"bits": 3, "is_symmetric": False}),
        ("fp8", "deepseek_v3", {}),
    ],
    ids=str,
)
def test_tokens_have_the_same_bits_in_any_steps(sources, tmp_path, writer, family, options):
    params, config = load_checkpoint(WRITERS[writer](sources[family], tmp_path / "both", **options).path)
    sequences = [np.random.default_rng(0).integers(0, config.vocab_size, length) for length in LENGTHS]

    chunks, others = (
        replay(params, sequences, SPLITS[name], config=config, shape=SHAPE)
        for name in ("chunks", "decoding beside prefill")
    )

    for one, other in zip(chunks, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [("input_scale", float("nan"), "rounds inputs by nan"), ("input_scale", 0.0, "rounds inputs by 0.0 to -9")],
)
def test_ranges_of_activations_that_are_none_are_refused(sources, tmp_path, part, value, message):
    options = {"is_dynamic": False, "is_symmetric": False}
    path = WRITERS["compressed w8a8"](sources["llama"], tmp_path / "both", **options).path
    rewrite(path, lambda tensors: tensors | {f"{Q}.{part}": torch.tensor([value])})

    with pytest.raises(ValueError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("kind", "part", "value", "message"),
    [
        ("NVFP4", "weight_global_scale", 0.0, "weight_global_scale is 0.0"),
        ("NVFP4", "weight_global_scale", float("nan"), "weight_global_scale is nan"),
        ("NVFP4", "weight_global_scale", 1e-38, "weight_global_scale is 9.*e-39"),
        ("NVFP4", "weight_scale", 0x7F, "scales that are no finite numbers"),
        ("MXFP4", "weight_scale", 255, "scales that are no finite numbers"),
        ("MXFP8", "weight_scale", 255, "scales that are no finite numbers"),
    ],
)
def test_scales_of_floats_that_are_no_numbers_are_refused(sources, tmp_path, kind, part, value, message):
    path = WRITERS["compressed floats"](sources["llama"], tmp_path / "both", kind=kind).path

    def change(tensors: Tensors) -> Tensors:
        tensor = tensors[f"{Q}.{part}"].clone()
        flat = tensor.view(-1) if tensor.dtype == torch.float32 else tensor.view(torch.uint8).view(-1)
        flat[0] = value
        return tensors | {f"{Q}.{part}": tensor}

    rewrite(path, change)

    with pytest.raises(ValueError, match=message):
        load_checkpoint(path)


def test_a_packed_checkpoint_on_a_mesh_has_the_same_numbers(packed):
    config = read_config(packed.path)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))

    placed = load_params(packed.path, config, "float32", placement=shardings(config, mesh))

    expected = load_params(packed.path, config, "float32")
    assert jax.tree.structure(placed) == jax.tree.structure(expected)
    for own, other in zip(jax.tree.leaves(placed), jax.tree.leaves(expected), strict=True):
        assert isinstance(own.sharding, jax.sharding.NamedSharding)
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize(
    ("writer", "options"),
    [
        *((writer, {}) for writer in ("gptq", "awq", "compressed", "fp8", "mxfp4", "compressed w8a8")),
        ("compressed fp8", {"strategy": "tensor"}),
        *(("compressed floats", {"kind": kind}) for kind in ("NVFP4", "MXFP4", "MXFP8")),
    ],
)
def test_a_damaged_checkpoint_loads_or_is_refused(sources, tmp_path, writer, options):
    source = sources["gpt_oss" if writer == "mxfp4" else "llama"]
    path: Path = WRITERS[writer](source, tmp_path / "both", **options).path
    rng, content = np.random.default_rng(11), (path / "model.safetensors").read_bytes()
    config = json.loads((path / "config.json").read_text())

    def mutant() -> dict[str, bytes]:
        if rng.random() < 0.5:
            return {"model.safetensors": mutated_safetensors(content, rng)}
        settings = with_other_entries({"quantization_config": config["quantization_config"]}, rng)
        return {"config.json": json.dumps(config | settings).encode()}

    assert len(read_mutants(path, (mutant() for _ in range(OF_A_FORMAT)))) > OF_A_FORMAT / 3
