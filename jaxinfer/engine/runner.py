"""The one owner of device state: parameters, cache and compiled steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.batch import StepOutput, VerifyOutput
from jaxinfer.cache import abstract_cache, init_cache
from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig
from jaxinfer.engine.batching import BatchBuilder, Bucket, build_loop, build_prompt, plan_buckets
from jaxinfer.engine.chaining import chained_step
from jaxinfer.engine.compiled_steps import CompiledSteps
from jaxinfer.engine.executables import compile_or_load
from jaxinfer.engine.page_copier import PageCopier
from jaxinfer.engine.page_copies import Content, Copy, CopyIn, CopyOut, CopyWithin, PageCopies
from jaxinfer.engine.step import Step
from jaxinfer.engine.tiers import PageTiers
from jaxinfer.params import Params
from jaxinfer.processors import LogitsProcessor
from jaxinfer.steps import decode_loop, decode_step, prefill_step, verify_step

# Pages copied at once, without tiers and with them: one that is evicted while others decode, or many.
COPY_WIDTHS = ((1,), (1, 8))


class Runner:
    """Runs scheduled steps. A step that holds any other is compiled before the first one runs."""

    def __init__(
        self,
        params: Params,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        cache_config: CacheConfig,
        *,
        max_model_len: int,
        max_drafts: int,
        custom: Mapping[str, LogitsProcessor],
        tiers: PageTiers | None,
        show_progress: bool,
    ):
        self._params = params
        self._model_config = model_config
        self._cache_config = cache_config
        self._max_log_probs = min(engine_config.max_log_probs, model_config.vocab_size)
        self._max_prompt_log_probs = engine_config.max_prompt_log_probs
        self._custom = dict(custom)
        self._max_listed_tokens = engine_config.max_listed_tokens
        self._loop_steps = engine_config.decode_loop_steps
        self._builder = BatchBuilder(
            page_size=cache_config.page_size,
            table_width=-(-max_model_len // cache_config.page_size),
            max_listed_tokens=engine_config.max_listed_tokens,
            vocab_size=model_config.vocab_size,
            custom=tuple(custom),
        )
        self.buckets = plan_buckets(engine_config, max_drafts)
        self._tiers = tiers
        self._drawn = jnp.zeros((engine_config.max_num_seqs,), jnp.int32)  # by each row of the last step
        self._rows: dict[int, int] = {}  # of the requests in the last step
        self.compiled_steps, self._copier = self._compile_all(show_progress)
        self._cache = init_cache(model_config, cache_config)
        if tiers is not None:
            tiers.seconds_per_copy = self._measure_copies()

    def launch(self, step: Step) -> StepOutput | VerifyOutput:
        """Begins to compute the step, after all before it; returns its output, one row per chunk and padding after."""
        self._make_copies(step.copies)
        bucket, compiled = self.compiled_steps.choose(step)
        arguments = self._build(step, bucket)
        output, self._drawn, self._cache = compiled(self._params, self._cache, self._drawn, *arguments)
        self._rows = {chunk.request.request_id: row for row, chunk in enumerate(step.chunks)}
        is_described = isinstance(output, VerifyOutput) or step.described
        return output if is_described else replace(output, prompt=None)  # nobody reads it

    def read(self, output: StepOutput | VerifyOutput) -> StepOutput | VerifyOutput:
        """Waits for what `launch` has begun and returns it as host arrays."""
        # States stay on the device: nobody but a drafter wants them.
        return replace(jax.device_get(replace(output, hidden=None)), hidden=output.hidden)

    def run(self, step: Step) -> StepOutput | VerifyOutput:
        """Computes the step and returns its output as host arrays."""
        return self.read(self.launch(step))

    def read_pages(self, copies: PageCopies, pages: Sequence[int]) -> list[Content]:
        """Returns what pages hold after copies that are still to be made."""
        self._make_copies(copies)
        return self._copier.read(self._cache, pages)

    def _make_copies(self, copies: PageCopies) -> None:
        for batch in copies.batches(self._copier.max_width):
            self._copy(batch)

    def _copy(self, copies: Sequence[Copy]) -> None:
        """Makes copies of one kind."""
        match copies:
            case [CopyWithin(source, page)]:
                self._cache = self._copier.duplicate(self._cache, source, page)
            case [CopyIn(), *_]:
                contents = [copy.content for copy in copies if isinstance(copy, CopyIn)]
                self._cache = self._copier.write(self._cache, [copy.page for copy in copies], contents)
            case [CopyOut(), *_]:
                contents = self._copier.read(self._cache, [copy.page for copy in copies])
                for copy, content in zip(copies, contents, strict=True):
                    assert isinstance(copy, CopyOut)
                    assert self._tiers is not None
                    self._tiers.put(copy.key, content)

    def _measure_copies(self) -> float:
        """Returns the seconds that a page takes out of the cache and in again, at best."""
        seconds = []
        pages = list(range(min(self._copier.max_width, self._cache_config.num_pages)))
        for _ in range(3):
            began = time.perf_counter()
            contents = self._copier.read(self._cache, pages)
            self._cache = jax.block_until_ready(self._copier.write(self._cache, pages, contents))
            seconds.append((time.perf_counter() - began) / len(pages))
        return min(seconds)

    def _build(self, step: Step, bucket: Bucket) -> tuple[Any, ...]:
        """Returns what the bucket's compiled step takes after parameters and cache."""
        arguments = self._builder.build(step, bucket, self._rows)
        if bucket.is_decode and self._loop_steps > 1:
            return *arguments, build_loop(step, bucket, self._max_listed_tokens)
        has_prompt = bucket.is_prefill and self._max_prompt_log_probs is not None
        return (*arguments, build_prompt(step, bucket)) if has_prompt else arguments

    def _compile_all(self, show_progress: bool) -> tuple[CompiledSteps, PageCopier]:
        cache = abstract_cache(self._model_config, self._cache_config)
        arguments = {bucket: self._build(Step(()), bucket) for bucket in self.buckets}

        def compile_bucket(bucket: Bucket) -> jax.stages.Compiled:
            step, statics = decode_step if bucket.is_decode else prefill_step, {}
            if bucket.is_decode and self._loop_steps > 1:
                step, statics = decode_loop, {"num_steps": self._loop_steps}
            if bucket.is_verify:
                step, statics = verify_step, {"q_len": bucket.q_len}
            if bucket.is_prefill:
                statics = {"max_prompt_log_probs": min(self._max_prompt_log_probs or 0, self._model_config.vocab_size)}
            return compile_or_load(
                chained_step,
                self._params,
                cache,
                self._drawn,
                *arguments[bucket],
                step=step,
                config=self._model_config,
                max_log_probs=self._max_log_probs,
                custom=tuple(self._custom.values()),
                **statics,
            )

        steps = CompiledSteps(self.buckets, compile_bucket)
        copier = PageCopier(cache, self._model_config, COPY_WIDTHS[self._tiers is not None])
        steps.wait_for_last(show_progress=show_progress)
        return steps, copier
