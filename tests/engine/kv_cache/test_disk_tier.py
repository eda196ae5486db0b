"""A disk gives back what it was given or nothing, whatever happens to it."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import threading
import weakref

import numpy as np
import pytest

from jaxinfer.engine.kv_cache import disk_tier
from jaxinfer.engine.kv_cache.disk_tier import DiskTier

A, B, C = (bytes([i]) * 32 for i in range(3))
SIZE = 100
FILE_SIZE = SIZE + 32 + 32  # its key and a digest before it


def content_of(key: bytes) -> np.ndarray:
    return np.random.default_rng(key[0]).integers(0, 256, SIZE).astype(np.uint8)


def make_disk(folder, num_pages: int = 9) -> DiskTier:
    return DiskTier(folder, num_pages * FILE_SIZE)


def put(disk: DiskTier, *keys: bytes) -> DiskTier:
    for key in keys:
        assert disk.put(key, content_of(key)) == []
    disk.flush()
    return disk


def has(disk: DiskTier, key: bytes) -> bool:
    content = disk.get(key) if disk.touch(key) else None
    return content is not None and np.array_equal(content, content_of(key))


def test_another_process_finds_what_was_stored(tmp_path):
    put(make_disk(tmp_path / "new" / "folder"), A, B)

    disk = make_disk(tmp_path / "new" / "folder")

    assert [has(disk, key) for key in (A, B, C)] == [True, True, False]
    assert (disk.metrics().num_pages, disk.metrics().num_hits) == (2, 2)


def test_the_files_take_no_more_bytes_than_allowed(tmp_path):
    disk = put(make_disk(tmp_path, num_pages=2), A, B, C)

    files = list(tmp_path.iterdir())
    assert sum(file.stat().st_size for file in files) == disk.metrics().num_bytes == 2 * FILE_SIZE
    assert [has(disk, key) for key in (A, B, C)] == [False, True, True]


def test_a_page_larger_than_the_limit_is_not_stored(tmp_path):
    disk = put(DiskTier(tmp_path, FILE_SIZE - 1), A)

    assert (has(disk, A), list(tmp_path.iterdir())) == (False, [])


def test_the_next_process_drops_what_was_not_used_for_longest(tmp_path):
    disk = put(make_disk(tmp_path), A, B, C)
    for age, key in enumerate((C, B, A)):
        os.utime(tmp_path / key.hex(), (1000 - age, 1000 - age))
    assert has(disk, A)

    disk = make_disk(tmp_path, num_pages=2)

    assert [has(disk, key) for key in (A, B, C)] == [True, False, True]


DAMAGES = {
    "a bit": lambda file: file.write_bytes(bytes([*file.read_bytes()[:-1], file.read_bytes()[-1] ^ 1])),
    "a bit of the digest": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1, *file.read_bytes()[1:]])),
    "cut off": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "empty": lambda file: file.write_bytes(b""),
    "gone": lambda file: file.unlink(),
    "another's": lambda file: shutil.copy(file.with_name(B.hex()), file),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_page_is_a_miss_and_counted_and_the_others_are_found(tmp_path, caplog, damage):
    disk = put(make_disk(tmp_path), A, B)
    DAMAGES[damage](tmp_path / A.hex())

    assert [has(disk, key) for key in (A, A, B)] == [False, False, True]
    disk.flush()
    assert (disk.metrics().num_lost, disk.metrics().num_pages) == (1, 1)
    assert not (tmp_path / A.hex()).exists()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_lost_disk_is_told_once_and_every_page_is_a_miss(tmp_path, caplog):
    disk = put(make_disk(tmp_path / "disk"), A, B)
    shutil.rmtree(tmp_path / "disk")

    put(disk, C)

    assert [has(disk, key) for key in (A, B, C)] == [False, False, False]
    assert (disk.metrics().num_lost, disk.metrics().num_bytes) == (3, 0)
    assert len(caplog.records) == 1


@pytest.fixture
def busy_disk(tmp_path):
    """A disk that writes nothing until its `go` is set."""
    disk, go = make_disk(tmp_path), threading.Event()
    disk._worker.submit(go.wait)
    yield disk, go
    go.set()


def test_nobody_waits_for_a_write_and_what_is_not_yet_written_is_found(busy_disk, tmp_path):
    disk, go = busy_disk

    disk.put(A, content_of(A))

    assert list(tmp_path.iterdir()) == []
    assert has(disk, A)
    go.set()
    disk.flush()
    assert [file.name for file in tmp_path.iterdir()] == [A.hex()]
    assert has(disk, A)


def test_what_goes_before_it_is_written_leaves_no_file(busy_disk, tmp_path):
    disk, go = busy_disk
    disk._max_bytes = FILE_SIZE
    contents = [(key, content_of(key)) for key in (A, B, A, C)]
    held = [weakref.ref(content) for _, content in contents]

    while contents:
        disk.put(*contents.pop(0))

    assert [content() is not None for content in held] == [False, False, False, True]
    go.set()
    disk.flush()

    assert [file.name for file in tmp_path.iterdir()] == [C.hex()]
    assert [has(disk, key) for key in (A, B, C)] == [False, False, True]


def test_what_a_slow_disk_has_no_time_for_is_not_kept(busy_disk, monkeypatch):
    monkeypatch.setattr(disk_tier, "MAX_PENDING_BYTES", 2 * SIZE)
    disk, go = busy_disk

    for key in (A, B, C):
        disk.put(key, content_of(key))

    assert [has(disk, key) for key in (A, B, C)] == [True, True, False]
    assert disk.metrics().num_dropped == 1
    go.set()
    disk.flush()
    assert has(put(disk, C), C)


@pytest.fixture
def short_turns():
    """Threads take turns every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_metrics_change_nothing(busy_disk):
    disk, go = busy_disk
    disk.put(A, content_of(A))
    go.set()
    disk._worker.submit(lambda: None).result()  # the write is done, and the tier has not noticed yet

    disk.metrics()

    assert (disk._pending.keys(), disk._pending_bytes) == ({A}, SIZE)


def test_other_threads_ask_for_metrics_while_pages_are_written(tmp_path, monkeypatch, short_turns):
    monkeypatch.setattr(disk_tier, "_write", lambda *_: None)  # the tier's books are tested, not the files
    disk, is_over, failures = make_disk(tmp_path, num_pages=10**6), threading.Event(), []

    def ask():
        while not is_over.is_set():
            try:
                disk.metrics()
            except Exception as failure:
                failures.append(failure)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    content = content_of(A)
    for i in range(10_000):
        disk.put(i.to_bytes(32, "big"), content)
    disk.flush()
    is_over.set()
    for thread in threads:
        thread.join()

    assert failures == []
    assert (disk.metrics().num_stored, disk._pending, disk._pending_bytes) == (10_000, {}, 0)


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")

    put(make_disk(tmp_path, num_pages=1), A, B)

    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_a_killed_process_left_half_written_is_removed_once_it_is_old(tmp_path):
    old, new = (tmp_path / f".{A.hex()}.{suffix}" for suffix in ("123", "abc"))
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (0, 0))

    make_disk(tmp_path)

    assert (old.exists(), new.exists()) == (False, True)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ValueError, match=f"disk_cache_path='{re.escape(str(tmp_path))}/file/x' cannot be used"):
        make_disk(tmp_path / "file" / "x")
