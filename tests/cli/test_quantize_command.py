"""`jaxinfer quantize --method gptq`: the texts that it calibrates on, and the options that it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import jaxinfer
from jaxinfer.cli.main import main
from jaxinfer.text.tokenizer import Tokenizer
from tests.checkpoint.renamed import read_tensors
from tests.oracles import save_random_checkpoint

BUNDLED = Path(jaxinfer.__file__).parent / "assets" / "tiny"
TEXT = "def add(a, b):\n    return a + b\n" * 40


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "model"
    save_random_checkpoint(path, "llama", vocab_size=4096, num_hidden_layers=1)
    shutil.copyfile(BUNDLED / "tokenizer.json", path / "tokenizer.json")
    return path


@pytest.fixture
def calibrated(monkeypatch):
    """Returns the texts that `write_quantized` is given, which writes nothing."""
    given = []
    monkeypatch.setattr(
        "jaxinfer.checkpoint.quantized_copy.write_quantized", lambda *_, **options: given.append(options["calibration"])
    )
    return given


def run(source, target, *options):
    return main(["quantize", str(source), str(target), "--quiet", *options])


def test_texts_of_a_file_are_windows_of_its_tokens(source, tmp_path, calibrated):
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": TEXT}) + "\n" for _ in range(2)))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    tokenizer = Tokenizer.from_path(source)
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXT)
    options = ["--method", "gptq", "--text-length", "32"]

    run(source, tmp_path / "copy", *options, "--calibration", str(text))
    run(source, tmp_path / "copy", *options, "--calibration", str(lines), "--num-texts", "3", "--seed", "1")

    whole, chosen = calibrated
    assert whole.reshape(-1).tolist() == tokens[: whole.size]
    assert len(whole) == len(tokens) // 32
    windows = np.array([*tokens, *tokens])[: len(tokens) * 2 // 32 * 32].reshape(-1, 32).tolist()
    assert chosen.shape == (3, 32)
    assert all(window in windows for window in chosen.tolist())


def test_without_a_file_the_model_writes_the_texts_and_a_second_run_finds_them(source, tmp_path, monkeypatch):
    options = ["--method", "gptq", "--num-texts", "4", "--text-length", "24"]

    assert run(source, tmp_path / "one", *options) == 0
    assert run(source, tmp_path / "two", *options, "--seed", "5") == 0
    written = {file: file.stat().st_mtime_ns for file in (tmp_path / "one").rglob("*.safetensors")}
    monkeypatch.setattr(jaxinfer, "LLM", None)
    assert run(source, tmp_path / "one", *options) == 0

    one, two = (read_tensors(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert any((one[name] != two[name]).any() for name in one if name.endswith("packed"))
    assert written == {file: file.stat().st_mtime_ns for file in (tmp_path / "one").rglob("*.safetensors")}
    assert [file.suffix for file in (tmp_path / "one").glob(".*/*")] == [".npy"]


def test_texts_that_end_where_they_begin_are_refused(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: [5, 6, 7])

    assert run(source, tmp_path / "copy", "--method", "gptq", "--text-length", "3") == 2

    assert "text_length=3 is not allowed: text_length must be an integer from 4" in capsys.readouterr().err


def test_few_bits_without_gptq_are_refused(source, tmp_path, capsys):
    assert run(source, tmp_path / "copy", "--scheme", "int3") == 2

    assert "scheme='int3' needs calibration texts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--calibration", "FILE"], "--calibration is for --method gptq"),
        (["--num-texts", "4"], "--num-texts is for --method gptq"),
        (["--method", "gptq", "--calibration", "absent", "--text-length", "8"], "absent cannot be read"),
        (["--method", "gptq", "--calibration", "FILE", "--text-length", "8"], "has a line without a text"),
        (
            ["--method", "gptq", "--calibration", "TEXT", "--text-length", "200"],
            "has 2 tokens, and --text-length is 200",
        ),
        (["--method", "gptq", "--text-length", "257"], "text_length=257 is not allowed"),
        (["--method", "gptq", "--num-texts", "0"], "num_texts=0 is not allowed"),
        (["--method", "gptq", "--num-texts", "16384", "--text-length", "256"], "at most 4,096 for texts of 256 tokens"),
    ],
)
def test_options_that_do_not_fit_are_refused(source, tmp_path, calibrated, capsys, options, message):
    (tmp_path / "texts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "text.txt").write_text("a")
    files = {"FILE": str(tmp_path / "texts.jsonl"), "TEXT": str(tmp_path / "text.txt")}

    assert run(source, tmp_path / "copy", *(files.get(option, option) for option in options)) == 2

    assert message in capsys.readouterr().err
    assert calibrated == []
