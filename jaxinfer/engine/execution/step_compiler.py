"""Compiles a step for each shape that an engine's limits allow."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxinfer.config import CacheConfig
from jaxinfer.engine.execution.batch_builder import BatchBuilder
from jaxinfer.engine.execution.engine_model import EngineModel
from jaxinfer.engine.execution.executable_cache import compile_or_load
from jaxinfer.engine.scheduling.step import Chunks, Step
from jaxinfer.model.adapted_params import with_slots
from jaxinfer.model.batch import Batch, StepOutput, VerifyOutput
from jaxinfer.model.cache import KVCache, abstract_cache
from jaxinfer.model.decoder import logits_sharding
from jaxinfer.model.params import Params
from jaxinfer.plan.memory import step_bytes
from jaxinfer.plan.step_shapes import Bucket, max_rows, plan_buckets, plan_draws
from jaxinfer.sampling.batch import SamplingBatch
from jaxinfer.steps.steps import StepOptions, decode_loop, decode_step, draw_step, prefill_step, replicated, verify_step

logger = logging.getLogger(__name__)


@functools.partial(jax.jit, static_argnames=("step", "options"), donate_argnames="cache")
def step_with_feedback(
    params: Params,
    cache: KVCache,
    drawn: jax.Array,
    batch: Batch,
    sampling: SamplingBatch,
    *rest: Any,
    step: Callable[..., Any],
    options: StepOptions,
) -> tuple[Any, jax.Array, KVCache]:
    """Runs `step(params, cache, batch, sampling, *rest, options=options)` and returns (output, drawn, cache).

    `drawn` i32[R] has the token that each row of the previous step sampled; R is the most rows of any step. The token
    `pending_token(r)` in the batch is replaced by `drawn[r]`. Donates the cache.
    """
    tokens = jnp.where(batch.tokens < 0, drawn[-1 - batch.tokens], batch.tokens)
    output, cache = step(params, cache, replace(batch, tokens=tokens), sampling, *rest, options=options)
    return output, replicated(_enter(drawn, output), options.mesh), cache


@functools.partial(jax.jit, static_argnames=("step", "options"))
def draw_with_feedback(
    cache: KVCache,
    drawn: jax.Array,
    batch: Batch,
    sampling: SamplingBatch,
    logits: jax.Array,
    *,
    step: Callable[..., Any],
    options: StepOptions,
) -> tuple[Any, jax.Array]:
    """Runs a `step` that draws from the logits of `step_with_feedback`; returns (output, drawn) as that does."""
    output = step(cache, batch, sampling, logits, options=options)
    return output, replicated(_enter(drawn, output), options.mesh)


def _enter(drawn: jax.Array, output: StepOutput | VerifyOutput) -> jax.Array:
    """Returns `drawn` with the last token that each row of a step has sampled."""
    tokens = output.tokens
    if isinstance(output, VerifyOutput):
        tokens = jnp.take_along_axis(tokens, jnp.maximum(output.num_emitted - 1, 0)[:, None], axis=1)[:, 0]
    return drawn.at[: tokens.shape[0]].set(tokens)


class StepCompiler:
    """Plans the shapes that an engine's limits allow, and compiles a step for each.

    The steps return the states after each of the numbers of layers in `kept_layers`, see `forward_with_states`.
    """

    def __init__(self, target: EngineModel, max_drafts: int, kept_layers: tuple[int, ...] = ()) -> None:
        config, self._placement = target.engine_config, target.placement
        self.buckets = plan_buckets(config, max_drafts)
        if target.model_config.has_logits:
            self.buckets = (*plan_draws(self.buckets), *self.buckets)
        self.max_num_rows = max_rows(config)
        self.model_config = target.model_config
        slots = target.abstract_slots
        self._params = target.params if slots is None else with_slots(target.params, slots)
        self._max_log_probs = min(config.max_log_probs, target.model_config.vocab_size)
        self._max_prompt_log_probs = config.max_prompt_log_probs
        self._custom = tuple(target.custom.values())
        self._kept_layers = kept_layers
        self._options = StepOptions(
            config=target.model_config,
            implementation=config.attention,
            exact=config.exact,
            sampling_log_probs=config.sampling_log_probs,
            mesh=target.placement.mesh,
        )
        self._empty = self._empty_steps(BatchBuilder.of(target))
        self.seconds: dict[Bucket, float] = {}  # duration of each shape's last compilation or load

    @property
    def largest(self) -> list[Bucket]:
        """Returns the largest shape of each kind, which needs the most memory; the last one holds any step."""
        kinds = {
            (bucket.is_decode, bucket.q_len, bucket.is_draw, bucket.is_mixed, bucket.num_steps, bucket.form): bucket
            for bucket in self.buckets
        }
        return list(kinds.values())

    def _empty_steps(self, builder: BatchBuilder) -> dict[Bucket, tuple[Any, ...]]:
        """Returns the arguments of a step without requests, for each shape."""
        built = {bucket: builder.build(Step(Chunks.of(())), bucket) for bucket in self.buckets}
        empty = {bucket: self._placement.replicated(arguments) for bucket, arguments in built.items()}
        for bucket in [bucket for bucket in self.buckets if bucket.is_draw]:  # they take logits too
            shape, mesh = (bucket.num_tokens, self.model_config.padded_vocab_size), self._options.mesh
            sharding = None if mesh is None else logits_sharding(mesh, shape[1])
            empty[bucket] += (jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding),)
        return empty

    @property
    def host_arguments(self) -> list[Any]:
        """The shapes and dtypes of the arguments that the host gives to the step of each bucket, in their order."""
        # A draw also takes the logits of its step.
        return [self._empty[bucket][: -1 if bucket.is_draw else None] for bucket in self.buckets]

    def step_bytes(self, compiled: Mapping[Bucket, jax.stages.Compiled]) -> int:
        """Returns the most bytes that any of the compiled steps needs beside parameters and cache."""
        return max(step_bytes(step, self._empty[bucket]) for bucket, step in compiled.items())

    def compile(self, cache_config: CacheConfig, bucket: Bucket) -> jax.stages.Compiled:
        """Compiles a shape for a cache of this configuration, or loads its executable from disk."""
        began = time.perf_counter()
        function, arguments, statics = self._call(cache_config, bucket)
        compiled = compile_or_load(function, *arguments, num_rows=bucket.num_tokens, **statics)
        self.seconds[bucket] = time.perf_counter() - began
        logger.info("%s is ready after %.1f s", bucket.name, self.seconds[bucket])
        return compiled

    def trace(self, cache_config: CacheConfig, bucket: Bucket) -> ClosedJaxpr:
        """Returns the traced computation of a shape, without compiling it."""
        function, arguments, statics = self._call(cache_config, bucket)
        return function.trace(*arguments, **statics).jaxpr

    def _call(self, cache_config: CacheConfig, bucket: Bucket) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Returns the jitted function that computes a bucket's steps, its arguments and its static arguments."""
        state = (
            self._placement.cache(self.model_config, abstract_cache(self.model_config, cache_config)),
            self._placement.replicated(jax.ShapeDtypeStruct((self.max_num_rows,), jnp.int32)),
            *self._empty[bucket],
        )
        step, options = self._step_of(bucket)
        form = "full" if bucket.is_verify else bucket.form
        if form == "full":
            options = replace(options, max_log_probs=self._max_log_probs, custom=self._custom)
        statics = {"step": step, "options": replace(options, form=form)}
        if bucket.is_draw:
            return draw_with_feedback, state, statics
        return step_with_feedback, (self._params, *state), statics

    def _step_of(self, bucket: Bucket) -> tuple[Callable[..., Any], StepOptions]:
        """Returns the step function of a bucket, and its options without those of its form."""
        if bucket.is_draw:
            return draw_step, self._options
        if bucket.num_steps > 1:  # a decode loop returns no states
            return decode_loop, replace(self._options, num_steps=bucket.num_steps)
        options = replace(self._options, kept_layers=self._kept_layers)
        if bucket.is_verify:
            return verify_step, replace(options, q_len=bucket.q_len)
        if bucket.is_prefill:
            num_log_probs = min(self._max_prompt_log_probs or 0, self.model_config.vocab_size)
            return prefill_step, replace(options, max_prompt_log_probs=num_log_probs)
        return decode_step, options
