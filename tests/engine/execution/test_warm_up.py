"""An engine takes no more memory than it was given, as its arrays and compiled steps say, and tells what it takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import LLM
from jaxinfer.checkpoint import abstract_checkpoint
from jaxinfer.config import CacheConfig, EngineConfig, SamplingParams
from jaxinfer.engine.execution import step_compiler, warm_up
from jaxinfer.engine.execution.compiled_steps import CompileCounter
from jaxinfer.model.cache import page_arrays
from jaxinfer.parallel import placement
from jaxinfer.plan import cache, limits
from jaxinfer.plan.memory import num_bytes
from tests.compiler import layers_apart
from tests.engine.engines import GREEDY, SMALL, are_tpu_kernels_interpreted, random_prompts, ready_engine, small_engine
from tests.engine.probe import runner_of

LIMIT = 1_500_000 if are_tpu_kernels_interpreted() else 2_700_000  # where the model has one layer, and two


@pytest.fixture(scope="module")
def small(checkpoint):
    """Its memory is the only limit on its pages, of which its rows could use more."""
    with layers_apart():  # a loop over them takes more memory of its own
        return ready_engine(checkpoint, max_model_len=256, memory_bytes=LIMIT)


def test_pages_fill_the_memory_that_is_given(small):
    memory = small.warm_up().memory

    # Memory for a fiftieth more is not worth compiling again, and pages come in steps of at most 1/64 of them.
    assert (0.98 - 1 / 64) * LIMIT <= memory.total_bytes <= LIMIT
    assert memory.num_pages == small.metrics().num_pages < 4 * 256 / 16


def test_the_plan_is_what_arrays_and_compiled_steps_take(small):
    memory, runner = small.warm_up().memory, runner_of(small)

    assert memory.resident_bytes == num_bytes(runner._params)
    assert memory.pool_bytes == num_bytes(runner._cache)
    for step in runner.compiled_steps.compiled.values():
        analysis = step.memory_analysis()
        results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        assert analysis.argument_size_in_bytes + results + analysis.temp_size_in_bytes <= memory.total_bytes


def test_a_small_reserve_is_kept_and_one_round_of_compilation_is_enough(checkpoint, monkeypatch):
    rounds, compile_for = [], warm_up.WarmUp._compile_for
    monkeypatch.setattr(
        warm_up.WarmUp, "_compile_for", lambda self, num_pages: rounds.append(num_pages) or compile_for(self, num_pages)
    )
    monkeypatch.setattr(warm_up, "MAX_RESERVED", 1.0)

    with small_engine(checkpoint, max_model_len=256, memory_bytes=2 * LIMIT) as llm:
        memory = llm.warm_up().memory

    assert len(rounds) == 1
    assert memory.num_pages == rounds[0]
    assert memory.total_bytes <= 2 * LIMIT


def test_a_step_that_needs_more_than_is_reserved_is_not_used_and_says_so(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(warm_up, "MAX_RESERVED", 1.0)
    needed = step_compiler.StepCompiler.step_bytes

    def step_bytes(self, compiled):
        (first, *others) = compiled
        return needed(self, compiled) if others or first.is_prefill else 2**40

    monkeypatch.setattr(step_compiler.StepCompiler, "step_bytes", step_bytes)

    with LLM(checkpoint, config=EngineConfig(**SMALL, memory_bytes=2 * LIMIT)) as llm:
        (first,) = llm.generate([[5, 6, 7]], GREEDY, show_progress=False)
        with pytest.raises(RuntimeError, match=r"needs 1099511627776 bytes beside parameters and pages, and \d+ are"):
            llm.warm_up()
        (second,) = llm.generate([[5, 6, 7]], GREEDY, show_progress=False)

    assert first.token_ids == second.token_ids
    assert "decode 1 cannot be compiled, slower steps stand in for it" in caplog.text


def test_weights_still_to_come_take_their_part_of_what_the_device_has_free(checkpoint, monkeypatch):
    monkeypatch.setattr(placement, "free_bytes", lambda: LIMIT)

    memory = ready_engine(checkpoint, max_model_len=256).warm_up().memory

    limit = LIMIT - int(limits.SPARE * LIMIT)
    assert memory.limit_bytes == limit
    assert memory.total_bytes <= limit


def test_a_gpu_gets_no_pool_that_its_kernels_address_wrongly(checkpoint, monkeypatch, caplog):
    _, config = abstract_checkpoint(checkpoint, "float32")
    arrays = page_arrays(config, CacheConfig(num_pages=1, page_size=16, dtype="int8"))
    size = max(array.size for array in arrays if array.dtype.itemsize == 1)
    monkeypatch.setattr(warm_up, "default_implementation", lambda: "gpu")
    monkeypatch.setattr(cache, "MISADDRESSED", range(20 * size + 1, 80 * size + 1))

    with small_engine(checkpoint, max_model_len=256, cache_dtype="int8") as llm:
        assert llm.metrics().num_pages == 20

    assert "20 of the 64 pages that fit are used: in 4 or 8 bits, GPU kernels read no keys" in caplog.text


def test_it_serves_more_than_it_has_pages_for(small):
    params = SamplingParams(max_tokens=40, ignore_eos=True)

    completions = small.generate(random_prompts(12, max_len=200), params, show_progress=False)

    assert {len(completion.token_ids) for completion in completions} == {40}
    assert small.metrics().num_late_compiles == 0


def test_what_was_compiled_is_counted(small):
    ready = small.warm_up()

    assert ready.num_executables == len(runner_of(small).buckets) + 2  # pages out and in
    assert ready.seconds > 0
    assert str(ready).startswith(f"{ready.num_executables} executables ready in ")


@pytest.mark.parametrize("limits", [{"memory_bytes": 1000}, {"memory_bytes": LIMIT, "num_pages": 10_000}], ids=str)
def test_too_little_memory_is_refused(checkpoint, limits):
    with pytest.raises(ValueError, match=rf"memory_bytes={limits['memory_bytes']} is too little: .* MB of parameters"):
        small_engine(checkpoint, max_model_len=256, **limits)


def test_a_compilation_in_a_step_is_counted(llm, monkeypatch):
    before, total, launch = llm.metrics().num_late_compiles, CompileCounter.total, runner_of(llm).launch
    monkeypatch.setattr(
        runner_of(llm), "launch", lambda step: (jnp.arange(before + 7) * 3).sum() * 0 + 1 and launch(step)
    )

    llm.generate([[5, 6]], GREEDY, show_progress=False)

    assert llm.metrics().num_late_compiles > before
    CompileCounter.total = total  # it was on purpose


def test_a_compilation_outside_of_a_step_is_not_counted(llm):
    before = llm.metrics().num_late_compiles

    jax.jit(lambda x: x * 5 + 2)(jnp.ones(3))

    assert llm.metrics().num_late_compiles == before
