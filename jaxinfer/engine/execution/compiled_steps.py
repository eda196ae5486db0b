"""The compiled steps of an engine, one per bucket, and the choice among them while others still compile."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import NamedTuple

import jax
from tqdm import tqdm

from jaxinfer.device import compiles_on_device
from jaxinfer.engine.execution.step_shapes import Bucket, choose_bucket
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.sampling_params import FORMS, Form

logger = logging.getLogger(__name__)

COMPILING = "compiling"  # name prefix of the compiling threads
DESCRIPTION = "compiling steps"
EXIT_INTERRUPTED = 130  # 128 + SIGINT


def is_compiling() -> bool:
    """True if a thread of this process compiles steps; the interpreter waits for such threads before it ends."""
    return any(thread.name.startswith(COMPILING) for thread in threading.enumerate())


def _end_interrupted() -> None:
    """Ends the process if Ctrl-C ended its wait for the compiler, whose threads would otherwise abort it."""
    if is_compiling():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED)


atexit.register(_end_interrupted)  # Python joins all threads first, so any that is left was interrupted


class Choice(NamedTuple):
    """The executables of a step."""

    bucket: Bucket
    compiled: jax.stages.Compiled
    draw: tuple[Bucket, jax.stages.Compiled] | None  # `Bucket.draw`, if the step draws apart


class CompiledSteps:
    """Compiles a step for each bucket, in parallel. Only the buckets that hold any step are waited for.

    The other buckets compile while the engine serves requests; the largest of a kind stands in for them. The first
    token comes as early as possible, and no request waits for the compiler.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        compile_bucket: Callable[[Bucket], jax.stages.Compiled],
        known: Mapping[Bucket, jax.stages.Compiled] = MappingProxyType({}),
    ) -> None:
        """Starts to compile all buckets that are not in `known`, the steps compiled already."""
        self._buckets = tuple(buckets)
        self._known = dict(known)
        # The compiler releases the interpreter lock and has threads of its own; half of the cores stay for requests.
        # It finishes at the end of the process, so that the next process finds the steps on disk.
        pool = ThreadPoolExecutor(max((os.cpu_count() or 1) // 2, 1), thread_name_prefix=COMPILING)
        self._enough = enough_buckets(self._buckets)
        order = sorted(self._buckets, key=lambda bucket: (bucket not in self._enough, bucket.is_draw))
        order = [bucket for bucket in order if bucket not in known]
        # In the order of compilation. Never changed, so any thread may wait for them.
        self._futures: dict[Bucket, Future[jax.stages.Compiled]] = {b: pool.submit(compile_bucket, b) for b in order}
        pool.shutdown(wait=False)
        # The rest belongs to the thread that chooses.
        self._compiled = dict(known)
        self._to_come = order
        self._record_ready()

    def wait_for_enough(self, *, show_progress: bool = False) -> None:
        """Waits for the buckets that hold any step, or for all if compiling while serving is impossible."""
        # Processes that compute together must choose the same buckets. A compiler that `compiles_on_device` measures
        # candidates there, in memory that the cache would take.
        is_enough = jax.process_count() == 1 and not compiles_on_device()
        self._wait_for(self._enough if is_enough else self._buckets, show_progress, DESCRIPTION)
        self._collect()

    def wait(self, *, show_progress: bool = False, description: str = DESCRIPTION) -> None:
        """Waits until every bucket has its step; raises the compiler's exceptions. Any thread may call it."""
        self._wait_for(self._buckets, show_progress, description)

    def cancel(self) -> None:
        """Cancels the compilations that have not begun."""
        for step in self._futures.values():
            step.cancel()

    @property
    def compiled(self) -> Mapping[Bucket, jax.stages.Compiled]:
        """Returns the steps compiled so far, by bucket. Any thread may read it."""
        done = [(bucket, future) for bucket, future in self._futures.items() if future.done()]
        succeeded = {b: f.result() for b, f in done if not f.cancelled() and f.exception() is None}
        return self._known | succeeded

    def choose(self, step: Step) -> Choice:
        """Returns the smallest compiled bucket that holds the step, and its executables."""
        self._collect()
        form = draw_form(self._with_draw, step)
        bucket = choose_bucket(self._ready if form is None else self._with_draw[form], step)
        draw = None if form is None else bucket.draw(form)
        return Choice(bucket, self._compiled[bucket], None if draw is None else (draw, self._compiled[draw]))

    def of(self, bucket: Bucket) -> jax.stages.Compiled:
        """Returns the step of a bucket; KeyError if it is not compiled."""
        self._collect()
        return self._compiled[bucket]

    def _wait_for(self, buckets: Sequence[Bucket], show_progress: bool, description: str) -> None:
        futures = [future for bucket, future in self._futures.items() if bucket in buckets]
        is_done = all(future.done() for future in futures)
        for future in tqdm(futures, desc=description, unit="step", disable=is_done or not show_progress):
            try:
                future.result()
            except CancelledError:
                raise RuntimeError("the engine was closed before its steps were compiled; make a new one") from None

    def _record_ready(self) -> None:
        self._ready = tuple(bucket for bucket in self._buckets if bucket in self._compiled)
        # By the forms in which the engine draws apart: the steps whose draw is compiled too.
        self._with_draw: dict[Form, tuple[Bucket, ...]] = {
            form: tuple(bucket for bucket in self._ready if bucket.draw(form) in self._compiled)
            for form in draw_forms_of(self._buckets)
        }

    def _collect(self) -> None:
        """Makes the steps that were compiled since the last call available to `choose`."""
        if not self._to_come or not any(self._futures[bucket].done() for bucket in self._to_come):
            return
        done = [bucket for bucket in self._to_come if self._futures[bucket].done()]
        self._to_come = [bucket for bucket in self._to_come if bucket not in done]
        for bucket in done:
            if (error := self._futures[bucket].exception()) is None:
                self._compiled[bucket] = self._futures[bucket].result()
            else:
                logger.error("%s cannot be compiled, slower steps stand in for it: %r", bucket.name, error)
        self._record_ready()


def draw_forms_of(buckets: Iterable[Bucket]) -> set[Form]:
    """Returns the forms in which `buckets` draw apart: none for a model without logits."""
    return {bucket.form for bucket in buckets if bucket.is_draw}


def draw_form(forms: Collection[Form], step: Step) -> Form | None:
    """Returns which of `forms` draws the tokens of a step; None if the step draws itself, or nothing is drawn."""
    if not step.draws_apart or not forms:
        return None
    return step.form if step.form in forms else "full"


def enough_buckets(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Returns the last of `buckets`, which holds any step, its draw buckets, and the last loop of each form."""
    last_loops = {bucket.form: bucket for bucket in buckets if bucket.num_steps > 1}
    enough = {*buckets[-1:], *(bucket.draw(form) for bucket in buckets[-1:] for form in FORMS), *last_loops.values()}
    return tuple(bucket for bucket in buckets if bucket in enough)


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
