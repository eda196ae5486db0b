"""Who may use an LLM, and whether it is still of use."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Self


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Lets what is inside come to its end before Ctrl-C has an effect; a second Ctrl-C does not wait.

    A step hands buffers over to the device and gets others back: between the two the engine has none. A lock is taken
    inside, for Ctrl-C could come between its release and the end of its `with`. The function that is yielded lets a
    Ctrl-C take effect at once.
    """
    handler = signal.getsignal(signal.SIGINT)
    # Python hands signals to the main thread alone, and what is not a function raises nothing.
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
        if interrupts:  # also where what is inside has raised
            handler(*interrupts[0])


class _Process:
    """The process in which JAX computes, None before the first engine."""

    pid: int | None = None


def require_own_process() -> None:
    """Notes that JAX computes in this process; RuntimeError in one that was forked from such a process."""
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
    """Is entered while an LLM is used: by one thread at a time, in the process that made it, until that fails or ends.

    Nobody waits for another thread: what that one is about to change would be changed under its hands a moment later.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reason: str | None = None  # why it is of no use any more
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
        """Raises RuntimeError where the LLM is of no use here."""
        if self._reason is not None:
            raise RuntimeError(f"this LLM {self._reason}; make a new one") from self._failure
        require_own_process()

    def fail(self, error: BaseException) -> None:
        """Enters what has left the LLM without a cache to go on from."""
        self._failure = error
        self._reason = f"has failed ({type(error).__name__}: {error})"
        error.add_note("the LLM has failed with this and lost its unfinished requests; make a new one")

    def close(self) -> None:
        """Enters that the LLM is closed."""
        self._take()
        self._reason = CLOSED
        self._lock.release()

    def _take(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "another thread is using this LLM, and one at a time may; let one thread own it and hand it requests"
                " through a queue.Queue, or hold a threading.Lock of your own around each call"
            )
