"""From an interpreter to the first token of the bundled model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Aimed at: 6 s on 2 free cores. Asserted loosely, and in CPU time where other processes stretch the clock.
WANTED_SECONDS = 6.0
SLACK = 3.0
PROGRAM = """
import time
start = time.perf_counter()
from jaxinfer import LLM, SamplingParams
delta = next(LLM().stream("Once upon a time", SamplingParams(max_tokens=2)))
assert len(delta.token_ids) == 1
print(time.perf_counter() - start, time.process_time())
"""


def seconds_to_first_token() -> tuple[float, float]:
    """Elapsed time and CPU time of a new process."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    elapsed, cpu = map(float, result.stdout.split())
    return elapsed, cpu


def test_the_first_token_comes_soon_with_a_warm_compilation_cache(capsys):
    seconds_to_first_token()  # compiles, unless an earlier run has

    elapsed, cpu = seconds_to_first_token()

    with capsys.disabled():
        print(f"\nfirst token of LLM() after {elapsed:.1f} s ({cpu:.1f} s of CPU); wanted: {WANTED_SECONDS} s")
    assert min(elapsed, cpu) < WANTED_SECONDS * SLACK
