"""Weights of the same inputs in one tensor: the same function, parts for each device, and back again."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxinfer.checkpoint.families import family_of
from jaxinfer.checkpoint.orbax import restore_params, save_params
from jaxinfer.gguf.blocks import BLOCK_TYPES
from jaxinfer.model.components import layers
from jaxinfer.model.components.attention import AttentionParams
from jaxinfer.model.components.mlp import MLPParams
from jaxinfer.model.config import ModelConfig, uniform_decoder
from jaxinfer.model.joined_params import join_products, split_products
from jaxinfer.model.params import Params, abstract_params, over_mesh, shardings
from jaxinfer.model.quantized_params import quantize_params
from jaxinfer.parallel.placement import Placement
from jaxinfer.quantization import PackedBlocks
from jaxinfer.quantization.activations import Activations
from jaxinfer.quantization.quantized_array import QuantizedArray
from jaxinfer.steps.log_probs import log_probs
from kernels_pallas.gpu_products import multiply
from kernels_pallas.gpu_products.tiles import ProductTile
from tests.oracles import CONFIGS, random_config
from tests.replay import lively_params

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "max_position": 64,
}
CONFIG = uniform_decoder(**SIZES, has_qkv_bias=True, has_mlp_bias=True)


def described(family: str) -> ModelConfig:
    hf = json.loads(random_config(family).to_json_string(use_diff=False))
    return family_of(hf).config_from_hf(hf)


def nodes(params: Params, kind: type) -> list[Any]:
    found = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in found if isinstance(node, kind)]


def copied(params: Params) -> Params:
    """The same numbers in other arrays, for joining frees those that it joins."""
    return jax.tree.map(jnp.array, params)


@pytest.mark.parametrize("family", CONFIGS)
def test_each_familys_tensors_are_joined_and_split_again(family):
    config = described(family)
    params = abstract_params(config, "bfloat16")
    joined = join_products(params, config)

    assert [m.qkv is not None for m in nodes(joined, AttentionParams)] == [
        sum(p is not None for p in (m.q, m.k, m.v, m.gate)) > 1 for m in nodes(params, AttentionParams)
    ]
    assert all(m.q is m.k is m.v is m.gate is None for m in nodes(joined, AttentionParams) if m.qkv is not None)
    assert split_products(joined, config) == params
    assert split_products(joined, config, like=joined) == joined
    assert join_products(joined, config) == joined


# With biases; with a gate; with layers that read others' keys, and keys that are values; with sinks and experts.
@pytest.mark.parametrize("family", ["qwen2", "qwen3_next", "gemma4_text", "gpt_oss"])
def test_a_joined_model_computes_what_it_did(family):
    config = described(family)
    params = lively_params(config)
    tokens = jnp.arange(2 * 9).reshape(2, 9) % 50 + 2
    compute = functools.partial(log_probs, tokens=tokens, config=config)

    joined = join_products(copied(params), config)

    assert any(m.qkv is not None for m in nodes(joined, AttentionParams))
    np.testing.assert_allclose(compute(joined), compute(params), rtol=1e-5, atol=1e-5)


def test_a_derivative_is_that_of_the_parts():
    params = lively_params(CONFIG)
    tokens = jnp.arange(2 * 9).reshape(2, 9) % 50 + 2

    def loss(params: Params) -> jax.Array:
        return log_probs(params, tokens, config=CONFIG).sum()

    expected = jax.grad(loss)(params)
    found = split_products(jax.grad(loss)(join_products(copied(params), CONFIG)), CONFIG)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)


PACKED_MODELS = {
    "int8": lambda params: quantize_params(params, CONFIG),
    "int4 in groups": lambda params: quantize_params(params, CONFIG, bits=4, group_size=16),
}


@pytest.mark.parametrize("name", PACKED_MODELS)
def test_packed_weights_are_joined_as_they_lie(name):
    packed = PACKED_MODELS[name](lively_params(CONFIG))
    tokens = jnp.arange(2 * 9).reshape(2, 9) % 50 + 2
    joined = join_products(copied(packed), CONFIG)

    assert all(isinstance(m.qkv, QuantizedArray) for m in nodes(joined, AttentionParams))
    assert all(isinstance(m.up_gate, QuantizedArray) for m in nodes(joined, MLPParams))
    jax.tree.map(np.testing.assert_array_equal, split_products(joined, CONFIG), packed)
    compute = functools.partial(log_probs, tokens=tokens, config=CONFIG)
    np.testing.assert_allclose(compute(joined), compute(packed), rtol=1e-5, atol=1e-5)
    from_joined = PACKED_MODELS[name](join_products(lively_params(CONFIG), CONFIG))
    jax.tree.map(np.testing.assert_array_equal, from_joined, packed)


FOR_KERNEL: dict[str, Any] = {**SIZES, "hidden_size": 64, "intermediate_size": 160, "vocab_size": 70}
TILE = ProductTile(block_channels=32, block_rows=16, block_inputs=32, num_stages=3, num_warps=4)


@pytest.mark.parametrize("name", ["plain", "with biases", "int8", "int4"])
def test_the_kernel_of_a_gpu_computes_a_joined_model_by_four_launches_a_layer(monkeypatch, name):
    """Interpreted, in float32. Gate and up meet in one launch, unless biases are between."""
    config = uniform_decoder(**FOR_KERNEL, has_mlp_bias=name == "with biases")
    params = lively_params(config)
    if name.startswith("int"):
        options = {"bits": 4, "group_size": 32, "is_packed": True} if name == "int4" else {}
        params = quantize_params(params, config, **options)
    tokens = jnp.arange(2 * 9).reshape(2, 9) % 50 + 2
    expected = log_probs(params, tokens, config=config)
    launches = []

    def multiply_interpreted(x, weights, scales=None, zeros=None, *, dtype=jnp.float32, combine=None):
        launches.append((weights.shape, combine is not None))
        return multiply(x, weights, scales, zeros, dtype=dtype, combine=combine, tile=TILE, interpret=True)

    monkeypatch.setattr(layers, "_is_for_kernel", lambda is_split: True)
    monkeypatch.setattr(layers, "can_multiply", lambda *operands: True)
    monkeypatch.setattr(layers, "multiply_on_gpu", multiply_interpreted)
    jax.clear_caches()  # of groups of layers that were traced without the kernel
    found = log_probs(join_products(copied(params), config), tokens, config=config)
    jax.clear_caches()

    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert sum(is_combined for _, is_combined in launches) == (0 if name == "with biases" else 1)
    # Layers of equal shapes are traced once.
    assert len([shape for shape, _ in launches if shape[0] != FOR_KERNEL["vocab_size"]]) == 4


def mlp_of(**weights: Any) -> tuple[Params, ModelConfig]:
    """Parameters of one layer whose network has these weights, and nothing else."""
    config = uniform_decoder(**{**SIZES, "num_layers": 1})
    params = abstract_params(config, "float32")
    (layer,), (network,) = params.layers, nodes(params, MLPParams)
    layer = replace(layer, feed_forward=MLPParams(down=network.down, **weights))
    return replace(params, layers=(layer,)), config


def shared_scales(rows: int, dtype: str = "float32") -> QuantizedArray:
    """FP8 weights [1, 48, 32] whose outputs share scales, `rows` of them."""
    return QuantizedArray(jnp.ones((1, 48, 32), jnp.float8_e4m3fn), jnp.arange(rows, dtype=dtype).reshape(1, rows, 1))


def test_outputs_that_share_scales_share_them_in_one_tensor():
    params, config = mlp_of(up=shared_scales(3), gate=shared_scales(3))

    joined = join_products(params, config)

    (network,) = nodes(joined, MLPParams)
    assert network.up_gate.values.shape == (1, 1, 96, 32)
    np.testing.assert_array_equal(network.up_gate.scales[0, 0, :, 0], [0, 1, 2, 0, 1, 2])
    (split,) = nodes(split_products(joined, config), MLPParams)
    np.testing.assert_array_equal(split.gate.scales[0, :, 0], [0, 1, 2])


def blocks(name: str) -> PackedBlocks:
    """Weights [1, 48, inputs of a block] in blocks of this type."""
    kind = next(kind for kind in BLOCK_TYPES.values() if kind.name == name)
    return PackedBlocks(jnp.zeros((1, 48, kind.num_bytes), jnp.uint8), name)


def test_blocks_of_one_type_are_joined():
    params, config = mlp_of(up=blocks("Q4_K"), gate=blocks("Q4_K"))

    (network,) = nodes(join_products(params, config), MLPParams)

    assert (network.up_gate.type, network.up_gate.shape[:3]) == ("Q4_K", (1, 1, 96))


@pytest.mark.parametrize(
    ("up", "gate"),
    [
        (shared_scales(3), shared_scales(6)),
        (shared_scales(3), shared_scales(3, "bfloat16")),
        (shared_scales(3), jnp.ones((1, 48, 32))),
        (blocks("Q4_K"), blocks("Q6_K")),
        (replace(shared_scales(3), multiplier=jnp.ones((1, 1, 2))),) * 2,
        (replace(shared_scales(3), input_range=jnp.ones((1, 1, 3)), activations=Activations(False, True)),) * 2,
        (replace(shared_scales(3), order=jnp.zeros((1, 32), jnp.int32)),) * 2,
    ],
    ids=["shares", "dtypes", "kinds", "blocks", "multiplier", "input range", "order"],
)
def test_weights_that_do_not_go_together_stay_apart(up, gate):
    params, config = mlp_of(up=up, gate=gate)

    (network,) = nodes(join_products(params, config), MLPParams)

    assert network.up_gate is None
    assert [id(a) for a in jax.tree.leaves((network.up, network.gate))] == [id(a) for a in jax.tree.leaves((up, gate))]


def test_each_device_has_its_own_outputs_of_all_weights():
    mesh = AbstractMesh((4,), ("model",))
    config = over_mesh(CONFIG, mesh)
    params = Placement(mesh).params(config, abstract_params(config, "bfloat16"))  # type: ignore[arg-type]
    joined = join_products(params, config)

    (attention,), (network,) = nodes(joined, AttentionParams), nodes(joined, MLPParams)
    # 8 heads of queries, and 4 each of keys and values
    assert attention.qkv.shape == (2, 4, 4, 16, 32)
    assert network.up_gate.shape == (2, 4, 24, 32)
    for tensor, ndim in ((attention.qkv, 5), (network.up_gate, 4)):
        assert tensor.sharding == NamedSharding(mesh, PartitionSpec(None, "model", *(None,) * (ndim - 2)))
    split = split_products(joined, config)
    placed = shardings(config, mesh)  # type: ignore[arg-type]
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b, a.ndim), split, placed))


def test_a_checkpoint_of_orbax_has_the_parts(tmp_path):
    params = lively_params(CONFIG)
    joined = join_products(copied(params), CONFIG)

    assert not nodes(joined, AttentionParams)[0].qkv.committed  # a program over a mesh may take it
    with pytest.raises(ValueError, match="params do not have the tensors that config declares"):
        save_params(tmp_path / "wrong", joined, uniform_decoder(**{**SIZES, "num_layers": 3}, layer_groups=(1, 2)))
    save_params(tmp_path / "saved", joined, CONFIG)

    restored, config = restore_params(tmp_path / "saved")
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, restored, params)
