"""The digest of a checkpoint tells weights apart, and nothing else."""

from __future__ import annotations

import os
import shutil

import pytest

from jaxinfer.checkpoint import Checkpoint, checkpoint


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "x.safetensors").write_bytes(bytes(1000))
    (folder / "y.safetensors").write_bytes(b"1" * 1000)
    for file in folder.iterdir():
        os.utime(file, (0, 0))  # or a change within the clock's tick would have the same time
    return folder


def test_the_same_weights_have_the_same_digest_wherever_they_lie(folder, tmp_path):
    before = Checkpoint(folder).digest()
    (folder / "README.md").write_text("another word")

    shutil.move(folder, tmp_path / "b")

    assert Checkpoint(tmp_path / "b").digest() == before


CHANGES = {
    "a bit": lambda folder: (folder / "y.safetensors").write_bytes(b"1" * 999 + b"2"),
    "the names": lambda folder: (folder / "x.safetensors").rename(folder / "z.safetensors"),
    "the config": lambda folder: (folder / "config.json").write_text('{"rope_theta": 1}'),
    "one more": lambda folder: (folder / "z.safetensors").write_bytes(b""),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_weights_have_another_digest(folder, change):
    before = Checkpoint(folder).digest()

    change(folder)

    assert Checkpoint(folder).digest() != before


@pytest.fixture
def read(monkeypatch):
    """The names of the files that were read to their end."""
    names, digest = [], checkpoint._digest
    monkeypatch.setattr(checkpoint, "_digest", lambda file: names.append(file.name) or digest(file))
    return names


def test_a_digest_reads_each_file_once_also_after_the_headers_are_freed(folder, read):
    opened = Checkpoint(folder)

    before = opened.digest()
    opened.forget()

    assert opened.digest(["tokenizer.json"]) == before
    assert sorted(read) == ["config.json", "x.safetensors", "y.safetensors"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("a bit", {"y.safetensors"}),
        ("the names", {"z.safetensors"}),
        ("the config", {"config.json"}),
        ("one more", {"z.safetensors"}),
    ],
)
def test_a_changed_file_is_noticed_and_it_alone_is_read_again(folder, read, change, expected):
    opened = Checkpoint(folder)
    before = opened.digest()
    read.clear()

    CHANGES[change](folder)

    assert opened.digest() == Checkpoint(folder).digest() != before
    assert set(read[: len(expected)]) == expected
