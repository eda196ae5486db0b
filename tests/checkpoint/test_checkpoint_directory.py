"""A checkpoint is found, its config and end tokens are read, and what is wrong with it is said."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from jaxinfer.checkpoint import (
    Checkpoint,
    abstract_checkpoint,
    load_checkpoint,
    open_checkpoint,
    read_config,
    resolve_checkpoint,
)
from jaxinfer.checkpoint.safetensors_file import read_header
from tests.oracles import save_random_checkpoint

ROOT = Path(__file__).parents[2]


def write(path, **files) -> None:
    for name, content in files.items():
        (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_existing_directory_is_its_own_checkpoint(tmp_path):
    assert resolve_checkpoint(tmp_path) == tmp_path
    assert resolve_checkpoint(str(tmp_path)) == tmp_path


def test_a_configuration_has_an_end(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)

    with pytest.raises(ValueError, match="config.json has more than 67,108,864 bytes; give the checkpoint's own"):
        read_config(tmp_path)


def test_a_header_has_an_end(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((2**39).to_bytes(8, "little"))
        file.truncate(2**40)

    with pytest.raises(ValueError, match="is not a complete safetensors file: its header cannot be read"):
        read_header(tmp_path / "model.safetensors")


def test_a_file_is_no_checkpoint(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()

    with pytest.raises(ValueError, match=r"model.safetensors' is a file; give the directory that it is in"):
        resolve_checkpoint(file)


@pytest.mark.parametrize("path_or_id", ["someone/no-such-model", "/no/such/directory", "not an id", "./model"])
def test_what_is_neither_local_nor_on_the_hub_is_refused(monkeypatch, path_or_id):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The variable is read when huggingface_hub is imported, which has happened by now.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="neither a local directory nor reachable on the Hugging Face Hub") as refusal:
        resolve_checkpoint(path_or_id)
    assert repr(path_or_id) in str(refusal.value)
    assert "give the path of an existing directory" in str(refusal.value)


def test_hub_id_is_downloaded_without_what_is_not_needed(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.update(k, id=a[0]) or str(tmp_path))
    assert resolve_checkpoint("someone/model") == tmp_path
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
        "merges.txt",
        "pytorch_model.bin",
    ]
    files += ["original/params.json", "consolidated.safetensors", "chat_template.jinja", "README.md"]
    chosen = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert asked["id"] == "someone/model"
    assert list(chosen) == [*files[:4], "chat_template.jinja"]


def test_for_the_shapes_of_a_hub_checkpoint_its_config_alone_is_downloaded(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **k: asked.update(k) or str(ROOT / "jaxinfer/assets/tiny")
    )
    params, config = abstract_checkpoint("someone/model", "float32")
    assert params.embedding.shape[0] == config.vocab_size
    assert asked["allow_patterns"] == ["config.json"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "has no config.json"),
        ("{", "is not JSON"),
        ([1], "holds a list"),
        ({"model_type": "bert"}, "bert"),
    ],
)
def test_unreadable_config_is_refused(tmp_path, content, complaint):
    if content is not None:
        write(tmp_path, config=content)
    with pytest.raises(ValueError, match=complaint):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("scans", "cuts", "groups"),
    [
        *((True, (), (3,)), (True, (2,), (2, 1)), (True, (1, 2, 3), (1, 1, 1)), (True, (3, 0), (3,))),
        *((False, (), (1, 1, 1)), (False, (2,), (1, 1, 1))),
    ],
)
def test_layers_are_loaded_in_the_groups_that_suit_the_device(tmp_path, monkeypatch, scans, cuts, groups):
    monkeypatch.setattr("jaxinfer.checkpoint.checkpoint.scans_layers", lambda: scans)
    path = save_random_checkpoint(tmp_path, "llama")

    params, config = load_checkpoint(path, layer_cuts=cuts)

    assert config.layer_groups == groups
    assert tuple(layers.mixer.q.shape[0] for layers in params.layers) == groups


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_config_of_a_saved_checkpoint_is_read(tmp_path, family):
    path = save_random_checkpoint(tmp_path, family, num_hidden_layers=1)
    assert read_config(path).num_layers == 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [5, 6]}, "config": {"eos_token_id": 2}}, (5, 6)),
        ({"generation_config": {"eos_token_id": 0}, "config": {"eos_token_id": 2}}, (0,)),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 2}}, (2,)),
        ({"generation_config": {}, "config": {"eos_token_id": [2, 3]}}, (2, 3)),
        ({"config": {"eos_token_id": 2}}, (2,)),
        ({"config": {}}, ()),
    ],
)
def test_generation_config_decides_the_end_tokens_before_config(tmp_path, files, expected):
    write(tmp_path, **files)
    assert Checkpoint(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("value", ["</s>", -1, [1, None], True])
def test_end_token_that_is_no_id_is_refused(tmp_path, value):
    write(tmp_path, config={"eos_token_id": value})
    with pytest.raises(ValueError, match=r"eos_token_id=.*config\.json"):
        _ = Checkpoint(tmp_path).eos_token_ids


def test_a_checkpoint_reads_its_configuration_and_its_headers_once(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(save_random_checkpoint(tmp_path, "llama", shard_size="20KB"))
    shards = [file.name for file in checkpoint.path.glob("*.safetensors")]
    opened = []
    for module, name in (("checkpoint", "read_json"), ("huggingface", "read_json"), ("huggingface", "read_header")):
        read = getattr(importlib.import_module(f"jaxinfer.checkpoint.{module}"), name)
        counted = lambda file, read=read: opened.append(file.name) or read(file)  # noqa: E731
        monkeypatch.setattr(f"jaxinfer.checkpoint.{module}.{name}", counted)

    for _ in range(2):
        checkpoint.abstract("float32", quantization="int8")
        _, config = checkpoint.load("float32", quantization="int8")
        checkpoint.plan(config)
        checkpoint.file_sizes()

    assert sorted(opened) == sorted(["config.json", "model.safetensors.index.json", *shards])
    checkpoint.forget()
    checkpoint.plan(config)
    assert len(opened) == 2 * (2 + len(shards))


def test_a_file_that_changes_after_its_header_was_read_is_refused(tmp_path):
    checkpoint = open_checkpoint(save_random_checkpoint(tmp_path / "one", "llama"))
    assert checkpoint.config.num_layers == 3
    other = save_random_checkpoint(tmp_path / "other", "llama", seed=1)
    (other / "model.safetensors").replace(tmp_path / "one" / "model.safetensors")

    with pytest.raises(ValueError, match="model.safetensors has changed since it was opened; load the checkpoint"):
        checkpoint.load("float32")


def test_a_quantization_that_is_unknown_is_refused(tmp_path):
    checkpoint = open_checkpoint(save_random_checkpoint(tmp_path, "llama"))
    for use in (checkpoint.load, checkpoint.abstract):
        with pytest.raises(ValueError, match="quantization='int3'"):
            use("float32", quantization="int3")


def test_loading_imports_neither_torch_nor_the_hub(tmp_path):
    path = save_random_checkpoint(tmp_path, "llama")
    program = (
        "import sys; from jaxinfer.checkpoint import load_checkpoint; import jaxinfer.checkpoint.orbax;"
        " load_checkpoint(sys.argv[1]);"
        " print([name for name in ('torch', 'transformers', 'huggingface_hub', 'orbax.checkpoint')"
        " if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
