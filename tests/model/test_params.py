"""One declaration per tensor: the abstract tree, the random start and the shardings all follow it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from jaxinfer.model.components.attention import AttentionParams
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.config import LayerGroup, uniform_decoder
from jaxinfer.model.params import TensorSpec, abstract_params, declare, fit_params, init_params, over_mesh, shardings

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_layers": 3,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 6,
    "max_position": 64,
}
CONFIG = uniform_decoder(**SIZES)
ALL_SWITCHES = uniform_decoder(
    **SIZES, has_qkv_bias=True, has_output_bias=True, has_mlp_bias=True, has_qk_norm=True, layer_groups=(1, 2)
)
# Written from the layout of Hugging Face checkpoints, without the layer axis.
LAYER_SHAPES = {
    "mixer_norm": (24,),
    "mixer.q": (8, 6, 24),
    "mixer.k": (4, 6, 24),
    "mixer.v": (4, 6, 24),
    "mixer.o": (24, 48),
    "feed_forward_norm": (24,),
    "feed_forward.gate": (40, 24),
    "feed_forward.up": (40, 24),
    "feed_forward.down": (24, 40),
}
SWITCHED_SHAPES = {
    "has_qkv_bias": {"mixer.q_bias": (8, 6), "mixer.k_bias": (4, 6), "mixer.v_bias": (4, 6)},
    "has_output_bias": {"mixer.o_bias": (24,)},
    "has_qk_norm": {"mixer.q_norm": (6,), "mixer.k_norm": (6,)},
    "has_mlp_bias": {
        "feed_forward.gate_bias": (40,),
        "feed_forward.up_bias": (40,),
        "feed_forward.down_bias": (24,),
    },
}


def layer_shapes(stack, num_layers):
    """The shapes of a stack's tensors, after checking that the layer axis leads."""
    present = {keystr(path, simple=True, separator="."): leaf.shape for path, leaf in tree_leaves_with_path(stack)}
    assert all(shape[0] == num_layers for shape in present.values())
    return {name: shape[1:] for name, shape in present.items()}


def mesh_of(num_devices: int, axis: str = "model") -> Any:
    """A mesh without devices, which is all that names and sizes need."""
    return AbstractMesh((num_devices,), (axis,))


def specs(config):
    return jax.tree.leaves(declare(config), is_leaf=lambda x: isinstance(x, TensorSpec))


def test_a_layer_has_the_tensors_of_its_topology():
    params = abstract_params(CONFIG, jnp.float32)

    assert layer_shapes(params.layers[0], 3) == LAYER_SHAPES


@pytest.mark.parametrize("switch", SWITCHED_SHAPES)
def test_a_switch_adds_its_tensors_and_no_others(switch):
    params = abstract_params(uniform_decoder(**dict(SIZES, **{switch: True})), jnp.float32)

    assert layer_shapes(params.layers[0], 3) == LAYER_SHAPES | SWITCHED_SHAPES[switch]


@pytest.mark.parametrize("groups", [(3,), (1, 1, 1), (2, 1)])
def test_layers_are_stacked_by_group(groups):
    params = abstract_params(CONFIG.regrouped(groups), jnp.float32)

    assert tuple(layers.mixer.q.shape[0] for layers in params.layers) == groups


def test_tied_embeddings_have_no_second_table():
    tied = abstract_params(uniform_decoder(**SIZES, has_tied_embeddings=True), jnp.float32)
    untied = abstract_params(CONFIG, jnp.float32)

    assert tied.unembedding is None
    assert untied.unembedding.shape == untied.embedding.shape == (128, 24)


@pytest.mark.parametrize("config", [CONFIG, ALL_SWITCHES], ids=["plain", "all switches"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_random_start_matches_the_abstract_tree(config, dtype):
    params = jax.eval_shape(lambda: init_params(jax.random.key(0), config, jnp.dtype(dtype)))

    assert params == abstract_params(config, jnp.dtype(dtype))


def test_a_random_start_has_the_declared_scales_and_no_tensor_twice():
    # Equal sizes everywhere: few shapes to compile, and tensors that could be mistaken for each other.
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads"), 16)
    config = uniform_decoder(**sizes, num_layers=2, head_dim=16, max_position=64, has_qkv_bias=True)

    init = jax.jit(init_params, static_argnames="config")
    leaves = jax.tree.leaves(init(jax.random.key(0), config))

    for spec, leaf in zip(specs(config), leaves, strict=True):
        # The standard deviation of n samples errs by 1 / sqrt(2 n), 4.4 % for the 256 of the smallest; four times that.
        assert np.std(leaf) == pytest.approx(spec.scale, rel=0.18) if spec.scale else (leaf == 1).all()
    starts = [tuple(leaf.ravel()[:8].tolist()) for leaf in leaves if (leaf != 1).any()]
    assert len(set(starts)) == len(starts)


def test_a_specification_names_every_axis():
    assert all(len(spec.axes) == len(spec.shape) for spec in specs(ALL_SWITCHES))


def test_heads_mlp_and_vocabulary_are_split_over_the_model_axis():
    placement = shardings(ALL_SWITCHES, mesh_of(4))

    layers: Any = placement.layers[1]
    assert placement.embedding.spec == PartitionSpec("model", None)
    assert layers.mixer.q.spec == layers.mixer.k.spec == PartitionSpec(None, "model", None, None)
    assert layers.mixer.o.spec == PartitionSpec(None, None, "model")
    assert layers.feed_forward.down.spec == PartitionSpec(None, None, "model")
    assert layers.mixer_norm.spec == PartitionSpec(None, None)


# The inputs of `o` are 48 numbers, which eight devices could share, but not so that each has whole heads.
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "of_heads"), [(8, 4, 6, ("experts", "model")), (6, 2, 8, "model")]
)
def test_experts_are_split_over_an_axis_of_their_own_and_all_else_over_both(
    num_heads, num_kv_heads, head_dim, of_heads
):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    (layer,) = uniform_decoder(**SIZES | sizes).groups[0].layers
    expert = MLP(intermediate_size=40)
    sparse = MoE(num_experts=8, expert=expert, router=Router(num_chosen=2), shared=expert)
    config = replace(CONFIG, groups=(LayerGroup((replace(layer, feed_forward=sparse),), 3),))
    mesh: Any = AbstractMesh((4, 2), ("experts", "model"))

    placement = shardings(over_mesh(config, mesh), mesh)
    layers: Any = placement.layers[0]
    params, both = layers.feed_forward, ("experts", "model")

    assert params.experts.up.spec == PartitionSpec(None, "experts", "model", None)
    assert params.experts.down.spec == PartitionSpec(None, "experts", None, "model")
    assert params.shared.up.spec == PartitionSpec(None, both, None)
    assert params.router.is_fully_replicated
    assert placement.embedding.spec == PartitionSpec(both, None)
    assert layers.mixer.q.spec == layers.mixer.k.spec == PartitionSpec(None, of_heads, None, None)
    assert layers.mixer.o.spec == PartitionSpec(None, None, of_heads)


def test_the_abstract_tree_carries_the_placement():
    placement = shardings(ALL_SWITCHES, mesh_of(2))

    params = abstract_params(ALL_SWITCHES, jnp.float32, placement)

    assert jax.tree.map(lambda leaf: leaf.sharding, params) == placement


def test_a_mesh_without_the_rules_axis_replicates_everything():
    placement = shardings(CONFIG, mesh_of(3, "data"))

    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(placement))


@pytest.mark.parametrize(
    ("num_devices", "message"),
    [(3, "'vocab' of size 128 .* 3 devices"), (8, "'kv_heads' of size 4 .* 8 devices")],
)
def test_an_axis_the_mesh_cannot_divide_is_refused_by_name_and_size(num_devices, message):
    with pytest.raises(ValueError, match=message):
        shardings(CONFIG, mesh_of(num_devices))


def test_rules_without_an_axis_leave_it_whole():
    rules = {"heads": ("model",), "mlp": ("model",)}

    placement = shardings(CONFIG, mesh_of(8), rules)

    mixer = placement.layers[0].mixer
    assert isinstance(mixer, AttentionParams)
    assert mixer.k.is_fully_replicated
    assert mixer.q.spec == PartitionSpec(None, "model", None, None)


def test_a_vocabulary_for_more_devices_has_rows_of_zeros_at_its_end():
    config = uniform_decoder(**{**SIZES, "vocab_size": 37})
    params = init_params(jax.random.key(0), config)

    fitted = fit_params(params, config.for_devices(4))

    np.testing.assert_array_equal(fitted.embedding, np.pad(params.embedding, ((0, 3), (0, 0))))
