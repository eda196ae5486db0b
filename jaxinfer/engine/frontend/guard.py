"""Guards an LLM: one thread at a time, and Ctrl-C between two steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import deque
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
