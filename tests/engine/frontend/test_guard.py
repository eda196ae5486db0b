"""An LLM is used by one thread, until it is closed or its device fails, and says so to everybody else."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from pathlib import Path

import jax
import pytest

from jaxinfer.engine.frontend.guard import Guard
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request.completion import Completion
from tests.display.test_html import Page
from tests.engine.engines import (
    GREEDY,
    ScriptedDrafter,
    completions_of,
    drain,
    generate,
    num_owned_pages,
    ready_engine,
    small_engine,
    token_ids_of,
)
from tests.engine.probe import runner_of, scheduler_of

COMPLETION = Completion(
    request_id=0,
    prompt_token_ids=(5,),
    text="a",
    token_ids=(5,),
    log_probs=(-1.0,),
    top_log_probs=({5: -1.0},),
    finish_reason="length",
    seed=0,
)
TEMPLATE = "{{ messages[0].content }}{{ messages[1].content }}"  # of a query and a document
CALLS = {
    "has_unfinished": lambda llm: llm.has_unfinished,
    "metrics": lambda llm: llm.metrics(),
    "identity": lambda llm: llm.identity(),
    "on_step": lambda llm: llm.on_step,
    "add": lambda llm: llm.add([5], GREEDY),
    "abort": lambda llm: llm.abort(0),
    "fork": lambda llm: llm.fork(0),
    "rewind": lambda llm: llm.rewind(0, 1),
    "save": lambda llm: llm.save(0, "request"),
    "restore": lambda llm: llm.restore("request"),
    "step": lambda llm: llm.step(),
    "stream": lambda llm: list(llm.stream([5], GREEDY)),
    "generate": lambda llm: generate(llm, [5]),
    "chat": lambda llm: llm.chat([{"content": "a"}], GREEDY, chat_template="b", show_progress=False),
    "default_sampling_params": lambda llm: llm.default_sampling_params,
    "beam_search": lambda llm: llm.beam_search([5], num_beams=2, max_tokens=2),
    "embed": lambda llm: llm.embed([5], show_progress=False),
    "score": lambda llm: llm.score("a", "b", chat_template=TEMPLATE, answer_tokens=("y", "n"), show_progress=False),
    "labels": lambda llm: llm.labels,
    "agreement": lambda llm: llm.agreement(COMPLETION),
    "update_params": lambda llm: llm.update_params(None),
    "adapters": lambda llm: llm.adapters,
    "load_adapter": lambda llm: llm.load_adapter("a", "adapter"),
    "unload_adapter": lambda llm: llm.unload_adapter("a"),
    "warm_up": lambda llm: llm.warm_up(),
    "engine": lambda llm: contextlib.ExitStack().enter_context(llm.engine()),
    "timeline": lambda llm: llm.timeline(),
    "show": lambda llm: llm.show(COMPLETION),
}
# Another thread may call these at any time.
LOOKS = {
    *("has_unfinished", "metrics", "identity", "on_step", "default_sampling_params", "adapters", "warm_up", "show"),
    "labels",
}


def test_no_call_is_left_out():
    assert {name for name in vars(LLM) if not name.startswith("_")} == CALLS.keys() | {
        *("close", "drop"),
        "classify",  # by a classifier alone
    }


@pytest.mark.parametrize("name", [name for name in CALLS if name not in LOOKS])
def test_another_thread_is_refused_and_changes_nothing(llm, name):
    expected = token_ids_of(generate(llm, [[5, 6], [7]]))
    refusals = []

    def intrude(*_):
        def run():
            try:
                CALLS[name](llm)
            except RuntimeError as error:
                refusals.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    llm.on_step = intrude
    completions = generate(llm, [[5, 6], [7]])
    llm.on_step = None

    assert token_ids_of(completions) == expected
    assert len(refusals) >= 8
    assert all("another thread is using this LLM" in refusal for refusal in refusals)


def test_deferred_work_of_another_thread_is_waited_for():
    guard, begun, go_on = Guard(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go_on.wait(60)

    worker = threading.Thread(target=guard.defer, args=[work])
    worker.start()
    assert begun.wait(60)
    threading.Timer(0.1, go_on.set).start()

    with guard:
        assert go_on.is_set()
    worker.join()


def test_deferred_work_itself_is_refused_and_does_not_wait_for_its_own_end():
    guard, refusals = Guard(), []

    def work() -> None:
        with pytest.raises(RuntimeError, match="one at a time may"):
            guard.__enter__()
        refusals.append(guard)

    guard.defer(work)

    assert refusals == [guard]


def test_a_stream_begins_in_no_other_thread_while_a_step_is_computed(llm):
    refusals = []

    def intrude(*_):
        def run():
            with pytest.raises(RuntimeError, match="another thread is using this LLM"):
                next(stream)
            refusals.append(stream)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        llm.on_step = None

    stream, llm.on_step = llm.stream([5], GREEDY), intrude
    generate(llm, [[5, 6]])

    assert refusals == [stream]
    assert not llm.has_unfinished


@pytest.fixture(scope="module")
def closed_llm(checkpoint):
    llm = small_engine(checkpoint)
    llm.add([5], GREEDY)
    llm.close()
    llm.close()
    return llm


def test_a_closed_llm_still_shows_its_line(closed_llm):
    assert Page(closed_llm._repr_html_()).text == repr(closed_llm)


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_llm_says_so(closed_llm, name):
    with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
        CALLS[name](closed_llm)


def test_the_end_of_a_with_block_closes_and_frees_without_waiting_for_the_collector(checkpoint):
    gc.collect()
    before = num_bytes()
    gc.disable()
    try:
        with small_engine(checkpoint, max_num_seqs=2) as llm:
            generate(llm, [[5]])
            cache, open_repr = weakref.ref(jax.tree.leaves(runner_of(llm)._cache)[0]), repr(llm)
    finally:
        gc.enable()

    assert cache() is None
    # What is left is what a step without sampling parameters has in place of them, once per shape.
    assert num_bytes() - before < 10_000
    assert "2 layers of hidden_size=144, float32, max_num_seqs=2, 0 unfinished requests>" in open_repr
    assert "closed>" in repr(llm)


def test_an_open_stream_keeps_no_memory_of_a_closed_llm(checkpoint):
    gc.collect()
    before = num_bytes()
    llm = small_engine(checkpoint, max_num_seqs=2)
    stream = llm.stream([5], GREEDY)
    next(stream)
    cache = weakref.ref(jax.tree.leaves(runner_of(llm)._cache)[0])

    llm.close()

    assert cache() is None
    assert num_bytes() - before < 10_000
    with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
        next(stream)


def num_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def num_maps():
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_engines_that_are_dropped_give_back_what_was_compiled_for_them(checkpoint):
    jax.config.update("jax_enable_compilation_cache", False)  # as where nothing is compiled yet
    try:
        counts = []
        for max_num_seqs in (2, 5):
            llm = ready_engine(checkpoint, max_num_seqs=max_num_seqs)
            generate(llm, [[5]])
            compiled = num_maps()
            del llm
            gc.collect()
            counts.append((compiled, num_maps()))
    finally:
        jax.config.update("jax_enable_compilation_cache", True)

    (before, first), (after, last) = counts
    assert before - first > 200  # an engine's steps are hundreds of memory maps
    assert last - first < 100
    assert after - before < 100


def test_a_fork_of_the_process_is_told_what_to_do(llm, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: -1)

    message = r"process -1 was forked from process \d+, in which JAX runs.*get_context\('spawn'\)"
    with pytest.raises(RuntimeError, match=message):
        llm.add([5], GREEDY)
    with pytest.raises(RuntimeError, match=message):
        LLM()

    monkeypatch.undo()


def test_an_llm_whose_device_has_failed_says_so(checkpoint, monkeypatch):
    llm = small_engine(checkpoint)
    generate(llm, [[5]])

    def out_of_memory(step):
        def compiled(params, cache, *_):
            jax.tree.map(lambda array: array.delete(), cache)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

        return choose(step)._replace(compiled=compiled)

    choose = runner_of(llm).compiled_steps.choose
    monkeypatch.setattr(runner_of(llm).compiled_steps, "choose", out_of_memory)

    with pytest.raises(jax.errors.JaxRuntimeError, match="EXHAUSTED") as failure:
        generate(llm, [[5]])
    assert "the LLM has failed with this" in failure.value.__notes__[0]
    for name in CALLS:
        with pytest.raises(RuntimeError, match=r"has failed \(JaxRuntimeError: RESOURCE_EXHAUSTED\); make a new one"):
            CALLS[name](llm)
    llm.close()


class FailingDrafter(ScriptedDrafter):
    """Raises where it is told to."""

    where = ""

    def draft(self, requests, counts):
        return self._maybe("draft") or super().draft(requests, counts)

    def forget(self, request):
        self._maybe("forget")

    def _maybe(self, where):
        if where == self.where:
            raise LookupError(f"no {where} today")


@pytest.mark.parametrize("where", ["draft", "forget"])
def test_no_token_is_lost_by_what_a_drafter_raises(checkpoint, llm, where):
    expected = token_ids_of(generate(llm, [[5, 6], [7]]))
    drafter = FailingDrafter(1.0)
    drafting = small_engine(checkpoint, speculation=drafter, max_drafts=2, adaptive_drafts=False)
    drafter.where = where

    ids, deltas = [drafting.add(prompt, GREEDY) for prompt in ([5, 6], [7])], []

    def step_until_it_raises():
        while drafting.has_unfinished:
            deltas.extend(drafting.step())

    with pytest.raises(LookupError, match=f"no {where} today") as raised:
        step_until_it_raises()
    drafter.where = ""
    completions = completions_of(deltas + drain(drafting))

    assert raised.value.__notes__ == ["raised by the drafter FailingDrafter; no token was lost by it"]
    assert [completions[request_id].token_ids for request_id in ids] == expected
    assert num_owned_pages(drafting) == 0


def test_an_engine_that_cannot_go_on_does_not_wait_for_ever(llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(scheduler_of(llm), "schedule", lambda *_: None)
        with pytest.raises(RuntimeError, match="requests are unfinished and no step can be computed: Metrics"):
            generate(llm, [[5]])

    assert not llm.has_unfinished


def test_a_request_that_draws_its_last_token_does_not_wait(llm):
    with llm.timeline() as timeline:
        generate(llm, [[5]])

    assert {load.num_waiting for load in timeline.loads} == {0}
