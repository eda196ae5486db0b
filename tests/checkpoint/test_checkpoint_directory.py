"""A checkpoint is found, its config and end tokens are read, and what is wrong with it is said."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from jaxinfer.checkpoint import (
    Checkpoint,
    abstract_checkpoint,
    load_checkpoint,
    load_params,
    open_checkpoint,
    read_config,
    resolve_checkpoint,
)
from jaxinfer.checkpoint.huggingface import read_headers
from jaxinfer.checkpoint.safetensors_file import read_header
from tests.checkpoint.renamed import rewrite
from tests.oracles import save_random_checkpoint

ROOT = Path(__file__).parents[2]


def write(path, **files) -> None:
    for name, content in files.items():
        (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_existing_directory_is_its_own_checkpoint(tmp_path):
    assert resolve_checkpoint(tmp_path) == tmp_path
    assert resolve_checkpoint(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("files", "way_out"),
    [
        (
            {"adapter_config": {"base_model_name_or_path": "a/b"}},
            "it is an adapter: .* says 'a/b'.*load_adapter or --ad",
        ),
        ({"adapter_config": {}}, "it is an adapter: .* says None"),
        ({"adapter_config": {"base_model_name_or_path": [3]}}, "it is an adapter"),
        ({"params": {"dim": 8}}, "it has params.json in Mistral's own layout"),
        ({"params": {}, "consolidated": "", "tekken": {}}, "it has params.json and consolidated.safetensors in"),
        ({"one.gguf": "", "two.gguf": ""}, "give one of its files: one.gguf, two.gguf"),
        ({}, "give the directory of a complete Hugging Face checkpoint, or a GGUF file"),
    ],
    ids=str,
)
def test_a_folder_without_config_names_the_files_that_are_there_and_the_way_out(tmp_path, files, way_out):
    write(tmp_path, **{name: content for name, content in files.items() if "gguf" not in name and content != ""})
    for name, content in files.items():
        if content == "":
            (tmp_path / (name if "gguf" in name else f"{name}.safetensors")).touch()

    with pytest.raises(ValueError, match=f"has no config.json; {way_out}"):
        open_checkpoint(tmp_path).config  # noqa: B018


@pytest.mark.parametrize("others", [(), ("mmproj-F16.gguf",), ("README.md", "params.json")], ids=str)
def test_a_folder_with_one_gguf_and_no_config_is_that_file(tmp_path, others):
    for name in ("model-Q8_0.gguf", *others):
        (tmp_path / name).touch()

    assert open_checkpoint(tmp_path).path == tmp_path / "model-Q8_0.gguf"


def test_a_repository_of_which_one_gguf_was_downloaded_is_not_that_file(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))

    assert open_checkpoint("owner/name").path == tmp_path


def test_a_checkpoint_beside_a_gguf_stays_the_checkpoint(tmp_path):
    write(tmp_path, config={})
    (tmp_path / "model.gguf").touch()

    assert open_checkpoint(tmp_path).path == tmp_path


def test_weights_of_one_file_with_another_name_are_named(tmp_path):
    (tmp_path / "gptq_model-4bit-128g.safetensors").touch()

    with pytest.raises(ValueError, match="if gptq_model-4bit-128g.safetensors has its weights, rename it to model.saf"):
        read_headers(tmp_path)


LEFT_OVER = "model.layers.1.mlp.experts.3.up_proj.weight"


def without(path, names, more=()):
    """Leaves tensors out of the index, after further ones were added to a file."""
    file = sorted(path.glob("*.safetensors"))[0]
    tensors = load_file(file) | {name: torch.zeros(8, 64) for name in more}
    save_file(tensors, file)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name not in names}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.fixture
def sharded(tmp_path):
    return rewrite(save_random_checkpoint(tmp_path / "model", "llama"), lambda tensors: tensors, num_files=2)


@pytest.mark.parametrize(
    "more",
    [[LEFT_OVER], [LEFT_OVER, f"{LEFT_OVER}_scale_inv"], ["model.layers.9.mlp.up_proj.weight"], ["lm_head.qweight"]],
)
def test_a_tensor_that_the_index_leaves_out_is_none_of_the_model(sharded, more):
    config = read_config(sharded)
    expected = load_params(sharded, config, "float32")

    without(sharded, [], more)

    assert Checkpoint(sharded).config == config
    found = Checkpoint(sharded).load_params(config, "float32")
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(expected)))


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_tensor_that_the_model_lacks_is_read_though_the_index_leaves_it_out(sharded, name):
    config = read_config(sharded)
    expected = load_params(sharded, config, "float32")

    without(sharded, [name])

    found = Checkpoint(sharded).load_params(config, "float32")
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(expected)))


def test_the_unembedding_of_another_model_does_not_untie_one(tmp_path):
    tied = save_random_checkpoint(tmp_path / "model", "llama", tie_word_embeddings=True)
    path = rewrite(tied, lambda tensors: tensors, num_files=2)

    without(path, [], ["lm_head.weight"])

    assert read_config(path).has_tied_embeddings


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


@pytest.mark.parametrize("path_or_id", ["someone/no-such-model", "not an id"])
def test_what_is_neither_local_nor_on_the_hub_is_refused(monkeypatch, path_or_id):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The variable is read when huggingface_hub is imported, which has happened by now.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="neither a local directory nor reachable on the Hugging Face Hub") as refusal:
        resolve_checkpoint(path_or_id)
    assert repr(path_or_id) in str(refusal.value)
    assert "give the path of an existing directory" in str(refusal.value)


@pytest.mark.parametrize("path", ["/no/such/directory", "./model", "~/no/such/model"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(monkeypatch, path):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("looked for it"))
    with pytest.raises(ValueError, match=f"checkpoint '{path}' does not exist; give the path of a folder"):
        resolve_checkpoint(path)


def test_a_hub_id_may_name_a_revision(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.update(k, id=a[0]) or str(tmp_path))
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *a, **k: asked.update(k, file=a) or str(tmp_path / "model.gguf")
    )
    assert resolve_checkpoint("someone/model@refs/pr/3") == tmp_path
    assert (asked["id"], asked["revision"]) == ("someone/model", "refs/pr/3")
    resolve_checkpoint("someone/model/q4.gguf@v1")
    assert (asked["file"], asked["revision"]) == (("someone/model", "q4.gguf"), "v1")
    resolve_checkpoint("someone/model")
    assert asked["revision"] is None


@pytest.mark.parametrize(
    ("name", "file", "revision"),
    [
        ("own/name@v1/q4.gguf", "q4.gguf", "v1"),
        ("own/name@v1/folder/q4.gguf", "folder/q4.gguf", "v1"),
        ("own/name@refs/pr/3/q4.gguf", "q4.gguf", "refs/pr/3"),
        ("own/name/q4.gguf@refs/pr/3", "q4.gguf", "refs/pr/3"),
    ],
)
def test_a_revision_may_stand_before_a_gguf_file_or_behind_it(name, file, revision, monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("fetched the repository"))
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *a, **k: asked.update(k, file=a) or str(tmp_path / "q4.gguf")
    )

    assert resolve_checkpoint(name) == tmp_path / "q4.gguf"

    assert asked == {"file": ("own/name", file), "revision": revision}


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
