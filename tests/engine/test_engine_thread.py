"""An engine on a thread of its own: threads and event loops use it at once, and every request ends exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import jax
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.engine_thread import EngineThread
from jaxinfer.engine.frontend.guard import _Process
from jaxinfer.engine.frontend.sample_group import SampleGroup
from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.engine.request.request import QueueFullError
from tests.engine.engines import GREEDY, ScriptedDrafter, generate, random_prompts, small_engine, token_ids_of
from tests.engine.probe import engine_of, runner_of, scheduler_of

PROMPTS = random_prompts(6, max_len=40, seed=3)
ENDLESS = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
WAIT = 300.0  # seconds; only a test that fails waits for as long


class Reader:
    """A sink that collects what a request receives, and fails if anything comes after the end."""

    def __init__(self, samples: SampleGroup) -> None:
        self.request_id = samples.request_id
        self._sampling = samples.sampling
        self._num_left = samples.num_completions
        self.deltas: list[Delta] = []
        self.completions: list[Completion] = []
        self.error: Exception | None = None
        self.num_ends = 0
        self._has_ended, self._has_begun = threading.Event(), threading.Event()

    def __call__(self, item: Delta | Exception) -> None:
        if isinstance(item, Exception):
            self.error = item
        else:
            self.deltas.append(item)
            if item.completion is not None:
                self.completions.append(item.completion)
        self._has_begun.set()
        if self.error is not None or len(self.completions) == self._num_left:
            self.num_ends += 1
            self._has_ended.set()

    def wait_for_begin(self) -> None:
        assert self._has_begun.wait(WAIT)

    def wait(self) -> list[Completion]:
        """Returns the completions after the end; raises the exception that ended the request."""
        assert self._has_ended.wait(WAIT), f"request {self.request_id} has no end"
        if self.error is not None:
            raise self.error
        return in_order(self.completions, self._sampling)


def in_order(completions: list[Completion], sampling: SamplingParams) -> list[Completion]:
    return completions if sampling.best_of is not None else sorted(completions, key=lambda one: one.sample_index)


def submit(thread: EngineThread, prompt: Any, params: SamplingParams = GREEDY, **options: Any) -> Reader:
    samples = thread.engine.admit(prompt, params, **options)
    reader = Reader(samples)
    thread.submit(samples, reader)
    return reader


def result_of(future: Future[Any]) -> Any:
    return future.result(WAIT)


def metrics_of(thread: EngineThread) -> Any:
    return result_of(thread.call(lambda engine: engine.metrics()))


@contextlib.contextmanager
def running(llm: Any) -> Iterator[EngineThread]:
    thread = EngineThread(engine_of(llm))
    try:
        yield thread
    finally:
        thread.close(drain_seconds=0)


@pytest.fixture
def new_llm(checkpoint):
    """A new engine, whose compiled steps are those of the other tests."""
    return small_engine(checkpoint, max_prompt_log_probs=3)


@pytest.fixture
def thread(new_llm) -> Iterator[EngineThread]:
    with running(new_llm) as thread:
        yield thread


# ---- requests and commands


def test_requests_of_several_threads_yield_the_tokens_of_generate(shared_llm, thread):
    expected = token_ids_of(generate(shared_llm, PROMPTS))
    results: dict[int, Any] = {}

    def run(i: int) -> None:
        results[i] = submit(thread, PROMPTS[i]).wait()[0].token_ids

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(PROMPTS))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert [results[i] for i in range(len(PROMPTS))] == expected


def test_the_deltas_of_a_request_join_to_its_completion(thread):
    reader = submit(thread, PROMPTS[0])
    (completion,) = reader.wait()

    assert sum((delta.token_ids for delta in reader.deltas), ()) == completion.token_ids
    assert "".join(delta.text for delta in reader.deltas) == completion.text
    assert len(reader.deltas) > 1


@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 2, "best_of": 4}], ids=["n", "best_of"])
def test_several_samples_have_one_sink_and_one_end(shared_llm, thread, fields):
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=6, ignore_eos=True, **fields)

    reader = submit(thread, PROMPTS[0], params)

    assert token_ids_of(reader.wait()) == token_ids_of(generate(shared_llm, [PROMPTS[0]], params))
    assert reader.num_ends == 1


def test_commands_run_between_steps_in_their_order(thread):
    order: list[int] = []
    futures = [thread.call(lambda _, i=i: order.append(i)) for i in range(20)]

    for future in futures:
        result_of(future)

    assert order == list(range(20))


def test_a_command_gives_its_result_or_its_exception_to_the_caller(thread):
    def fail(engine: Any) -> None:
        raise KeyError("no such thing")

    assert result_of(thread.call(lambda engine: engine.num_unfinished)) == 0
    with pytest.raises(KeyError, match="no such thing"):
        result_of(thread.call(fail))
    assert submit(thread, PROMPTS[0]).wait()


def test_an_aborted_request_ends_with_its_tokens_so_far(thread):
    expected = submit(thread, PROMPTS[0], ENDLESS).wait()[0].token_ids
    reader = submit(thread, PROMPTS[0], ENDLESS)
    reader.wait_for_begin()

    result_of(thread.call(lambda engine: engine.abort(reader.request_id)))

    (completion,) = reader.wait()
    if completion.finish_reason != "length":  # it was faster than this thread
        assert completion.finish_reason == "abort"
        assert completion.token_ids == expected[: len(completion.token_ids)]
    assert metrics_of(thread).num_owned_pages == 0


def test_a_branch_of_a_request_has_a_sink_of_its_own(shared_llm, thread):
    expected = token_ids_of(generate(shared_llm, [PROMPTS[0]], ENDLESS))
    samples = thread.engine.admit(PROMPTS[0], ENDLESS)
    origin, branch = Reader(samples), Reader(samples)

    def submit_and_fork(engine: Any) -> None:
        engine.submit(samples, origin)
        engine.advance()
        engine.fork(samples.request_id, branch)

    result_of(thread.call(submit_and_fork))

    assert token_ids_of(origin.wait()) == expected
    assert token_ids_of(branch.wait()) == expected
    assert branch.completions[0].request_id != samples.request_id


def test_a_future_that_is_cancelled_before_its_turn_is_left_out(thread):
    has_begun, may_end, ran = threading.Event(), threading.Event(), []
    thread.call(lambda _: (has_begun.set(), may_end.wait(WAIT)))
    assert has_begun.wait(WAIT)
    future = thread.call(ran.append)

    assert future.cancel()
    may_end.set()
    metrics_of(thread)

    assert ran == []


def test_an_idle_engine_computes_no_steps_and_sleeps(thread, monkeypatch):
    submit(thread, PROMPTS[0]).wait()
    metrics_of(thread)
    turns = []
    monkeypatch.setattr(thread.engine, "advance", lambda: turns.append(1))

    time.sleep(0.3)

    assert len(turns) <= 1


# ---- refusals and failures


def test_the_seconds_of_a_step_that_hangs_grow_and_an_idle_engine_has_none(thread, monkeypatch):
    advance, hangs, may_go_on = thread.engine.advance, threading.Event(), threading.Event()

    def hang() -> Any:
        hangs.set()
        assert may_go_on.wait(60)
        return advance()

    monkeypatch.setattr(thread.engine, "advance", hang)
    assert thread.step_seconds == 0.0
    samples, deltas = thread.engine.admit(PROMPTS[0], GREEDY), SimpleQueue()
    thread.submit(samples, deltas.put)
    assert hangs.wait(60)

    first = thread.step_seconds
    time.sleep(0.01)
    second = thread.step_seconds
    may_go_on.set()
    while deltas.get(timeout=60).completion is None:
        pass
    thread.call(lambda engine: None).result(60)

    assert 0.0 < first < second
    while thread.step_seconds:
        time.sleep(0.001)


def test_a_full_queue_is_the_end_of_the_request_that_found_it(new_llm, monkeypatch):
    monkeypatch.setattr(scheduler_of(new_llm), "_max_waiting", 1)  # beside the 4 that can run
    with running(new_llm) as thread:
        readers = []

        def fill(engine: Any) -> None:
            readers.extend(submit(thread, PROMPTS[0]) for _ in range(6))

        result_of(thread.call(fill))

        assert all(len(reader.wait()) == 1 for reader in readers[:5])
        with pytest.raises(QueueFullError, match="raise EngineConfig.max_waiting"):
            readers[5].wait()


def test_samples_are_not_queued_twice(thread):
    samples = thread.engine.admit(PROMPTS[0], GREEDY)
    readers = [Reader(samples), Reader(samples)]
    for reader in readers:
        thread.submit(samples, reader)

    assert readers[0].wait()
    with pytest.raises(ValueError, match=f"request {samples.request_id} was submitted before"):
        readers[1].wait()


def test_samples_of_another_engine_are_refused(shared_llm, thread):
    samples = engine_of(shared_llm).admit(PROMPTS[0], GREEDY)
    reader = Reader(samples)
    thread.submit(samples, reader)

    with pytest.raises(ValueError, match=f"request {samples.request_id} was admitted by another engine"):
        reader.wait()


def test_only_an_engine_gets_a_thread(shared_llm):
    with pytest.raises(ValueError, match="engine=<LLM .* is not allowed"):
        EngineThread(shared_llm)


def test_a_command_that_closes_the_engine_ends_every_request(new_llm):
    with running(new_llm) as thread:
        reader = submit(thread, PROMPTS[0], ENDLESS)
        reader.wait_for_begin()
        result_of(thread.call(lambda engine: engine.close()))

        with pytest.raises(RuntimeError, match="is closed"):
            reader.wait()
        assert reader.num_ends == 1


def test_an_exception_while_tokens_are_handed_out_reaches_every_request(new_llm, monkeypatch):
    scheduler, commit, calls = scheduler_of(new_llm), scheduler_of(new_llm).commit, []

    def commit_and_fail(step: Any, output: Any) -> Any:
        commit(step, output)
        calls.append(step)
        raise MemoryError("host")

    with running(new_llm) as thread:
        readers = [submit(thread, prompt, ENDLESS) for prompt in PROMPTS[:2]]
        readers[0].wait_for_begin()
        result_of(thread.call(lambda _: monkeypatch.setattr(scheduler, "commit", commit_and_fail)))
        for reader in readers:
            with pytest.raises(RuntimeError, match=r"has failed \(MemoryError: host\)"):
                reader.wait()

    assert len(calls) == 1
    with pytest.raises(RuntimeError, match=r"has failed \(MemoryError: host\)"):
        thread.engine.admit(PROMPTS[0])


def test_a_sink_that_raises_ends_its_request_alone_and_frees_its_pages(thread):
    calls = []

    def full(item: Any) -> None:
        calls.append(item)
        raise BufferError("the queue of a slow reader is full")

    other = submit(thread, PROMPTS[1], ENDLESS)
    thread.submit(thread.engine.admit(PROMPTS[0], ENDLESS), full)

    assert other.wait()[0].finish_reason == "length"
    assert len(calls) == 1
    assert metrics_of(thread).num_owned_pages == 0


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_sink_that_raises_receives_nothing_of_its_other_samples(thread, num_samples):
    calls = []

    def full(item: Any) -> None:
        calls.append(item)
        raise BufferError("full")

    params = SamplingParams(n=num_samples, max_tokens=20, seed=1, ignore_eos=True)
    thread.submit(thread.engine.admit(PROMPTS[0], params), full)
    submit(thread, PROMPTS[1], ENDLESS).wait()

    assert len(calls) == 1
    assert (metrics_of(thread).num_running, metrics_of(thread).num_owned_pages) == (0, 0)


def fail_on_device(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the next step lose the cache."""
    steps, choose = runner_of(llm).compiled_steps, runner_of(llm).compiled_steps.choose

    def compiled(params: Any, cache: Any, *_: Any) -> None:
        jax.tree.map(lambda array: array.delete(), cache)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(steps, "choose", lambda step: choose(step)._replace(compiled=compiled))


def test_a_failure_of_the_device_reaches_every_request_and_every_later_call(new_llm, monkeypatch, caplog):
    with running(new_llm) as thread:
        readers = [submit(thread, prompt, ENDLESS) for prompt in PROMPTS]
        readers[0].wait_for_begin()
        late = thread.engine.admit(PROMPTS[0])
        result_of(thread.call(lambda _: fail_on_device(new_llm, monkeypatch)))

        ends = []
        for reader in readers:
            try:
                ends.append(reader.wait()[0].finish_reason)
            except RuntimeError as error:
                ends.append(str(error))
        refused = Reader(late)
        thread.submit(late, refused)

        assert {reader.num_ends for reader in readers} == {1}
        failed = "this engine has failed (JaxRuntimeError: RESOURCE_EXHAUSTED); make a new one"
        assert set(ends) <= {"length", failed}
        assert failed in ends
        with pytest.raises(RuntimeError, match="has failed .*RESOURCE_EXHAUSTED"):
            refused.wait()
        with pytest.raises(RuntimeError, match="has failed .*RESOURCE_EXHAUSTED"):
            metrics_of(thread)
        assert isinstance(thread.failure, jax.errors.JaxRuntimeError)
        assert "the engine has failed" in caplog.text


@pytest.mark.parametrize("num_failures", [1, 2, 3])
def test_a_step_that_the_host_cannot_lay_out_is_tried_again_twice(
    shared_llm, new_llm, monkeypatch, caplog, num_failures
):
    expected = token_ids_of(generate(shared_llm, PROMPTS[:2]))
    builder, failures = runner_of(new_llm)._builder, [MemoryError("host")] * num_failures
    build = builder.build

    def build_or_fail(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return build(*args, **kwargs)

    monkeypatch.setattr(builder, "build", build_or_fail)
    with running(new_llm) as thread:
        readers = [submit(thread, prompt) for prompt in PROMPTS[:2]]
        if num_failures < 3:
            assert [reader.wait()[0].token_ids for reader in readers] == expected
            assert "is computed again" in caplog.text
            assert thread.failure is None
        else:
            with pytest.raises(RuntimeError, match=r"this engine has failed \(MemoryError: host\)"):
                readers[0].wait()


def test_an_exception_of_a_drafter_is_logged_and_costs_no_token(shared_llm, checkpoint, caplog):
    expected = token_ids_of(generate(shared_llm, PROMPTS))

    class Failing(ScriptedDrafter):
        def draft(self, requests: Any, counts: Any) -> Any:
            raise LookupError("no drafts today")

    with running(small_engine(checkpoint, speculation=Failing(1.0), max_drafts=2, adaptive_drafts=False)) as thread:
        assert [submit(thread, prompt).wait()[0].token_ids for prompt in PROMPTS] == expected
    assert "no drafts today" in caplog.text


def test_a_fork_of_the_process_is_refused(thread, monkeypatch):
    samples = thread.engine.admit(PROMPTS[0], GREEDY)
    monkeypatch.setattr(_Process, "pid", -1)
    reader = Reader(samples)
    thread.submit(samples, reader)

    with pytest.raises(RuntimeError, match="was forked from process -1"):
        reader.wait()
    with pytest.raises(RuntimeError, match="was forked from process -1"):
        metrics_of(thread)
    monkeypatch.undo()


# ---- the end


def test_close_lets_requests_finish_and_takes_no_others(new_llm):
    with running(new_llm) as thread:
        readers = [submit(thread, prompt) for prompt in PROMPTS]
        late = thread.engine.admit(PROMPTS[0], GREEDY)

        thread.close(drain_seconds=WAIT)

        assert [reader.wait()[0].finish_reason for reader in readers] == ["length"] * len(PROMPTS)
        refused = Reader(late)
        thread.submit(late, refused)
        with pytest.raises(RuntimeError, match="this engine is closed; make a new one"):
            refused.wait()
        with pytest.raises(RuntimeError, match="this engine is closed"):
            metrics_of(thread)
        assert thread.failure is None


def test_close_without_time_aborts_what_is_unfinished(new_llm):
    with running(new_llm) as thread:
        readers = [submit(thread, prompt, ENDLESS) for prompt in PROMPTS]

        thread.close(drain_seconds=0)

        reasons = [reader.wait()[0].finish_reason for reader in readers]
        assert set(reasons) <= {"abort", "length"}
        assert "abort" in reasons
        assert {reader.num_ends for reader in readers} == {1}
    assert repr(new_llm).endswith("closed>")


def test_a_second_close_shortens_the_first(new_llm):
    with running(new_llm) as thread:
        hold = threading.Event()
        thread.call(lambda _: hold.wait(WAIT))
        reader = submit(thread, PROMPTS[0], ENDLESS)
        patient = threading.Thread(target=thread.close, kwargs={"drain_seconds": 1e9})
        patient.start()
        hasty = threading.Thread(target=thread.close, kwargs={"drain_seconds": 0})
        hasty.start()
        hold.set()

        patient.join(WAIT)
        hasty.join(WAIT)

        assert [closer.is_alive() for closer in (patient, hasty)] == [False, False]
        assert reader.num_ends == 1


def test_a_command_may_not_wait_for_the_end_of_its_own_thread(thread):
    with pytest.raises(RuntimeError, match="close waits for the engine's thread"):
        result_of(thread.call(lambda _: thread.close(drain_seconds=0)))


@pytest.mark.parametrize("seconds", [-1, float("nan"), "1", None])
def test_an_impossible_time_to_drain_is_refused(thread, seconds):
    with pytest.raises(ValueError, match="drain_seconds="):
        thread.close(drain_seconds=seconds)


def test_a_program_that_forgets_to_close_ends_by_itself():
    program = (
        "from jaxinfer import EngineConfig, SamplingParams;"
        " from jaxinfer.engine.engine import Engine; from jaxinfer.engine.engine_thread import EngineThread;"
        " thread = EngineThread(Engine(config=EngineConfig(max_num_seqs=1)));"
        " thread.submit(thread.engine.admit('a', SamplingParams(max_tokens=400, ignore_eos=True)), lambda _: None);"
        " print(thread.call(lambda engine: engine.num_unfinished).result())"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT, check=False)

    assert (process.returncode, process.stdout) == (0, "1\n"), process.stderr


# ---- many clients at random


SECONDS = float(os.environ.get("JAXINFER_THREAD_SECONDS", "15"))
NUM_THREADS = 64
NUM_TASKS = 16
DRAWN = SamplingParams(temperature=1.5, seed=5, max_tokens=12, ignore_eos=True)
CASES: list[tuple[list[int], SamplingParams]] = [
    *((prompt, GREEDY) for prompt in PROMPTS),
    *((prompt, DRAWN) for prompt in PROMPTS[:3]),
    (PROMPTS[0], SamplingParams(n=3, temperature=1.2, seed=8, max_tokens=7, ignore_eos=True)),
    (PROMPTS[1], SamplingParams(n=2, best_of=3, temperature=1.2, seed=9, max_tokens=7, ignore_eos=True)),
    (PROMPTS[2], SamplingParams(temperature=0, max_tokens=9, log_probs=2, ignore_eos=True)),
]


class Tally:
    """Counts ends by their kind, and collects what is wrong."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: dict[str, int] = {}
        self.wrong: list[str] = []

    def count(self, kind: str) -> None:
        with self._lock:
            self.counts[kind] = self.counts.get(kind, 0) + 1

    def judge(self, case: int, completions: list[Completion], expected: list[list[tuple[int, ...]]]) -> None:
        """Compares the tokens of an ended request with those of `LLM.generate`, or with their beginning."""
        reasons = {completion.finish_reason for completion in completions}
        self.count("/".join(sorted(reasons)))
        is_whole = reasons == {"length"}
        if CASES[case][1].best_of is not None and not is_whole:
            return  # the best of samples that were broken off
        for completion, right in zip(completions, expected[case], strict=True):
            if completion.token_ids != right[: None if is_whole else len(completion.token_ids)]:
                self.wrong.append(f"case {case}: {completion.finish_reason} {completion.token_ids} for {right}")


def use_at_random(thread: EngineThread, seed: int, end: float, tally: Tally, expected: Any) -> None:
    """One thread's requests, streams, cancellations and looks at metrics."""
    rng = random.Random(seed)
    while time.monotonic() < end:
        case = rng.randrange(len(CASES))
        prompt, params = CASES[case]
        options = {"deadline": rng.choice([0.001, 0.2])} if rng.random() < 0.1 else {}
        reader = submit(thread, prompt, params, priority=rng.choice(["interactive", "batch"]), **options)
        way = rng.random()
        if way < 0.3:
            reader.wait_for_begin()
        if way < 0.4:
            thread.call(partial(abort, request_id=reader.request_id))
        if way > 0.9 and metrics_of(thread).num_owned_pages > metrics_of(thread).num_pages:
            tally.wrong.append("more pages are owned than there are")
        try:
            tally.judge(case, reader.wait(), expected)
        except QueueFullError:
            tally.count("refused")
        if reader.num_ends != 1:
            tally.wrong.append(f"request {reader.request_id} ended {reader.num_ends} times")


def abort(engine: Any, request_id: int) -> None:
    engine.abort(request_id)


async def use_from_a_loop(thread: EngineThread, seed: int, end: float, tally: Tally, expected: Any) -> None:
    """The same from a task of an event loop, which reads deltas as they come."""
    rng, loop = random.Random(seed), asyncio.get_running_loop()
    while time.monotonic() < end:
        case = rng.randrange(len(CASES))
        samples = thread.engine.admit(*CASES[case])
        queue: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        thread.submit(samples, partial(loop.call_soon_threadsafe, queue.put_nowait))
        num_read = rng.choice([0, 3, 10**9, 10**9])
        completions: list[Completion] = []
        error: Exception | None = None
        while error is None and len(completions) < samples.num_completions:
            if num_read == 0:
                await asyncio.wrap_future(thread.call(partial(abort, request_id=samples.request_id)))
            num_read -= 1
            item = await asyncio.wait_for(queue.get(), WAIT)
            if isinstance(item, Exception):
                error = item
            elif item.completion is not None:
                completions.append(item.completion)
        if error is None:
            tally.judge(case, in_order(completions, samples.sampling), expected)
        else:
            tally.count("refused")
            if not isinstance(error, QueueFullError):
                tally.wrong.append(repr(error))
        await asyncio.sleep(0.001)
        if not queue.empty():
            tally.wrong.append(f"request {samples.request_id} received something after its end")


def test_threads_and_an_event_loop_that_do_anything_lose_no_request_and_no_page(shared_llm, checkpoint, monkeypatch):
    expected = [token_ids_of(generate(shared_llm, [prompt], params)) for prompt, params in CASES]
    busy = small_engine(checkpoint, max_prompt_log_probs=3, num_pages=14)
    monkeypatch.setattr(scheduler_of(busy), "_max_waiting", 60)
    monkeypatch.setattr(logging.getLogger("asyncio"), "disabled", True)  # it logs slow callbacks of a busy machine
    tally, end = Tally(), time.monotonic() + SECONDS
    with running(busy) as thread:
        users: list[Callable[[], None]] = [
            partial(use_at_random, thread, seed, end, tally, expected) for seed in range(NUM_THREADS)
        ]

        async def run_tasks() -> None:
            tasks = [use_from_a_loop(thread, 1000 + seed, end, tally, expected) for seed in range(NUM_TASKS)]
            await asyncio.gather(*tasks)

        users.append(lambda: asyncio.run(run_tasks()))

        def noted(use: Callable[[], None]) -> None:
            try:
                use()
            except BaseException as error:
                tally.wrong.append(repr(error))

        threads = [threading.Thread(target=noted, args=(use,)) for use in users]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        metrics = metrics_of(thread)
        open_sinks = result_of(thread.call(lambda engine: engine.sinks))

    assert tally.wrong == []
    assert (metrics.num_running, metrics.num_waiting, metrics.num_owned_pages, open_sinks) == (0, 0, 0, {})
    assert {"length", "abort", "refused", "deadline"} <= set(tally.counts)
    assert tally.counts["length"] > 100
