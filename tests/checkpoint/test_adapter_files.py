"""Adapters in PEFT's layout: what they add to which weights, and every file that is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint import Checkpoint, load_params, read_config
from jaxinfer.checkpoint.adapters import read_adapter
from jaxinfer.model.adapted_params import Adapter, adapted_weights
from jaxinfer.model.components.layers import TensorSpec
from tests.adapters import linear_modules, merge, save_adapter
from tests.hostile.mutations import MUTATIONS, file_limits, mutated_json, mutated_safetensors
from tests.oracles import save_random_checkpoint

MAX_RANK = 8
Q = "model.layers.0.self_attn.q_proj"
# Of each family, the modules of layers that no adapter may change; * stands for a number.
REFUSED: dict[str, set[str]] = {
    "llama": set(),
    "phi3": set(),
    "glm4": set(),
    "gemma3_text": set(),
    "olmo2": set(),
    "qwen2_moe": {
        *(f"model.layers.*.mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")),
        *("model.layers.*.mlp.gate", "model.layers.*.mlp.shared_expert_gate"),
    },
    "deepseek_v3": {
        *(f"model.layers.*.mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")),
        *("model.layers.*.mlp.gate", "model.layers.*.self_attn.kv_b_proj"),
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_random_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory):
    return save_adapter(tmp_path_factory.mktemp("adapter"), checkpoint)


def read(adapter: Path, checkpoint: Path, **options: Any) -> Adapter:
    options = {"max_rank": MAX_RANK, "dtype": np.float32, **options}
    return read_adapter(adapter, Checkpoint(checkpoint), read_config(checkpoint), **options)


def changed_weights(checkpoint: Path, adapter: Adapter) -> list[np.ndarray]:
    """The weights that adapters may change, in the order of `Params`, with the adapter's change."""
    config = read_config(checkpoint)
    params, specs = load_params(checkpoint, config, np.float32), adapted_weights(config)

    def add(w: jax.Array, spec: TensorSpec | None, pair: Any) -> Any:
        if spec is None:
            return None
        down, up, gain = pair
        change = np.einsum("nir,nrf->nfi", down[:, : w.shape[-1]].astype(float), up[:, : down.shape[2]])
        return np.asarray(w) * (1 + gain.reshape(*w.shape[:-1], 1)) + change.reshape(w.shape)

    changed = jax.tree.map(add, params, specs, adapter.tensors, is_leaf=lambda node: node is None)
    return jax.tree.leaves(changed)


@pytest.mark.parametrize("family", REFUSED)
def test_every_matrix_of_a_layer_is_changed_as_by_merging_or_refused_by_name(family, tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "model", family, num_hidden_layers=2)
    modules, refused = linear_modules(checkpoint), dict[str, str]()
    for module in modules:
        try:
            read(save_adapter(tmp_path / module, checkpoint, modules=[module]), checkpoint)
        except ValueError as error:
            refused[module] = str(error)
    taken = [module for module in modules if module not in refused]
    folder = save_adapter(tmp_path / "all", checkpoint, modules=taken, rank=3)

    changed = changed_weights(checkpoint, read(folder, checkpoint))

    assert {re.sub(r"\d+", "*", module) for module in refused} == REFUSED[family]
    assert all(f"{m} is no weight that an adapter may change; those are model" in text for m, text in refused.items())
    zeros = save_adapter(tmp_path / "none", checkpoint, modules=taken[:1], lora_alpha=0)
    expected = changed_weights(merge(checkpoint, folder, tmp_path / "merged"), read(zeros, checkpoint))
    for ours, theirs in zip(changed, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"use_dora": True},
        {"use_dora": True, "use_rslora": True, "alpha_pattern": {"k_proj": 2}},
        {"lora_alpha": 3.5},
        {"alpha_pattern": {"k_proj": 2, "layers.1.mlp.up_proj": 30}},
        {"rank_pattern": {"q_proj": 4, "^model.layers.2.mlp.up_proj": 4}, "init_lora_weights": "gaussian"},
        {"lora_dropout": 0.5, "modules_to_save": [], "use_dora": False, "bias": "none", "layers_to_transform": [0]},
    ],
    ids=str,
)
def test_settings_scale_the_change_as_peft_does(settings, checkpoint, tmp_path):
    folder = save_adapter(tmp_path / "adapter", checkpoint, rank=4, **settings)

    changed = changed_weights(checkpoint, read(folder, checkpoint))

    zeros = save_adapter(tmp_path / "none", checkpoint, lora_alpha=0)
    expected = changed_weights(merge(checkpoint, folder, tmp_path / "merged"), read(zeros, checkpoint))
    for ours, theirs in zip(changed, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_stored_numbers_of_other_types_are_read_exactly(dtype, checkpoint, tmp_path):
    folder = save_adapter(tmp_path, checkpoint, modules=[Q], dtype=dtype, lora_alpha=4)
    stored = load_file(folder / "adapter_model.safetensors")[f"base_model.model.{Q}.lora_A.weight"]

    down, *_ = read(folder, checkpoint).tensors.layers[0].mixer.q

    np.testing.assert_array_equal(down[0, : stored.shape[1], :4], stored.T.astype(np.float32))


def test_names_may_lack_the_prefix_of_the_backbone(checkpoint, tmp_path):
    whole = save_adapter(tmp_path / "whole", checkpoint, alpha_pattern={"^model.layers.1.self_attn.q_proj": 3})
    own = save_adapter(tmp_path / "own", checkpoint, alpha_pattern={"^layers.1.self_attn.q_proj": 3})
    tensors = load_file(whole / "adapter_model.safetensors")
    save_file(
        {name.replace("model.model.", "model."): w for name, w in tensors.items()}, own / "adapter_model.safetensors"
    )

    ours, theirs = (jax.tree.leaves(read(folder, checkpoint).tensors) for folder in (own, whole))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


WITH_IMAGES = {
    "gemma3_text": "gemma3",
    "mistral": "mistral3",
    "qwen3_5_text": "qwen3_5",
    "qwen3_vl_text": "qwen3_vl",
}
# What stands for "model." in the names of a text model that lies in a model with images.
NAMES = ["language_model.model.", "model.language_model.", "language_model."]


@pytest.fixture(scope="module", params=WITH_IMAGES)
def pair(request, tmp_path_factory):
    """A text model, the same inside a checkpoint with images, and an adapter of the text model."""
    folder = tmp_path_factory.mktemp(request.param)
    text = save_random_checkpoint(folder / "text", request.param)
    whole = Path(shutil.copytree(text, folder / "whole"))
    settings = json.loads((text / "config.json").read_text())
    kind = WITH_IMAGES[request.param]
    name = NAMES[1] if kind in ("qwen3_5", "qwen3_vl") else NAMES[0]
    tensors = load_file(whole / "model.safetensors")
    save_file({key.replace("model.", name, 1): w for key, w in tensors.items()}, whole / "model.safetensors")
    (whole / "config.json").write_text(json.dumps({"model_type": kind, "text_config": settings}))
    modules = [name for name in linear_modules(text) if name.endswith(("k_proj", "o_proj", "out_proj", "down_proj"))]
    return text, whole, save_adapter(folder / "adapter", text, modules=modules)


def leaves(adapter: Path, checkpoint: Path) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(read(adapter, checkpoint).tensors)]


def renamed(adapter: Path, folder: Path, name: str, more: dict[str, np.ndarray] | None = None) -> Path:
    """Copies an adapter whose modules have another beginning than "model.", and adds tensors."""
    shutil.copytree(adapter, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    own = {key.replace("base_model.model.model.", f"base_model.model.{name}"): w for key, w in tensors.items()}
    save_file(own | (more or {}), folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["model.", *NAMES, ""])
def test_an_adapter_of_a_text_model_is_one_of_the_whole_model_and_the_other_way_about(pair, tmp_path, name):
    text, whole, adapter = pair
    expected, named = leaves(adapter, text), renamed(adapter, tmp_path / "named", name)

    for checkpoint in (text, whole):
        for ours, theirs in zip(leaves(named, checkpoint), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("part", "shapes"),
    [
        ("model.vision_tower.encoder.layers.0.self_attn.q_proj", ((4, 8), (8, 4))),
        ("model.visual.patch_embed.proj", ((4, 3, 2, 2), (8, 4, 1, 1))),
        ("multi_modal_projector.linear_1", ((4, 8), (8, 4))),
        ("model.audio_tower.layers.0.proj", ((4, 8), (8, 4))),
    ],
)
def test_the_part_of_an_adapter_for_images_is_left_out_with_a_warning(pair, tmp_path, caplog, part, shapes):
    text, whole, adapter = pair
    tower = {
        f"base_model.model.{part}.lora_{half}.weight": np.ones(shape, np.float32)
        for half, shape in zip("AB", shapes, strict=True)
    }
    named = renamed(adapter, tmp_path / "named", NAMES[1], tower)
    expected = leaves(adapter, text)

    for checkpoint in (text, whole):
        for ours, theirs in zip(leaves(named, checkpoint), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)

    word = part.removeprefix("model.").partition(".")[0]
    assert [f"in {word}, which no text passes" in record.getMessage() for record in caplog.records] == [True, True]


def test_an_adapter_of_the_part_for_images_alone_is_refused(checkpoint, tmp_path):
    folder = save_adapter(tmp_path, checkpoint, rank=4)
    name = "base_model.model.model.visual.blocks.0.attn.qkv.lora_{}.weight"
    save_file({name.format(half): np.ones((4, 4), np.float32) for half in "AB"}, folder / "adapter_model.safetensors")

    with pytest.raises(ValueError, match=f"^{re.escape(str(folder))}: it changes visual alone"):
        read(folder, checkpoint)


def test_a_digest_is_of_the_contents(checkpoint, adapter, tmp_path):
    digest = read(adapter, checkpoint).digest
    other_folder = save_adapter(tmp_path / "same", checkpoint, base_model_name_or_path="other")

    assert read(other_folder, checkpoint).digest == digest
    assert read(adapter, checkpoint, max_rank=2 * MAX_RANK).digest != digest  # slots that add up in another order
    different: list[dict[str, Any]] = [
        *({"seed": 1}, {"rank": 3}, {"lora_alpha": 17}, {"modules": [Q]}, {"use_dora": True})
    ]
    for i, changes in enumerate(different):
        assert read(save_adapter(tmp_path / str(i), checkpoint, **changes), checkpoint).digest != digest


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, r"peft_type='IA3' is not supported; .* merge_and_unload"),
    ({"peft_type": None}, "peft_type=None"),
    ({"use_dora": "yes"}, "use_dora='yes' is neither true nor false"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
    ({"bias": "lora_only"}, "bias='lora_only' is not supported"),
    ({"lora_bias": True}, "lora_bias=True is not supported"),
    ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters=.* is not supported"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices=.* is not supported"),
    ({"layer_replication": [[0, 2]]}, "layer_replication=.* is not supported"),
    ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens=.* is not supported"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out=True is not supported"),
    ({"a_later_setting": 0.5}, "a_later_setting=0.5 is not supported"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the base weights too; convert"),
    ({"r": 5}, "the tensors of model.layers.0.mlp.down_proj have rank 4, but adapter_config.json states 5"),
    ({"r": 0}, "r has 0, which is no rank"),
    ({"lora_alpha": "x"}, "lora_alpha has 'x', which is no finite number"),
    ({"lora_alpha": float("nan")}, "lora_alpha has nan"),
    ({"lora_alpha": 10**400}, "lora_alpha has 1000"),
    ({"use_rslora": "yes"}, "use_rslora='yes' is neither true nor false"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern=.* is no object"),
    ({"alpha_pattern": {"(a+)+$": 5}}, r"alpha_pattern has the key '\(a\+\)\+\$'; name each module"),
]


@pytest.mark.parametrize(
    ("settings", "message"), SETTINGS, ids=[next(iter(s)) + f"-{i}" for i, (s, _) in enumerate(SETTINGS)]
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(settings, message, checkpoint, tmp_path):
    folder = save_adapter(tmp_path, checkpoint, rank=4, **settings)

    with pytest.raises(ValueError, match=f"^{re.escape(str(folder))}: {message}"):
        read(folder, checkpoint)


A, B = (f"base_model.model.{Q}.lora_{half}.weight" for half in "AB")
ONES = {A: np.ones((4, 32), np.float32), B: np.ones((32, 4), np.float32)}
TENSORS: list[tuple[dict[str, np.ndarray], str]] = [
    ({}, "it has no tensors"),
    ({A: ONES[A]}, f"{Q} has no lora_B; save the adapter again"),
    (
        ONES | {A: np.ones((4, 31), np.float32)},
        r"has A \[4, 31\] and B \[32, 4\], but its weight has the shape \[32, 32\]",
    ),
    (ONES | {B: np.ones((32, 5), np.float32)}, r"has A \[4, 32\] and B \[32, 5\]"),
    (ONES | {A: np.ones((4, 32, 1), np.float32)}, "A and B are matrices"),
    (ONES | {A: np.ones((0, 32), np.float32)}, "A and B are matrices"),
    (ONES | {A: np.ones((4, 32), np.int8)}, "has dtype I8"),
    (ONES | {A: np.full((4, 32), np.nan, np.float32)}, f"{Q} has numbers that are not finite"),
    (ONES | {A: np.full((4, 32), 1e300)}, f"{Q} has numbers that are not finite"),
    (
        ONES | {f"base_model.model.{Q}.lora_magnitude_vector": np.ones(32, np.float32)},
        f"{Q} has a magnitude vector, but adapter_config.json states use_dora=False",
    ),
    (ONES | {f"base_model.model.{Q}.lora_B.bias": np.ones(32, np.float32)}, ".*lora_B.bias is no A or B"),
    (ONES | {"base_model.model.lm_head.weight": np.ones((96, 32), np.float32)}, ".*lm_head.weight is no A or B"),
    ({name.replace(Q, "lm_head"): w for name, w in ONES.items()}, "lm_head is no weight that an adapter may change"),
    ({name.replace("q_proj", "x_proj"): w for name, w in ONES.items()}, ".*x_proj is no weight"),
    ({name.replace("0", "7"): w for name, w in ONES.items()}, ".*layers.7.self_attn.q_proj is no weight"),
]


@pytest.mark.parametrize(("tensors", "message"), TENSORS, ids=range(len(TENSORS)))
def test_tensors_that_do_not_fit_are_refused_by_name(tensors, message, checkpoint, tmp_path):
    folder = save_adapter(tmp_path, checkpoint, rank=4)
    save_file(tensors, folder / "adapter_model.safetensors")

    with pytest.raises(ValueError, match=f"^{re.escape(str(folder))}: .*{message}"):
        read(folder, checkpoint)


def test_a_rank_above_the_limit_is_refused(checkpoint, tmp_path):
    folder = save_adapter(tmp_path, checkpoint, rank=9)

    with pytest.raises(ValueError, match="has rank 9, more than max_adapter_rank=8; raise EngineConfig"):
        read(folder, checkpoint)


def test_numbers_that_half_precision_cannot_hold_are_refused(checkpoint, tmp_path):
    folder = save_adapter(tmp_path, checkpoint, lora_alpha=1e7)

    with pytest.raises(ValueError, match="not finite in float16"):
        read(folder, checkpoint, dtype=np.float16)


def test_a_pickle_is_refused_with_the_command_that_converts_it(checkpoint, tmp_path):
    folder = save_adapter(tmp_path, checkpoint)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")

    with pytest.raises(ValueError, match=r"is a pickle.* safetensors.torch.save_file\(torch.load\("):
        read(folder, checkpoint)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(name, checkpoint, tmp_path):
    folder = save_adapter(tmp_path, checkpoint)
    (folder / name).unlink()

    with pytest.raises(ValueError, match=f"has no {name}; give the folder"):
        read(folder, checkpoint)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_file_is_read_rightly_or_refused(name, checkpoint, tmp_path):
    folder, rng = save_adapter(tmp_path, checkpoint, modules=[Q], rank=2), np.random.default_rng(0)
    file, whole = folder / name, (folder / name).read_bytes()
    shapes, messages = [half.shape for half in jax.tree.leaves(read(folder, checkpoint).tensors)], []
    for _ in range(MUTATIONS):
        is_json = name == "adapter_config.json"
        file.write_bytes(mutated_json(json.loads(whole), rng) if is_json else mutated_safetensors(whole, rng))
        try:
            with file_limits(*folder.iterdir(), *checkpoint.iterdir()):
                adapter = read(folder, checkpoint)
        except ValueError as error:
            messages.append(str(error))
        else:
            assert [half.shape for half in jax.tree.leaves(adapter.tensors)] == shapes
    assert len(messages) > MUTATIONS / 3
    assert all(str(folder) in message for message in messages)


@pytest.mark.parametrize(
    "text", ["[]", "{", "7", '{"peft_type": "LORA", "r": [[[[]]]]}', "[" * 100_000, json.dumps({})]
)
def test_a_configuration_of_another_kind_is_refused(text, checkpoint, tmp_path):
    folder = save_adapter(tmp_path, checkpoint)
    (folder / "adapter_config.json").write_text(text)

    with pytest.raises(ValueError, match=re.escape(str(folder))):
        read(folder, checkpoint)
