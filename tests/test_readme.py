"""The examples of the README run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=["functional", "generate"])
def test_an_example_of_the_readme_runs_and_prints_something(example, capsys, monkeypatch):
    monkeypatch.chdir(README.parent)

    exec(compile(example, str(README), "exec"), {})

    assert capsys.readouterr().out.strip()
