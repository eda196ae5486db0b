"""The engine for asyncio: the tokens of `LLM`, an end for every request, and a free event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.async_llm import AsyncLLM, SlowReaderError, Stream
from jaxinfer.engine.request.request import QueueFullError
from tests.engine.engines import GREEDY, WAIT, generate, random_prompts, run, small_async_engine, token_ids_of

PROMPTS = random_prompts(6, max_len=40, seed=3)
ENDLESS = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def async_llm(checkpoint) -> Iterator[AsyncLLM]:
    llm = small_async_engine(checkpoint, max_prompt_log_probs=3)
    yield llm
    run(llm.close)


async def until_idle(llm: AsyncLLM) -> None:
    """Waits until no request is unfinished, and requires that none has a page."""
    while llm.metrics().num_running or llm.metrics().num_waiting:
        await asyncio.sleep(0.001)
    assert llm.metrics().num_owned_pages == 0


# ---- results


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(n=2, seed=3, max_tokens=6), SamplingParams(n=2, best_of=3, seed=3, max_tokens=6)],
    ids=["greedy", "n", "best_of"],
)
def test_generate_returns_the_completions_of_llm(shared_llm, async_llm, params):
    expected = generate(shared_llm, PROMPTS, params)

    completions = run(lambda: async_llm.generate(PROMPTS, params))

    assert token_ids_of(completions) == token_ids_of(expected)
    assert [c.sample_index for c in completions] == [c.sample_index for c in expected]


def test_many_tasks_yield_the_tokens_of_llm(shared_llm, async_llm):
    expected = generate(shared_llm, PROMPTS)

    async def read(prompt: list[int]) -> list[Any]:
        return [delta async for delta in async_llm.stream(prompt, GREEDY)]

    async def read_all() -> list[Any]:
        return await asyncio.gather(*map(read, PROMPTS))

    for deltas, completion in zip(run(read_all), expected, strict=True):
        assert len(deltas) > 1
        assert sum((delta.token_ids for delta in deltas), ()) == completion.token_ids
        assert "".join(delta.text for delta in deltas) == completion.text
        assert deltas[-1].completion.token_ids == completion.token_ids


def test_event_loops_of_several_threads_share_an_engine(shared_llm, async_llm):
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        results[i] = run(lambda: async_llm.generate(PROMPTS[i], GREEDY))[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [results[i] for i in range(4)] == token_ids_of(generate(shared_llm, PROMPTS[:4]))


def test_chat_and_embed_return_the_results_of_llm(shared_llm, async_llm):
    talks = [[{"role": "user", "content": text}] for text in ("hello", "goodbye")]
    expected = shared_llm.chat(talks, GREEDY, chat_template=TEMPLATE, show_progress=False)
    vectors = shared_llm.embed(PROMPTS, pooling="mean", show_progress=False)

    async def ask() -> Any:
        return await asyncio.gather(
            async_llm.chat(talks, GREEDY, chat_template=TEMPLATE), async_llm.embed(PROMPTS, pooling="mean")
        )

    completions, embeddings = run(ask)

    assert token_ids_of(completions) == token_ids_of(expected)
    np.testing.assert_allclose(embeddings, vectors, atol=1e-6)


def test_a_command_runs_on_the_engine_and_returns_its_result(async_llm):
    assert run(lambda: async_llm.call(lambda engine: engine.num_unfinished)) == 0


# ---- refusals


def test_a_prompt_that_cannot_be_honoured_is_refused_before_anything_is_computed(async_llm):
    with pytest.raises(ValueError, match=r"prompt 1: prompt\[0\] is 96; token ids of this model"):
        run(lambda: async_llm.generate([PROMPTS[0], [96]], GREEDY))
    with pytest.raises(TypeError, match="unknown argument prio=1"):
        run(lambda: async_llm.generate(PROMPTS[0], GREEDY, prio=1))

    async def read() -> None:
        async for _ in async_llm.stream([96], GREEDY):
            pass

    with pytest.raises(ValueError, match=r"prompt\[0\] is 96"):
        run(read)
    assert async_llm.metrics().num_steps == 0


def test_all_prompts_wait_or_none(checkpoint):
    llm = small_async_engine(checkpoint, max_waiting=2)

    with pytest.raises(QueueFullError, match="raise EngineConfig.max_waiting"):
        run(lambda: llm.generate([PROMPTS[0]] * 7, GREEDY))
    assert llm.metrics().num_steps == 0
    run(llm.close)


# ---- readers that go away, and slow ones


def test_a_reader_that_leaves_its_loop_frees_the_pages(async_llm):
    async def leave() -> None:
        async for delta in async_llm.stream(PROMPTS[0], ENDLESS):
            assert delta.token_ids
            break
        await until_idle(async_llm)

    run(leave)


@pytest.mark.parametrize("call", ["stream", "generate"])
def test_a_task_that_is_cancelled_frees_the_pages(shared_llm, async_llm, call):
    async def work() -> None:
        if call == "generate":
            await async_llm.generate(PROMPTS[:3], ENDLESS)
        else:
            async for _ in async_llm.stream(PROMPTS[0], ENDLESS):
                pass

    async def cancel() -> Any:
        task = asyncio.create_task(work())
        other = asyncio.create_task(async_llm.generate(PROMPTS[4], GREEDY))
        while not async_llm.metrics().num_running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        completions = await other
        await until_idle(async_llm)
        return completions

    assert token_ids_of(run(cancel)) == token_ids_of(generate(shared_llm, [PROMPTS[4]]))


def test_a_slow_reader_loses_its_request_and_no_other(checkpoint, shared_llm):
    llm = small_async_engine(checkpoint, max_unread_tokens=5)

    async def read_slowly() -> tuple[int, Any]:
        stream, num_read = llm.stream(PROMPTS[0], ENDLESS), 0
        await anext(stream)
        other = await llm.generate(PROMPTS[1], ENDLESS)  # meanwhile nobody reads
        await until_idle(llm)

        async def read_on() -> None:
            nonlocal num_read
            async for delta in stream:
                num_read += len(delta.token_ids)

        with pytest.raises(SlowReaderError, match="more than max_unread_tokens=5"):
            await read_on()
        return num_read, other

    num_read, other = run(read_slowly)
    run(llm.close)

    assert num_read == 5
    assert token_ids_of(other) == token_ids_of(generate(shared_llm, [PROMPTS[1]], ENDLESS))


async def fail_in_the_sink(stream: Stream, llm: AsyncLLM) -> None:
    stream._reader.put(ValueError("the sink's"))  # as the engine's thread does
    with pytest.raises(ValueError, match="the sink's"):
        await read_whole(stream, llm)


async def read_whole(stream: Stream, llm: AsyncLLM) -> None:
    async for _ in stream:
        pass


async def close_twice(stream: Stream, llm: AsyncLLM) -> None:
    await stream.close()
    await stream.close()


async def close_beside_a_reader(stream: Stream, llm: AsyncLLM) -> None:
    # The engine's thread waits meanwhile, so the reader has nothing to read.
    is_held, may_go_on = threading.Event(), threading.Event()
    llm.engine_thread.call(lambda _: (is_held.set(), may_go_on.wait(WAIT)))
    await asyncio.to_thread(is_held.wait, WAIT)
    reading = asyncio.create_task(read_whole(stream, llm))
    await asyncio.sleep(0.01)
    await stream.close()
    may_go_on.set()
    await reading


async def read_by_two_tasks(stream: Stream, llm: AsyncLLM) -> None:
    await asyncio.gather(read_whole(stream, llm), read_whole(stream, llm))


async def abort(stream: Stream, llm: AsyncLLM) -> None:
    await llm.call(lambda engine: [engine.abort(request_id) for request_id in stream.request_ids])
    await read_whole(stream, llm)


ENDS = [fail_in_the_sink, read_whole, close_twice, close_beside_a_reader, read_by_two_tasks, abort]


@pytest.mark.parametrize("end", ENDS)
def test_a_stream_that_has_ended_stays_ended_and_has_no_page(async_llm, end):
    async def work() -> list[Any]:
        stream = await async_llm.open(PROMPTS[:2], ENDLESS)
        await end(stream, async_llm)
        await until_idle(async_llm)
        return [*[delta async for delta in stream], *[delta async for delta in stream]]

    assert run(work) == []


async def read_with_patience(stream: Stream) -> None:
    while True:
        await asyncio.wait_for(anext(stream), 0.01)


def test_a_reader_that_stops_waiting_reads_on_later(async_llm, shared_llm):
    async def work() -> Any:
        async with await async_llm.open(PROMPTS[0], GREEDY) as stream:
            is_held, may_go_on = threading.Event(), threading.Event()
            async_llm.engine_thread.call(lambda _: (is_held.set(), may_go_on.wait(WAIT)))
            await asyncio.to_thread(is_held.wait, WAIT)
            with pytest.raises(TimeoutError):
                await read_with_patience(stream)
            may_go_on.set()
            return [delta async for delta in stream][-1].completion

    assert token_ids_of([run(work)]) == token_ids_of(generate(shared_llm, PROMPTS[:1]))


CALLS: dict[str, Callable[[AsyncLLM], Awaitable[Any]]] = {
    "generate": lambda llm: llm.generate(PROMPTS[0], ENDLESS),
    "several prompts": lambda llm: llm.generate(PROMPTS[:3], ENDLESS),
    "several samples": lambda llm: llm.generate(PROMPTS[0], replace(ENDLESS, n=2, temperature=1)),
    "best_of": lambda llm: llm.generate(PROMPTS[0], replace(ENDLESS, best_of=3, temperature=1)),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "hello"}], ENDLESS, chat_template=TEMPLATE),
    "stream": lambda llm: anext(aiter(llm.stream(PROMPTS[0], replace(ENDLESS, best_of=2, temperature=1)))),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_request_of_a_closed_event_loop_ends_at_its_next_token(async_llm, call):
    loop, is_held, may_go_on = asyncio.new_event_loop(), threading.Event(), threading.Event()
    task: Any = asyncio.ensure_future(CALLS[call](async_llm), loop=loop)
    while not async_llm.metrics().num_running:
        loop.run_until_complete(asyncio.sleep(0.001))
    async_llm.engine_thread.call(lambda _: (is_held.set(), may_go_on.wait(WAIT)))
    assert is_held.wait(WAIT)

    loop.close()
    num_before = async_llm.metrics().num_output_tokens
    may_go_on.set()
    run(partial(until_idle, async_llm))

    assert not task.done()
    assert async_llm.metrics().num_output_tokens - num_before < 20  # of 80 for each sample
    task._log_destroy_pending = False


def test_prompts_are_admitted_outside_the_event_loop(async_llm, monkeypatch):
    engine, may_end = async_llm._engine, threading.Event()
    admit = engine.admit

    def admit_slowly(*args: Any, **options: Any) -> Any:
        assert may_end.wait(WAIT)
        return admit(*args, **options)

    monkeypatch.setattr(engine, "admit", admit_slowly)

    async def work() -> Any:
        task = asyncio.create_task(async_llm.generate(PROMPTS[0], GREEDY))
        await asyncio.sleep(0.01)
        may_end.set()  # by this loop, which is free while the prompt is admitted
        return await task

    assert len(run(work)) == 1


SCHEMAS = [replace(GREEDY, json_schema=f'{{"type": "integer", "maximum": {most}}}') for most in range(1, 9)]
BESIDE: dict[str, Callable[[AsyncLLM], Awaitable[Any]]] = {
    "a prompt of its own": lambda llm: llm.generate(PROMPTS[0], GREEDY, tenant="a"),
    "another prompt": lambda llm: llm.generate(PROMPTS[0], GREEDY),
    "a chat": lambda llm: llm.chat([{"role": "user", "content": "hello"}], GREEDY, chat_template=TEMPLATE, tenant="a"),
    "a stream": lambda llm: anext(aiter(llm.stream(PROMPTS[0], GREEDY, tenant="a"))),
    "an embedding": lambda llm: llm.embed(PROMPTS[0], tenant="a"),
    "a text": lambda llm: llm.tokenize("hello", tenant="a"),
    "a structure of another tenant": lambda llm: llm.generate(PROMPTS[0], replace(GREEDY, regex="[ab]+"), tenant="b"),
    "a structure that is compiled": lambda llm: llm.generate(PROMPTS[0], replace(GREEDY, regex="[cd]+"), tenant="a"),
}


@pytest.mark.parametrize("beside", BESIDE)
def test_a_request_waits_for_no_structures_that_compile_for_another(async_llm, beside, monkeypatch):
    run(lambda: async_llm.generate(PROMPTS[0], replace(GREEDY, regex="[cd]+")))
    engine, may_end = async_llm._engine, threading.Event()
    admit = engine.admit

    def admit_slowly(prompt: Any, params: Any = None, **options: Any) -> Any:
        assert params is None or params.json_schema is None or may_end.wait(WAIT)
        return admit(prompt, params, **options)

    monkeypatch.setattr(engine, "admit", admit_slowly)

    async def work() -> None:
        compiling = [asyncio.ensure_future(async_llm.generate(PROMPTS[0], one, tenant="a")) for one in SCHEMAS]
        await asyncio.sleep(0.01)
        await BESIDE[beside](async_llm)
        assert not any(task.done() for task in compiling)
        may_end.set()
        await asyncio.gather(*compiling)

    run(work)


# ---- failures and the end


def test_a_failure_of_the_engine_reaches_every_waiting_call(async_llm):
    async def read() -> None:
        async for _ in async_llm.stream(PROMPTS[0], ENDLESS):
            pass

    def fail(engine: Any) -> None:
        def advance() -> None:
            engine._lifecycle.fail(MemoryError("device"))
            engine.check()

        engine.advance = advance

    async def work() -> Any:
        calls = [read(), async_llm.generate(PROMPTS, ENDLESS), async_llm.embed(PROMPTS[0]), async_llm.call(fail)]
        return await asyncio.gather(*calls, return_exceptions=True)

    read_end, generate_end, _, _ = run(work)

    for end in (read_end, generate_end):
        assert isinstance(end, RuntimeError)
        assert "has failed (MemoryError: device)" in str(end)
    with pytest.raises(RuntimeError, match="has failed"):
        run(lambda: async_llm.generate(PROMPTS[0]))
    assert isinstance(async_llm.failure, MemoryError)


def test_close_lets_requests_finish_and_refuses_later_ones(checkpoint):
    async def work() -> Any:
        async with small_async_engine(checkpoint) as llm:
            task = asyncio.create_task(llm.generate(PROMPTS[0], GREEDY))
            while not llm.metrics().num_running and not task.done():
                await asyncio.sleep(0.001)
            await llm.close(drain_seconds=WAIT)
        with pytest.raises(RuntimeError, match="is closed; make a new one"):
            await llm.generate(PROMPTS[0], GREEDY)
        return await task

    assert [completion.finish_reason for completion in run(work)] == ["length"]


def test_the_end_of_the_last_reference_closes_the_engine(checkpoint):
    llm = small_async_engine(checkpoint)
    run(partial(llm.generate, PROMPTS[0], GREEDY))
    thread, lost = llm._thread._thread, weakref.ref(llm)

    del llm
    gc.collect()
    thread.join(WAIT)

    assert lost() is None
    assert not thread.is_alive()
