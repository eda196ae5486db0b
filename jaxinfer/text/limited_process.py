"""Runs code that may take for ever, or all memory, in a process of its own, which can be ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxinfer.validation import cut

MAX_BYTES = 2**31
MAX_START_SECONDS = 60  # imports from a slow disk
BUSY_FACTOR = 10  # times as long as it may compute, a question may take beside the other work of a busy machine
MAX_ENDING_SECONDS = 10  # from the end of a process's output to its own end; a core dump takes time
MAX_LAST_WORDS = 2**12  # bytes of standard error
# Last words of code in C++ or Rust that gets no memory. Python's own MemoryError has the exit status ENOMEM.
OUT_OF_MEMORY = ("std::bad_alloc", "memory allocation of ")
OUT_OF_TIME = signal.SIGPROF if hasattr(signal, "SIGPROF") else 0  # the system ends a process by it
# Loads the package from the parent's folder, whatever other copies are installed. The parent's search path comes last,
# so that no file there stands for a module of the standard library.
BOOTSTRAP = """
import importlib.util, sys
sys.path += [entry for entry in {path!r} if entry not in sys.path]
spec = importlib.util.spec_from_file_location("jaxinfer", {package!r})
sys.modules["jaxinfer"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from {program} import answers
from jaxinfer.text.limited_process import serve
serve(answers)
"""


class LimitError(ValueError):
    """A question took too much processor time or memory; the message is the limit."""


class BusyError(RuntimeError):
    """A question had no answer in time, because the machine is busy or the process waits. Try again later."""


class EndedError(ValueError):
    """A question ended the process in another way; the message is the exit status or signal, and its last words."""


class LimitedProcess:
    """Asks a program one question after the other. The process begins with the first, and anew after it has ended.

    `program` is the name of a module with a function `answers`, which returns the function from a question to its
    answer; both are JSON. The process imports nothing from the current folder. Any number of threads may ask; each
    question waits for its turn.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._turn = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] = lambda: None  # ends the process, if there is one, and closes its pipes
        self._last_words = _LastWords()

    def ask(self, question: Any, max_seconds: float) -> Any:
        """Returns the answer to a question.

        Raises LimitError if it takes more seconds of processor time, or 2 GiB of memory, and EndedError if the process
        ends for another cause. Raises BusyError if `BUSY_FACTOR` times these seconds pass from the question's turn, or
        if the process is not ready in time, and RuntimeError if it cannot start.
        """
        line = json.dumps([max_seconds, question]) + "\n"
        with self._turn:
            process = self._process
            if process is None or process.poll() is not None:
                self._end()
                process = self._process = self._start()
            try:
                return json.loads(self._exchange(process, line, max_seconds))
            except BaseException:
                self._end()  # an unread answer would be taken for the next one
                raise

    @property
    def is_ready(self) -> bool:
        """True if a question need not wait for the start of the process."""
        process = self._process
        return process is not None and process.poll() is None

    def _exchange(self, process: subprocess.Popen[str], line: str, max_seconds: float) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        with _killed_after(BUSY_FACTOR * max_seconds, process) as is_late:
            with contextlib.suppress(BrokenPipeError):  # it has ended; then there is no answer
                process.stdin.write(line)
                process.stdin.flush()
            answer = process.stdout.readline()
        if not answer.endswith("\n"):
            if is_late.is_set():
                raise BusyError(
                    f"the process of {self._program} had no answer within {BUSY_FACTOR * max_seconds:g} seconds; try"
                    " again when the machine has less to do"
                )
            raise self._death_of(process, max_seconds)
        if is_late.is_set():  # the answer came just before the end
            self._end()
        return answer

    def _start(self) -> subprocess.Popen[str]:
        package = str(Path(__file__).parents[1] / "__init__.py")
        program = BOOTSTRAP.format(path=_search_path(), package=package, program=self._program)
        self._last_words = _LastWords()
        pipe = subprocess.PIPE
        # -I: without the current folder, and without PYTHONPATH, which may name it too.
        command = [sys.executable, "-I", "-c", program]
        with self._last_words.pipe() as errors:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True)
        self._end = weakref.finalize(self, _end, process)
        assert process.stdout is not None
        try:
            # It is ready; its imports do not count against the first question.
            with _killed_after(MAX_START_SECONDS, process) as is_late:
                is_ready = process.stdout.readline() == "\n"
            if is_late.is_set():
                raise BusyError(
                    f"the process of {self._program} was not ready within {MAX_START_SECONDS:g} seconds; try again when"
                    " the machine has less to do"
                )
            if not is_ready:
                cause = self._death_of(process)
                raise RuntimeError(f"the process of {self._program} ended before it was ready: {cause}")
        except BaseException:
            self._end()
            raise
        return process

    def _death_of(self, process: subprocess.Popen[str], max_seconds: float = 0.0) -> LimitError | EndedError:
        """Waits for the end of a process that has closed its output, and returns the error with its cause."""
        try:
            status = process.wait(MAX_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        lines = self._last_words.lines()
        if status == errno.ENOMEM or any(mark in line for mark in OUT_OF_MEMORY for line in lines):
            return LimitError(f"{MAX_BYTES >> 30} GiB of memory")
        if status == -OUT_OF_TIME and max_seconds:
            return LimitError(f"{max_seconds:g} second{'s' if max_seconds > 1 else ''}")
        cause = f"exit status {status}"
        if status < 0:
            cause = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
            if -status == signal.SIGKILL:
                cause += ", which the system sends if its own memory runs out"
        return EndedError(f"{cause}: {cut(lines[-1])}" if lines else cause)


class LimitedProcesses:
    """Some processes of one program, which begin when needed, for the questions of any number of threads."""

    def __init__(self, program: str, count: int) -> None:
        self._idle = deque(LimitedProcess(program) for _ in range(count))
        self._num_idle = threading.Semaphore(count)

    def ask(self, question: Any, max_seconds: float) -> Any:
        """Returns the answer to a question as `LimitedProcess.ask` does, when a process is free."""
        with self._num_idle:
            process = self._idle.pop()
            try:
                return process.ask(question, max_seconds)
            finally:
                # The next question takes a process that is ready; one that was ended begins anew when all others work.
                (self._idle.append if process.is_ready else self._idle.appendleft)(process)


class _LastWords:
    """The end of a process's standard error. A thread reads all of it, so that the process never waits."""

    def __init__(self) -> None:
        self._tail = b""
        self._reader: threading.Thread | None = None

    @contextlib.contextmanager
    def pipe(self) -> Iterator[int]:
        """Yields the descriptor to give to the process that begins inside the `with`."""
        source, sink = os.pipe()
        try:
            self._reader = threading.Thread(target=self._read, args=[source], daemon=True)
            self._reader.start()
            yield sink
        finally:
            os.close(sink)

    def lines(self) -> list[str]:
        """Returns the last lines that are not blank, once the process has ended."""
        if self._reader is not None:
            self._reader.join(MAX_ENDING_SECONDS)
        return [line.strip() for line in self._tail.decode(errors="replace").splitlines() if line.strip()]

    def _read(self, source: int) -> None:
        while chunk := os.read(source, MAX_LAST_WORDS):
            self._tail = (self._tail + chunk)[-MAX_LAST_WORDS:]
        os.close(source)


def _search_path() -> list[str]:
    """Returns the entries of this process's search path without the current folder."""
    here = None
    with contextlib.suppress(OSError):  # the folder has been removed
        here = os.path.realpath(os.getcwd())
    absolute = [entry for entry in sys.path if isinstance(entry, str) and os.path.isabs(entry)]
    return [entry for entry in absolute if os.path.realpath(entry) != here]


@contextlib.contextmanager
def _killed_after(seconds: float, process: subprocess.Popen[str]) -> Iterator[threading.Event]:
    """Kills the process if the block takes more seconds. The event, final after the block, is set if it has done so."""
    is_late = threading.Event()

    def kill() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        yield is_late
    finally:
        timer.cancel()
        timer.join()  # it may have begun to kill


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # of a question that was not sent whole
        process.stdin.close()
    process.stdout.close()


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Ends this process if its threads take more seconds of processor time in the block."""
    if not OUT_OF_TIME:  # not every system has such a timer
        yield
        return
    signal.signal(OUT_OF_TIME, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def serve(answers: Callable[[], Callable[[Any], Any]]) -> None:
    """Is the program of the process: answers each line of standard input."""
    # A terminal sends Ctrl-C to this process as well, which ends when its input does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has such a limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    try:
        answer = answers()
        print(flush=True)
        for line in sys.stdin:
            max_seconds, question = json.loads(line)
            with _ended_after(max_seconds):
                answered = answer(question)
            print(json.dumps(answered), flush=True)
    except MemoryError:
        os._exit(errno.ENOMEM)  # there may be no memory to print a traceback
