"""Guards an LLM: one thread at a time, in one process, and only until it is closed or fails."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Self


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


CLOSED = "is closed"


class Guard:
    """Entered for each use of an LLM. Allows one thread at a time, in the process that made the LLM.

    A second thread gets RuntimeError and does not wait, because its turn would change state that the first thread
    still works with.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reason: str | None = None  # why the LLM is unusable, None while it is usable
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self.check()
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def is_closed(self) -> bool:
        return self._reason == CLOSED

    def check(self) -> None:
        """Raises RuntimeError if the LLM is closed, has failed, or belongs to another process."""
        if self._reason is not None:
            raise RuntimeError(f"this LLM {self._reason}; make a new one") from self._failure
        require_own_process()

    def fail(self, error: BaseException) -> None:
        """Marks the LLM as failed by `error`, which lost its cache."""
        self._failure = error
        self._reason = f"has failed ({type(error).__name__}: {error})"
        error.add_note("the LLM has failed with this and lost its unfinished requests; make a new one")

    def close(self) -> None:
        """Marks the LLM as closed."""
        self._take()
        self._reason = CLOSED
        self._lock.release()

    def _take(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "another thread is using this LLM, and one at a time may; let one thread own it and hand it requests"
                " through a queue.Queue, or hold a threading.Lock of your own around each call"
            )
