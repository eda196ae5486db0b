"""A tokenizer of vocab.json and merges.txt has the ids of the one that transformers builds of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.text.tokenizer import Tokenizer

TEXT = (
    "def add(a, b):\n    return a + b<|im_end|> I'LL don't 12345 na\u00efve caf\u00e9 e\u0301 \u4e2d\u6587"
    " \U0001f600\n\n \t<|endoftext|> end  "
)


def write(folder: Path, stated: dict[str, Any] | None = None) -> Path:
    """Writes the bundled vocabulary and its merges, and tokenizer_config.json beside them."""
    model = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())["model"]
    lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    if stated is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder


ADDED = {"500000": {"content": "<|im_end|>", "special": True}}


@pytest.mark.parametrize(
    "stated",
    [
        {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": ADDED, "eos_token": "<|im_end|>"},
        {"tokenizer_class": "Qwen2TokenizerFast", "eos_token": "<|im_end|>"},
        {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"},
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
    ],
    ids=str,
)
def test_ids_are_those_of_transformers(tmp_path, stated):
    folder = write(tmp_path, stated)
    expected = transformers.AutoTokenizer.from_pretrained(folder)

    tokenizer = Tokenizer.from_path(folder)

    assert tokenizer is not None
    ids = tokenizer.encode(TEXT)
    assert ids == expected.encode(TEXT)
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected.decode(ids)
    assert tokenizer.is_byte_level


def test_without_a_class_the_model_decides(tmp_path):
    named, own = tmp_path / "named", tmp_path / "own"
    for folder in (named, own):
        folder.mkdir()
    (own / "config.json").write_text(json.dumps({"model_type": "qwen3"}))

    tokenizers = [
        Tokenizer.from_path(folder)
        for folder in (write(named, {"tokenizer_class": "Qwen2Tokenizer"}), write(own, {"eos_token": "<|im_end|>"}))
    ]

    ids = [tokenizer.encode(TEXT.replace("<|im_end|>", "")) for tokenizer in tokenizers if tokenizer is not None]
    assert len(ids) == 2
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("stated", "changes", "message"),
    [
        ({"tokenizer_class": "GPT2Tokenizer"}, {"vocab.json": "[]"}, "vocab.json and merges.txt in .* are damaged"),
        ({"tokenizer_class": "GPT2Tokenizer"}, {"vocab.json": "{"}, "vocab.json and merges.txt in .* are damaged"),
        (
            {"tokenizer_class": "GPT2Tokenizer"},
            {"merges.txt": "zz qq\n"},
            "vocab.json and merges.txt in .* are damaged",
        ),
        ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": "yes"}, {}, "add_prefix_space='yes' in"),
    ],
    ids=str,
)
def test_files_that_cannot_be_read_are_refused_with_the_way_out(tmp_path, stated, changes, message):
    folder = write(tmp_path, stated)
    for name, content in changes.items():
        (folder / name).write_text(content)

    with pytest.raises(ValueError, match=message) as error:
        Tokenizer.from_path(folder)

    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"tokenizer_class": "RobertaTokenizer"}, "not 'RobertaTokenizer'; AutoTokenizer.from_pretrained("),
        ({"tokenizer_class": ["GPT2Tokenizer"]}, "not ['GPT2Tokenizer']; AutoTokenizer.from_pretrained("),
        (None, "not None; AutoTokenizer.from_pretrained("),
    ],
    ids=str,
)
def test_files_of_another_class_are_no_tokenizer_and_a_warning_has_the_way_out(tmp_path, caplog, stated, named):
    assert Tokenizer.from_path(write(tmp_path, stated)) is None

    (record,) = caplog.records
    assert str(tmp_path) in record.getMessage()
    assert named in record.getMessage()


def test_a_tokenizer_in_the_layout_of_mistral_alone_is_none_and_a_warning_has_the_way_out(tmp_path, caplog):
    (tmp_path / "tekken.json").write_text("{}")

    assert Tokenizer.from_path(tmp_path) is None
    (record,) = caplog.records
    assert "tekken.json" in record.getMessage()
    assert "AutoTokenizer.from_pretrained(" in record.getMessage()


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_one_of_both_files_is_no_tokenizer(tmp_path, name):
    folder = write(tmp_path, {"tokenizer_class": "GPT2Tokenizer"})
    (folder / name).unlink()

    assert Tokenizer.from_path(folder) is None
