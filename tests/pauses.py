"""The pauses of other threads while some work holds the interpreter's lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def longest_pause(work: Callable[[], object]) -> float:
    """Returns the longest time in seconds between two turns of a thread that sleeps a millisecond at a time."""
    pauses, is_over = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not is_over.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            pauses.append(now - last)
            last = now

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        work()
    finally:
        is_over.set()
        ticking.join()
    return max(pauses)
