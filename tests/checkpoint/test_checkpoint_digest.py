"""The digest of a checkpoint tells weights apart, and nothing else."""

from __future__ import annotations

import shutil

import pytest

from jaxinfer.checkpoint import Checkpoint


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "x.safetensors").write_bytes(bytes(1000))
    (folder / "y.safetensors").write_bytes(b"1" * 1000)
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
