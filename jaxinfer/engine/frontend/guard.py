"""Guards an engine: until its end, in a process of its own, one thread at a time, and Ctrl-C between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

FAILURE_NOTE = "the LLM has failed with this and lost its unfinished requests; make a new one"


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Defers Ctrl-C to the end of the `with` block; a second Ctrl-C takes effect at once.

    A step donates buffers to the device and gets new ones back; in between the engine has no cache. Take locks inside
    the block: otherwise Ctrl-C could come between a lock's release and the end of its `with`. Call the yielded
    function to let a pending Ctrl-C take effect now.
    """
    handler = signal.getsignal(signal.SIGINT)
    # Python runs signal handlers in the main thread only, and a handler that is no function raises nothing.
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    interrupts = []

    def defer(number: int, frame: object) -> None:
        interrupts.append((number, frame))
        signal.signal(signal.SIGINT, handler)

    def take_effect() -> None:
        if interrupts:
            signal.signal(signal.SIGINT, defer)
            handler(*interrupts.pop())

    signal.signal(signal.SIGINT, defer)
    try:
        yield take_effect
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupts:  # also if the block raised
            handler(*interrupts[0])


class Guard:
    """Entered for each use of an engine. Allows one thread at a time, which may enter it again.

    A second thread gets RuntimeError and does not wait, because its turn would change state that the first thread
    still works with. Work that must not be refused is deferred until the engine is free.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread inside
        self._depth = 0  # how often it is inside
        self._worker: int | None = None  # the thread that does deferred work while none is inside
        self._deferred: deque[Callable[[], None]] = deque()

    def __enter__(self) -> Self:
        if self._owner != threading.get_ident():
            while not self._lock.acquire(timeout=0.01):
                # Else the lock is held for deferred work of another thread, which ends soon.
                if self._owner is not None or self._worker == threading.get_ident():
                    raise RuntimeError(
                        "another thread is using this LLM, and one at a time may; hold a threading.Lock of your own"
                        " around each call, or make an AsyncLLM for all threads"
                    )
            self._owner = threading.get_ident()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._lock.release()
            self._run_if_free()

    def defer(self, work: Callable[[], None]) -> None:
        """Does the work now if no thread is inside, else when the thread inside leaves or calls `run_deferred`.

        The collector may call this in the middle of any statement of the thread inside.
        """
        self._deferred.append(work)
        self._run_if_free()

    def run_deferred(self) -> None:
        """Does the deferred work; the thread inside calls it where the engine is in order."""
        while self._deferred:
            self._deferred.popleft()()

    def _run_if_free(self) -> None:
        while self._deferred and self._lock.acquire(blocking=False):
            self._worker = threading.get_ident()
            try:
                self.run_deferred()
            finally:
                self._worker = None
                self._lock.release()


class _Process:
    """The id of the process in which JAX computes, None before the first engine."""

    pid: int | None = None


def require_own_process() -> None:
    """Records that JAX computes in this process; RuntimeError if it was forked from a process that runs JAX."""
    pid = os.getpid()
    if _Process.pid is None:
        _Process.pid = pid
    if pid != _Process.pid:
        raise RuntimeError(
            f"process {pid} was forked from process {_Process.pid}, in which JAX runs; JAX would wait for ever here."
            " Start processes with multiprocessing.get_context('spawn'), or fork before the first LLM is made"
        )


class Lifecycle:
    """The end of an engine for its callers, if it has come: it is closed or has failed. Any thread may read it.

    `name` stands for the engine in refusals. An exception that ends the engine gets the `note`.
    """

    def __init__(self, name: str, note: str | None = None) -> None:
        self._name, self._note = name, note
        self._reason: str | None = None
        self.failure: BaseException | None = None  # the exception that has ended the engine
        self.is_closed = False

    @property
    def is_open(self) -> bool:
        """True if the engine is neither closed nor failed."""
        return self._reason is None

    def refusal(self) -> RuntimeError:
        """Returns the exception of a call after the end."""
        refusal = RuntimeError(f"this {self._name} {self._reason}; make a new one")
        refusal.__cause__ = self.failure
        return refusal

    def check(self) -> None:
        """Raises RuntimeError if the engine is closed, has failed, or belongs to another process."""
        if self._reason is not None:
            raise self.refusal()
        require_own_process()

    def fail(self, error: BaseException) -> None:
        """Marks the engine as failed by `error`."""
        self.failure = error
        self._reason = f"has failed ({type(error).__name__}: {error})"
        if self._note is not None:
            error.add_note(self._note)

    def close(self) -> None:
        """Marks the engine as closed; one that has failed stays so too."""
        self.is_closed, self._reason = True, self._reason or "is closed"
