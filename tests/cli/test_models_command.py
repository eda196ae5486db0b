"""`jaxinfer models` lists published models, and says of one checkpoint if it can be read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from jaxinfer.checkpoint.families import FAMILIES
from jaxinfer.cli import models
from jaxinfer.cli.main import main
from jaxinfer.engine.engine import BUNDLED_MODEL
from tests.gguf.gguf_files import save_gguf

ROOT = Path(__file__).parents[2]
QWEN3 = {
    **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 64},
    **{"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"head_dim": 16, "max_position_embeddings": 40960},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    return tmp_path


@pytest.fixture
def hub(folder, monkeypatch):
    """The Hub, which has this folder as owner/name; its files are those that a test puts into the dict."""
    files: dict[str, int] = {"config.json": 300, "model.safetensors": 2_500_000_000}

    def model_info(self, name, *, revision, files_metadata):
        assert (name, files_metadata) == ("owner/name", True)
        assert revision in (None, "v1")
        siblings = [SimpleNamespace(rfilename=file, size=size) for file, size in files.items()]
        return SimpleNamespace(siblings=siblings)

    def snapshot_download(name, *, allow_patterns, **_):
        assert not any("safetensors" in pattern for pattern in allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return files


def test_the_list_has_every_family_and_fits_a_terminal(capsys):
    assert main(["models"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert sorted(model_type for _, model_types, _ in models.SERIES for model_type in model_types) == sorted(FAMILIES)
    assert all(published for _, _, published in models.SERIES)


def test_a_folder_is_read_with_its_headers(capsys):
    assert main(["models", str(BUNDLED_MODEL)]) == 0

    yes, memory, following = capsys.readouterr().out.splitlines()
    assert yes == "yes: llama, 5.5 M parameters, 11.0 MB as stored, context 2,048 tokens"
    assert memory == "weights in memory: 11.0 MB on a GPU or TPU (2 bytes each), 21.9 MB on a CPU (float32)"
    assert following == f'next: jaxinfer generate "Once upon a time" --model {BUNDLED_MODEL}'


def test_a_gguf_file_is_read(tmp_path, capsys):
    path, _ = save_gguf(tmp_path, "llama", "Q8_0")

    assert main(["models", str(path)]) == 0
    assert capsys.readouterr().out.startswith("yes: llama, ")


def test_a_hub_id_is_answered_from_its_configuration(hub, capsys):
    assert main(["models", "owner/name"]) == 0

    out = capsys.readouterr().out
    assert out.startswith("yes: qwen3, ")
    assert "2.5 GB as stored, context 40,960 tokens" in out
    assert "only its configuration is here" in out


def test_a_model_with_a_chat_template_is_for_chat(hub, folder, capsys):
    (folder / "chat_template.jinja").write_text("{{ messages }}")

    assert main(["models", "owner/name"]) == 0
    assert capsys.readouterr().out.endswith("next: jaxinfer chat owner/name\n")


def test_an_embedding_model_is_for_embed(hub, folder, capsys):
    (folder / "config.json").write_text(json.dumps(QWEN3 | {"architectures": ["Qwen3Model"]}))

    assert main(["models", "owner/name"]) == 0

    out = capsys.readouterr().out
    assert "embeddings alone" in out
    assert out.endswith("next: LLM('owner/name').embed([...]) in Python\n")


def test_a_hub_that_cannot_be_asked_for_sizes_leaves_them_out(hub, monkeypatch, capsys):
    def refuse(self, name, **_):
        raise huggingface_hub.errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)

    assert main(["models", "owner/name"]) == 0
    assert "as stored" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"pytorch_model.bin": 9}, "owner/name has no weights in safetensors or GGUF"),
        ({"model-q8_0.gguf": 9}, "give one of them, such as owner/name/model-q8_0.gguf"),
        (
            {"mmproj-f16.gguf": 9, "q4.gguf": 9},
            "owner/name has its weights in GGUF files; give one of them, such as owner/name/q4.gguf",
        ),
        ({"mmproj-f16.gguf": 9}, "owner/name has no weights in safetensors or GGUF"),
        ({"consolidated.safetensors": 9}, "owner/name has no weights in safetensors or GGUF"),
    ],
)
def test_a_repository_without_weights_that_are_read_gets_a_no(hub, files, message, capsys):
    hub.clear()
    hub |= {"config.json": 300} | files

    assert main(["models", "owner/name"]) == 1

    out = capsys.readouterr().out
    assert out.startswith("no: ")
    assert message in out


def test_a_gguf_file_of_a_revision_is_named_as_it_can_be_given(hub, capsys):
    hub.clear()
    hub |= {"q4.gguf": 9}

    assert main(["models", "owner/name@v1"]) == 1
    assert "such as owner/name@v1/q4.gguf\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["owner/name/q4.gguf", "owner/name/q4.gguf@v1", "owner/name@v1/q4.gguf"])
def test_a_gguf_file_on_the_hub_is_read_only_if_it_is_here(name, tmp_path, monkeypatch, capsys):
    path, _ = save_gguf(tmp_path, "llama", "Q8_0")
    found: dict[tuple[str, ...], str] = {}
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("downloaded the weights"))
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda repository, file, *, revision: found.get((repository, file, revision)),
    )

    assert main(["models", name]) == 2
    message = capsys.readouterr().err
    assert "`hf download owner/name q4.gguf" in message
    assert ("--revision v1" in message) == ("v1" in name)
    assert main(["plan", name, "--device", "H100x1"]) == 2
    assert "download it first" in capsys.readouterr().err

    found["owner/name", "q4.gguf", "v1" if "v1" in name else None] = str(path)  # type: ignore[index]
    assert main(["models", name]) == 0
    assert "only its configuration" not in capsys.readouterr().out


@pytest.mark.parametrize("has_index", [True, False])
def test_an_interrupted_download_counts_as_its_configuration(has_index, hub, folder, capsys):
    (folder / "model-00002-of-00002.safetensors").touch()
    if has_index:
        files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    assert main(["models", "owner/name"]) == 0

    out = capsys.readouterr().out
    assert "2.5 GB as stored" in out
    assert "only its configuration is here" in out


def test_packed_weights_that_cannot_be_read_get_a_no_from_the_configuration(hub, folder, capsys):
    packing = {"quant_method": "awq", "version": "gemv", "bits": 4, "group_size": 64, "zero_point": True}
    (folder / "config.json").write_text(json.dumps(QWEN3 | {"quantization_config": packing}))

    assert main(["models", "owner/name"]) == 1

    out = capsys.readouterr().out
    assert out.startswith("no: ")
    assert "gemv" in out

    (folder / "config.json").write_text(json.dumps(QWEN3 | {"quantization_config": packing | {"version": "gemm"}}))
    assert main(["models", "owner/name"]) == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "acme"}, "model_type='acme' is not supported; use a checkpoint of one of these families"),
        ({}, "has neither model.safetensors nor model.safetensors.index.json"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method is none of"),
    ],
)
def test_a_folder_that_cannot_be_read_gets_a_no_with_the_reason(folder, changed, message, capsys):
    (folder / "config.json").write_text(json.dumps(QWEN3 | changed))

    assert main(["models", str(folder)]) == 1

    out = capsys.readouterr().out
    assert out.startswith("no: ")
    assert message in out


def test_a_built_in_shape_leads_to_a_plan(capsys):
    assert main(["models", "Qwen3-8B"]) == 0

    yes, following = capsys.readouterr().out.splitlines()
    assert yes == "yes: qwen3, 8.2 B parameters, context 40,960 tokens; a built-in shape, for plans"
    assert following == "next: jaxinfer plan Qwen3-8B --device L4"


@pytest.mark.parametrize("name", ["/no/such/folder", "owner/name/model.gguf"])
def test_a_model_that_is_not_here_is_a_mistake(name, capsys):
    assert main(["models", name]) == 2
    assert capsys.readouterr().out == ""


def test_the_readme_names_every_family():
    readme = (ROOT / "README.md").read_text()
    assert [model_type for model_type in FAMILIES if f"`{model_type}`" not in readme] == []
