"""Compiles steps from parameters, and sets the number of pages by the memory that the steps leave."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.device import joins_products
from jaxinfer.engine.execution.compiled_steps import CompiledSteps
from jaxinfer.engine.execution.engine_model import EngineModel, PreparesDrafts, abstract
from jaxinfer.engine.execution.page_copier import PageCopier
from jaxinfer.engine.execution.step_compiler import StepCompiler
from jaxinfer.model.cache import abstract_cache
from jaxinfer.model.joined_params import join_products
from jaxinfer.model.params import Params
from jaxinfer.plan.cache import MemoryQuestion, addressable_pages, guess_memory, plan_cache
from jaxinfer.plan.memory import MemoryPlan, fit_pages, usable_pages
from jaxinfer.plan.step_shapes import Bucket, first_buckets, plan_buckets
from jaxinfer.sampling.processors import LogitsProcessor
from jaxinfer.sampling_params import Form
from jaxinfer.validation import shown
from kernels_pallas.paged_attention.api import default_implementation

logger = logging.getLogger(__name__)

# Pages per copy, without tiers and with them: one page if it is evicted while others decode, or many pages.
COPY_WIDTHS = ((1,), (1, 8))
HAND_OVER_WIDTHS = (1, 4, 16)  # pages per bundle of a hand-over
# The part of the memory beside parameters that is reserved for steps beyond the guess, which leaves small things out.
MARGIN = 0.01
# The part of that memory that is reserved for steps unseen. If it is not enough by the guess, the largest steps are
# compiled first, and their need is reserved.
MAX_RESERVED = 0.1


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The state of compilation."""

    num_executables: int  # compiled or loaded from disk so far
    seconds: float  # spent on them, summed over all threads
    memory: MemoryPlan
    replicas: tuple[MemoryPlan, ...] = ()  # the plans of all replicas, of which `memory` is the first; () for one

    @classmethod
    def of_all(cls, states: Sequence[Ready]) -> Ready:
        """Returns the state of all replicas together."""
        if len(states) == 1:
            return states[0]
        return cls(
            num_executables=sum(state.num_executables for state in states),
            seconds=sum(state.seconds for state in states),
            memory=states[0].memory,
            replicas=tuple(state.memory for state in states),
        )

    def __str__(self) -> str:
        plans = [f"replica {index}: {plan}" for index, plan in enumerate(self.replicas)] or [str(self.memory)]
        return "; ".join([self.compiled, *plans])

    def _repr_html_(self) -> str:
        plans = self.replicas or (self.memory,)
        return f"<div>{self.compiled}</div>{''.join(plan._repr_html_() for plan in plans)}"

    @property
    def compiled(self) -> str:
        """The number of executables and their seconds, for people."""
        return f"{self.num_executables} executables ready in {self.seconds:.1f} s"


def plan_target(params: Params, question: MemoryQuestion, custom: Mapping[str, LogitsProcessor]) -> EngineModel:
    """Returns the model and its engine's limits, with the largest useful number of pages.

    Raises ValueError if a logits processor of `custom` cannot be a part of a step, or if it needs logits that the model
    does not have.
    """
    model, config = question.model, question.config
    if not model.has_logits:
        _refuse_logits(config, custom)
    _require_traceable(custom, model.vocab_size, question.max_model_len)
    cache_config = plan_cache(question)
    if model.is_recurrent and question.speculates:
        num_ends = max(bucket.num_sampled for bucket in plan_buckets(config, config.max_drafts) if bucket.is_verify)
        cache_config = replace(cache_config, num_draft_states=num_ends)
    return EngineModel(
        params=join_products(params, model) if joins_products() else params,
        model_config=model,
        engine_config=config,
        cache_config=cache_config,
        table_width=-(-question.max_model_len // config.page_size),
        custom=custom,
        placement=question.placement,
    )


def _refuse_logits(config: EngineConfig, custom: Mapping[str, LogitsProcessor]) -> None:
    """Raises ValueError for what needs the logits that an embedding model does not have."""
    given = {"logits_processors": list(custom), "EngineConfig.max_prompt_log_probs": config.max_prompt_log_probs}
    for name, value in given.items():
        if value not in ([], None):
            raise ValueError(
                f"{name}={shown(value)} needs logits, and this checkpoint is an embedding model without an unembedding"
                " (lm_head); leave it out, or load the checkpoint of a language model"
            )


def _require_traceable(custom: Mapping[str, LogitsProcessor], vocab_size: int, num_tokens: int) -> None:
    """Raises ValueError, naming the processor, if one cannot be traced or does not return f32[V]."""
    shapes = {"logits": (vocab_size,), "tokens": (num_tokens,), "length": (), "argument": ()}
    dtypes = {"tokens": np.int32, "length": np.int32}
    arguments = [jax.ShapeDtypeStruct(shape, dtypes.get(name, np.float32)) for name, shape in shapes.items()]
    for name, processor in custom.items():
        try:
            result: Any = jax.eval_shape(processor, *arguments)
        except Exception as error:
            raise ValueError(
                f"logits_processors[{shown(name)}] raised {type(error).__name__} when JAX traced it with"
                f" logits f32[{vocab_size}], tokens i32[{num_tokens}], length i32[] and argument f32[]; length and"
                " argument have no values then, so use jnp.where instead of slices and branches"
            ) from error
        shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", np.bool_)
        if shape != (vocab_size,) or not jnp.issubdtype(dtype, np.floating):
            raise ValueError(
                f"logits_processors[{shown(name)}] returned {shown(result)}; return the logits, f32[{vocab_size}]"
            )


class WarmUp:
    """Compiles the first shapes, and fits the number of pages. Others are compiled when steps want them.

    The pages are at most those of the target's cache. With a memory limit, the guess of what steps need stays reserved
    for the shapes to come. If that is more than MAX_RESERVED, or with speculation, the largest shape of each kind is
    compiled first, and its need is reserved. Raises ValueError if the device, or EngineConfig.memory_bytes, has no room
    for a page.
    """

    def __init__(
        self,
        target: EngineModel,
        speculation: PreparesDrafts | None,
        *,
        limit_bytes: int | None,
        show_progress: bool,
        expected_form: Form = "plain",
    ) -> None:
        """`limit_bytes`: what `plan_limit` returns. `expected_form`: in which most requests will draw."""
        self._show_progress = show_progress
        self._expected_form: Form = expected_form
        self.model, self._speculation = target, speculation
        max_drafts = 0 if speculation is None else target.engine_config.max_drafts
        self._drafter = drafter = None if speculation is None else speculation.device_drafter
        kept_layers = () if drafter is None else drafter.kept_layers
        compiled = replace(target, params=abstract(target.params))
        self.compiler = compiler = StepCompiler(compiled, max_drafts, kept_layers)
        guess = guess_memory(target.question(drafter), target.cache_config, compiler.buckets, limit_bytes)
        is_fixed = target.engine_config.num_pages is not None
        left = None if limit_bytes is None else limit_bytes - guess.resident_bytes - guess.bounded_bytes
        guess = replace(guess, step_bytes=guess.step_bytes + int(MARGIN * max(left or 0, 0)))
        # All steps of an engine that speculates are compiled at its start and have to fit, so a guess is not enough.
        is_measured = left is not None and (speculation is not None or guess.step_bytes > MAX_RESERVED * left)
        self._first = self._first_buckets(is_measured=is_measured)
        self._reserved: int | None = None  # bytes that a step may need, once they are planned
        reserved = 0 if limit_bytes is None or is_measured else guess.step_bytes
        self._attempts: list[CompiledSteps] = []  # one for each number of pages; the last one counts
        try:
            self.copiers, self._memory = fit_pages(
                self._compile_for, guess, is_fixed=is_fixed, reserved=reserved, allowed=self._addressable
            )
        except BaseException:
            self._cancel()
            raise
        self.steps = self._attempts.pop()
        self._cancel()
        if limit_bytes is not None:
            self._reserved = self._memory.step_bytes - self._copier_bytes(self.copiers)
        fitting = usable_pages(self._memory, guess.num_pages)
        if not is_fixed and (addressable := self._addressable(fitting)) < fitting:
            logger.warning(
                "%d of the %d pages that fit are used: in 4 or 8 bits, GPU kernels read no keys between 2 and 4 GiB",
                *(addressable, fitting),
            )
        self.cache_config = self._cache_config(self._memory.num_pages)
        self.model = replace(target, params=abstract(target.params))  # the runner owns the parameters

    def _first_buckets(self, *, is_measured: bool) -> Sequence[Bucket]:
        """Returns the shapes that the engine waits for."""
        if jax.process_count() > 1:  # processes that compute together must choose the same shapes
            return self.compiler.buckets
        first = first_buckets(self.compiler.buckets)
        return tuple(dict.fromkeys((*first, *self.compiler.largest))) if is_measured else first

    def ready(self) -> Ready:
        """Returns the executables compiled so far, their seconds and the memory plan."""
        executables, drafting = len(self.steps.compiled) + sum(copier.num_executables for copier in self.copiers), 0
        if self._drafter is not None:
            executables, drafting = executables + self._drafter.num_executables, self._drafter.step_bytes
        reserved = 0 if self._reserved is None else self._memory.step_bytes
        needed = max(self._needed(self.steps, self.copiers), drafting, reserved)
        return Ready(
            num_executables=executables,
            seconds=sum(self.compiler.seconds.values()),
            memory=replace(self._memory, step_bytes=needed),
        )

    def _addressable(self, num_pages: int) -> int:
        """Returns the most pages, up to a number of them, that the attention of this device can use."""
        target = self.model
        if default_implementation() != "gpu" or target.engine_config.attention is not None:
            return num_pages
        return addressable_pages(target.question(), target.cache_config, num_pages)

    def _cancel(self) -> None:
        for steps in self._attempts:
            steps.cancel()

    def _compile_for(self, num_pages: int) -> tuple[list[PageCopier], int]:
        self._cancel()
        cache_config = self._cache_config(num_pages)
        cache = abstract_cache(self.compiler.model_config, cache_config)
        with ThreadPoolExecutor(1) as pool:
            num_sinks = (self.model.engine_config.num_sink_tokens or 0) // cache_config.page_size
            model_config = self.compiler.model_config
            sinks = [num_sinks, *[0] * (len(model_config.page_kinds) - 1)]
            hands_over = self.model.engine_config.num_prefill_replicas > 0
            options = {"hand_over_widths": HAND_OVER_WIDTHS} if hands_over else {}
            make = partial(
                PageCopier, cache, model_config, self._copy_widths, placement=self.model.placement, **options
            )
            copiers = pool.map(make, sinks, count())
            compile_bucket = partial(self._compile, cache_config)
            steps = CompiledSteps(self.compiler.buckets, compile_bucket, self._first, self._expected_form)
            self._attempts.append(steps)
            steps.wait_for_first(show_progress=self._show_progress)
        copiers = list(copiers)
        needed = self._needed(steps, copiers)
        if self._speculation is not None:
            self._speculation.prepare(replace(self.model, cache_config=cache_config))
        # No step runs while drafts are made, so the larger of the two needs counts.
        needed = max(needed, 0 if self._drafter is None else self._drafter.step_bytes)
        return copiers, needed

    def _compile(self, cache_config: CacheConfig, bucket: Bucket) -> jax.stages.Compiled:
        """Compiles a shape; raises RuntimeError if it needs more memory than is reserved."""
        compiled, reserved = self.compiler.compile(cache_config, bucket), self._reserved
        needed = 0 if reserved is None else self.compiler.step_bytes({bucket: compiled})
        if reserved is not None and needed > reserved:
            raise RuntimeError(
                f"{bucket.name} needs {needed} bytes beside parameters and pages, and {reserved} are reserved; lower"
                " EngineConfig.max_num_batched_tokens or max_num_seqs"
            )
        return compiled

    def _needed(self, steps: CompiledSteps, copiers: Sequence[PageCopier]) -> int:
        """Returns the most bytes that what is compiled needs beside parameters and pages."""
        return self.compiler.step_bytes(steps.compiled) + self._copier_bytes(copiers)

    @staticmethod
    def _copier_bytes(copiers: Sequence[PageCopier]) -> int:
        return max(copier.step_bytes for copier in copiers)

    @property
    def _copy_widths(self) -> tuple[int, ...]:
        return COPY_WIDTHS[self.model.engine_config.has_tiers]

    def _cache_config(self, num_pages: int) -> CacheConfig:
        return replace(self.model.cache_config, num_pages=num_pages)
