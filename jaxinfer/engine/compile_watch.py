"""Compilations that a request had to wait for: there should be none."""

from __future__ import annotations

import threading

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"


class _Thread(threading.local):
    watch: CompileWatch | None = None


_thread = _Thread()


class CompileWatch:
    """Counts what JAX compiles in this thread while it is entered. `total` is that of all watches of the process."""

    total = 0

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        _thread.watch = self

    def __exit__(self, *_: object) -> None:
        _thread.watch = None


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event == COMPILED and _thread.watch is not None:
        _thread.watch.count += 1
        CompileWatch.total += 1


jax.monitoring.register_event_duration_secs_listener(_listen)
