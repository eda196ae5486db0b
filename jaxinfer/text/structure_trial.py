"""Compiles structures for trial in a process of their own.

Some take `llguidance` minutes or gigabytes, and its own limits stop not all of them. A process can be ended. `main` is
the program of that process.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from jaxinfer.text.schema_check import schema_error

MAX_SECONDS = 5
MAX_BYTES = 2**31


class Trial:
    """Compiles structures one after the other, in a process that is begun with the first."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, kind: str, grammar: str, schema: str | None) -> None:
        """Returns when a structure, in Lark's notation, was compiled; `schema` is its JSON schema, if it has one.

        Raises ValueError if that takes too much time or memory, or if the schema is none. What else is wrong with a
        structure shows where it is compiled for use.
        """
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(MAX_SECONDS, end)
        timer.start()
        try:
            process.stdin.write(json.dumps([grammar, schema]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BaseException:
            process.kill()  # an unread answer would be taken for the next one
            raise
        finally:
            timer.cancel()
        if late.is_set() or not answer:
            process.wait()
            limit = f"{MAX_SECONDS} seconds" if late.is_set() else f"{MAX_BYTES >> 30} GiB of memory"
            raise ValueError(f"{kind} takes more than {limit} to compile; make it smaller or simpler")
        if error := json.loads(answer):
            raise ValueError(f"{kind} is not a JSON schema: {error}")

    def _start(self) -> subprocess.Popen[str]:
        root = str(Path(__file__).parents[2])
        program = f"import sys; sys.path.insert(0, {root!r}); from jaxinfer.text.structure_trial import main; main()"
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=nowhere, text=True)
        weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def main() -> None:
    # A terminal sends Ctrl-C to this process as well, which ends when its input does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has such a limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    for line in sys.stdin:
        grammar, schema = json.loads(line)
        error = None if schema is None else schema_error(schema)
        if error is None:
            with contextlib.suppress(ValueError):
                LLMatcher(tokenizer, grammar, log_level=0).compute_bitmask()
        print(json.dumps(error), flush=True)
