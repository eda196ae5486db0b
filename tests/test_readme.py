"""The examples of the README run as they are printed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from jaxinfer import steps
from tests.unoptimised import unoptimised_copy

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run(example: str) -> None:
    exec(compile(example, str(README), "exec"), {})


def test_the_functional_example_runs_and_prints_something(capsys, monkeypatch):
    monkeypatch.chdir(README.parent)  # it names a folder
    monkeypatch.setitem(sys.modules, "jaxinfer.steps", unoptimised_copy(steps))

    run(EXAMPLES[0])

    assert capsys.readouterr().out.strip()


def test_the_examples_of_the_engine_run_one_after_another_and_print_something(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # they write a file

    run("\n".join(EXAMPLES[1:]))

    assert capsys.readouterr().out.strip()
