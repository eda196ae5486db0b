"""The state of an engine that can be used: not closed, its device not failed, in a process of its own."""

from __future__ import annotations

import os

FAILURE_NOTE = "the LLM has failed with this and lost its unfinished requests; make a new one"


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
