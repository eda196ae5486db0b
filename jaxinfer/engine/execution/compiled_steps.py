"""The compiled steps of an engine, one per bucket, compiled when they are wanted, and the choice among them."""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import NamedTuple

import jax

from jaxinfer.display.progress import Bar
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.plan.step_shapes import Bucket, find_bucket, first_buckets
from jaxinfer.sampling_params import Form

logger = logging.getLogger(__name__)

COMPILING = "compiling"  # name prefix of the compiling threads
DESCRIPTION = "compiling"
SECONDS_BETWEEN_UPDATES = 0.5  # of the bar, while an executable is compiled
EXIT_INTERRUPTED = 130  # 128 + SIGINT


def is_compiling() -> bool:
    """True if a thread of this process compiles steps; the interpreter waits for such threads before it ends."""
    return any(thread.name.startswith(COMPILING) for thread in threading.enumerate())


def _is_program_over() -> bool:
    """True if the main thread has ended, and no thread is left that Python waits for, but those that compile."""
    if threading.main_thread().is_alive():
        return False
    return all(
        thread.daemon or thread.name.startswith(COMPILING) for thread in threading.enumerate() if thread.is_alive()
    )


def _end_interrupted() -> None:
    """Ends the process if Ctrl-C ended its wait for the compiler, whose threads would otherwise abort it."""
    if is_compiling():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED)


atexit.register(_end_interrupted)  # Python joins all threads first, so any that is left was interrupted


def choose_bucket(buckets: Sequence[Bucket], step: Step) -> Bucket:
    """Returns the smallest bucket of the step's kind that holds the step; see `find_bucket`."""
    kind = {"is_decode": step.is_decode, "is_verify": step.is_verify, "is_mixed": step.is_verify and step.is_mixed}
    return find_bucket(
        buckets, step.num_tokens, len(step.chunks), **kind, loop_form=step.form if step.is_loop else None
    )


class Choice(NamedTuple):
    """The executables of a step."""

    bucket: Bucket
    compiled: jax.stages.Compiled
    draw: tuple[Bucket, jax.stages.Compiled] | None  # `Bucket.draw`, if the step draws apart


class CompiledSteps:
    """Compiles the steps that requests need, and chooses among those that are compiled.

    An engine waits for the few `first` buckets, which compute any request that is drawn plainly. Any other bucket is
    compiled beside the requests once a step has come that suits it best; until then the smallest that is ready stands
    in. So the first token comes as early as possible, no request waits for a shape that it can do without, and nothing
    is compiled that no step wants.

    Until a larger prefill step is ready the steps have at most `max_tokens` tokens. Requests that draw in another form
    wait for the draw of that form, see `can_draw`; the steps of others go on meanwhile.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        compile_bucket: Callable[[Bucket], jax.stages.Compiled],
        first: Sequence[Bucket] | None = None,
        expected_form: Form = "plain",
    ) -> None:
        """Starts to compile `first`, by default `first_buckets`, and beside them the draw of `expected_form`."""
        self._buckets, self._compile_bucket = tuple(buckets), compile_bucket
        self._draw_forms = draw_forms_of(self._buckets)
        self.on_change: Callable[[], object] = lambda: None  # called on another thread when a step has been compiled
        # Of any thread, under the lock.
        self._lock = threading.Lock()
        self._futures: dict[Bucket, Future[jax.stages.Compiled]] = {}
        self._to_compile: deque[Bucket] = deque()
        self._num_threads = 0
        self._is_cancelled = False
        # Of the thread that chooses.
        self._compiled: dict[Bucket, jax.stages.Compiled] = {}
        self._collected: set[Bucket] = set()  # of `_ended`, what `_compiled` has, and what has failed
        self._base = first_buckets(self._buckets)[0]  # holds all rows
        self._loops = {b.form: b for b in self._buckets if b.num_steps > 1}  # the largest of each form
        self._most_tokens = self._buckets[-1].num_tokens
        self._record_ready()
        self._first = first_buckets(self._buckets) if first is None else tuple(first)
        self._demand(self._first)
        if (draw := self._draw_of(expected_form)) is not None:
            self._demand((draw,))

    def wait_for_first(self, *, show_progress: bool = False) -> None:
        """Waits for the first buckets; raises the compiler's exceptions."""
        self._wait_for(self._first, show_progress, DESCRIPTION)
        self._collect()

    def wait(self, *, show_progress: bool = False, description: str = DESCRIPTION) -> None:
        """Compiles every bucket; raises the compiler's exceptions. Any thread may call it."""
        self._wait_for(self._buckets, show_progress, description)

    def to_come(self) -> list[Future[jax.stages.Compiled]]:
        """Returns the results of the compilations that have not ended. Any thread may call it."""
        with self._lock:
            return [future for future in self._futures.values() if not future.done()]

    def cancel(self) -> None:
        """Cancels the compilations that have not begun, and ends the waiting for any."""
        with self._lock:
            self._is_cancelled = True
            while self._to_compile:
                self._futures[self._to_compile.popleft()].set_exception(CancelledError())

    @property
    def compiled(self) -> Mapping[Bucket, jax.stages.Compiled]:
        """Returns the steps compiled so far, by bucket. Any thread may read it."""
        return {b: f.result() for b, f in self._ended().items() if f.exception() is None}

    @property
    def max_tokens(self) -> int:
        """The most tokens of a step so far."""
        if self._max_tokens < self._most_tokens:
            self._collect()
        return self._max_tokens

    def want_tokens(self) -> None:
        """Has the largest prefill step compiled that has not failed."""
        failed = {bucket for bucket, future in self._ended().items() if future.exception() is not None}
        self._ask_for([bucket for bucket in self._buckets if bucket.is_prefill and bucket not in failed][-1:])

    def can_draw(self, form: Form) -> bool:
        """True if a step of any rows can draw in this form; if not, has the draw compiled beside the requests."""
        draw = self._draw_of(form)
        if draw is None or self._has(draw):
            return True
        if self._ask_for((draw,)):
            logger.info("requests wait until %s is compiled", draw.name)
        with self._lock:
            if draw in self._to_compile:  # no step waits, but a request does
                self._to_compile.remove(draw)
                self._to_compile.appendleft(draw)
        return False

    def draw_error(self, form: Form) -> str | None:
        """Returns the compiler's message if the draw of this form cannot be compiled."""
        draw = self._draw_of(form)
        failed = None if draw is None else self._ended().get(draw)
        error = None if failed is None else failed.exception()
        return None if draw is None or error is None else f"{draw.name} cannot be compiled: {error!r}"

    def can_loop(self, form: Form) -> bool:
        """True if a loop of any rows can draw in this form; if not, has one compiled beside the requests."""
        if (loop := self._loops.get(form)) is None:
            return False
        if self._has(loop):
            return True
        self._ask_for((loop,))
        return False

    def choose(self, step: Step) -> Choice:
        """Returns the smallest compiled bucket that holds the step, and its executables.

        If a smaller one would hold it, that is compiled for later steps.
        """
        form = draw_form(self._draw_forms, step)
        best = choose_bucket(self._buckets, step)
        choice = self._choice(best, form)
        if choice is None:
            self._ask_for((best,) if form is None else (best, best.draw(form)))
            self._collect()
            ready = self._ready if form is None else self._with_draw[form]
            choice = self._choice(choose_bucket(ready, step), form)
            assert choice is not None
        return choice

    def of(self, bucket: Bucket) -> jax.stages.Compiled:
        """Returns the step of a bucket; KeyError if it is not compiled."""
        self._collect()
        return self._compiled[bucket]

    def _choice(self, bucket: Bucket, form: Form | None) -> Choice | None:
        """Returns the executables of a bucket; None if one is not compiled."""
        compiled = self._compiled.get(bucket)
        if compiled is None or form is None:
            return None if compiled is None else Choice(bucket, compiled, None)
        draw = bucket.draw(form)
        return None if draw not in self._compiled else Choice(bucket, compiled, (draw, self._compiled[draw]))

    def _has(self, bucket: Bucket) -> bool:
        if bucket not in self._compiled:
            self._collect()
        return bucket in self._compiled

    def _draw_of(self, form: Form) -> Bucket | None:
        """Returns the draw of any rows in a form; None if the steps themselves draw in it."""
        if form == "plain" or not self._draw_forms:
            return None
        return self._base.draw(form if form in self._draw_forms else "full")

    def _ask_for(self, buckets: Iterable[Bucket]) -> bool:
        """Has buckets compiled that are not yet; True if none of them has been asked for before."""
        buckets = tuple(buckets)
        names = " and ".join(bucket.name for bucket in buckets)
        with self._lock:
            is_new = not any(bucket in self._futures for bucket in buckets)
        try:
            self._demand(buckets)
        except RuntimeError as error:  # a later step tries again
            logger.warning("no thread can compile %s now: %s", names, error)
        return is_new

    def _demand(self, buckets: Iterable[Bucket]) -> list[Future[jax.stages.Compiled]]:
        """Has buckets compiled that are not yet, steps before draws; returns the results to come."""
        with self._lock:
            wanted = list(buckets)
            for bucket in sorted(wanted, key=lambda bucket: bucket.is_draw):
                if bucket not in self._futures:
                    self._futures[bucket] = future = Future()
                    if self._is_cancelled:
                        future.set_exception(CancelledError())
                    else:
                        self._to_compile.append(bucket)
            # The compiler releases the interpreter lock and has threads of its own; half of the cores stay for
            # requests.
            most = max((os.cpu_count() or 1) // 2, 1)
            for _ in range(min(most - self._num_threads, len(self._to_compile))):
                # No daemon, as the thread that demands may be one: Python then waits for the step under way.
                thread = threading.Thread(target=self._compile, name=f"{COMPILING}-{self._num_threads}", daemon=False)
                thread.start()
                self._num_threads += 1
            return [self._futures[bucket] for bucket in wanted]

    def _compile(self) -> None:
        """Compiles what is demanded, in this thread, as long as the program runs."""
        while True:
            with self._lock:
                if not self._to_compile or _is_program_over():
                    self._num_threads -= 1
                    return
                bucket = self._to_compile.popleft()
                future = self._futures[bucket]
            try:
                future.set_result(self._compile_bucket(bucket))
            except BaseException as error:
                future.set_exception(error)
            self.on_change()

    def _wait_for(self, buckets: Sequence[Bucket], show_progress: bool, description: str) -> None:
        futures = self._demand(buckets)
        is_shown = show_progress and not all(future.done() for future in futures)
        with Bar(len(futures), unit="executable", description=description, show=is_shown) as bar:
            for future in futures:
                while not concurrent.futures.wait([future], SECONDS_BETWEEN_UPDATES).done and not self._is_cancelled:
                    bar.update(0)
                if self._is_cancelled:
                    raise RuntimeError("the engine was closed before its steps were compiled; make a new one")
                future.result()
                bar.update()

    def _record_ready(self) -> None:
        self._ready = tuple(bucket for bucket in self._buckets if bucket in self._compiled)
        self._max_tokens = max((bucket.num_tokens for bucket in self._ready if bucket.is_prefill), default=0)
        # By the forms in which the engine draws apart: the steps whose draw is compiled too.
        self._with_draw: dict[Form, tuple[Bucket, ...]] = {
            form: tuple(bucket for bucket in self._ready if bucket.draw(form) in self._compiled)
            for form in self._draw_forms
        }

    def _collect(self) -> None:
        """Makes the steps that were compiled since the last call available to `choose`."""
        ended = self._ended()
        if len(ended) == len(self._collected):
            return
        for bucket in ended.keys() - self._collected:
            if (error := ended[bucket].exception()) is None:
                self._compiled[bucket] = ended[bucket].result()
            elif not isinstance(error, CancelledError):
                effect = "requests that need it end" if bucket.is_draw else "slower steps stand in for it"
                logger.error("%s cannot be compiled, %s: %r", bucket.name, effect, error)
        self._collected = {*ended}
        self._record_ready()

    def _ended(self) -> dict[Bucket, Future[jax.stages.Compiled]]:
        """Returns the compilations that have ended, in success or failure."""
        with self._lock:
            return {bucket: future for bucket, future in self._futures.items() if future.done()}


def wait_for_one(compiled: Iterable[CompiledSteps], seconds: float) -> None:
    """Waits for the end of a compilation that is to come, if there is one, at most for these seconds."""
    to_come = [future for steps in compiled for future in steps.to_come()]
    concurrent.futures.wait(to_come, seconds, concurrent.futures.FIRST_COMPLETED)


def draw_forms_of(buckets: Iterable[Bucket]) -> set[Form]:
    """Returns the forms in which `buckets` draw apart: none for a model without logits."""
    return {bucket.form for bucket in buckets if bucket.is_draw}


def draw_form(forms: Collection[Form], step: Step) -> Form | None:
    """Returns which of `forms` draws the tokens of a step; None if the step draws itself, or nothing is drawn."""
    if not step.draws_apart or not forms:
        return None
    return step.form if step.form in forms else "full"


COMPILED = "/jax/core/compile/backend_compile_duration"


class _Thread(threading.local):
    watch: CompileCounter | None = None


_thread = _Thread()


class CompileCounter:
    """Context manager: counts the compilations of JAX in this thread."""

    total = 0  # of all counters of the process

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        _thread.watch = self

    def __exit__(self, *_: object) -> None:
        _thread.watch = None


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event == COMPILED and _thread.watch is not None:
        _thread.watch.count += 1
        CompileCounter.total += 1


jax.monitoring.register_event_duration_secs_listener(_listen)
