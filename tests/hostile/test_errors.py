"""Errors of a drafter, of the disk and of other threads between calls in any order: no request is lost or changed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import threading
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from jaxinfer.config import SamplingParams
from jaxinfer.engine.kv_cache import disk_tier
from jaxinfer.engine.llm import LLM
from tests.engine.engines import GREEDY, drain, generate, num_owned_pages, small_engine
from tests.engine.probe import is_idle
from tests.hostile.cases import cases, limits

SEEDED = SamplingParams(max_tokens=24, seed=11, temperature=0.9, ignore_eos=True)
PARAMS = [GREEDY, SEEDED, dataclasses.replace(GREEDY, max_tokens=30)]
PROMPTS = [[5], [7, 8] * 9, [9, 10, 11] * 15]
ANSWERS = [TypeError("a drafter's own"), RuntimeError("another"), "junk", [[1]] * 9, [[10**9]] * 3, [[-1]] * 2, None]


class HostileDrafter:
    """Drafts what `answer` is set to, or raises it; else the token 5."""

    def __init__(self) -> None:
        self.answer: Any = [[5]]

    def draft(self, requests: Any, counts: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return [[5][:count] for count in counts] if self.answer == [[5]] else self.answer

    def forget(self, request: Any) -> None:
        """Remembers nothing."""


class ErrorMachine(RuleBasedStateMachine):
    """Keeps what the requests that somebody waits for have to yield, by their ids."""

    llm: LLM
    drafter: HostileDrafter
    disk: list[OSError]  # what the next writes raise
    expected: dict[tuple[int, int], tuple[int, ...]]  # by the places of prompt and parameters
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[int, tuple[int, ...]] = {}

    def take(self, deltas: list[Any]) -> None:
        for delta in deltas:
            if delta.completion is not None:
                assert delta.completion.token_ids == self.waiting.pop(delta.request_id)

    @precondition(lambda self: len(self.waiting) < 8)
    @rule(prompt=st.integers(0, 2), params=st.integers(0, 2))
    def add(self, prompt: int, params: int) -> None:
        self.waiting[self.llm.add(PROMPTS[prompt], PARAMS[params])] = self.expected[prompt, params]

    @rule(count=st.integers(1, 9))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.llm.step())

    @rule(request_id=st.integers(-2, 10**6))
    def call_about_a_request_that_has_ended(self, request_id: int) -> None:
        if request_id in self.waiting:
            return
        self.llm.abort(request_id)
        for call in (lambda: self.llm.fork(request_id), lambda: self.llm.rewind(request_id, 1)):
            with pytest.raises(ValueError, match=f"request {request_id} is unknown or has finished"):
                call()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), count=st.integers(1, 9))
    def rewind(self, data: st.DataObject, count: int) -> None:
        with contextlib.suppress(ValueError):  # it has ended, or has fewer tokens
            self.llm.rewind(data.draw(st.sampled_from(sorted(self.waiting))), count)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), is_whole=st.booleans())
    def save_and_restore(self, data: st.DataObject, is_whole: bool) -> None:
        request_id, path = data.draw(st.sampled_from(sorted(self.waiting))), self.folder / "request"
        with contextlib.suppress(ValueError):  # it has ended
            self.llm.save(request_id, path)
            if not is_whole:
                path.write_bytes(path.read_bytes()[:-1])
                with pytest.raises(ValueError, match="cut off or changed"):
                    self.llm.restore(path)
                return
            self.waiting[self.llm.restore(path)] = self.waiting[request_id]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), name=st.sampled_from(["missing/request", "", "/proc/request"]))
    def save_where_nothing_can_be_written(self, data: st.DataObject, name: str) -> None:
        with pytest.raises((OSError, ValueError), match=r"missing|no regular file|proc|unknown or has finished"):
            self.llm.save(data.draw(st.sampled_from(sorted(self.waiting))), self.folder / name)

    @rule(prompt=st.integers(0, 2), params=st.integers(0, 2))
    def generate(self, prompt: int, params: int) -> None:
        completions = generate(self.llm, [PROMPTS[prompt]] * 2, PARAMS[params])
        assert [completion.token_ids for completion in completions] == [self.expected[prompt, params]] * 2

    @rule(answer=st.sampled_from(ANSWERS))
    def a_drafter_fails(self, answer: Any) -> None:
        self.drafter.answer, said = answer, ""
        try:
            deltas = self.llm.step()
        except (TypeError, RuntimeError, ValueError) as error:
            deltas, said = [], str(error)
        self.drafter.answer = [[5]]
        self.take(deltas)
        assert not said or "HostileDrafter drafted" in said or said == str(answer)

    @rule(count=st.integers(1, 3), number=st.sampled_from([errno.ENOSPC, errno.EIO, errno.EACCES]))
    def the_disk_fails(self, count: int, number: int) -> None:
        self.disk += [OSError(number, "the disk's own")] * count

    @precondition(lambda self: self.waiting)
    @rule()
    def another_thread_calls_while_a_step_is_computed(self) -> None:
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
        with limits():
            self.take(drain(self.llm))
        assert self.waiting == {}
        assert num_owned_pages(self.llm) == 0
        assert is_idle(self.llm)


@pytest.mark.parametrize("speculates", [False, True], ids=["plain", "speculating"])
def test_no_error_between_calls_loses_or_changes_a_request(speculates, checkpoint, tmp_path, monkeypatch):
    drafter, disk, write = HostileDrafter(), [], disk_tier.write_checked

    def write_or_fail(*arguments: Any) -> None:
        if disk:
            raise disk.pop()
        write(*arguments)

    monkeypatch.setattr(disk_tier, "write_checked", write_or_fail)
    pages = {"num_pages": 12, "disk_cache_path": str(tmp_path / "pages"), "disk_cache_bytes": 2**20}
    with small_engine(checkpoint, **pages, speculation=drafter if speculates else None) as llm:
        ErrorMachine.llm, ErrorMachine.drafter, ErrorMachine.disk, ErrorMachine.folder = llm, drafter, disk, tmp_path
        ErrorMachine.expected = {
            (i, j): generate(llm, [prompt], params)[0].token_ids
            for i, prompt in enumerate(PROMPTS)
            for j, params in enumerate(PARAMS)
        }
        run_state_machine_as_test(ErrorMachine, settings=cases(0.02, stateful_step_count=20))
        assert llm.metrics().num_owned_pages == 0
