"""A forked child is told so before it waits for ever."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from jaxinfer.engine.frontend.guard import require_own_process
if sys.argv[1] == "after":
    require_own_process()
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
try:
    require_own_process()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.parametrize(("when", "complaint"), [("after", "in which JAX runs"), ("before", "")])
def test_a_process_that_was_forked_after_the_first_engine_is_told_to_spawn(when, complaint):
    run = subprocess.run([sys.executable, "-c", PROGRAM, when], capture_output=True, text=True, check=True)

    assert complaint in run.stdout
    assert ("'spawn'" in run.stdout) == bool(complaint)
