"""The state of an engine that can be used: not closed, its device not failed, in a process of its own."""

from __future__ import annotations

import os


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


class Health:
    """The reason why an engine cannot be used any more, if there is one. Any thread may read it."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self.failure: BaseException | None = None  # the exception of the device, until the engine is closed
        self.is_closed = False

    @property
    def is_good(self) -> bool:
        """True if the engine is neither closed nor failed."""
        return self._reason is None

    def check(self) -> None:
        """Raises RuntimeError if the engine is closed, has failed, or belongs to another process."""
        if self._reason is not None:
            raise RuntimeError(f"this LLM {self._reason}; make a new one") from self.failure
        require_own_process()

    def fail(self, error: BaseException) -> None:
        """Marks the engine as failed by `error`, which lost its cache."""
        self.failure = error
        self._reason = f"has failed ({type(error).__name__}: {error})"
        error.add_note("the LLM has failed with this and lost its unfinished requests; make a new one")

    def close(self) -> None:
        """Marks the engine as closed, and frees the failure, whose traceback may refer to the device's memory."""
        self.is_closed, self._reason, self.failure = True, self._reason or "is closed", None
