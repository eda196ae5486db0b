"""The help of each command ends with examples that parse, and begins with a usage of a line."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from jaxinfer.cli import main as cli
from jaxinfer.cli.options import EXAMPLES, EXAMPLES_TITLE

COMMANDS: Any = cli._parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]


def test_every_command_has_examples():
    assert EXAMPLES.keys() == COMMANDS.keys()
    assert {len(examples) for examples in EXAMPLES.values()} <= {2, 3}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_help_ends_with_the_examples_after_a_usage_of_one_line(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")

    assert cli.main([name, "--help"]) == 0

    usage, options = capsys.readouterr().out.split("\n\n", 1)
    assert usage.startswith(f"usage: jaxinfer {name} [options]")
    assert "\n" not in usage
    _, _, examples = options.rpartition(f"\n{EXAMPLES_TITLE}\n")
    assert examples.splitlines() == [text for line, what in EXAMPLES[name] for text in (f"  {line}", f"      {what}")]


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in EXAMPLES.items() for line, _ in lines])
def test_an_example_parses(name, line):
    words = shlex.split(line.rpartition("| ")[2].partition(" >")[0])

    assert words[:2] == ["jaxinfer", name]
    assert callable(cli._parser().parse_args(words[1:]).run)


def test_the_usage_has_the_options_that_a_command_needs():
    assert COMMANDS["plan"].usage == "jaxinfer plan [options] --device NAME MODEL"
    assert COMMANDS["generate"].usage == "jaxinfer generate [options] [prompt]"
