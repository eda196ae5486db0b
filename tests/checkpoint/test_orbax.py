"""What is saved with Orbax is restored bit for bit, on any mesh, with its config."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint import load_params, read_config
from jaxinfer.checkpoint.orbax import read_saved_config, restore_params, save_params
from jaxinfer.model.components.rope import RopeScaling
from jaxinfer.model.config import uniform_decoder
from jaxinfer.model.layer_parts import MIXERS
from jaxinfer.model.params import abstract_params, shardings
from tests.model.components.recurrent.test_states import MODEL
from tests.model.components.test_latent_attention import MODEL as LATENT_MODEL
from tests.on_devices import with_devices
from tests.oracles import save_random_checkpoint
from tests.replay import lively_params

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_layers": 3,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "max_position": 32,
    "rope_scaling": RopeScaling(kind="yarn", factor=2.0, original_max_position=16, attention_factor=1.1),
    "has_tied_embeddings": True,
    "has_qk_norm": True,
    "layer_groups": (1, 2),
}
CONFIG = uniform_decoder(**SIZES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The path of a checkpoint, and the parameters that are in it."""
    path = tmp_path_factory.mktemp("orbax") / "checkpoint"
    generator = np.random.default_rng(0)
    params = jax.tree.map(
        lambda spec: jnp.asarray(generator.normal(size=spec.shape), spec.dtype),
        abstract_params(CONFIG, jnp.bfloat16),
    )
    # A tensor in another dtype than the rest has to keep it.
    params = params.replace(final_norm=params.final_norm.astype(jnp.float32))
    save_params(path, params, CONFIG)
    return path, params


@pytest.fixture(scope="module")
def on_meshes(tmp_path_factory):
    """What mesh_program saw, the checkpoint that it loaded, and the one that it saved from 4 devices."""
    folder = tmp_path_factory.mktemp("meshes")
    checkpoint = save_random_checkpoint(folder / "hf", "qwen2", num_key_value_heads=4)
    program = [sys.executable, "-m", "tests.checkpoint.mesh_program", str(checkpoint), str(folder / "orbax")]
    run = subprocess.run(program, check=False, cwd=ROOT, env=with_devices(4), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout), checkpoint, folder / "orbax"


def assert_same(params, others) -> None:
    assert jax.tree.structure(params) == jax.tree.structure(others)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_restored_parameters_and_config_equal_the_saved(saved):
    path, params = saved
    restored, config = restore_params(path)
    assert config == read_saved_config(path) == CONFIG
    assert_same(restored, params)


def test_parameters_and_config_of_every_mixer_are_restored(tmp_path):
    config = replace(MODEL, groups=(*MODEL.groups, *LATENT_MODEL.groups))
    assert {type(mixer) for mixer in config.mixers} == set(MIXERS)
    params = lively_params(config)
    save_params(tmp_path / "checkpoint", params, config)

    restored, found = restore_params(tmp_path / "checkpoint")

    assert found == config
    assert_same(restored, params)


def test_weights_load_split_over_the_devices_of_a_mesh(on_meshes):
    seen, *_ = on_meshes
    assert seen["loaded"] == {"devices": 4, "shard": [3, 1, 8, 32], "same": True}


@pytest.mark.parametrize("num_devices", [4, 2, 1])
def test_parameters_saved_from_four_devices_are_restored_on_another_mesh(on_meshes, num_devices):
    seen, *_ = on_meshes
    assert seen[str(num_devices)] == {
        "devices": num_devices,
        "shard": [3, 4 // num_devices, 8, 32],
        "same": True,
    }


def test_parameters_saved_from_four_devices_are_restored_where_there_are_fewer(on_meshes):
    _, checkpoint, path = on_meshes
    restored, config = restore_params(path)
    assert config == read_config(checkpoint)
    assert restored.layers[0].mixer.q.sharding.device_set == {jax.devices()[0]}
    assert_same(restored, load_params(checkpoint, config, jnp.bfloat16))


def test_placement_for_other_layer_groups_is_refused(saved):
    path, _ = saved
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    placement = shardings(CONFIG.regrouped((3,)), mesh)
    with pytest.raises(ValueError, match=r"saved with layer_groups=\(1, 2\); build it from read_saved_config"):
        restore_params(path, placement=placement)


def test_existing_checkpoint_is_not_overwritten(saved):
    path, params = saved
    with pytest.raises(ValueError, match="already holds a checkpoint; choose another path"):
        save_params(path, params, CONFIG)


def test_parameters_of_another_config_are_not_saved(saved, tmp_path):
    _, params = saved
    config = uniform_decoder(**dict(SIZES, intermediate_size=17, has_qk_norm=False))
    with pytest.raises(
        ValueError, match=r"differ in \.layers\[0\]\.feed_forward\.down, .*q_norm.*; save them with the config"
    ):
        save_params(tmp_path / "new", params, config)
    assert not (tmp_path / "new").exists()


def test_missing_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a directory; give the path that save_params was given"):
        restore_params(tmp_path / "nowhere")


def test_directory_without_description_is_refused(tmp_path):
    (tmp_path / "params").mkdir()
    with pytest.raises(ValueError, match=r"is not a checkpoint of jaxinfer: it lacks jaxinfer\.json"):
        restore_params(tmp_path)


@pytest.mark.parametrize(("content", "complaint"), [("{", "is not JSON"), ('{"version": 1}', "version 1 but 3")])
def test_damaged_description_is_refused(tmp_path, content, complaint):
    (tmp_path / "params").mkdir()
    (tmp_path / "jaxinfer.json").write_text(content)
    with pytest.raises(ValueError, match=complaint):
        restore_params(tmp_path)
