"""Calls in any order, interrupted anywhere, by several threads, with errors between: no request is lost or changed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

import jaxinfer
from jaxinfer.config import SamplingParams
from jaxinfer.engine.llm import LLM
from tests.engine.engines import GREEDY, drain, generate, num_owned_pages, quick_engine
from tests.hostile.cases import cases, limits

PACKAGE = str(Path(jaxinfer.__file__).parent)
SEEDED = SamplingParams(max_tokens=24, seed=11, temperature=0.9, ignore_eos=True)
PARAMS = [GREEDY, SEEDED, dataclasses.replace(GREEDY, max_tokens=30)]
PROMPTS = [[5], [7, 8] * 9, [9, 10, 11] * 15]
FAILURES = [TypeError("a drafter's own"), RuntimeError("another"), "junk", [[1], [2], [3], [4], [5]], [[10**9]] * 3]


class HostileDrafter:
    """Drafts what `answer` is set to, once, or raises it; else the token 5."""

    def __init__(self) -> None:
        self.answer: Any = None

    def draft(self, requests: Any, counts: Any) -> Any:
        answer, self.answer = self.answer, None
        if isinstance(answer, Exception):
            raise answer
        return [[5][:count] for count in counts] if answer is None else answer

    def forget(self, request: Any) -> None:
        """Remembers nothing."""


@contextlib.contextmanager
def interrupted(num_calls: int | None) -> Iterator[None]:
    """Ctrl-C in place of the call of a function of the package that has this number; nothing where there are fewer."""
    count = itertools.count(1)

    def trace(frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code.co_filename.startswith(PACKAGE) and next(count) == num_calls:
            signal.raise_signal(signal.SIGINT)

    before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.settrace(trace if num_calls is not None else before)
        yield
    except KeyboardInterrupt:
        assert num_calls is not None
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, handler)


MOMENTS = st.none() | st.none() | st.integers(1, 60) | st.integers(1, 1000)


class Machine(RuleBasedStateMachine):
    """Requests that somebody waits for, by id: what they have to yield, and whether they may yield less."""

    llm: LLM
    drafter: HostileDrafter
    expected: dict[tuple[int, int], tuple[int, ...]]  # by the place of prompt and parameters
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[int, tuple[int, ...]] = {}
        self.aborted: set[int] = set()
        self.untold: list[tuple[int, ...]] = []  # what requests yield whose id was lost to an interrupt

    def call(self, call: Callable[[], Any], moment: int | None) -> Any:
        """Returns what a call does, None if it was interrupted."""
        with limits(), interrupted(moment):
            return call()

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.waiting)))

    @precondition(lambda self: len(self.waiting) < 8)
    @rule(prompt=st.integers(0, 2), params=st.integers(0, 2), moment=MOMENTS)
    def add(self, prompt: int, params: int, moment: int | None) -> None:
        request_id = self.call(lambda: self.llm.add(PROMPTS[prompt], PARAMS[params]), moment)
        if request_id is not None:
            self.waiting[request_id] = self.expected[prompt, params]

    @rule(count=st.integers(1, 9), moment=MOMENTS)
    def step(self, count: int, moment: int | None) -> None:
        for _ in range(count):
            self.take(self.call(self.llm.step, moment) or [])

    def take(self, deltas: list[Any]) -> None:
        for delta in deltas:
            if delta.completion is None:
                continue
            tokens, expected = delta.completion.token_ids, self.waiting.pop(delta.request_id)
            if delta.request_id in self.aborted and delta.completion.finish_reason == "abort":
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), moment=MOMENTS)
    def abort(self, data: st.DataObject, moment: int | None) -> None:
        request_id = self.pick(data)
        self.aborted.add(request_id)
        self.call(lambda: self.llm.abort(request_id), moment)

    @rule(request_id=st.integers(-2, 10**6))
    def call_about_a_request_that_has_ended(self, request_id: int) -> None:
        if request_id in self.waiting:
            return
        self.llm.abort(request_id)
        for call in (lambda: self.llm.fork(request_id), lambda: self.llm.rewind(request_id, 1)):
            with pytest.raises(ValueError, match="request"):
                call()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), moment=MOMENTS)
    def fork(self, data: st.DataObject, moment: int | None) -> None:
        request_id = self.pick(data)
        expected = self.waiting[request_id]
        if expected[:2] == self.expected[0, 1][:2] or expected in [self.expected[p, 1] for p in range(3)]:
            return  # a branch with a seed draws others
        with contextlib.suppress(ValueError):  # it has ended, and its completion is on its way
            branch = self.call(lambda: self.llm.fork(request_id), moment)
            if branch is not None:
                self.waiting[branch] = expected

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), count=st.integers(0, 9), moment=MOMENTS)
    def rewind(self, data: st.DataObject, count: int, moment: int | None) -> None:
        request_id = self.pick(data)
        with contextlib.suppress(ValueError):  # it has ended, or has fewer tokens
            self.call(lambda: self.llm.rewind(request_id, count), moment)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), moment=MOMENTS, is_restored=st.booleans())
    def save(self, data: st.DataObject, moment: int | None, is_restored: bool) -> None:
        request_id, path = self.pick(data), self.folder / "request"
        path.unlink(missing_ok=True)
        with contextlib.suppress(ValueError):
            self.call(lambda: self.llm.save(request_id, path), moment)
        if is_restored and path.exists():
            again = self.call(lambda: self.llm.restore(path), moment)
            if again is not None:
                self.waiting[again] = self.waiting[request_id]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), name=st.sampled_from(["missing/request", "", "/proc/request"]))
    def save_where_nothing_can_be_written(self, data: st.DataObject, name: str) -> None:
        with pytest.raises((OSError, ValueError)):
            self.llm.save(self.pick(data), self.folder / name)

    @rule(prompt=st.integers(0, 2), params=st.integers(0, 2), moment=MOMENTS)
    def generate(self, prompt: int, params: int, moment: int | None) -> None:
        completions = self.call(lambda: generate(self.llm, [PROMPTS[prompt]] * 2, PARAMS[params]), moment)
        if completions is not None:
            assert [completion.token_ids for completion in completions] == [self.expected[prompt, params]] * 2

    @rule(prompt=st.integers(0, 2), params=st.integers(0, 2), count=st.integers(0, 5), moment=MOMENTS)
    def stream_and_leave(self, prompt: int, params: int, count: int, moment: int | None) -> None:
        def read() -> list[int]:
            stream = self.llm.stream(PROMPTS[prompt], PARAMS[params])
            tokens = [token for delta in itertools.islice(stream, count) for token in delta.token_ids]
            stream.close()
            return tokens

        tokens = self.call(read, moment)
        if tokens is not None:
            assert tuple(tokens) == self.expected[prompt, params][: len(tokens)]

    @rule(answer=st.sampled_from(FAILURES))
    def drafter_fails(self, answer: Any) -> None:
        self.drafter.answer, said = answer, ""
        try:
            deltas = self.llm.step()
        except (TypeError, RuntimeError, ValueError) as error:
            deltas, said = [], str(error)
        self.drafter.answer = None
        self.take(deltas)
        assert not said or "drafte" in said or said == "another"

    @precondition(lambda self: self.waiting)
    @rule()
    def another_thread_calls(self) -> None:
        refusals = []

        def run() -> None:
            for call in (self.llm.step, lambda: self.llm.add([5])):
                with pytest.raises(RuntimeError, match="another thread is using this LLM"):
                    call()
                refusals.append(call)

        def intrude(*_: Any) -> None:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

        self.llm.on_step = intrude
        self.take(self.llm.step())
        self.llm.on_step = None
        assert len(refusals) in (0, 2)  # none where there was nothing to compute

    def teardown(self) -> None:
        self.take(drain(self.llm))
        assert self.waiting == {}
        assert num_owned_pages(self.llm) == 0
        assert self.llm._delivery.mailroom.is_idle


@pytest.mark.parametrize("speculates", [False, True], ids=["plain", "speculating"])
def test_no_sequence_of_calls_loses_or_changes_a_request(speculates, checkpoint, llm, tmp_path):
    drafter = HostileDrafter()
    engine = quick_engine(checkpoint, num_pages=16, speculation=drafter if speculates else None)
    expected = {
        (i, j): generate(llm, [prompt], params)[0].token_ids
        for i, prompt in enumerate(PROMPTS)
        for j, params in enumerate(PARAMS)
    }

    class Case(Machine):
        """The machine on these engines."""

    Case.llm, Case.drafter, Case.expected, Case.folder = engine, drafter, expected, tmp_path
    run_state_machine_as_test(Case, settings=cases(0.05, stateful_step_count=20))
