"""Writes beside each other do not disturb each other."""

from __future__ import annotations

import pytest

from jaxinfer.atomic_file import read_checked, write_checked


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
