"""Calls in any order, with errors and interrupts anywhere: each request ends with its own tokens, and none is lost."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

import jaxinfer
from jaxinfer.config import SamplingParams
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request.completion import Delta
from tests.engine.engines import num_owned_pages
from tests.engine.probe import buffer_of, scheduler_of
from tests.hostile.cases import cases, limits

PROMPTS = [[5, 6, 7], [8] * 20, [5, 6, 7, 8], [9] * 40]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=3, ignore_eos=True, n=2),
]
PACKAGE = str(Path(jaxinfer.__file__).parent)
# Enters and leaves a call; a signal there comes before it, or after it and before the caller has the result.
EDGES = ("guard.py", "outputs.py")


@contextlib.contextmanager
def interrupt_after(num_lines: int) -> Iterator[None]:
    """Sends this process SIGINT once when this many lines of the package have run."""
    left = num_lines

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_filename.endswith(EDGES):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    handler, tracer = signal.signal(signal.SIGINT, signal.default_int_handler), sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(tracer)
        signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="session")
def expected(llm):
    """The tokens of every pair of prompt and parameters alone, by sample."""
    return {
        (i, j): [c.token_ids for c in llm.generate(prompt, params, show_progress=False)]
        for i, prompt in enumerate(PROMPTS)
        for j, params in enumerate(PARAMS)
    }


pairs = st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, len(PARAMS) - 1))
num_lines = st.integers(1, 60) | st.integers(1, 1500)


class EngineMachine(RuleBasedStateMachine):
    llm: LLM
    expected: dict[tuple[int, int], list[tuple[int, ...]]]
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.pairs: dict[int, tuple[int, int]] = {}  # of each request that `step` hands out
        self.finished: dict[int, list[int]] = {}  # samples by request
        self.aborted: set[int] = set()
        self.streams: list[Any] = []
        (self.folder / "request").unlink(missing_ok=True)

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            completion = delta.completion
            if completion is None:
                continue
            samples = self.finished.setdefault(delta.request_id, [])
            assert delta.sample_index not in samples, "a request has finished twice"
            samples.append(delta.sample_index)
            if completion.finish_reason == "abort":
                assert delta.request_id in self.aborted
            elif delta.request_id in self.pairs:
                pair = self.pairs[delta.request_id]
                assert completion.token_ids == self.expected[pair][delta.sample_index % PARAMS[pair[1]].n]

    def interrupted(self, lines: int, call: Callable[[], Any]) -> Any:
        """Returns the result, or None where the interrupt came first; `step` may have handed deltas out by then."""
        taken: list[Delta] = []
        take = buffer_of(self.llm).take

        def noted() -> list[Delta]:
            taken.extend(take())
            return taken

        buffer_of(self.llm).take = noted
        try:
            with interrupt_after(lines):
                return call()
        except KeyboardInterrupt:
            self.take(taken)
            return None
        finally:
            del buffer_of(self.llm).take

    @rule(pair=pairs)
    def add(self, pair):
        self.pairs[self.llm.add(PROMPTS[pair[0]], PARAMS[pair[1]])] = pair

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            self.take(self.llm.step())

    @rule(lines=num_lines)
    def step_interrupted(self, lines):
        self.take(self.interrupted(lines, self.llm.step) or [])

    @rule(pair=pairs, lines=num_lines)
    def add_interrupted(self, pair, lines):
        before = set(scheduler_of(self.llm)._requests)
        request_id = self.interrupted(lines, lambda: self.llm.add(PROMPTS[pair[0]], PARAMS[pair[1]]))
        added = sorted(set(scheduler_of(self.llm)._requests) - before)
        assert len(added) in (0, PARAMS[pair[1]].n), "some samples of a prompt are missing"
        if added:
            self.pairs[added[0] if request_id is None else request_id] = pair

    @rule(pair=pairs, lines=num_lines)
    def generate_interrupted(self, pair, lines):
        prompt, params = PROMPTS[pair[0]], PARAMS[pair[1]]
        done = self.interrupted(lines, lambda: self.llm.generate(prompt, params, show_progress=False))
        assert done is None or [c.token_ids for c in done] == self.expected[pair]

    @precondition(lambda self: self.pairs)
    @rule(number=st.integers(0, 50), lines=st.none() | num_lines)
    def abort(self, number, lines):
        request_id = sorted(self.pairs)[number % len(self.pairs)]
        self.aborted.add(request_id)
        self.interrupted(lines or sys.maxsize, lambda: self.llm.abort(request_id))

    @precondition(lambda self: self.pairs)
    @rule(number=st.integers(0, 50), name=st.sampled_from(["rewind", "save", "fork"]), lines=st.none() | num_lines)
    def change(self, number, name, lines):
        request_id = sorted(self.pairs)[number % len(self.pairs)]
        path = self.folder / "request"
        arguments = {"rewind": (1,), "save": (path,), "fork": ()}[name]
        with contextlib.suppress(ValueError):  # it has finished, has no token yet, or several samples
            self.interrupted(lines or sys.maxsize, lambda: getattr(self.llm, name)(request_id, *arguments))
        assert [file.name for file in self.folder.iterdir()] in ([], ["request"]), "a file is left behind"

    @rule(lines=st.none() | num_lines)
    def restore(self, lines):
        if (self.folder / "request").exists():
            self.interrupted(lines or sys.maxsize, lambda: self.llm.restore(self.folder / "request"))

    @rule(pair=pairs, count=st.integers(0, 3))
    def stream(self, pair, count):
        stream = self.llm.stream(PROMPTS[pair[0]], PARAMS[pair[1]])
        for _ in zip(range(count), stream, strict=False):
            pass
        self.streams.append(stream)

    @precondition(lambda self: self.streams)
    @rule(number=st.integers(0, 50))
    def close_stream(self, number):
        self.streams.pop(number % len(self.streams)).close()

    @rule(call=st.sampled_from(["step", "metrics"]))
    def use_another_thread(self, call):
        thread = threading.Thread(target=lambda: self.take(getattr(self.llm, call)() if call == "step" else []))
        thread.start()
        thread.join()

    @rule(error=st.sampled_from([LookupError, MemoryError, OSError]), pair=pairs)
    def raise_in_on_step(self, error, pair):
        def fail(*_: Any) -> None:
            raise error("of the user's own")

        self.llm.on_step = fail
        try:
            with pytest.raises(error, match="of the user's own"):
                self.llm.generate(PROMPTS[pair[0]], PARAMS[pair[1]], show_progress=False)
        finally:
            self.llm.on_step = None

    def teardown(self):
        for stream in self.streams:
            stream.close()
        with limits():
            while self.llm.has_unfinished:
                self.take(self.llm.step())
        assert num_owned_pages(self.llm) == 0
        for request_id, (_, params) in self.pairs.items():
            assert len(self.finished.get(request_id, [])) == PARAMS[params].n, f"request {request_id} is lost"


def test_any_order_of_calls_and_interrupts_leaves_every_request_its_tokens(llm, expected, tmp_path):
    EngineMachine.llm, EngineMachine.expected, EngineMachine.folder = llm, expected, tmp_path
    run_state_machine_as_test(EngineMachine, settings=cases(0.1, stateful_step_count=20))
