"""The walk of a token in docs/architecture.md is that of a decode step, by a profiler."""

from __future__ import annotations

import subprocess
import sys

from scripts.measure.token_walk import PAGE, PLACE, ROOT, with_lines

MOST = 40


def test_a_plain_decode_step_passes_no_file_that_the_page_leaves_out():
    script = [sys.executable, "scripts/measure/token_walk.py"]
    printed = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    passed = {line.strip() for line in printed.splitlines() if line.startswith("  ")}
    assert passed
    assert passed <= {place[0] for place in PLACE.findall(PAGE.read_text())}
    assert len(passed) <= MOST


def test_each_place_of_the_page_is_on_its_line():
    page = PAGE.read_text()

    assert page == with_lines(page), "run scripts/measure/token_walk.py --write"
