"""Runs the tests of every family and writes what they show to docs/families.md.

    python scripts/measure/family_table.py [-n 2]

A cell is ✓ if all of its tests passed, ✗ if one failed, and "refused" if the engine refuses, whose error then stands
below the table. Tests say by the marker `shows` which columns they stand for. Arguments go to pytest.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from datetime import date
from pathlib import Path
from textwrap import fill

import pytest

from jaxinfer.checkpoint.families import FAMILIES
from scripts.measure.family_layers import layers_section

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "families.md"
TESTS = (
    "tests/checkpoint/test_logits.py",
    "tests/engine/exactness/test_families.py",
    "tests/steps/test_mesh_steps.py",
)
COLUMNS = {
    "logits": "logits of three or more configurations, within 1e-4 of those of `transformers`",
    "greedy": "the greedy tokens of 20 requests, as `transformers` takes them",
    "chunks": "prompts computed in chunks of 5 tokens beside other requests, in a pool that is too small",
    "prefix": "pages of another request's prompt",
    "recompute": "preempted requests that are computed again",
    "swap": "preempted requests whose pages come back from the host's memory",
    "rewind": "tokens dropped, and drawn again",
    "fork": "a branch of a running request",
    "save": "a request written to a file, and restored from it",
    "drafts": "drafts, of which some are wrong",
    "trees": "trees of drafts",
    "loop": "four decode steps in one launch",
    "mesh": "a prefill and a decode step split over several devices, within 1e-4 of `transformers`",
}
PASSED, FAILED, REFUSED = "✓", "✗", "refused"


class Cells:
    """A pytest plugin that collects the outcome of each family and column."""

    def __init__(self) -> None:
        self.outcomes: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.refusals: dict[str, str] = {}
        self.num_tests = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        columns = [column for key, value in report.user_properties if key == "shows" for column in value]  # type: ignore[union-attr]
        if not columns or (report.when != "call" and report.passed):
            return
        self.num_tests += 1
        (family,) = {word for word in re.findall(r"\w+", report.nodeid.partition("[")[2]) if word in FAMILIES}
        refusal = dict(report.user_properties).get("refusal")
        for column in columns:
            self.outcomes[family, column].add(FAILED if report.failed else REFUSED if refusal else PASSED)
            if refusal:
                self.refusals[column] = str(refusal)

    def cell(self, family: str, column: str) -> str:
        outcomes = self.outcomes[family, column]
        return next((outcome for outcome in (FAILED, REFUSED, PASSED) if outcome in outcomes), "")


def page_of(cells: Cells) -> str:
    lines = [f"* **{name}**: {text};" for name, text in COLUMNS.items()]
    lines[-1] = lines[-1][:-1] + "."
    rows = [
        [f"`{family}`", *(cells.cell(family, column) for column in COLUMNS)]
        for family in FAMILIES
        if (family, "logits") in cells.outcomes
    ]
    table = [["family", *COLUMNS], ["---", *[":-:"] * len(COLUMNS)], *rows]
    reasons = [
        f"`{column}` is refused for families with recurrent layers: {text}." for column, text in cells.refusals.items()
    ]
    text = (
        f"`python scripts/measure/family_table.py` ran {cells.num_tests} tests on CPU in float32 and wrote this page on"
        f" {date.today()}. Each family has small random checkpoints. Columns from chunks to loop compare all tokens and"
        " log-probabilities with those of each request computed alone, to the bit. `gemma3`, `gemma4`, `kimi_k25`,"
        " `mistral3`, `qwen3_5`, `qwen3_5_moe`, `qwen3_vl` and `qwen3_vl_moe` read images too; the table has their text"
        " models. The columns:"
    )
    parts = [
        "# What works for each family",
        fill(text, 120),
        "\n".join(lines),
        "\n".join(f"| {' | '.join(row)} |" for row in table),
        *(fill(reason, 120) for reason in reasons),
        layers_section(),
    ]
    return "\n\n".join(parts)


def main() -> None:
    cells = Cells()
    arguments = [
        "--optimised",
        "-m",
        "shows",
        "-p",
        "no:cacheprovider",
        *sys.argv[1:],
        *(str(ROOT / test) for test in TESTS),
    ]
    code = pytest.main(arguments, plugins=[cells])
    if cells.num_tests:
        PAGE.write_text(page_of(cells), encoding="utf-8")
    sys.exit(code)


if __name__ == "__main__":
    main()
