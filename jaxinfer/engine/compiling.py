"""How steps are laid out in their shapes, and how these are compiled."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxinfer.cache import abstract_cache
from jaxinfer.config import CacheConfig
from jaxinfer.engine.batching import BatchBuilder, build_loop, build_parents, build_prompt
from jaxinfer.engine.buckets import Bucket, plan_buckets, plan_draws
from jaxinfer.engine.chaining import chained_draw, chained_step
from jaxinfer.engine.device_drafter import Target
from jaxinfer.engine.executables import compile_or_load
from jaxinfer.engine.step import NO_ROWS, Chunks, Rows, Step
from jaxinfer.plan.memory import step_bytes
from jaxinfer.steps import decode_loop, decode_step, draw_step, draw_verify_step, prefill_step, verify_step


class StepCompiler:
    """Knows the shapes that an engine's limits allow, lays steps out in them and compiles them."""

    def __init__(self, target: Target, max_drafts: int) -> None:
        config = target.engine_config
        self.buckets = plan_buckets(config, max_drafts)
        if config.decode_loop_steps == 1 and find_spec("llguidance") is not None:  # steps are launched ahead of masks
            self.buckets = (*plan_draws(self.buckets, config.draft_trees), *self.buckets)
        self.max_num_rows = config.max_num_seqs
        self.model_config = target.model_config
        self._params = target.params
        self._max_log_probs = min(config.max_log_probs, target.model_config.vocab_size)
        self._max_prompt_log_probs = config.max_prompt_log_probs
        self._custom = dict(target.custom)
        self._max_listed_tokens = config.max_listed_tokens
        self._draft_trees = config.draft_trees
        self._loop_steps = config.decode_loop_steps
        self._attention = config.attention
        self._builder = BatchBuilder(
            page_size=config.page_size,
            table_width=target.table_width,
            max_listed_tokens=config.max_listed_tokens,
            vocab_size=target.model_config.vocab_size,
            custom=tuple(target.custom),
        )
        self._empty = {bucket: self.lay_out(Step(Chunks.of(())), bucket) for bucket in self.buckets}
        self.seconds: dict[Bucket, float] = {}  # that each shape took to be compiled or loaded the last time

    @property
    def largest(self) -> list[Bucket]:
        """The largest shape of each kind, which needs the most memory of its kind; the last one holds any step."""
        kinds = {(bucket.is_decode, bucket.q_len, bucket.is_draw): bucket for bucket in self.buckets}
        return list(kinds.values())

    def lay_out(
        self, step: Step, bucket: Bucket, before: Rows = NO_ROWS, *, draws_apart: bool = False
    ) -> tuple[Any, ...]:
        """Returns what the bucket's compiled step takes after parameters, cache and tokens of the step before.

        `before` are the rows of that one; what structures allow comes later where the step `draws_apart`.
        """
        arguments = self._builder.build(step, bucket, before, draws_apart=draws_apart)
        if bucket.is_draw:
            shape, dtype = (bucket.num_tokens, self.model_config.hidden_size), self._params.final_norm.dtype
            return *arguments, jax.ShapeDtypeStruct(shape, dtype)
        if bucket.is_decode and self._loop_steps > 1:
            return *arguments, build_loop(step, bucket, self._max_listed_tokens)
        if bucket.is_verify and self._draft_trees:
            return *arguments, build_parents(step, bucket)
        has_prompt = bucket.is_prefill and self._max_prompt_log_probs is not None
        return (*arguments, build_prompt(step, bucket)) if has_prompt else arguments

    def guess_bytes(self) -> int:
        """Returns about what steps will be found to need: how XLA for CPU allots logits and activations in float32."""
        D, F, V = (getattr(self.model_config, f"{name}_size") for name in ("hidden", "intermediate", "vocab"))
        return max(
            4 * 9 * V * (bucket.num_tokens if bucket.is_verify else bucket.num_rows)
            + 4 * bucket.num_tokens * (3 * F + 16 * D)
            for bucket in self.buckets
        )

    def step_bytes(self, compiled: Mapping[Bucket, jax.stages.Compiled]) -> int:
        """Returns what the hungriest of some compiled steps needs beside parameters and cache."""
        return max(step_bytes(step, self._empty[bucket]) for bucket, step in compiled.items())

    def compile(self, cache_config: CacheConfig, bucket: Bucket) -> jax.stages.Compiled:
        """Compiles a shape for a cache of this configuration, or loads it from disk."""
        began = time.perf_counter()
        function, arguments, statics = self._call(cache_config, bucket)
        compiled = compile_or_load(function, *arguments, **statics)
        self.seconds[bucket] = time.perf_counter() - began
        return compiled

    def trace(self, cache_config: CacheConfig, bucket: Bucket) -> ClosedJaxpr:
        """Returns what a shape computes, as JAX traces it before it is compiled."""
        function, arguments, statics = self._call(cache_config, bucket)
        return function.trace(*arguments, **statics).jaxpr

    def _call(self, cache_config: CacheConfig, bucket: Bucket) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Returns the jitted function that computes a bucket's steps, its arguments and its static arguments."""
        arguments = (
            self._params,
            abstract_cache(self.model_config, cache_config),
            jax.ShapeDtypeStruct((self.max_num_rows,), jnp.int32),
            *self._empty[bucket],
        )
        statics = {"max_log_probs": self._max_log_probs, "custom": tuple(self._custom.values())}
        if not bucket.is_draw:
            statics |= {"config": self.model_config, "implementation": self._attention}
            return chained_step, arguments, statics | self._step_of(bucket)
        step = {"step": draw_verify_step, "q_len": bucket.q_len} if bucket.q_len else {"step": draw_step}
        return chained_draw, arguments, statics | step

    def _step_of(self, bucket: Bucket) -> dict[str, Any]:
        """Returns the step that a bucket is a shape of, and its own statics."""
        if bucket.is_verify:
            return {"step": verify_step, "q_len": bucket.q_len}
        if bucket.is_prefill:
            num_log_probs = min(self._max_prompt_log_probs or 0, self.model_config.vocab_size)
            return {"step": prefill_step, "max_prompt_log_probs": num_log_probs}
        return {"step": decode_loop, "num_steps": self._loop_steps} if self._loop_steps > 1 else {"step": decode_step}
