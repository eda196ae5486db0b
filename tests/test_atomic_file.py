"""Writes beside each other do not disturb each other."""

from __future__ import annotations

import os

import pytest

from jaxinfer import atomic_file
from jaxinfer.atomic_file import files_by_use, read_checked, try_lock, write_checked


def test_a_file_may_be_written_while_the_same_process_writes_it(tmp_path):
    path = tmp_path / "file"

    def parts():
        yield b"first"
        write_checked(path, [b"second"])

    write_checked(path, parts())

    assert bytes(read_checked(path)) == b"first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
def test_a_write_that_breaks_off_leaves_what_was_there_and_nothing_else(tmp_path, error):
    path = tmp_path / "file"
    write_checked(path, [b"first"])

    def parts():
        yield b"second"
        raise error

    with pytest.raises(error):
        write_checked(path, parts())

    assert bytes(read_checked(path)) == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_listed_by_use_and_others_are_left_out(tmp_path):
    for name, used in [("page-1", 30), ("page-22", 10), ("page-x", 20), ("a-page-1", 20), ("page-3", 20)]:
        (tmp_path / name).write_bytes(bytes(used))
        os.utime(tmp_path / name, (used, used))

    assert files_by_use(tmp_path, "page-[0-9]+") == [
        (10 * 10**9, "page-22", 10),
        (20 * 10**9, "page-3", 20),
        (30 * 10**9, "page-1", 30),
    ]


def test_a_file_is_locked_once_until_it_is_closed(tmp_path):
    path = tmp_path / "lock"
    with path.open("wb") as first, path.open("wb") as second:
        assert try_lock(first)
        assert not try_lock(second)
        first.close()
        assert try_lock(second)


def test_a_system_without_locks_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_file, "fcntl", None)
    with (tmp_path / "lock").open("wb") as file, pytest.raises(OSError, match="not implemented"):
        try_lock(file)
