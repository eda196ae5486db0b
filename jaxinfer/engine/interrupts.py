"""Ctrl-C where it does no harm."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


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
