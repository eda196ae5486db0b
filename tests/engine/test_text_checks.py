"""The whole text of a request is held against its schema while the engine goes on with others."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jaxinfer.batch_job import run_batch
from jaxinfer.config import SamplingParams
from jaxinfer.engine.async_llm import AsyncLLM, Stream
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request.completion import Completion
from jaxinfer.text.grammar import Grammar
from tests.engine.engines import GREEDY, WAIT, random_prompts, run, small_async_engine

PROMPTS = random_prompts(3, max_len=40, seed=3)
CHECKED = SamplingParams(temperature=0, max_tokens=20, json_schema={"enum": ["ab"]})


class Checks:
    """Checks of texts, which wait at a gate and then find a fault."""

    def __init__(self) -> None:
        self.gate, self.has_begun = threading.Event(), threading.Event()
        self.fault: str | None = None
        self.threads: list[str] = []

    def find(self, grammar: Grammar, text: str) -> str | None:
        if text != '"ab"':
            return None
        self.threads.append(threading.current_thread().name)
        self.has_begun.set()
        assert self.gate.wait(WAIT)
        return self.fault


@pytest.fixture
def checks(monkeypatch) -> Iterator[Checks]:
    checks = Checks()
    monkeypatch.setattr(Grammar, "fault", lambda *arguments: checks.find(*arguments))
    yield checks
    checks.gate.set()


@pytest.fixture
def async_llm(checkpoint) -> Iterator[AsyncLLM]:
    llm = small_async_engine(checkpoint)
    yield llm
    run(llm.close)


@pytest.mark.parametrize(("fault", "reason"), [(None, "stop"), ("at $: wrong", "error")])
@pytest.mark.parametrize("fields", [{}, {"n": 2, "seed": 1}, {"best_of": 2, "seed": 1}], ids=["one", "n", "best_of"])
def test_generate_returns_the_result_of_the_check(shared_llm, checks, fields, fault, reason):
    checks.fault = fault
    checks.gate.set()
    params = replace(CHECKED, temperature=1 if fields else 0, **fields)

    completions = shared_llm.generate(PROMPTS, params, show_progress=False)

    assert len(completions) == len(PROMPTS) * params.n
    assert {(c.text, c.finish_reason, c.error) for c in completions} == {('"ab"', reason, fault)}
    assert threading.current_thread().name not in checks.threads
    assert not shared_llm.has_unfinished


@pytest.mark.parametrize("fault", [None, "at $: wrong"])
def test_a_job_records_the_result_of_the_check(shared_llm, checks, fault, tmp_path):
    checks.fault = fault
    checks.gate.set()
    rows = [{"custom_id": str(i), "prompt": "a", "max_tokens": 20, "json_schema": {"enum": ["ab"]}} for i in range(3)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))

    run_batch(shared_llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl")

    records = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len(records) == 3
    assert all((fault or '"stop"') in record for record in records)


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_requests_are_computed_while_a_text_is_checked_and_its_pages_are_free(async_llm, checks, tenant):
    async def work() -> Completion:
        checked = asyncio.ensure_future(async_llm.generate(PROMPTS[0], CHECKED, tenant="a"))
        await asyncio.to_thread(checks.has_begun.wait, WAIT)
        (other,) = await async_llm.generate(PROMPTS[1], GREEDY, tenant=tenant)
        assert other.finish_reason == "length"
        assert async_llm.metrics().num_owned_pages == async_llm.metrics().num_running == 0
        assert not checked.done()
        checks.gate.set()
        return (await checked)[0]

    assert run(work).finish_reason == "stop"
    assert checks.threads[0].startswith("text checks")


def test_the_check_of_a_tenant_does_not_wait_for_those_of_another(async_llm, checks):
    async def work() -> None:
        waiting = [asyncio.ensure_future(async_llm.generate(PROMPTS[0], CHECKED, tenant="a")) for _ in range(5)]
        await asyncio.to_thread(checks.has_begun.wait, WAIT)
        await async_llm.generate(PROMPTS[0], replace(CHECKED, json_schema={"enum": ["cd"]}), tenant="b")
        assert not any(task.done() for task in waiting)
        checks.gate.set()
        await asyncio.gather(*waiting)

    run(work)


async def abort(llm: AsyncLLM, stream: Stream) -> None:
    await llm.call(lambda engine: [engine.abort(request_id) for request_id in stream.request_ids])


async def drop(llm: AsyncLLM, stream: Stream) -> None:
    await stream.close()


async def end_at_once(llm: AsyncLLM, stream: Stream) -> None:
    await llm.close()


async def fail(llm: AsyncLLM, stream: Stream) -> None:
    def command(engine: Engine) -> None:
        engine._lifecycle.fail(MemoryError("device"))

    await llm.call(command)


@pytest.mark.parametrize(
    ("end", "reasons"), [(abort, ["abort"]), (drop, []), (end_at_once, ["abort"]), (fail, ["RuntimeError"])]
)
def test_a_request_that_ends_while_its_text_is_checked_ends_once(checkpoint, checks, end, reasons):
    llm = small_async_engine(checkpoint)

    async def work() -> list[Any]:
        stream = await llm.open(PROMPTS[0], CHECKED)
        seen: list[Any] = []
        await asyncio.to_thread(checks.has_begun.wait, WAIT)
        await end(llm, stream)
        checks.gate.set()
        try:
            async for delta in stream:
                seen += [delta.completion.finish_reason] if delta.completion is not None else []
        except RuntimeError as error:
            seen.append(type(error).__name__)
        return seen

    assert run(work) == reasons
    run(llm.close)


def test_close_lets_a_check_finish(checkpoint, checks):
    llm = small_async_engine(checkpoint)

    async def work() -> Any:
        task = asyncio.ensure_future(llm.generate(PROMPTS[0], CHECKED))
        await asyncio.to_thread(checks.has_begun.wait, WAIT)
        closing = asyncio.ensure_future(llm.close(drain_seconds=WAIT))
        await asyncio.sleep(0.05)
        assert not task.done()
        checks.gate.set()
        await closing
        return await task

    assert [completion.finish_reason for completion in run(work)] == ["stop"]


def test_a_deadline_that_passes_while_a_whole_text_is_checked_changes_nothing(async_llm, checks):
    async def work() -> Any:
        task = asyncio.ensure_future(async_llm.generate(PROMPTS[0], CHECKED, deadline=30.0))
        await asyncio.to_thread(checks.has_begun.wait, WAIT)
        await async_llm.call(lambda engine: setattr(engine._scheduler, "clock", lambda: float("inf")))
        checks.gate.set()
        return await task

    assert [completion.finish_reason for completion in run(work)] == ["stop"]
