"""Who may use an LLM, and whether it is still of use."""

from __future__ import annotations

import threading
from typing import Self

from jaxinfer.engine.own_process import require_own_process

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
