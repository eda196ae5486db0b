"""An engine begins to serve with its first shapes, and no request waits for a shape that it does not need."""

from __future__ import annotations

import json
import queue
import threading
import time

import pytest

from jaxinfer import LLM
from jaxinfer.batch_job import run_batch
from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.engine_thread import EngineThread
from jaxinfer.engine.execution.step_compiler import StepCompiler
from jaxinfer.plan import step_shapes
from tests.engine.engines import SMALL, forget_prefixes, random_prompts

CONFIG = EngineConfig(**{**SMALL, "max_num_batched_tokens": 32, "decode_loop_steps": 4})
FILTERED = SamplingParams(max_tokens=6, temperature=1.0, top_k=3, seed=1)


@pytest.fixture
def gate(monkeypatch):
    """A device whose compiler tunes without end, until the gate opens, whatever is not among the first three shapes."""
    monkeypatch.setattr(step_shapes, "waits_for_decode", lambda: True)
    monkeypatch.setattr(step_shapes, "draws_filtered", lambda: True)
    monkeypatch.setattr(step_shapes, "PREFILL_TOKENS", 8)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    gate, compile_now = threading.Event(), StepCompiler.compile

    def compile_slowly(self, cache_config, bucket):
        assert bucket in step_shapes.first_buckets(self.buckets) or gate.wait(300)
        return compile_now(self, cache_config, bucket)

    monkeypatch.setattr(StepCompiler, "compile", compile_slowly)
    yield gate
    gate.set()


def shapes_of(llm):
    with llm.engine() as engine:
        return [bucket.name for warm_up in engine._warm_ups for bucket in warm_up.steps.compiled]


def params_of(max_tokens, temperature):
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=3, ignore_eos=True)


def test_three_shapes_serve_any_request_that_is_drawn_plainly_however_long_the_others_take(checkpoint, gate):
    prompts = random_prompts(9, max_len=80)
    params = [params_of(1 + 5 * (i % 3), float(i % 2)) for i in range(9)]
    with LLM(checkpoint, config=CONFIG) as llm:
        assert sorted(shapes_of(llm)) == ["decode 1", "plain loop of 4 steps 4", "prefill 8"]

        staged = llm.generate(prompts, params, show_progress=False)

        assert len(shapes_of(llm)) == 3
        gate.set()
        llm.warm_up(show_progress=False)
        assert len(shapes_of(llm)) == 10
        whole = llm.generate(prompts, params, show_progress=False)
        assert llm.metrics().num_late_compiles == 0

    assert [c.token_ids for c in staged] == [c.token_ids for c in whole]


def test_a_request_that_needs_a_fourth_shape_waits_for_it_alone_and_others_run_past_it(checkpoint, gate):
    with LLM(checkpoint, config=CONFIG) as llm:
        first = llm.add([5, 6, 7], FILTERED)
        others = [llm.add([8, 9, i], params_of(5, 0.0)) for i in range(6)]

        ended = []
        while len(ended) < len(others):
            ended += [delta.completion for delta in llm.step() if delta.completion is not None]
        assert sorted(c.request_id for c in ended) == others
        assert llm.step() == []  # waits for the compiler, and not without end
        assert llm.has_unfinished

        gate.set()
        while llm.has_unfinished:
            ended += [delta.completion for delta in llm.step() if delta.completion is not None]
        assert ended[-1].request_id == first
        (again,) = llm.generate([[5, 6, 7]], FILTERED, show_progress=False)

    assert ended[-1].token_ids == again.token_ids


def test_an_engines_thread_ends_a_held_request_at_its_deadline_and_goes_on_when_the_draw_is_there(checkpoint, gate):
    engine, completions = Engine(checkpoint, config=CONFIG, show_progress=False), queue.Queue()
    thread = EngineThread(engine)

    def submit(**options):
        sink = lambda delta: delta.completion and completions.put(delta.completion)  # noqa: E731
        thread.submit(engine.admit([5, 6, 7], FILTERED, **options), sink)

    try:
        submit(deadline=0.3)
        submit()
        assert completions.get(timeout=60).finish_reason == "deadline"
        assert completions.empty()
        gate.set()
        assert completions.get(timeout=120).finish_reason == "length"
    finally:
        gate.set()
        thread.close(drain_seconds=0.0)


def test_a_job_of_requests_that_wait_for_the_compiler_goes_on_when_it_is_ready(checkpoint, gate, tmp_path):
    line = {"custom_id": "a", "prompt": [5, 6, 7], "temperature": 1.0, "top_k": 3, "seed": 1, "max_tokens": 4}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    threading.Timer(1.5, gate.set).start()  # later than a wait for a change

    with LLM(checkpoint, config=CONFIG) as llm:
        summary = run_batch(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl", show_progress=False)

    assert (summary.num_completed, summary.num_errors) == (1, 0)


def test_a_prompt_is_computed_in_small_steps_until_a_large_one_is_there(checkpoint, gate):
    sizes = []
    with LLM(checkpoint, config=CONFIG) as llm:
        llm.on_step = lambda step, seconds: sizes.append(step.num_tokens)
        (staged,) = llm.generate(random_prompts(1, max_len=80)[:1], params_of(2, 0.0), show_progress=False)
        assert max(sizes) == 8
        gate.set()
        sizes.clear()
        end = time.monotonic() + 300
        while max(sizes, default=0) < 32 and time.monotonic() < end:
            forget_prefixes(llm)
            llm.generate([list(staged.prompt_token_ids)], params_of(2, 0.0), show_progress=False)

    assert max(sizes) == 32
