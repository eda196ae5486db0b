"""`EngineThread`: an engine on a thread of its own, for programs with many threads or an event loop."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.frontend.guard import Lifecycle
from jaxinfer.engine.frontend.sample_group import SampleGroup
from jaxinfer.engine.request.completion import Delta
from jaxinfer.validation import require, require_real

logger = logging.getLogger(__name__)

T = TypeVar("T")
# As `outputs.Sink`, but the last argument may be an exception: the request was refused, or the engine has failed.
ThreadSink = Callable[[Delta | Exception], object]
MAX_ATTEMPTS = 3  # to compute a step that raises an exception, if the device has not failed
LOOK_SECONDS = 0.1  # between two looks at deadlines and the time of the end, while no step can be computed


class EngineThread:
    """The only caller of its engine: computes steps while requests are unfinished, and sleeps otherwise.

    any thread          submit(a) ─┐    call(f) ─┐                     sink of a
                                   ▼             ▼                         ▲
    engine's thread     step n ─ take a ─ step n + 1 ─ f(engine) ─ step n + 2 ─ deltas ─ …

    Any thread may call its methods. Every request that `submit` takes ends exactly once, by a completion or by an
    exception. Sinks and commands run on the engine's thread and hold up its steps. They may not wait for a result of
    `call` or for `close`. A sink receives a refusal on the thread that calls `submit`, if the engine takes no more
    commands. The thread owns the engine from now on, and closes it.

    A request from an event loop, with a queue as the sink:

        samples = engine_thread.engine.admit("Hello")
        engine_thread.submit(samples, lambda delta: loop.call_soon_threadsafe(queue.put_nowait, delta))
    """

    def __init__(self, engine: Engine) -> None:
        require(isinstance(engine, Engine), "engine", engine, "an Engine")
        self.engine = engine  # other threads may call what its docstring allows
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()  # a command comes either before the end or after it
        self._lifecycle = Lifecycle("engine")  # after its end no more commands are taken
        self._step_began: float | None = None  # on time.monotonic
        self._closing_time = math.inf  # on time.monotonic: unfinished requests are aborted then
        engine.on_change(lambda: self._commands.put(_wake_up))
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)  # Python must not end while a daemon thread is inside JAX

    @property
    def failure(self) -> BaseException | None:
        """The exception that has ended the engine, or None."""
        return self._lifecycle.failure

    @property
    def step_seconds(self) -> float:
        """The seconds since the step under way began, 0 if none is. They grow while the device hangs."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, samples: SampleGroup, sink: ThreadSink) -> None:
        """Queues samples that `Engine.admit` has returned. Never raises: the sink receives a refusal too.

        A refusal is QueueFullError, ValueError for samples that were submitted before, or RuntimeError if the engine is
        closed or has failed.
        """

        def submit() -> None:
            try:
                self.engine.submit(samples, sink)
            except Exception as error:
                _end(sink, error)

        if (refusal := self._post(submit)) is not None:
            _end(sink, refusal)

    def call(self, command: Callable[[Engine], T]) -> Future[T]:
        """Calls a function with the engine between two steps, after all earlier commands; returns its future result.

        This is the way to `abort`, `fork`, `save`, `update_params` and all else that changes the engine. A future that
        is cancelled before its turn is left out. RuntimeError is the result if the engine is closed or has failed.
        """
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    self.engine.check()
                    future.set_result(command(self.engine))
                except BaseException as error:
                    future.set_exception(error)

        if (refusal := self._post(run)) is not None:
            future.set_exception(refusal)
        return future

    def close(self, *, drain_seconds: float) -> None:
        """Takes no more commands, ends all requests, and returns when the engine is closed.

        Unfinished requests have `drain_seconds`; then they end with finish reason "abort". Another call may shorten the
        time.
        """
        require_real("drain_seconds", drain_seconds, 0.0)
        if threading.current_thread() is self._thread:
            raise RuntimeError("close waits for the engine's thread, so sinks and commands may not call it")
        with self._lock:
            self._lifecycle.close()
            self._closing_time = min(self._closing_time, time.monotonic() + drain_seconds)
            self._commands.put(_wake_up)
        self._thread.join()
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        self.close(drain_seconds=0.0)

    def _post(self, command: Callable[[], None]) -> RuntimeError | None:
        """Queues a command; returns the refusal if no more commands are taken."""
        with self._lock:
            if self._lifecycle.is_open:
                try:
                    self.engine.check()  # in a fork of the process there is no thread that takes commands
                except RuntimeError as error:
                    return error
                self._commands.put(command)
                return None
        return self._lifecycle.refusal()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            with self._lock:  # after this no command comes
                self._lifecycle.fail(self.engine.failure or error)
            logger.critical("the engine has failed, and its unfinished requests with it", exc_info=error)
        try:
            self._obey()
            if self.failure is None:
                self.engine.abort_all()
        finally:
            for sink in self.engine.sinks.values():
                _end(cast(ThreadSink, sink), self._lifecycle.refusal())
            self.engine.close()

    def _serve(self) -> None:
        """Computes steps and obeys commands until the engine is to be closed; raises if the engine cannot go on."""
        num_attempts = 0
        while True:
            is_closing = not self._lifecycle.is_open  # then all commands have come
            has_requests = self.engine.num_unfinished > 0
            if not self.engine.has_steps and (has_requests or not is_closing):
                # The end of a check or a compilation comes as a command; a deadline may pass before.
                with contextlib.suppress(Empty):
                    self._commands.get(timeout=LOOK_SECONDS if has_requests else None)()
            self._obey()
            self.engine.check()  # a command may have met a failure of the device
            if is_closing and (self.engine.num_unfinished == 0 or time.monotonic() >= self._closing_time):
                return
            self._step_began = time.monotonic()
            try:
                self.engine.advance()
                num_attempts = 0
            except Exception as error:
                num_attempts += 1
                self.engine.check()
                if num_attempts == MAX_ATTEMPTS:
                    raise
                logger.error("a step raised an exception and is computed again", exc_info=error)
            finally:
                self._step_began = None
            if (error := self.engine.take_error()) is not None:
                logger.error("the drafter raised an exception", exc_info=error)

    def _obey(self) -> None:
        """Runs the commands that have come; those that come meanwhile wait for the next step."""
        for _ in range(self._commands.qsize()):
            self._commands.get()()


def _wake_up() -> None:
    """The command that ends the sleep of an idle engine."""


def _end(sink: ThreadSink, error: Exception) -> None:
    try:
        sink(error)
    except Exception as raised:
        logger.info("a sink raised %r when it received %r", raised, error)
