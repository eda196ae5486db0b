"""Any request is computed as soon as one step is compiled, and with every step afterwards, to the same bits.

A step is compiled when it is wanted, and a process ends without those that are not.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxinfer import LLM
from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.engine.execution.compiled_steps import CompiledSteps, wait_for_one
from jaxinfer.plan.step_shapes import first_buckets, plan_buckets, plan_draws
from tests.engine.engines import SMALL, content_of, forget_prefixes, random_prompts, recorded_steps
from tests.engine.execution.test_batch_builder import make_step
from tests.engine.probe import runner_of

BUCKETS = plan_buckets(EngineConfig(max_num_seqs=8, max_num_batched_tokens=64))
LAST = BUCKETS[-1]
DECODE = make_step([(5, 1), (9, 1)])


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()  # or its threads would wait for ever


def steps_behind(gate, buckets=BUCKETS):
    """Steps of which all but the last are compiled when the gate opens; each is the name of its bucket."""

    def compile_bucket(bucket):
        assert bucket == LAST or gate.wait(60)
        return bucket.name

    steps = CompiledSteps(buckets, compile_bucket)
    steps.wait_for_first()
    return steps


def test_the_last_stands_in_for_what_is_not_compiled(gate):
    steps = steps_behind(gate)

    assert steps.choose(DECODE) == (LAST, LAST.name, None)


def test_every_step_has_its_own_when_all_are_compiled(gate):
    steps = steps_behind(gate)
    gate.set()

    steps.wait()

    assert [steps.choose(make_step([(5, 1)] * n))[1] for n in (1, 2, 8)] == ["decode 1", "decode 8", "decode 8"]
    assert steps.choose(make_step([(0, 9), (0, 50)]))[1] == "prefill 64"


def test_what_no_step_wants_is_not_compiled():
    names = []

    def compile_bucket(bucket):
        names.append(bucket.name)
        return bucket.name

    steps = CompiledSteps(BUCKETS, compile_bucket)
    steps.wait_for_first()
    assert names == [LAST.name]

    steps.choose(DECODE)
    while len(names) < 2:
        time.sleep(0.01)
    steps.choose(DECODE)

    assert names == [LAST.name, "decode 8"]


def test_what_is_compiled_meanwhile_is_used_without_waiting(gate):
    steps = steps_behind(gate)
    gate.set()

    while steps.choose(DECODE)[0] == LAST:
        pass

    assert steps.choose(DECODE)[1] == "decode 8"


def apart(num_rows):
    """A decode step whose tokens are drawn in the full form."""
    step = make_step([(5, 1)] * num_rows)
    step.form = "full"
    return step


def test_a_step_that_draws_apart_takes_a_bucket_whose_draw_is_compiled(gate, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)  # one compiles after the other
    draws = plan_draws(BUCKETS)
    names = []

    def compile_bucket(bucket):
        assert bucket != draws[0] or gate.wait(60)
        names.append(bucket.name)
        return bucket.name

    steps = CompiledSteps((*draws, *BUCKETS), compile_bucket, expected_form="full")
    steps.wait_for_first()
    while not steps.can_draw("full"):
        time.sleep(0.01)
    assert steps.choose(apart(1)).draw == (LAST.draw("full"), "full draw 8")
    while steps.choose(make_step([(5, 1)])).compiled != "decode 1":
        pass
    assert steps.choose(apart(1))[1:] == (LAST.name, (LAST.draw("full"), "full draw 8"))
    gate.set()

    steps.wait()

    # The step that holds any other comes first, then what a step has wanted; each time steps before draws.
    assert names == [LAST.name, "full draw 8", "decode 1", "full draw 1", "decode 8"]
    assert steps.choose(apart(1))[1:] == ("decode 1", (draws[0], "full draw 1"))


def test_a_draw_that_a_request_waits_for_comes_before_what_steps_would_rather_have(gate, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    names = []

    def compile_bucket(bucket):
        assert bucket != BUCKETS[0] or gate.wait(60)
        names.append(bucket.name)
        return bucket.name

    steps = CompiledSteps((*plan_draws(BUCKETS), *BUCKETS), compile_bucket)
    steps.wait_for_first()
    for num_rows in (1, 8):
        steps.choose(make_step([(5, 1)] * num_rows))
    assert not steps.can_draw("full")
    assert steps.can_draw("plain")
    gate.set()
    while not steps.can_draw("full"):
        wait_for_one([steps], 1.0)
    steps.wait()

    assert names.index("full draw 8") < names.index("decode 8")


def test_a_draw_that_cannot_be_compiled_says_why(monkeypatch):
    def compile_bucket(bucket):
        if bucket.is_draw:
            raise MemoryError("out of registers")
        return bucket.name

    steps = CompiledSteps((*plan_draws(BUCKETS), *BUCKETS), compile_bucket)
    steps.wait_for_first()
    while steps.draw_error("full") is None:
        assert not steps.can_draw("full")

    assert steps.draw_error("full") == "full draw 8 cannot be compiled: MemoryError('out of registers')"
    assert steps.draw_error("plain") is None


LOOPED = plan_buckets(EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, decode_loop_steps=4))


def test_a_loop_is_there_when_it_is_compiled_for_all_rows(gate):
    steps = steps_behind(gate, LOOPED)
    assert not steps.can_loop("plain")
    gate.set()
    while not steps.can_loop("plain"):
        wait_for_one([steps], 1.0)
    step = make_step([(5, 1)])
    step.is_loop = True

    assert steps.choose(step).compiled == "plain loop of 4 steps 8"
    assert not steps_behind(gate).can_loop("plain")


LARGE = plan_buckets(EngineConfig(max_num_seqs=32, max_num_batched_tokens=2048))


def test_steps_grow_when_a_larger_prefill_is_compiled_and_that_is_when_it_is_wanted(gate):
    names = []

    def compile_bucket(bucket):
        assert bucket != LARGE[-1] or gate.wait(60)
        names.append(bucket.name)
        return bucket.name

    steps = CompiledSteps(LARGE, compile_bucket)
    steps.wait_for_first()
    assert (steps.max_tokens, names) == (128, ["prefill 128"])
    steps.want_tokens()
    assert steps.max_tokens == 128
    gate.set()
    while steps.max_tokens == 128:
        wait_for_one([steps], 1.0)

    assert steps.max_tokens == 2048
    assert names == ["prefill 128", "prefill 2048"]


@pytest.mark.parametrize("loop_steps", [1, 4])
@pytest.mark.parametrize("num_rows", [1, 8, 64, 256])
@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_the_first_shapes_compute_any_rows_and_are_three_at_most(monkeypatch, backend, num_rows, loop_steps):
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    config = EngineConfig(max_num_seqs=num_rows, decode_loop_steps=loop_steps)
    buckets = plan_buckets(config)

    first = first_buckets(buckets)

    prefill, *decode = first
    assert prefill.is_prefill
    assert prefill.num_rows == num_rows
    assert prefill.num_tokens == max(128, num_rows)
    assert len(first) <= 3
    assert bool(decode) == (backend != "cpu")
    if decode:
        assert decode[-1] == max(
            (b for b in buckets if b.is_decode and b.form == "plain"), key=lambda b: (b.num_rows, b.num_steps)
        )
        assert decode[0].num_rows == min(num_rows, 8)


def test_an_accelerator_has_no_shapes_that_a_larger_one_computes_as_fast(monkeypatch):
    config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=2048, decode_loop_steps=4)
    counts = {}
    for backend in ("tpu", "gpu"):
        monkeypatch.setattr("jax.default_backend", lambda backend=backend: backend)
        buckets = plan_buckets(config)
        counts[backend] = len(buckets) + len(plan_draws(buckets))
        assert {b.num_rows for b in (*buckets, *plan_draws(buckets))} == {8, 64, 256}

    assert counts == {"tpu": 14, "gpu": 17}  # 17 and 23 with decode steps of one row and draws of 128


def test_threads_may_wait_for_the_steps_that_another_chooses_from():
    buckets = plan_buckets(EngineConfig(max_num_seqs=64, max_num_batched_tokens=512))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def compile_bucket(bucket):
        time.sleep(1e-4)
        return bucket.name

    try:
        for _ in range(30):
            steps, errors = CompiledSteps(buckets, compile_bucket), []
            steps.wait_for_first()

            def wait(steps=steps, errors=errors):
                try:
                    steps.wait()
                    assert len(steps.compiled) == len(buckets)
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=wait) for _ in range(4)]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                steps.choose(DECODE)
            assert errors == []
            assert steps.choose(make_step([(5, 1)]))[1] == "decode 1"
    finally:
        sys.setswitchinterval(interval)


def test_the_progress_of_a_wait_has_its_reason_and_none_is_shown_where_all_is_done(gate, lines_at_once, capsys):
    steps = steps_behind(gate)
    gate.set()

    steps.wait(show_progress=True, description="compiling all steps")
    waited = capsys.readouterr().err
    steps.wait(show_progress=True, description="compiling all steps")

    assert "compiling all steps: 100%" in waited
    assert capsys.readouterr().err == ""


PROGRAM = """
import os, threading, time
from jaxinfer.config import EngineConfig
from jaxinfer.engine.execution.compiled_steps import CompiledSteps
from jaxinfer.plan.step_shapes import plan_buckets
buckets = plan_buckets(EngineConfig(max_num_batched_tokens=64))
"""


def output_of(program):
    """What a program prints that ends with status 0."""
    command = [sys.executable, "-c", PROGRAM + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout


def test_the_end_of_a_program_waits_for_no_step_that_has_not_begun():
    program = (
        "os.cpu_count = lambda: 2; "
        "steps = CompiledSteps(buckets, lambda bucket: (print(bucket.name, flush=True), time.sleep(1))); "
        "steps.wait_for_first(); steps._demand(buckets)"
    )
    assert len(output_of(program).splitlines()) <= 2


@pytest.mark.parametrize("is_daemon", [False, True])
def test_a_program_ends_well_while_a_step_is_compiled_for_a_thread(is_daemon):
    program = (
        "begun = threading.Event(); "
        "steps = CompiledSteps(buckets, lambda bucket: bucket == buckets[-1] or begun.set() or time.sleep(1)); "
        "steps.wait_for_first(); "
        f"threading.Thread(target=steps._demand, args=(buckets,), daemon={is_daemon}).start(); begun.wait()"
    )
    output_of(program)  # fails for another status than 0


def test_threads_go_on_with_better_steps_after_the_end_of_the_main_thread():
    program = (
        "steps = CompiledSteps(buckets, lambda bucket: bucket.name); "
        "serve = lambda: (time.sleep(0.5), steps._demand(buckets[:1]), time.sleep(0.5), print(steps.of(buckets[0]))); "
        "threading.Thread(target=serve).start()"
    )
    assert output_of(program) == "decode 1\n"


def test_a_thread_that_waits_has_all_steps_after_the_end_of_the_main_thread():
    program = (
        "steps = CompiledSteps(buckets, lambda bucket: time.sleep(0.1)); "
        "wait = lambda: (time.sleep(0.5), steps.wait(), print(len(steps.compiled) == len(buckets))); "
        "threading.Thread(target=wait).start()"
    )
    assert output_of(program) == "True\n"


def test_ctrl_c_at_the_end_of_a_process_ends_its_compiler_with_it():
    program = (
        # Not ignored, as it is in the background of a shell.
        "import signal, threading, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from jaxinfer.config import EngineConfig; from jaxinfer.plan.step_shapes import plan_buckets; "
        "from jaxinfer.engine.execution.compiled_steps import CompiledSteps; "
        "buckets = plan_buckets(EngineConfig(max_num_batched_tokens=64)); "
        "begun = threading.Event(); "
        "steps = CompiledSteps(buckets, lambda bucket: bucket == buckets[-1] or begun.set() or time.sleep(20)); "
        # Called when the program has ended and the process begins to wait for its threads.
        "threading._register_atexit(lambda: print('done', flush=True)); steps.wait_for_first(); "
        "steps._demand(buckets); begun.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"done\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(600) == 130


# A command of the command line, whose compiler is busy for minutes when it ends.
COMMAND = """
import sys, threading
import jax, jax.numpy as jnp
from jaxinfer.cli import main
from jaxinfer.config import EngineConfig
from jaxinfer.engine.execution.compiled_steps import CompiledSteps
from jaxinfer.plan.step_shapes import plan_buckets

has_begun = threading.Event()

def compile_bucket(bucket):
    if bucket != buckets[-1]:
        def slow(x):
            for _ in range(6_000):
                x = jnp.cumsum(jnp.sin(x @ x), axis=0)[::-1]
            return x
        traced = jax.jit(slow).lower(jnp.ones((16, 16)))
        has_begun.set()
        traced.compile()
        print("compiled", flush=True)

def command():
    global buckets
    buckets = plan_buckets(EngineConfig(max_num_batched_tokens=64))
    steps = CompiledSteps(buckets, compile_bucket)
    steps.wait_for_first()
    steps._demand(buckets)
    has_begun.wait()
    steps.cancel()
    print("ends", flush=True)
    if sys.argv[2] == "raise":
        raise RuntimeError("the engine has failed")
    return int(sys.argv[2])

main.main = command
main.run()
"""


@pytest.mark.parametrize(("end", "status"), [("0", 0), ("1", 1), ("2", 2), ("raise", 1)])
def test_a_command_that_ends_leaves_the_compiler(end, status):
    command = [sys.executable, "-c", COMMAND, "generate", end]

    process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)

    assert (process.returncode, process.stdout) == (status, "ends\n")
    assert ("RuntimeError: the engine has failed" in process.stderr) == (end == "raise")
    assert not any(word in process.stderr.lower() for word in ("fatal", "abort", "terminate", "segmentation"))


def test_a_failure_of_the_compiler_is_told_and_larger_steps_go_on(caplog):
    def compile_bucket(bucket):
        if bucket != LAST:
            raise MemoryError("out of registers")
        return bucket.name

    steps = CompiledSteps(BUCKETS, compile_bucket)
    steps.wait_for_first()

    while not caplog.records:
        assert steps.choose(DECODE) == (LAST, LAST.name, None)

    assert "out of registers" in caplog.text
    with pytest.raises(MemoryError, match="out of registers"):
        steps.wait()


def test_a_step_goes_on_where_no_thread_can_be_started(gate, monkeypatch, caplog):
    steps = steps_behind(gate)
    gate.set()

    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        assert steps.choose(DECODE).bucket == LAST
    assert "no thread can compile decode 8" in caplog.text

    steps.wait()
    assert steps.choose(DECODE).compiled == "decode 8"


def test_who_waits_while_the_engine_is_closed_is_told(gate):
    steps, errors = steps_behind(gate), []

    def wait() -> None:
        try:
            steps.wait()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while len(steps._futures) < len(BUCKETS):
        time.sleep(0.01)
    steps.cancel()
    thread.join(60)  # though the gate holds up the step under way

    assert errors == ["the engine was closed before its steps were compiled; make a new one"]


def test_a_failure_at_the_last_is_raised():
    def compile_bucket(bucket):
        raise MemoryError("out of registers")

    with pytest.raises(MemoryError, match="out of registers"):
        CompiledSteps(BUCKETS, compile_bucket).wait_for_first()


def test_a_larger_step_yields_every_bit_of_those_it_stands_in_for(llm, monkeypatch):
    expected, steps = contents(llm), runner_of(llm).compiled_steps
    (first,) = first_buckets(steps._buckets)
    for name in ("_compiled", "_ready", "_with_draw", "_max_tokens"):
        monkeypatch.setattr(steps, name, getattr(steps, name))  # as they are, after the test
    steps._compiled = {bucket: steps.of(bucket) for bucket in (first, first.draw("full"))}
    steps._record_ready()

    with recorded_steps(llm) as computed:
        assert contents(llm) == expected

    assert any(step.is_decode for step in computed)
    assert {steps.choose(step)[0].is_decode for step in computed} == {False}


def test_a_request_begins_with_a_step_that_stands_in_and_others_go_on_with_their_own(checkpoint, monkeypatch):
    with LLM(checkpoint, config=EngineConfig(**SMALL)) as llm:
        steps, names = runner_of(llm).compiled_steps, []
        choose = steps.choose

        def recorded(step):
            choice = choose(step)
            names.append(choice.bucket.name)
            return choice

        monkeypatch.setattr(steps, "choose", recorded)
        expected, first = contents(llm), names[:]
        end = time.monotonic() + 300
        while not names[-1].startswith("decode") and time.monotonic() < end:
            assert contents(llm) == expected

        assert first[0].startswith("prefill")
        assert contents(llm) == expected
        assert names[-1].startswith("decode")
        assert llm.metrics().num_late_compiles == 0


def contents(llm):
    """What some requests yield, greedy and drawn, of which nothing is cached."""
    forget_prefixes(llm)
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=8, log_probs=2) for i in range(6)]
    return [*map(content_of, llm.generate(random_prompts(6, max_len=60), params, show_progress=False))]
