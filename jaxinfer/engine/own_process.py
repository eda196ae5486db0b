"""Refuses to compute in a forked child: JAX's threads stay behind in the parent, and a step in the child never ends."""

from __future__ import annotations

import os


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
