"""The folder of files: what is not the server's stays as it is, nothing of its own is lost, and damage is noticed."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.openai.errors import RefusedError
from jaxinfer.serve.batches.file_store import FileStore, Objects

CONTENT = b"a result that took days\n"


def opened(folder: Path) -> FileStore:
    return FileStore(folder, max_file_bytes=2**20)


def stored(folder: Path) -> Path:
    """The path, without its end, of one file that a server has stored."""
    store = opened(folder)
    file = store.upload(io.BytesIO(CONTENT), len(CONTENT), "in.jsonl", "ann", 0)
    store.close()
    return folder / "files" / file.id


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


FOREIGN = {
    "a file": lambda folder: (folder / "thesis.pdf").write_text("ten years of work"),
    "a file in files": lambda folder: (folder / "files").mkdir() or (folder / "files/thesis.pdf").write_text("work"),
    "a folder in files": lambda folder: (folder / "files/photos").mkdir(parents=True),
    "a file in batches": lambda folder: (folder / "batches").mkdir() or (folder / "batches/a.json").write_text("{}"),
    "a lock with text": lambda folder: (folder / "lock").write_text("mine"),
    "a link as lock": lambda folder: (folder / "lock").symlink_to(folder.parent / "precious"),
    "a link as files": lambda folder: (folder / "files").symlink_to(folder.parent),
    "another mark": lambda folder: (folder / "jaxinfer.json").write_text("{}"),
    "a file in lost": lambda folder: (folder / "lost").mkdir() or (folder / "lost/key").write_text("k"),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_a_folder_with_what_no_server_has_written_is_refused_by_name_and_stays_as_it_is(tmp_path, make):
    (tmp_path / "precious").write_text("precious")
    folder = tmp_path / "home"
    folder.mkdir()
    make(folder)
    before = names(tmp_path)

    with pytest.raises(ValueError, match=r"which no server has written; give a new or empty folder"):
        opened(folder)

    assert names(tmp_path) == before
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("name", [None, "lost+found"])
def test_an_empty_folder_and_the_root_of_a_volume_become_the_servers_own(tmp_path, name):
    if name:
        (tmp_path / name).mkdir()
    opened(tmp_path).close()
    (tmp_path / "notes.txt").write_text("added later")

    opened(tmp_path).close()

    assert (tmp_path / "notes.txt").exists()


def test_the_folder_of_an_earlier_version_is_taken_over_with_its_files(tmp_path):
    place = stored(tmp_path)
    (tmp_path / "jaxinfer.json").unlink()
    (tmp_path / "lost").rmdir()
    raw = json.loads(place.with_suffix(".json").read_bytes())
    old = {name: raw[name] for name in ("tenant", "created_ns", "object")}
    place.with_suffix(".json").write_text(json.dumps(old))

    store = opened(tmp_path)

    (file,) = store.of("ann")
    assert store.verified(file).read_bytes() == CONTENT
    store.close()


def test_a_link_as_lock_of_an_own_folder_is_not_followed(tmp_path):
    opened(tmp_path / "a").close()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "a/lock").unlink()
    (tmp_path / "a/lock").symlink_to(tmp_path / "precious")

    with pytest.raises(ValueError, match="cannot be used"):
        opened(tmp_path / "a")

    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("mode", [None, 0o755, 0o777])
def test_files_are_for_their_owner_alone_in_any_folder(tmp_path, mode):
    folder = tmp_path / "a"
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    before = os.umask(0)
    try:
        stored(folder)
    finally:
        os.umask(before)

    paths = [path for path in folder.rglob("*") if path != folder / "lost"]
    assert len(paths) == 6
    assert {path.name: path.stat().st_mode & 0o077 for path in paths} == {path.name: 0 for path in paths}


LOSSES = {
    "the object": lambda place: place.with_suffix(".json").unlink(),
    "the content": lambda place: place.with_suffix(".content").unlink(),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_what_has_lost_its_other_half_is_kept_and_logged(tmp_path, caplog, lose):
    place = stored(tmp_path)
    lose(place)

    store = opened(tmp_path)

    assert store.of("ann") == []
    (kept,) = (tmp_path / "lost").iterdir()
    assert kept.stem == place.name
    assert f"it is kept as {kept}" in caplog.text
    store.close()


DAMAGES = {
    "empty": lambda raw: b"",
    "cut": lambda raw: raw[: len(raw) // 2],
    "null": lambda raw: b"null",
    "no text": lambda raw: b"\xff\xfe",
    "another tenant": lambda raw: raw.replace(b'"ann"', b'"bob"'),
    "another id": lambda raw: raw.replace(b"file-", b"fill-", 1),
    "other bytes": lambda raw: raw.replace(b'"bytes":24', b'"bytes":-4'),
    "another name": lambda raw: raw.replace(b"in.jsonl", b"in.jsonk"),
    "another digest": lambda raw: raw.replace(b'"content":"', b'"content":"0'),
    "a key of the digest": lambda raw: raw.replace(b'"seal"', b'"seam"'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_object_is_refused_by_name_and_its_content_survives_the_advice(tmp_path, damage):
    place = stored(tmp_path)
    path = place.with_suffix(".json")
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(ValueError, match=rf"{place.name}.json is damaged \(.+\); restore it, or move it into .*lost"):
        opened(tmp_path)

    path.rename(tmp_path / "lost" / path.name)
    opened(tmp_path).close()
    assert (tmp_path / "lost" / f"{place.name}.content").read_bytes() == CONTENT


@pytest.mark.parametrize("content", [b"b" + CONTENT[1:], CONTENT[:5], CONTENT * 2, b""])
def test_a_content_that_has_changed_is_not_given_out(tmp_path, content):
    stored(tmp_path).with_suffix(".content").write_bytes(content)
    store = opened(tmp_path)
    (file,) = store.of("ann")

    with pytest.raises(RefusedError, match="is damaged") as error:
        store.verified(file)

    assert (error.value.status, error.value.code) == (500, "file_damaged")
    store.close()


def test_a_foreign_file_that_was_put_into_an_own_folder_stays(tmp_path):
    place = stored(tmp_path)
    (place.parent / "thesis.pdf").write_text("ten years of work")
    opened(tmp_path).close()
    assert (place.parent / "thesis.pdf").exists()


def test_what_a_killed_process_has_not_completed_is_removed(tmp_path):
    place = stored(tmp_path)
    place.with_name(f".{place.name}.content.new").write_bytes(b"half")
    opened(tmp_path).close()
    assert not list(place.parent.glob(".*"))


class Full(io.BytesIO):
    def read(self, *_: Any) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("content", "filename", "error"),
    [(Full(), "x", OSError), (io.BytesIO(b"{}"), "\ud800.jsonl", RefusedError), (io.BytesIO(b"{}"), "x", OSError)],
)
def test_an_upload_that_fails_leaves_nothing(tmp_path, monkeypatch, content, filename, error):
    store = opened(tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Objects, "add", fail)
    with pytest.raises(error):
        store.upload(content, 2, filename, "ann", 0)

    assert list((tmp_path / "files").iterdir()) == []
    store.close()
