"""Progress as a terminal, a notebook and a file show it."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from jaxinfer.display.progress import Bar, is_shown, write_line


@contextlib.contextmanager
def terminal() -> Iterator[Callable[[], str]]:
    """Standard error is a terminal without a size; yields a function that returns what it was sent."""
    master, slave = pty.openpty()

    def read() -> str:
        sys.stderr.flush()
        is_there = select.select([master], [], [], 5.0)[0]
        return os.read(master, 2**16).decode() if is_there else ""

    with open(slave, "w") as stream, contextlib.redirect_stderr(stream):
        yield read
    os.close(master)


def work(num_units, **options):
    with Bar(num_units, unit="unit", **{"description": "working", "show": True, **options}) as bar:
        for _ in range(num_units):
            bar.update(note="7 tokens/s")


def test_a_file_gets_lines(lines_at_once, capsys):
    work(2)

    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" gone")[0] for line in lines[:2]] == [
        "working: 50%, 1 of 2, 00:00",
        "working: 100%, 2 of 2, 00:00",
    ]
    assert all(line.endswith("left, 7 tokens/s") for line in lines)


def test_a_file_gets_a_line_a_minute_and_none_of_short_work(monkeypatch, capsys):
    work(1_000)
    assert capsys.readouterr().err == ""

    now = 0.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    with Bar(1_000, unit="unit", show=True) as bar:
        for _ in range(1_000):
            now += 20.0
            bar.update()

    assert 1_000 / 3 - 1 <= len(capsys.readouterr().err.splitlines()) <= 1_000 / 3 + 1


def test_a_terminal_without_a_size_gets_a_bar():
    with terminal() as read:
        work(2)
        shown = read()

    assert "working: 100%|█" in shown
    assert "2/2" in shown


def test_a_terminal_that_is_no_file_gets_a_bar():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with contextlib.redirect_stderr(Terminal()) as shown:  # whose fileno raises
        work(2)

    assert "working: 100%|###" in shown.getvalue()


def test_of_two_bars_the_second_is_shown_after_the_end_of_the_first(lines_at_once, capsys):
    with Bar(2, unit="unit", description="first", show=True) as first:
        second = Bar(4, unit="unit", description="second", show=True)
        first.update()
        second.update()
        second.update()
    assert "second" not in capsys.readouterr().err

    with second:
        second.update(0)
        second.update()

    assert capsys.readouterr().err.splitlines()[0].startswith("second: 50%, 2 of 4")


def test_a_bar_that_is_not_wanted_shows_nothing_and_is_in_no_ones_way():
    with terminal() as read, Bar(1, unit="unit", description="unwanted", show=False) as unwanted:
        unwanted.update()
        work(1)
        shown = read()

    assert "working" in shown
    assert "unwanted" not in shown


def test_a_line_stands_above_the_bar():
    with terminal() as read, Bar(2, unit="unit", show=True) as bar:
        bar.update()
        write_line("limits")
        bar.update()

        assert "limits\r\n" in read()


def test_progress_is_shown_where_somebody_sees_it(monkeypatch):
    with terminal():
        assert is_shown(None)
        assert not is_shown(False)
    assert not is_shown(None)
    assert is_shown(True)

    kernel = types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: kernel))
    assert is_shown(None)


def test_another_value_is_refused():
    with pytest.raises(ValueError, match="show_progress must be True or False"):
        is_shown(cast(Any, "no"))
