"""Runs code that may take for ever, or all memory, in a process of its own, which can be ended."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_BYTES = 2**31


class LimitError(ValueError):
    """A question took too much time or memory; the message is the limit."""


class LimitedProcess:
    """Asks a program one question after the other. The process begins with the first, and anew after a limit.

    `program` is the name of a module with a function `answers`, which returns the function from a question to its
    answer; both are JSON.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: Any, max_seconds: float) -> Any:
        """Returns the answer to a question. Raises LimitError if it takes more seconds, or 2 GiB of memory."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(max_seconds, end)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended; then there is no answer
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
            answer = process.stdout.readline()
        except BaseException:
            process.kill()  # an unread answer would be taken for the next one
            raise
        finally:
            timer.cancel()
        if late.is_set() or not answer.endswith("\n"):
            process.kill()
            process.wait()
            seconds = f"{max_seconds:g} second{'s' if max_seconds > 1 else ''}"
            raise LimitError(seconds if late.is_set() else f"{MAX_BYTES >> 30} GiB of memory")
        return json.loads(answer)

    def _start(self) -> subprocess.Popen[str]:
        root = str(Path(__file__).parents[2])
        program = (
            f"import sys; sys.path.insert(0, {root!r}); from {self._program} import answers;"
            " from jaxinfer.text.limited_process import serve; serve(answers)"
        )
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=nowhere, text=True)
        weakref.finalize(self, _end, process)
        assert process.stdout is not None
        process.stdout.readline()  # it is ready; its imports do not count against the first question
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def serve(answers: Callable[[], Callable[[Any], Any]]) -> None:
    """Is the program of the process: answers each line of standard input."""
    # A terminal sends Ctrl-C to this process as well, which ends when its input does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has such a limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    answer = answers()
    print(flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
