"""Engines that compile a step of a shape when the first step of that shape comes: a test needs few of the shapes.

Compiling takes most of the suite's time, so engines that compute the same steps share them.
`tests/engine/execution` tests engines that compile steps of their own.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from jaxinfer.engine.drafters import draft_heads, draft_model, hidden_states
from jaxinfer.engine.execution import executable_cache, step_compiler, warm_up
from jaxinfer.engine.execution.compiled_steps import Choice, CompiledSteps, choose_bucket, draw_form, draw_forms_of
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.plan.step_shapes import Bucket
from jaxinfer.sampling_params import Form
from tests.memory_maps import are_memory_maps_short

# What this process has compiled, by the key on disk, and by the options, because the key leaves out logits processors.
_compiled: dict[Any, jax.stages.Compiled] = {}


def clear_compiled() -> None:
    """Drops the compiled steps that no engine uses."""
    _compiled.clear()
    gc.collect()


class KeptProcessor:
    """A logits processor whose compiled steps are kept on disk, by its source; those of users are not.

    The source may use nothing but `jax` and `jax.numpy`, whose versions are in every key.
    """

    def __init__(self, function: Callable[..., jax.Array]) -> None:
        self._function, self._source = function, inspect.getsource(function)

    def __call__(self, *args: jax.Array) -> jax.Array:
        return self._function(*args)

    def __repr__(self) -> str:
        return self._source


@contextlib.contextmanager
def kept_processors() -> Iterator[None]:
    """Steps that are compiled meanwhile with processors of this kind alone are kept on disk."""

    def has_other(statics: Mapping[str, Any]) -> bool:
        custom = [each for value in statics.values() for each in getattr(value, "custom", ())]
        return not all(isinstance(each, KeptProcessor) for each in custom)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executable_cache, "_has_custom", has_other)
        yield


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """Steps that are compiled meanwhile are those that an earlier engine of this process has compiled, if any has."""

    def compile_once(function: Any, *args: Any, **statics: Any) -> jax.stages.Compiled:
        key = executable_cache._key(function, args, statics, {}), statics.get("options")
        if key not in _compiled:
            if are_memory_maps_short():
                clear_compiled()
            _compiled[key] = executable_cache.compile_or_load(function, *args, **statics)
        return _compiled[key]

    with kept_processors(), pytest.MonkeyPatch.context() as patch:
        for module in (step_compiler, draft_heads, draft_model, hidden_states):
            patch.setattr(module, "compile_or_load", compile_once)
        yield


class StepsOnDemand(CompiledSteps):
    """Takes the smallest bucket for every step, and no other one in its place: bits and speed do not depend on luck."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        compile_bucket: Callable[[Bucket], jax.stages.Compiled],
        first: Sequence[Bucket],
        expected_form: Form,
    ) -> None:
        super().__init__(buckets, compile_bucket, first=())
        self._planned, self._measured = tuple(buckets), first

    def wait_for_first(self, **_: Any) -> None:
        for bucket in self._measured:  # the engine plans its pages by their memory
            self.of(bucket)

    @property
    def max_tokens(self) -> int:
        return self._most_tokens

    def can_draw(self, form: Form) -> bool:
        return True

    def can_loop(self, form: Form) -> bool:
        return True

    @property
    def compiled(self) -> Mapping[Bucket, jax.stages.Compiled]:
        return self._compiled

    def choose(self, step: Step) -> Choice:
        bucket = choose_bucket(self._planned, step)
        form = draw_form(draw_forms_of(self._planned), step)
        draw = None if form is None else bucket.draw(form)
        return Choice(bucket, self.of(bucket), None if draw is None else (draw, self.of(draw)))

    def wait(self, **_: Any) -> None:
        for bucket in self._planned:
            self.of(bucket)

    def of(self, bucket: Bucket) -> jax.stages.Compiled:
        if bucket not in self._compiled:
            # In another thread, as in every engine: `CompileCounter` counts the compilations of the engine's own.
            with compiled_once(), ThreadPoolExecutor(1) as pool:
                self._compiled[bucket] = pool.submit(self._compile_bucket, bucket).result()
        return self._compiled[bucket]


@contextlib.contextmanager
def steps_on_demand() -> Iterator[None]:
    """Engines that are made meanwhile compile their steps on demand, or when `LLM.warm_up` asks for all of them."""
    with compiled_once(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_up, "CompiledSteps", StepsOnDemand)
        patch.setattr(StepsOnDemand, "wait", lambda *_, **__: None)  # an engine with a drafter waits for all its steps
        yield
